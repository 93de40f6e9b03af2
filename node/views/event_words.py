"""Events of a run as lines for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...collectives.foreign import escaped
from ..home.output import bytes_text, short_peer, span_text

Event = Mapping[str, Any]
QUIET = frozenset({"round.phase", "reduction.timed", "state.root", "script.report", "work.judged"})
"""Kinds for tools: several a round. Shown with --all, and always with --json."""


class Words:
    """Events as lines for a person. It remembers who was a member, to say who came and went, and
    whether contributions are masked: then what an entry counts of each is no number of samples.
    """

    def __init__(self) -> None:
        self._members: set[str] | None = None
        self._masked = False

    def of(self, event: Event) -> Iterator[str]:
        """The lines of one event."""
        kind = event["event"]
        if kind in ("round.committed", "entry.committed"):
            yield from self._entry(event)
            return
        self._masked |= kind == "round.unmasked"
        write = _WORDS.get(kind)
        try:
            yield write(event) if write is not None else _plain(event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # not ours
            yield _plain(event)

    def _entry(self, event: Event) -> Iterator[str]:
        members = event.get("members")
        if isinstance(members, list):
            now, before = set(map(str, members)), self._members
            self._members = now
            for peer in sorted(now - before) if before is not None else ():
                yield f"{short_peer(peer)} is a member, of {len(now)} now"
            left = event.get("left")
            gone = before - now if before is not None else set[str]()
            for peer in sorted(gone):
                if isinstance(left, list) and peer in left:
                    yield f"{short_peer(peer)} has left; {len(now)} are members"
                else:
                    yield f"{short_peer(peer)} is no member any more; {len(now)} are"
        lost = event.get("lost")
        for peer in lost if isinstance(lost, list) else ():
            yield f"{short_peer(str(peer))} was lost in the round; it was decided without it"
        shares = event.get("contributors")
        if isinstance(shares, Mapping) and shares:
            mine = "" if event.get("counted") else ", this peer did not"
            samples = "" if self._masked else f"{sum(shares.values())} samples, "
            yield (
                f"round {event.get('round')}: {len(shares)} contributed{mine}, "
                f"{samples}{span_text(float(event.get('elapsed_s') or 0))}, "
                f"{bytes_text(float(event.get('bytes_sent') or 0))} sent so far"
            )


def _peer(event: Event, key: str = "peer") -> str:
    return short_peer(str(event[key]))


_WORDS: Mapping[str, Callable[[Event], str]] = {
    "script.attached": lambda e: f"a script trains, process {int(e['pid'])}",
    "script.ended": lambda e: (
        f"the script has let go, process {int(e['pid'])}"
        + (f": {escaped(e['error'], 300)}" if e.get("error") else "")
    ),
    "script.exited": lambda e: f"process {int(e['pid'])} {escaped(e['how'], 300)}",
    "script.missing": lambda e: (
        "a script trained here until the node ended, and none is attached now"
    ),
    "run.left": lambda e: "this machine has left the run",
    "script.unattached": lambda e: (
        f"process {int(e['pid'])} joined {span_text(float(e['seconds']))} ago "
        "and has attached nothing"
    ),
    "script.idle": lambda e: (
        f"the script has made no step in the {span_text(float(e['seconds']))} since it attached"
    ),
    "script.still": lambda e: (
        f"process {int(e['pid'])} has made no step for {span_text(float(e['seconds']))}; "
        f"{escaped(e['doing'], 300)}"
    ),
    "data.order": lambda e: (
        "the same data in the same order are read by this script and by "
        + ", ".join(short_peer(str(peer)) for peer in e["equal"])
        if e["equal"]
        else "no other member reads what this script reads any more"
    ),
    "state.ready": lambda e: f"the state of round {int(e['round'])} is here",
    "run.waiting": lambda e: (
        f"finished: {escaped(e['ends'])}"
        if e["state"] == "finished"
        else (
            f"{escaped(e['state'])}, no round for {float(e['round_open_s']):.0f} s: waits "
            f"for {escaped(e['what'])}"
        )
        + (f", of {', '.join(short_peer(str(peer)) for peer in e['of'])}" if e.get("of") else "")
        + f"; it ends when {escaped(e['ends'])}"
    ),
    "run.goes_on": lambda e: "it goes on",
    "operation.committed": lambda e: (
        f"operation “{escaped(e['op_id'], 60)}”: {len(e['contributors'])} contributed, "
        f"{span_text(float(e['elapsed_s']))}"
    ),
    "storage.mended": lambda e: "what must be written is written again",
    "run.starting": lambda e: (
        f"the script waits with its first step: {int(e['there'])} of "
        f"{int(e['wanted'])} members are there"
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
    "privacy.spent": lambda e: (
        f"epsilon {float(e['epsilon']):.3g} is spent here; {int(e['left'])} more "
        "contributions are allowed"
    ),
    "round.unmasked": lambda e: (
        f"the masks are off the sum of {len(e['members'])} contributions"
        + (f", in {len(e['buckets'])} buckets" if e.get("buckets") else "")
        + "".join(
            f", mean {escaped(name, 64)} {float(value):.6g}" for name, value in e["metrics"].items()
        )
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
