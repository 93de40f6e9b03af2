"""watch: the verdicts on a run, for people, scripts and cron."""

from __future__ import annotations

import threading
import time
from typing import Any

import click

from ...collectives.errors import DeadlineExceededError, NetworkError
from ...collectives.foreign import escaped
from ..home.output import Terminal, as_json, current, short_peer, span_text
from .happenings import LOOK_S
from .options import RUN, shared_options

HOLDS = 1
"""Exit status where a verdict stands."""
NO_NODE = 3
"""Exit status where none is known to stand, and no node is running that could tell."""


@click.command("watch")
@click.argument("run", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Go on, and say each that comes or goes.")
@shared_options
def watch_command(run: str, follow: bool) -> int:
    """Say what is wrong with a run over many rounds; exit status 0: nothing, 1: something.

    From the run's events alone, so it works without a node, too: then the exit status is 3 where no
    verdict stands, since nobody looks any more. What each verdict means: atoll
    explain V01 to V24. To have a command run for each: atoll config set notify.command COMMAND.
    """
    from ..manifest import load_run
    from ..run import diary
    from ..run.verdicts import Verdicts

    terminal = current()
    folder = terminal.paths.run_dir(load_run(terminal.paths, run).run_id)
    verdicts, newest = Verdicts(), 0.0
    for event in diary.events(folder):
        verdicts.take(event)
        newest = max(newest, event.at)
    verdicts.look(time.time())
    standing = sorted(verdicts.standing.values(), key=lambda each: each.since)
    if not follow:
        looked_at, silent = _node_runs(terminal)
        lines = [_line(each, "since") for each in standing]
        if not looked_at:
            ago = (
                f"; the newest event is of {span_text(time.time() - newest)} ago" if newest else ""
            )
            lines.append(f"{silent}, so nobody looks at this run now{ago}")
        terminal.data(
            "\n".join(lines) or "nothing is wrong",
            {"verdicts": [each._asdict() for each in standing], "node": looked_at},
        )
        return HOLDS if standing else 0 if looked_at else NO_NODE
    for each in standing:
        _say(terminal, each, "since")
    _follow(terminal, folder, verdicts)
    return 0


def _node_runs(terminal: Terminal) -> tuple[bool, str]:
    """Whether a node of this home answers, and why not."""
    from ..joining.commands import NodeClient

    try:
        with NodeClient.connect(terminal.paths):
            return True, ""
    except DeadlineExceededError as error:
        return False, f"{error.message} ({error.why})"
    except NetworkError:
        return False, "no node is running"


def _follow(terminal: Terminal, folder: Any, verdicts: Any) -> None:
    from ..run import diary

    def wait() -> None:
        for change in verdicts.look(time.time()):
            _say(terminal, change.verdict, "raised" if change.raised else "over")
        threading.Event().wait(LOOK_S)

    for event in diary.follow(folder, time.time(), wait):
        for change in verdicts.take(event):
            _say(terminal, change.verdict, "raised" if change.raised else "over")


def _say(terminal: Terminal, verdict: Any, how: str) -> None:
    if terminal.json:
        terminal.print(as_json({**verdict._asdict(), "state": how}))
    else:
        terminal.print(_line(verdict, how))


def _line(verdict: Any, how: str) -> str:
    from ..run.verdicts import PAGES

    of = f" {short_peer(verdict.subject)}" if verdict.subject else ""
    ago = f"for {span_text(time.time() - verdict.since)}" if how == "since" else how
    return f"{verdict.code} {PAGES[verdict.code].title} ({ago}):{of} {escaped(verdict.said, 2000)}"
