"""What a run looks like: its events and its node's status documents, folded into one picture of
bounded size, from which the page and the terminal draw. Pure: no I/O, no clock.

Events come from files (`node.run.diary`), which may be damaged, of another version, or somebody
else's: one that did not fit its kind is counted and left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...collectives.group import MAX_MEMBERS
from ..run import events as e
from ..run import rate
from ..run.gain import NEWEST, ddp_bytes, gain_words, training_share
from ..run.status import FIGURES, RunStatus
from .allowed import EVERYTHING, Allowed

KEPT_ROUNDS = 10_000
KEPT_LINES = 500
KEPT_PEERS = 4 * MAX_MEMBERS
"""Peers that are told apart, members of long ago included; what later ones do is not shown."""
KEPT_VERDICTS = 64
KEPT_ANSWERS = 32
WAITING = ("state", "what", "of", "ends", "since")
Trouble = e.CodedEvent | e.VerdictRaisedEvent
"""Something that is wrong and has a code."""


@dataclass(slots=True)
class RoundPicture:
    """One committed round of one fragment. Peers are their numbers in `RunPicture.peers`; ``who``:
    the contributors as bits.
    """

    round: int
    entry: int
    fragment: int
    at: float
    period_s: float | None  # since the round before it, of the same fragment
    elapsed_s: float
    who: int
    lost: int
    members: int
    samples: int
    counted: bool
    sent: int
    received: int
    reduced_s: float | None = None  # until the part that this node adds up was complete
    decided_s: float | None = None
    waited_s: float | None = None  # from this node's contribution to the new anchor
    slowest: int | None = None
    phase: str = ""
    behind_s: float = 0.0


@dataclass(slots=True)
class PeerPicture:
    """What is known of one peer. ``since`` and ``until``: of its newest membership."""

    peer: str
    number: int
    member: bool = False
    you: bool = False
    since: float | None = None
    until: float | None = None
    rounds: int = 0
    samples: int = 0
    lost: int = 0  # how often rounds were decided without it, and it was removed
    slowest: int = 0  # in how many rounds it was
    sent: int = 0  # to it, and from it, in reductions
    received: int = 0
    round: int | None = None
    loss: float = math.nan
    link: dict[str, Any] = field(default_factory=dict[str, Any])  # its row of `atoll peers`


@dataclass(slots=True)
class About:
    """What the recipe says; zeros and "" where nobody has it."""

    run_id: str = ""
    name: str = ""
    kind: str = "swarm"
    rounds: int | None = None
    sync_every: int | None = None
    codec: str = ""
    overlap: str = "none"
    fragments: int = 1
    parameters: int | None = None
    unit: str = "samples"  # that members count by
    allowed: Allowed = EVERYTHING


class Curve:
    """The losses that one peer reported, by round."""

    def __init__(self) -> None:
        self.rounds: deque[int] = deque(maxlen=KEPT_ROUNDS)
        self.losses: deque[float] = deque(maxlen=KEPT_ROUNDS)
        self.taken = 0  # how many ever, those that are forgotten included

    def take(self, round_: int, loss: float) -> None:
        """A later word on the same round replaces the earlier one."""
        if self.rounds and self.rounds[-1] == round_:
            self.losses[-1] = loss
            return
        self.rounds.append(round_)
        self.losses.append(loss)
        self.taken += 1


class RunPicture:
    """The picture of one run. ``words``: an event in lines for a person."""

    def __init__(
        self, about: About | None = None, words: Callable[[e.RunEvent], Iterable[str]] | None = None
    ) -> None:
        self.about = about or About()
        self.me = ""
        self.peers: list[PeerPicture] = []
        self.rounds: deque[RoundPicture] = deque(maxlen=KEPT_ROUNDS)
        self.taken = 0  # rounds ever
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=KEPT_LINES)
        self.lines_taken = 0
        self.verdicts: dict[str, Trouble] = {}
        self.curves: dict[int, Curve] = {}
        self.changes = 0  # goes up with everything that is taken
        self.at: float | None = None  # of the newest event
        self.began: float | None = None
        self.skipped = 0
        self.ddp_bytes = 0.0
        # What the node said last of the run; None while none answers.
        self.status: RunStatus | None = None
        self.node: dict[str, Any] = {}
        self.unanswered = ""  # why the node of a run that is looked at as it goes does not answer
        self.script: bool | None = None
        self.waiting: dict[str, Any] | None = None
        self.metrics: dict[str, float] = {}
        self.mean: dict[str, float] = {}  # metrics of the newest masked sum, of all sites together
        # What scripts found of what the model has learned; the loss by those members that the run
        # asks for it, or by this node's script alone, around the adoption of a round's model.
        self.answers: deque[e.ScriptAnswerEvent] = deque(maxlen=KEPT_ANSWERS)
        self.evaluation: e.ScriptEvaluationEvent | None = None
        self.held_out = Curve()
        self._told_by_members = False
        self.lying = 0
        self._words = words
        self._numbers: dict[str, int] = {}
        self._timed: dict[tuple[int, int], e.ReductionTimedEvent] = {}
        self._before: dict[int, float] = {}  # by fragment, when its newest round came
        self._entries: dict[int, int] = {}  # by fragment, the newest entry
        self._steps: dict[str, float] = {}
        # When rounds of the first fragment were decided, and each contributor's samples.
        self._work: deque[tuple[float, dict[str, int]]] = deque(maxlen=rate.KEPT_ROUNDS)
        self._base_sent = self._base_received = 0  # of node lives before
        self._last_sent = self._last_received = 0

    # ---- inputs
    def take(self, event: e.RunEvent, by: str = "") -> None:
        """An event. ``by``: the peer whose file it lies in, where several are folded together; of
        one file, whoever wrote it.
        """
        self.changes += 1
        if isinstance(event, e.OtherEvent) and event.kind in e.KINDS:
            self.skipped += 1
            return
        self._fold(event, by)
        if math.isfinite(event.at):
            self.at = event.at if self.at is None else max(self.at, event.at)
            self.began = event.at if self.began is None else min(self.began, event.at)
            self._tell(event.at, event)

    def _fold(self, event: e.RunEvent, by: str) -> None:
        match event:
            case e.EntryCommittedEvent():
                self._committed(event, mine=not self.me or by in ("", self.me))
            case e.ReductionTimedEvent():
                self._timing(event)
            case e.ScriptReportEvent():
                self._reported(event, by or self.me)
            case e.ScriptAnswerEvent():
                self.answers.append(event)
            case e.ScriptEvaluationEvent():
                self.evaluation = event
            case e.ScriptAttachedEvent() | e.ScriptEndedEvent():
                self.script = isinstance(event, e.ScriptAttachedEvent)
            case e.RunWaitingEvent():
                self.waiting = {key: getattr(event, key) for key in WAITING}
            case e.RunGoesOnEvent():
                self.waiting = None
            case e.PeerPathEvent():
                if (row := self._peer(event.peer)) is not None:
                    row.link = {**row.link, "path": event.path}
            case e.RoundUnmaskedEvent():
                self.mean = event.metrics
            case e.VerdictRaisedEvent() | e.CodedEvent():
                self._verdict(event)
            case _:
                pass

    def take_status(self, run: RunStatus, node: Mapping[str, Any]) -> None:
        """What the node says of the run, and its status document."""
        self.changes += 1
        self.status, self.node, self.unanswered = run, dict(node), ""
        self.me = str(node.get("peer") or self.me)
        self.script = run.script
        members = run.members or ()
        for peer in members:
            if (row := self._peer(peer)) is not None:
                row.link = {**row.link, "live": peer not in run.unreachable}
        self._members(members, None, ())
        self.waiting = dict(run.waiting) if run.waiting and run.waiting.get("quiet") else None

    def take_peers(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The rows of `atoll peers`."""
        self.changes += 1
        for given in rows[:KEPT_PEERS]:
            row = self._peer(str(given.get("peer", "")))
            if row is not None:
                row.link, row.you = dict(given), bool(given.get("you"))
                row.round = given.get("round")

    def node_gone(self, why: str) -> None:
        """The node does not answer: what it said last is not so any more."""
        if self.status is not None or self.unanswered != why:
            self.changes += 1
            self.status, self.node, self.waiting = None, {}, None
            self.script, self.unanswered = None, why
            for row in self.peers:
                row.link = {}

    # ---- rounds
    def _committed(self, event: e.EntryCommittedEvent, *, mine: bool) -> None:
        if mine:
            self._traffic(event)
        if event.entry <= self._entries.get(event.fragment, -1):
            return  # another file's word on the same
        self._entries[event.fragment] = event.entry
        self._members(event.members, event.at, event.lost)
        if not event.contributors:
            return
        if not self.me and event.counted and len(event.contributors) == 1:
            (self.me,) = event.contributors  # alone, it reduces with nobody and times nothing
        before, self._before[event.fragment] = self._before.get(event.fragment), event.at
        timed = self._timed.pop((event.fragment, event.entry), None)
        self._timed = {key: row for key, row in self._timed.items() if key[0] != event.fragment}
        row = RoundPicture(
            event.round,
            event.entry,
            event.fragment,
            event.at,
            max(0.0, event.at - before) if before is not None else None,
            event.elapsed_s,
            self._bits(event.contributors),
            self._bits(event.lost),
            len(event.members),
            sum(event.contributors.values()),
            event.counted,
            self._base_sent + self._last_sent,
            self._base_received + self._last_received,
        )
        for peer, samples in event.contributors.items():
            if (known := self._peer(peer)) is not None:
                known.rounds += 1
                known.samples += samples
        if timed is not None:
            self._add_timing(row, timed)
        if not event.fragment:
            self._work.append((event.at, dict(event.contributors)))
        if event.worth is not None:
            self._told_by_members = True
            self.held_out.take(event.round, event.worth.anchor)
        self.rounds.append(row)
        self.taken += 1

    def _traffic(self, event: e.EntryCommittedEvent) -> None:
        """Bytes of all lives of the node: its counts begin anew with each."""
        if event.bytes_sent < self._last_sent or event.bytes_received < self._last_received:
            self._base_sent += self._last_sent
            self._base_received += self._last_received
        self._last_sent, self._last_received = event.bytes_sent, event.bytes_received

    def _timing(self, event: e.ReductionTimedEvent) -> None:
        if event.op_id:
            return  # an operation of the script is no round
        self.me = self.me or event.peer
        if event.peer != self.me:
            return
        self._peer(self.me)
        if event.numel and self.about.parameters is None and self.about.fragments == 1:
            self.about.parameters = event.numel
        self.about.codec = self.about.codec or event.codec
        if len(self._timed) < KEPT_PEERS:
            self._timed[(event.fragment, event.round)] = event
        for peer, lane in event.lanes.items():
            if (known := self._peer(peer)) is not None:
                known.sent += lane.sent
                known.received += lane.received

    def _add_timing(self, row: RoundPicture, timed: e.ReductionTimedEvent) -> None:
        ready = timed.phases.get("ready", {}).get(timed.peer, 0.0)
        ready = ready if math.isfinite(ready) else 0.0
        row.reduced_s, row.decided_s = timed.reduced_s, timed.decided_s
        row.waited_s = max(0.0, timed.elapsed_s - ready)
        if timed.slowest is not None and (known := self._peer(timed.slowest.peer)) is not None:
            known.slowest += 1
            row.slowest, row.phase = known.number, timed.slowest.phase
            row.behind_s = timed.slowest.behind_s

    def _reported(self, event: e.ScriptReportEvent, by: str) -> None:
        mine = not self.me or by in ("", self.me)
        if mine:
            self.metrics = {name: v for name, v in event.metrics.items() if math.isfinite(v)}
        peer = self._peer(by)
        if peer is None:  # whose file it is, is not known yet
            return
        loss = event.metrics.get("loss", math.nan)
        last = self.rounds[-1] if self.rounds else None
        held_out = event.metrics.get("held_out", math.nan)
        if mine and last is not None and math.isfinite(held_out) and not self._told_by_members:
            self.held_out.take(last.round, held_out)
        if last is not None and "loss" in event.metrics:
            peer.loss = loss
            self.curves.setdefault(peer.number, Curve()).take(last.round, loss)
        step = event.metrics.get("step", math.nan)
        before = self._steps.get(by, math.nan)
        if mine and last is not None and last.counted and step > before:
            k = last.who.bit_count()
            self.ddp_bytes += (step - before) * ddp_bytes(k, self.about.parameters or 0) / k
        if math.isfinite(step):
            self._steps[by] = step

    # ---- who
    def _peer(self, peer: str) -> PeerPicture | None:
        number = self._numbers.get(peer)
        if number is None:
            if len(self.peers) >= KEPT_PEERS or not peer:
                return None
            number = self._numbers[peer] = len(self.peers)
            self.peers.append(PeerPicture(peer, number))
        return self.peers[number]

    def _bits(self, peers: Iterable[str]) -> int:
        found = 0
        for peer in peers:
            if (row := self._peer(peer)) is not None:
                found |= 1 << row.number
        return found

    def _members(self, members: Sequence[str], at: float | None, lost: Sequence[str]) -> None:
        now = set(members)
        for peer in members:
            row = self._peer(peer)
            if row is not None and not row.member:
                row.member, row.since, row.until = True, at or row.since, None
        for row in self.peers:
            if row.member and row.peer not in now:
                row.member, row.until = False, at
        for peer in lost:
            if (row := self._peer(peer)) is not None:
                row.lost += 1

    # ---- what is wrong, and words
    def _verdict(self, event: Trouble) -> None:
        subject = event.subject if isinstance(event, e.VerdictRaisedEvent) else ""
        key = f"{event.code or event.kind} {subject}"
        self.verdicts.pop(key, None)
        if isinstance(event, e.VerdictWithdrawnEvent):
            return
        self.verdicts[key] = event
        while len(self.verdicts) > KEPT_VERDICTS:
            del self.verdicts[next(iter(self.verdicts))]

    def _tell(self, at: float, event: e.RunEvent) -> None:
        if self._words is None:
            return
        for line in self._words(event):
            self.lines.append((at, event.kind, line))
            self.lines_taken += 1

    # ---- what follows from it
    def rate(self) -> rate.TrainingRate | None:
        """How much all and each of the members train on in a second; None where that is not known,
        or may not be shown.
        """
        if not self.about.allowed.samples:
            return None
        members = [row.peer for row in self.peers if row.member]
        return rate.rate_of(list(self._work), members, self.about.unit)

    def quick(self, now: float, last: int = NEWEST) -> dict[str, Any]:
        """The figures at the top: of the newest ``last`` rounds where they are means."""
        rows = list(self.rounds)[-last:]
        periods = [row.period_s for row in rows if row.period_s]
        waited = [(row.waited_s, row.period_s) for row in rows if row.period_s and row.waited_s]
        newest = self.rounds[-1] if self.rounds else None
        status = self.status or RunStatus()
        sent = self._base_sent + self._last_sent
        received = self._base_received + self._last_received
        sent = sent if status.bytes_sent is None else status.bytes_sent
        received = received if status.bytes_received is None else status.bytes_received
        return {
            "round": max((row.round for row in rows), default=0),
            "members": sum(row.member for row in self.peers),
            "reachable": sum(
                row.member and row.link.get("live", True) is not False for row in self.peers
            ),
            "contributors": newest.who.bit_count() if newest else 0,
            "samples": sum(row.samples for row in self.peers),
            "period_s": sum(periods) / len(periods) if periods else None,
            "training_share": training_share(waited, self.about.overlap),
            "gain": gain_words(status.gain or {}),
            "bytes_sent": sent,
            "bytes_received": received,
            "ddp_bytes": round(self.ddp_bytes),
            "ddp_times": self.ddp_bytes / sent if 0 < sent < self.ddp_bytes else None,
            "figures": [
                [figure.label, words]
                for figure in FIGURES
                if (words := figure.text(status))
                and (not figure.keeps or getattr(self.about.allowed, figure.keeps))
            ],
            "memory_bytes": self.node.get("memory_bytes"),
            "loss": self.own_loss(),
            "age_s": max(0.0, now - newest.at) if newest else None,
        }

    def own_loss(self) -> float | None:
        """The newest loss that this node's script reported."""
        loss = self.metrics.get("loss", math.nan)
        return loss if math.isfinite(loss) else None
