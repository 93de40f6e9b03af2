"""What happened in a run, as its sessions tell it: published to whoever subscribed, and kept for
its status.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import trio

from ...collectives.identifiers import PeerId
from ...collectives.layout import MAX_FRAGMENTS
from ..session import documents
from ..session import events as ev
from .troubles import doubled_here, other_histories, removed_here
from .waiting import document_of, explained

if TYPE_CHECKING:
    from .run import RunService

log = logging.getLogger("atoll")
USUAL = ("training", "round under way", "finished", "left")  # no news for whoever watches a log
PACE_ROUNDS = 10  # the newest ones, whose mean period is the pace of a run
HISTORY = 256  # committed rounds kept for status
SEEKING: tuple[str, int, int] = ("finding members", 0, 0)


class Chronicle:
    """Of one run at one node."""

    def __init__(self, run: RunService) -> None:
        self.run = run
        self.rounds: list[dict[str, Any]] = []
        self.operation: dict[str, Any] | None = None  # the free-standing one decided last
        self.progress = SEEKING
        self.unmasked: dict[str, Any] | None = None  # the newest secure sum
        self._without_part = set[int]()  # fragments in whose last round this node added up nothing

    def note_operation(self, operation: dict[str, Any]) -> None:
        """A free-standing operation of the script is decided."""
        self.operation = operation
        self.run.node.publish({"event": "operation.committed", "run": self.run.run_id, **operation})

    def _tell(self, kind: str, fragment: int, **fields: Any) -> None:
        """Publish; of a run in fragments every event says of which."""
        where = (
            {"fragment": fragment} if self.run.whole and len(self.run.whole.sessions) > 1 else {}
        )
        self.run.node.publish({"event": kind, "run": self.run.run_id, **where, **fields})

    def note(self, fragment: int, event: object) -> None:
        """An event of the session of one fragment. Long, since each kind of event has its case."""
        run = self.run
        match event:
            case ev.PlanTaken():
                run.phases.planned(trio.current_time(), event)
                run.timings.planned(event)
            case ev.Timed():
                run.timings.timed(trio.current_time(), event)
            case ev.RoundCommitted():
                self._note_part(fragment, event)
                document = documents.committed(event, time.time(), run.traffic())
                row = {"fragment": fragment, **document, "reach": run.reach}
                self.rounds = [
                    *self.rounds[-HISTORY:],
                    {key: value for key, value in row.items() if key != "event"},
                ]
                run.troubles.clear()
                run.node.publish({"run": run.run_id, **row})
            case ev.Unmasked():
                self.unmasked = {
                    "entry": event.round,
                    "attempt": event.attempt,
                    "members": list(event.members),
                }
                self.unmasked |= {"weight": event.weight, "metrics": dict(event.metrics)}
                self.unmasked |= (
                    {"buckets": [list(members) for members in event.sums]}
                    if len(event.sums) > 1
                    else {}
                )
                self.unmasked |= {"next_clip": event.bound} if event.bound is not None else {}
                self._tell("round.unmasked", fragment, **self.unmasked)
            case ev.PrivacySpent():
                self._tell(
                    "privacy.spent",
                    fragment,
                    epsilon=event.epsilon,
                    steps=event.steps,
                    left=event.left,
                )
            case ev.MaskingFailed():
                self._tell(
                    "masking.failed",
                    fragment,
                    entry=event.round,
                    attempt=event.attempt,
                    reason=event.reason,
                )
            case ev.Recertified():
                log.warning(
                    "run %s: entry %d is recertified without %d members",
                    run.run_id,
                    event.entry,
                    len(event.removed),
                )
                self._tell(
                    "entry.recertified", fragment, entry=event.entry, removed=list(event.removed)
                )
            case ev.Removed():
                run.fail(removed_here())
            case ev.StateProgress():
                self.progress = ("fetching state", event.have, event.total)
                self._tell("state.progress", fragment, have=event.have, total=event.total)
            case ev.StateReady():
                self.progress = ("ready", 1, 1)
                self._tell("state.ready", fragment, round=event.round)
            case ev.StateRoot():
                for row in self.rounds[-MAX_FRAGMENTS:]:
                    if (row["fragment"], row["entry"]) == (fragment, event.entry):
                        row["state_root"] = event.root.hex()
                self._tell("state.root", fragment, entry=event.entry, root=event.root.hex())
            case ev.PeerMisbehaved():
                self._tell("peer.misbehaved", fragment, peer=event.peer, reason=event.reason)
            case ev.SumDisputed():
                self._tell("sum.disputed", fragment, owner=event.owner, wrong=list(event.wrong))
            case ev.SumsDiffer():
                self._tell("sums.differ", fragment, peers=list(event.peers))
            case ev.Equivocated():
                run.guard(lambda: run.take_proof(event.evidence))
            case ev.WorkJudged():
                self._tell(
                    "work.judged",
                    fragment,
                    peer=event.peer,
                    entry=event.entry,
                    good=event.good,
                    fault=event.fault,
                )
            case ev.AnotherHistory():
                if (twice := other_histories(run.foreign, run.splits)) is not None:
                    run.troubles.tell(twice)
            case ev.Doubled():
                run.troubles.tell(doubled_here())
            case ev.Renewed():
                log.warning(
                    "run %s: this home is an old copy: the run has votes of it that it does not "
                    "know; it goes on as a new member, of life %d",
                    run.run_id,
                    event.incarnation,
                )
                self._tell("member.renewed", fragment, life=event.incarnation)
            case ev.StillWaiting():
                waiting = explained(event.waiting, run.troubles.current)
                document = document_of(waiting, trio.current_time())
                level = logging.INFO if waiting.state in USUAL else logging.WARNING
                if waiting.state == "finished":
                    log.info("run %s: finished: %s", run.run_id, waiting.ends)
                else:
                    log.log(
                        level,
                        "run %s: %s for %.0f s: waits for %s%s; it ends when %s",
                        run.run_id,
                        waiting.state,
                        waiting.round_open_s,
                        waiting.what,
                        ", of " + ", ".join(waiting.of) if waiting.of else "",
                        waiting.ends,
                    )
                self._tell("run.waiting", fragment, **document)
            case ev.WaitEnded():
                log.info("run %s: it goes on", run.run_id)
                self._tell("run.goes_on", fragment)
            case ev.StateDiverged():
                self._tell("state.diverged", fragment, entry=event.entry)
            case _:
                pass

    def part(self, peer: PeerId) -> float | None:
        """Which share of the newest round of each fragment, on the mean, ``peer`` added up; None
        where it contributed to none of them.
        """
        newest = {row["fragment"]: row for row in self.rounds if row["contributors"]}
        found = [row["parts"][peer] for row in newest.values() if peer in row["parts"]]
        return sum(found) / len(found) if found else None

    @property
    def period_s(self) -> float | None:
        """Mean seconds from one committed round to the next, over the newest PACE_ROUNDS; None
        before there are two. Of a run in fragments those of the first.
        """
        at = [row["at"] for row in self.rounds if row["contributors"] and not row["fragment"]]
        at = at[-PACE_ROUNDS:]
        return max(0.0, at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else None

    def was_member(self, peer: PeerId) -> bool:
        """Whether ``peer`` was in a configuration that is remembered here."""
        return any(peer in row["members"] for row in self.rounds)

    def _note_part(self, fragment: int, event: ev.RoundCommitted) -> None:
        """A user whose link is too slow for a part is told so, once until it has one again."""
        me = self.run.node.identity.peer
        part = documents.parts_of(event.contributors, event.parts).get(me)
        if part is None or (part == 0.0) == (fragment in self._without_part):
            return
        if part:
            self._without_part.discard(fragment)
        else:
            log.warning(
                (
                    "run %s: this node's link is too slow to add up a part for the others; it "
                    "sends and receives only"
                ),
                self.run.run_id,
            )
            self._without_part.add(fragment)
        self._tell("round.part", fragment, part=part)
