"""A script attached to a run: the node's side of `Swarm`. Implements
`control.service.ScriptSession`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import ReferenceType

import trio

from ...collectives.cutting import cut
from ...collectives.errors import LocalProtocolError, ModelMismatchError, StorageError
from ...collectives.group import NO_READING, Reading
from ...collectives.layout import Layout
from ...collectives.outcomes import Outcome, Spent, Tally
from ...collectives.script_swarm import Call, PeerView
from ..control import protocol as p
from ..control.calls import CallTable, answers, does, hears
from ..control.requests import ConnectionRequests
from ..control.service import AnchorFacts, ReduceMemory, buffer_opened, reduce_opened
from ..control.shared_memory import AnchorSlots, SharedBuffer, alive
from ..run.events import (
    ScriptAnswerEvent,
    ScriptEvaluationEvent,
    ScriptReportEvent,
)
from ..session import events as ev
from ..session.calls import calls_of
from ..session.fragments import Whole
from ..session.mode_events import WorkAsked
from .facts import finished, peers_of, spent
from .outside import RunTerms, ScriptTurn
from .reductions import Reductions
from .run import RunFailed, RunService

FLOAT_BYTES = 4
LEAVE_S = 30.0
LOOK_S = 0.5  # how often a script that leaves looks whether there still is a quorum


def check_size(terms: RunTerms, layout: Layout) -> None:
    """Raise ModelMismatchError when the model of a script that would found the run is not the one
    that the manifest promises.
    """
    if terms.parameters not in (None, layout.model_numel):
        raise ModelMismatchError(
            (
                f"your model has {layout.model_numel:,} parameters, the run's manifest promises "
                f"{terms.entry} with {terms.parameters:,}"
            ),
            why="Whoever joins brings the model that the manifest names.",
            hint=(
                'For a model of your own: [model] entry = "local:NAME" in RUN.toml, '
                "then atoll new RUN.toml"
            ),
        )


class AttachedScript:
    """One script of one run; lives in the node's trio thread."""

    def __init__(
        self,
        run: RunService,
        layout: Layout,
        events: ConnectionRequests,
        *,
        founding: bool,
        ended: Callable[[str | None], None] = lambda farewell: None,
    ) -> None:
        """``ended`` is called, with its farewell, when the script is gone. Raises StorageError,
        ModelMismatchError.
        """
        self.run, self.layout, self.events, self.founding = run, layout, events, founding
        if founding and run.terms is not None:
            check_size(run.terms, layout)
        folder = run.node.paths.run_dir(run.run_id)
        self.contribution = SharedBuffer(FLOAT_BYTES * layout.numel, folder=folder)
        parts = cut(layout, len(run.files))
        self.anchors: Sequence[AnchorSlots] = [
            run.slots(part.numel, number) for number, part in enumerate(parts)
        ]
        # Where each fragment ends in the flat vector.
        self._stops = list(accumulate(part.numel for part in parts))
        self._frozen: dict[int, tuple[bytes, float]] = {}  # by fragment
        # by fragment: what rounds, engine and workers were given of the contribution
        self._lent = defaultdict[int, list[ReferenceType[Any]]](list)
        self._reductions = Reductions(run, events)
        self._reported_traffic = run.traffic()
        self._ended = ended
        self._resting = False  # training is paused: nothing is expected of it
        self.calls = CallTable(
            does(p.Contribute, self.contribute),
            answers(p.Reclaim, self.unread, p.Unread),
            does(p.Resume, self.resume),
            does(p.Computed, self.computed),
            answers(p.BeginInterval, self.begin, p.Begun),
            answers(p.Members, self.members, lambda id_, told: p.MemberList(id_, *told)),
            answers(p.Tallies, self.tallies, lambda id_, found: p.TallyList(id_, tuple(found))),
            answers(p.NextNumber, self.next_number, p.Numbered),
            answers(p.Start, self.starts, lambda id_, there: p.Starting(id_, *there)),
            answers(p.Rest, self.rests, p.Resting),
            hears(p.Report, self.report),
            hears(p.ShowAnswer, self._show_answer),
            hears(p.ShowEvaluation, self._show_evaluation),
            does(p.Depart, self.leave),
            answers(p.BufferOpen, self._reductions.buffer_open, buffer_opened),
            does(p.BufferClose, self._reductions.buffer_close),
            answers(p.ReduceOpen, self.reduce_open, reduce_opened),
            does(p.ReduceStart, self._reductions.start),
            does(p.ReduceCancel, self._reductions.cancel),
            does(p.ReduceClose, self._reductions.close),
        )
        if not founding:
            self._attach()
        run.listeners.append(self._on_event)
        run.watch.script.note_turn("may train")

    @property
    def whole(self) -> Whole:
        return self.run.driven

    def _turn(self, turn: ScriptTurn) -> None:
        self.run.watch.script.note_turn(turn)

    # ---- ScriptSession
    async def found(self) -> None:
        """Found the run with what the script wrote."""
        if not self.founding:
            raise LocalProtocolError("this session does not found the run")
        await trio.lowlevel.checkpoint()
        if self.whole.phase == "seeking":
            self.whole.found(trio.current_time(), self.layout, self.contribution.tensor())
            self._attach()
        self.founding = False

    def _attach(self) -> None:
        try:
            self.whole.attach(trio.current_time(), self.layout)
        except (
            StorageError
        ) as error:  # it is attached; what could not be written will be tried again
            self.run.troubles.tell(error)

    def contribute(
        self,
        cid: bytes,
        samples: int,
        base: int | None = None,
        fragment: int = 0,
        reading: Reading = NO_READING,
        hold_s: float = 0.0,
    ) -> None:
        """Offer what the script wrote."""
        if fragment in self._frozen:
            raise LocalProtocolError("one contribution is frozen already")
        now, stop = trio.current_time(), self._stops[fragment]
        vector, read = self.contribution.lend(stop - self.anchors[fragment].numel, stop)
        self._lent[fragment] = [*alive(self._lent[fragment]), read]
        self._frozen[fragment] = (cid, now)
        try:
            self.whole.sessions[fragment].contribute(
                now, cid, samples, vector, base, reading, hold_s
            )
        except StorageError as error:  # it is frozen and will be offered again
            self.run.troubles.tell(error)
        except BaseException:
            del self._frozen[fragment]
            raise
        self._turn("gives")
        if self.run.terms is None or not self.run.terms.settings.trains_on:
            self._turn("waits")
        self.run.wake()

    def unread(self, fragment: int = 0) -> bool:
        """Whether all have let go of what the script wrote."""
        return fragment not in self._frozen and not alive(self._lent[fragment])

    def computed(self, number: int, part: int = 0) -> None:
        vector = self.contribution.tensor()
        self.whole.sessions[0].work.computed(trio.current_time(), number, vector, part)
        self.run.wake()

    def begin(self, number: int) -> bool:
        """Give the script what an interval begins at."""
        start = self.whole.sessions[0].work.starts(number)
        if start is not None:
            self.contribution.tensor().copy_(start)
        return start is not None

    def resume(self, cid: bytes, fragment: int = 0) -> None:
        """Say what became of an earlier contribution."""
        self.run.guard(lambda: self.whole.sessions[fragment].prior.ask(trio.current_time(), cid))
        self.run.wake()

    def facts(self, entry: int, fragment: int = 0) -> AnchorFacts:
        session = self.whole.sessions[fragment]
        steps = self.whole.sessions[0].steps
        return AnchorFacts(session.rounds(entry), session.samples(entry), session.lag(entry), steps)

    def members(self) -> tuple[tuple[PeerView, ...], Spent | None, str, str]:
        """The members of the current configuration; what this one has spent of its privacy, None in
        a run without noise; what evaluations have against averaging, and which sites the open round
        lacks, in words.
        """
        session = self.whole.sessions[0]
        at_work = set(session.at_work(session.clock()))
        same_order = self.run.watch.script.same_order
        members = tuple(
            PeerView(
                each.peer,
                each.round or 0,
                bool(each.live),
                each.path,
                each.organiser,
                same_order.get(each.peer, 0),
                each.peer in at_work,
            )
            for each in peers_of(self.run)
            if each.member
        )
        missing = session.waits.look(session.clock()).of_missing
        return members, spent(self.run), self.run.watch.against_averaging, missing

    def tallies(self, first: int) -> Sequence[Tally]:
        return self.whole.sessions[0].tallies(first)

    def next_number(self, name: str, least: int) -> int:
        """Of a series of operations."""
        return calls_of(self.run.driven.sessions[0]).next_number(name, least)

    def report(
        self,
        metrics: Mapping[str, float],
        first_batch: tuple[int, bytes] | None = None,
        read: Sequence[bytes] = (),
    ) -> None:
        """Training metrics; what the script reads is compared with what others do."""
        self.run.watch.script.note_report(metrics, first_batch, read)
        self.run.metrics.update(metrics)
        if self.run.session is not None:
            self.run.session.work.report(metrics)
        self.run.node.publish(ScriptReportEvent(run=self.run.run_id, metrics=dict(metrics)))

    def _show_answer(self, round: int, prompt: str, text: str) -> None:
        self.run.node.publish(
            ScriptAnswerEvent(run=self.run.run_id, round=round, prompt=prompt, text=text)
        )

    def _show_evaluation(self, round: int, tokens: int, held_out: float) -> None:
        self.run.node.publish(
            ScriptEvaluationEvent(
                run=self.run.run_id, round=round, tokens=tokens, held_out=held_out
            )
        )

    def starts(self, now: bool = False) -> tuple[int, int]:
        """Whether the script may make its first step."""
        if now:
            self.run.start.now()
        self._turn("may train")  # it was kept from training until now
        return self.run.start.look()

    def rests(self) -> str:
        """Why the script is not to train now; "": it may. While it rests nobody waits for its
        contributions.
        """
        why = "" if finished(self.run) else self.run.pause.why
        if why or finished(self.run):
            self._turn("waits")
        else:
            self._turn("asks")
        if why and not self._resting and not self._frozen:
            self._resting = True
            self._turn("gives")
            self._detach()
        elif self._resting and not why:
            self._resting = False
            self.run.guard(self._attach)
            self._turn("may train")
            self.run.wake()
        return why

    async def leave(self) -> None:
        """Contribute no more once the frozen contribution is decided, or cannot be for want of a
        quorum; keep seeding.
        """
        with trio.move_on_after(LEAVE_S):
            while self._frozen and self.run.decidable:
                with trio.move_on_after(LOOK_S):
                    await self._changed()
        self._detach()

    def _detach(self) -> None:
        self.run.guard(lambda: self.whole.detach(trio.current_time()))
        self.run.wake()

    async def _changed(self) -> None:
        event = trio.Event()

        def on_event(_: object) -> None:
            event.set()

        self.run.listeners.append(on_event)
        try:
            await event.wait()
        finally:
            self.run.listeners.remove(on_event)

    def detached(self, farewell: str | None) -> None:
        """The script is gone, and with it its memory; what the engine still reads goes when the
        engine lets go of it.
        """
        self.run.listeners.remove(self._on_event)
        self._turn("is gone")
        self.run.start.leave()
        self._detach()
        self._reductions.detached()
        self.contribution.close()
        # Its rows name this object: the circle would keep what the script wrote until a collection.
        self.calls = CallTable()
        self._ended(farewell)

    # ---- events
    def _on_event(self, event: object) -> None:
        fragment, event = (
            (event.fragment, event.event) if isinstance(event, ev.InFragment) else (0, event)
        )
        match event:
            case ev.RoundCommitted():
                self._on_round(fragment, event)
            case ev.ContributionRefused() if self._frozen.get(fragment, (b"",))[0] == event.cid:
                del self._frozen[fragment]
                self._turn("asks")
                completed = self.whole.sessions[fragment].completed
                self.events.decided(
                    event.cid,
                    Outcome(
                        "lost",
                        completed,
                        reason=f"refused: {event.reason}",
                        unfit=event.unfit,
                        over=event.over,
                    ),
                )
            case ev.EarlierSettled():
                self.events.decided(
                    event.cid,
                    Outcome("committed", event.round, event.contributors, True)
                    if event.counted
                    else Outcome("lost", 0, reason="it was lost with the node"),
                )
            case ev.RoundClosing():
                self.events.closing(event.round, fragment)
            case WorkAsked():
                self.events.asked(event.number, event.round, event.seed, event.interval)
            case ev.ContributionRefused():
                self._reductions.refused(event.cid)
            case ev.OperationDone():
                self._reductions.done(event)
            case ev.OperationRefused():
                self._reductions.hopeless(event)
            case RunFailed():
                self.events.failed(event.error)
            case _:
                pass

    def _on_round(self, fragment: int, event: ev.RoundCommitted) -> None:
        if self._frozen.get(fragment, (b"",))[0] != event.cid:
            return
        (cid, since), before = self._frozen.pop(fragment), self._reported_traffic
        self._turn("asks")
        # Each outcome has what came since the last: they add up.
        sent, received = self._reported_traffic = self.run.traffic()
        moved = sent - before[0], received - before[1]
        elapsed = trio.current_time() - since
        outcome = Outcome(
            "committed",
            event.round,
            event.contributors,
            event.counted,
            event.lost,
            *moved,
            elapsed,
        )
        self.events.decided(cid, outcome)

    # ---- free-standing reductions
    def reduce_open(self, call: Call, numel: int, buffer: int = 0) -> ReduceMemory:
        self._turn("gives")  # a script of collectives alone is not idle
        return self._reductions.open(call, numel, buffer)
