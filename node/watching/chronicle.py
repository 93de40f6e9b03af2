"""What happened in a run, as its sessions tell it: published to whoever subscribed, and kept for
its status.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from ...collectives.identifiers import PeerId
from ...collectives.layout import MAX_FRAGMENTS
from ..run import events as e
from ..session import documents
from ..session import events as ev
from ..session.events import Waiting
from ..session.mode_events import MaskingFailed, PrivacySpent, Unmasked
from .waiting import document_of, explained

if TYPE_CHECKING:
    from ..service.run import RunService

log = logging.getLogger("atoll")
USUAL = ("training", "round under way", "finished", "left")  # no news for whoever watches a log
PACE_ROUNDS = 10  # the newest ones, whose mean period is the pace of a run
HISTORY = 256  # committed rounds kept for status
MOST_ANSWERS = 16  # of a round, as many as a manifest has prompts
SEEKING: tuple[str, int, int] = ("finding members", 0, 0)


class Chronicle:
    """Of one run at one node."""

    def __init__(self, run: RunService) -> None:
        self.run = run
        self.rounds = list[e.EntryCommittedEvent]()
        # The free-standing one decided last.
        self.operation: e.OperationCommittedEvent | None = None
        self.progress = SEEKING
        self.unmasked: e.RoundUnmaskedEvent | None = None  # the newest secure sum
        # what the script found last of what the model has learned
        self.answers: tuple[e.ScriptAnswerEvent, ...] = ()
        self.evaluation: e.ScriptEvaluationEvent | None = None
        self._without_part = set[int]()  # fragments in whose last round this node added up nothing

    def note_published(self, event: e.RunEvent) -> None:
        """What others than the session tell, and status shows. Of answers those of the newest round
        that has any are kept, `MOST_ANSWERS` of them.
        """
        if isinstance(event, e.OperationCommittedEvent):
            self.operation = event
        elif isinstance(event, e.ScriptEvaluationEvent):
            self.evaluation = event
        elif isinstance(event, e.ScriptAnswerEvent):
            same = [each for each in self.answers if each.round == event.round]
            self.answers = (*same, event)[-MOST_ANSWERS:]

    def note(self, fragment: int, event: object) -> None:
        """An event of the session of one fragment: what follows from it here, and what is published
        of it. Long, since each kind of event has its case.
        """
        run = self.run
        of: Any = {"run": run.run_id, "fragment": fragment}
        match event:
            case ev.RoundCommitted():
                self._note_part(fragment, event)
                told = documents.committed(event, time.time(), run.traffic(), reach=run.reach, **of)
                self.rounds = [*self.rounds[-HISTORY:], told]
                run.node.publish(told)
            case Unmasked():
                self.unmasked = e.RoundUnmaskedEvent(
                    entry=event.round,
                    attempt=event.attempt,
                    members=event.members,
                    weight=event.weight,
                    metrics=dict(event.metrics),
                    buckets=event.sums if len(event.sums) > 1 else (),
                    next_clip=event.bound,
                    **of,
                )
                run.node.publish(self.unmasked)
            case PrivacySpent(epsilon, steps, left):
                run.node.publish(e.PrivacySpentEvent(epsilon=epsilon, steps=steps, left=left, **of))
            case MaskingFailed(entry, attempt, reason):
                run.node.publish(
                    e.MaskingFailedEvent(entry=entry, attempt=attempt, reason=reason, **of)
                )
            case ev.Recertified(entry, removed):
                log.warning(
                    "run %s: entry %d is recertified without %d members",
                    run.run_id,
                    entry,
                    len(removed),
                )
                run.node.publish(e.EntryRecertifiedEvent(entry=entry, removed=removed, **of))
            case ev.StateProgress(have, total):
                self.progress = ("fetching state", have, total)
                run.node.publish(e.StateProgressEvent(have=have, total=total, **of))
            case ev.StateReady(round_):
                self.progress = ("ready", 1, 1)
                run.node.publish(e.StateReadyEvent(round=round_, **of))
            case ev.StateRoot(entry, root):
                self._note_root(fragment, entry, root.hex())
                run.node.publish(e.StateRootEvent(entry=entry, root=root.hex(), **of))
            case ev.PeerMisbehaved(peer, reason):
                run.node.publish(e.PeerMisbehavedEvent(peer=peer, reason=reason, **of))
            case ev.SumDisputed(owner, wrong):
                run.node.publish(e.SumDisputedEvent(owner=owner, wrong=wrong, **of))
            case ev.SumsDiffer(peers):
                run.node.publish(e.SumsDifferEvent(peers=peers, **of))
            case ev.WorkJudged(peer, entry, good, fault):
                run.node.publish(
                    e.WorkJudgedEvent(peer=peer, entry=entry, good=good, fault=fault, **of)
                )
            case ev.Renewed(life):
                log.warning(
                    "run %s: this home is an old copy: the run has votes of it that it does not "
                    "know; it goes on as a new member, of life %d",
                    run.run_id,
                    life,
                )
                run.node.publish(e.MemberRenewedEvent(life=life, **of))
            case ev.StillWaiting(waiting):
                self._note_waiting(fragment, explained(waiting, run.troubles.current))
            case ev.WaitEnded():
                log.info("run %s: it goes on", run.run_id)
                run.node.publish(e.RunGoesOnEvent(**of))
            case ev.StateDiverged(entry):
                run.node.publish(e.StateDivergedEvent(entry=entry, **of))
            case _:
                pass

    def _note_root(self, fragment: int, entry: int, root: str) -> None:
        for at in range(max(0, len(self.rounds) - MAX_FRAGMENTS), len(self.rounds)):
            row = self.rounds[at]
            if (row.fragment, row.entry) == (fragment, entry):
                self.rounds[at] = msgspec.structs.replace(row, state_root=root)

    def _note_waiting(self, fragment: int, waiting: Waiting) -> None:
        run = self.run
        if waiting.state == "finished":
            log.info("run %s: finished: %s", run.run_id, waiting.ends)
        else:
            log.log(
                logging.INFO if waiting.state in USUAL else logging.WARNING,
                "run %s: %s for %.0f s: waits for %s%s; it ends when %s",
                run.run_id,
                waiting.state,
                waiting.round_open_s,
                waiting.what,
                ", of " + ", ".join(waiting.of) if waiting.of else "",
                waiting.ends,
            )
        told = document_of(waiting, trio.current_time())
        run.node.publish(
            e.RunWaitingEvent(
                run=run.run_id,
                fragment=fragment,
                state=waiting.state,
                what=waiting.what,
                of=waiting.of,
                ends=waiting.ends,
                since=told["since"],
                round_open_s=told["round_open_s"],
                missing=waiting.missing,
            )
        )

    def part(self, peer: PeerId) -> float | None:
        """Which share of the newest round of each fragment, on the mean, ``peer`` added up; None
        where it contributed to none of them.
        """
        newest = {row.fragment: row for row in self.rounds if row.contributors}
        found = [row.parts[peer] for row in newest.values() if peer in row.parts]
        return sum(found) / len(found) if found else None

    @property
    def period_s(self) -> float | None:
        """Mean seconds from one committed round to the next, over the newest PACE_ROUNDS; None
        before there are two. Of a run in fragments those of the first.
        """
        at = [row.at for row in self.rounds if row.contributors and not row.fragment]
        at = at[-PACE_ROUNDS:]
        return max(0.0, at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else None

    def was_member(self, peer: PeerId) -> bool:
        """Whether ``peer`` was in a configuration that is remembered here."""
        return any(peer in row.members for row in self.rounds)

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
        self.run.node.publish(e.RoundPartEvent(run=self.run.run_id, fragment=fragment, part=part))
