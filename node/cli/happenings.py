"""events, logs: what happened in a run, from the file that its node keeps of it; the node's own
log.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ...collectives.errors import ConfigError
from ...collectives.foreign import escaped
from .invites import duration_s
from .options import RUN, shared_options
from .output import Terminal, as_json, bytes_text, current, short_peer, span_text

Event = Mapping[str, Any]
LOOK_S = 0.5
LAST_LINES = 50
QUIET = frozenset({"round.phase", "reduction.timed", "state.root", "script.report", "work.judged"})
"""Kinds for tools: several a round. Shown with --all, and always with --json."""


@click.command("events")
@click.argument("run", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("--since", default="", metavar="SPAN", help="Only of the last 90s, 30min, 12h, 7d.")
@click.option("--all", "everything", is_flag=True, help="Also phases and timings of rounds.")
@shared_options
def events_command(run: str, follow: bool, since: str, everything: bool) -> None:
    """Say what happened in a run, in words, oldest first; with --json one JSON object a line.

    RUN is an id, its beginning, or a name. The file is events.jsonl in the run's folder; a node
    keeps the last 32 MiB.
    """
    from .. import diary
    from ..manifest import load_run

    terminal = current()
    folder = terminal.paths.run_dir(load_run(terminal.paths, run).run_id)
    since_s = time.time() - duration_s(since) if since else 0.0
    found = diary.follow(folder, since_s, _wait) if follow else diary.events(folder, since_s)
    if terminal.json:
        for event in found:
            _print(terminal, as_json(event))
        return
    words = Words()
    for event in found:
        if everything or event["event"] not in QUIET:
            for line in words.of(event):
                _print(terminal, f"{_when(event)}  {line}")


@click.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on.")
@click.option(
    "-n",
    "lines",
    default=LAST_LINES,
    show_default=True,
    type=click.IntRange(0),
    help="How many lines.",
)
@shared_options
def logs_command(follow: bool, lines: int) -> None:
    """Show the node's log: the last lines of the one in the background, or of a script's private
    node if that wrote last.
    """
    terminal = current()
    found = [
        file
        for name in ("node.log", "private-node.log")
        if (file := terminal.paths.log_dir / name).exists()
    ]
    if not found:
        raise ConfigError(
            f"there is no log in {terminal.paths.log_dir}",
            why="Logs are written by nodes in the background and by private nodes of scripts.",
            hint="atoll up --background",
        )
    newest = max(found, key=lambda file: file.stat().st_mtime)
    terminal.say(str(newest))
    for line in _tail(newest, lines, follow):
        _print(terminal, as_json({"line": line}) if terminal.json else line)


class Words:
    """Events as lines for a person. It remembers who was a member, to say who came and went."""

    def __init__(self) -> None:
        self._members: set[str] | None = None

    def of(self, event: Event) -> Iterator[str]:
        """The lines of one event."""
        kind = event["event"]
        if kind in ("round.committed", "entry.committed"):
            yield from self._entry(event)
            return
        write = _WORDS.get(kind)
        try:
            yield write(event) if write is not None else _plain(event)
        except (KeyError, TypeError, ValueError, AttributeError):  # of another version
            yield _plain(event)

    def _entry(self, event: Event) -> Iterator[str]:
        members = event.get("members")
        if isinstance(members, list):
            now, before = set(map(str, members)), self._members
            self._members = now
            for peer in sorted(now - before) if before is not None else ():
                yield f"{short_peer(peer)} is a member, of {len(now)} now"
            for peer in sorted(before - now) if before is not None else ():
                yield f"{short_peer(peer)} is no member any more; {len(now)} are"
        lost = event.get("lost")
        for peer in lost if isinstance(lost, list) else ():
            yield f"{short_peer(str(peer))} was lost in the round; it was decided without it"
        shares = event.get("contributors")
        if isinstance(shares, Mapping) and shares:
            mine = "" if event.get("counted") else ", this peer did not"
            yield (
                f"round {event.get('round')}: {len(shares)} contributed{mine}, {sum(shares.values())} samples,"
                f" {span_text(float(event.get('elapsed_s') or 0))}, {bytes_text(float(event.get('bytes_sent') or 0))} sent so far"
            )


def _peer(event: Event, key: str = "peer") -> str:
    return short_peer(str(event[key]))


_WORDS: Mapping[str, Callable[[Event], str]] = {
    "script.attached": lambda e: f"a script trains, process {int(e['pid'])}",
    "script.ended": lambda e: f"the script has let go, process {int(e['pid'])}",
    "script.unattached": lambda e: (
        f"process {int(e['pid'])} joined {span_text(float(e['seconds']))} ago and has attached nothing"
    ),
    "script.idle": lambda e: (
        f"the script has contributed nothing in the {span_text(float(e['seconds']))} since it attached"
    ),
    "state.ready": lambda e: f"the state of round {int(e['round'])} is here",
    "run.waiting": lambda e: (
        "finished: all rounds are committed"
        if e["state"] == "finished"
        else f"{escaped(e['state'])}, no round for {float(e['round_open_s']):.0f} s: waits for {escaped(e['what'])}"
        + (f" of {', '.join(short_peer(str(peer)) for peer in e['of'])}" if e.get("of") else "")
        + f"; it ends when {escaped(e['ends'])}"
    ),
    "run.goes_on": lambda e: "it goes on",
    "run.starting": lambda e: (
        f"the script waits with its first step: {int(e['there'])} of {int(e['wanted'])} members are there"
    ),
    "verdict.raised": lambda e: f"verdict {_verdict(e)}",
    "verdict.withdrawn": lambda e: f"verdict holds no more: {_verdict(e)}",
    "peer.path": lambda e: (
        f"{_peer(e)} is reached: {escaped(e['path'])}"
        if e["path"]
        else f"{_peer(e)} is not reached"
    ),
    "run.paused": lambda e: f"training is {escaped(e['why'])}; the node serves the run",
    "run.resumed": lambda e: "training may go on",
    "run.begun": lambda e: (
        f"training begins; {int(e['there'])} of {int(e['wanted'])} members are there"
    ),
    "run.failed": lambda e: f"failed: {_coded(e)}",
    "run.trouble": lambda e: f"trouble: {_coded(e)}",
    "storage.trouble": lambda e: f"trouble: {_coded(e)}",
    "peer.misbehaved": lambda e: f"{_peer(e)} broke a rule: {escaped(e['reason'])}",
    "branch.begun": lambda e: (
        f"no quorum; goes on without certainty with {len(e['members'])} members"
    ),
    "round.uncertified": lambda e: (
        f"round {int(e['round'])} without certainty: {len(e['contributors'])} contributed"
    ),
    "branch.ended": lambda e: (
        f"certain again; {int(e['lost'])} contributions without certainty are lost"
    ),
    "privacy.spent": lambda e: (
        f"epsilon {float(e['epsilon']):.3g} is spent here; {int(e['left'])} more contributions are allowed"
    ),
    "masking.failed": lambda e: f"a masked sum failed and is tried again: {escaped(e['reason'])}",
    "entry.recertified": lambda e: f"recertified without {len(e['removed'])} members",
    "member.renewed": lambda e: (
        "this home is an old copy: it goes on as a new member, after rounds that it had forgotten"
    ),
}


def _coded(event: Event) -> str:
    return f"{escaped(event['code'], 16)} {escaped(event['message'], 2000)}"


def _verdict(event: Event) -> str:
    of = f"{short_peer(str(event['subject']))} " if event.get("subject") else ""
    return f"{escaped(event['code'], 16)}: {of}{escaped(event['said'], 2000)}"


def _plain(event: Event) -> str:
    """A kind without words of its own."""
    rest = {key: value for key, value in event.items() if key not in ("at", "event", "run")}
    return escaped(f"{event['event']} {json.dumps(rest, default=str)}", 2000)


def _when(event: Event) -> str:
    return datetime.fromtimestamp(event["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _tail(file: Path, lines: int, follow: bool) -> Iterator[str]:
    """The last ``lines`` of a log, then, with ``follow``, those to come. Reads at most the last MiB
    to find them.
    """
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - (1 << 20)))
        for line in log.read().decode(errors="replace").splitlines()[-lines:] if lines else ():
            yield escaped(line, 8192)
        while follow:
            line = log.readline()
            if line:
                yield escaped(line.decode(errors="replace").rstrip("\n"), 8192)
            else:
                _wait()


def _wait() -> None:
    threading.Event().wait(LOOK_S)


def _print(terminal: Terminal, line: str) -> None:
    """A line of the result. Ends the command when nobody reads it any more."""
    try:
        terminal.print(line)
    except BrokenPipeError:
        raise click.exceptions.Exit(141) from None
