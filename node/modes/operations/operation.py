"""One free-standing operation at one member: its log, its caller, its result."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3
from torch import Tensor

from ....collectives import messages as m
from ....collectives.codecs.codec import Chunking
from ....collectives.codecs.encoded import EncodedVector
from ....collectives.errors import StorageError
from ....collectives.group import Certified, Config, Entry, Plan
from ....collectives.identifiers import HASH_BYTES, PeerId, RunId
from ....collectives.round import RoundMachine, Shape
from ....collectives.round.log_modes import LogModes
from ....security.rule_names import parse_reducer
from ...session import events as ev
from ...session.tallies import shares_of
from ...session.timeline import Timeline
from .beside import BesideRun
from .naming import Spec, config_key, describe, parse
from .volatile import VolatileJournal, patient

if TYPE_CHECKING:
    from ...session.session import Session
    from .operations import Operations

NO_STATE = bytes(HASH_BYTES)
EARLY_BYTES = 1 << 20
"""Of parts that come before a plan, in an operation that the own script has not called."""
MOST_NAMED = 4
Given = tuple[bytes, int, Tensor | EncodedVector]
"""cid, weight, vector."""


class Operation(BesideRun):
    """One free-standing operation at this member."""

    def __init__(
        self,
        session: Session,
        siblings: Operations,
        spec: Spec,
        key: str,
        config: Config,
        now: float,
    ) -> None:
        """Long, since it names each thing that the operation knows."""
        self.session, self.spec, self.key, self.touched_at = session, spec, key, now
        self._siblings = siblings
        main = session.machine
        assert main is not None
        self.whole, acceptors = config, spec.acceptors(key, config, main.me)
        self.log = log = spec.log_name(key, config, acceptors)
        self.op_id: str | None = None  # None: this member only votes
        self.by: PeerId | None = None  # whose message made it known here; None: the own script
        self.speaker: PeerId | None = None  # who said the newest thing about it
        self.heard_at = now
        self.deferred: tuple[Plan, Sequence[PeerId]] | None = None  # a plan that waits for a call
        self.charged: tuple[PeerId, int] | None = None  # what it takes, and on whose account
        self.pinned = False  # called under this configuration and no other
        self.timeline = Timeline()
        self.results: dict[tuple[bytes, ...], memoryview] = {}
        # What contributions were weighed with, by the same.
        self.weights: dict[tuple[bytes, ...], tuple[float, ...]] = {}
        self.overflowed = set[tuple[bytes, ...]]()  # which of them are not finite
        self.holders: set[PeerId] = set()  # who voted, and so has all bytes
        self.offered: m.Ready | None = None  # what this member said when it called
        self.given: Given | None = None  # and what it called with
        self.callers: set[PeerId] = set()
        # Who called the same operation otherwise, and the name of that log.
        self.others: dict[PeerId, str] = {}
        self.entry: Entry | None = None
        self.done = self.served = False
        self.complete_at = now
        self.decision_s = 0.0
        shape = replace(
            spec.shape(acceptors, session.settings.plan),
            single=session.settings.coordinator and spec.reducer != "gather",
        )
        self.journal = VolatileJournal(main.me.incarnation, lambda: siblings.spend(key))
        self.journal.append(Certified(_genesis(session.run, log, acceptors, shape), ()))
        self.machine = RoundMachine(
            run=session.run,
            log=log,
            me=main.me,
            organiser=acceptors[0].peer if spec.group else session.organiser,
            journal=self.journal,
            shape=shape,
            timing=patient(session.timing) if spec.everyone else session.timing,
            actions=self,
            rng=session.rng,
            now=now,
            modes=LogModes(),
            site=session.terms.site,
            root=NO_STATE,
        )
        self.peers = [member.peer for member in acceptors]
        session.ports.exchange.open_round(
            log,
            1,
            self.peers,
            shape.numel,
            shape.chunk_elements,
            spec.codec,
            EARLY_BYTES,
            shape.most,
            overflows=not self.bears_liars,
        )

    @property
    def called(self) -> bool:
        """Whether the own script takes part, or did."""
        return self.op_id is not None or self.machine.contribution is not None

    def gives(self, peer: PeerId) -> bool:
        """Whether a peer is known to contribute."""
        plan = self.machine.open.plan
        return peer in self.callers or (
            plan is not None and any(c.member.peer == peer for c in plan.contributors)
        )

    # ---- the caller
    def call(
        self, now: float, op_id: str, cid: bytes, weight: int, vector: Tensor | EncodedVector
    ) -> None:
        """This member's script calls. The others hear of it: those who have nothing to add say so
        at once. Weight 0: it only listens.
        """
        self.op_id, self.touched_at, self.given = op_id, now, (cid, weight, vector)
        self.offered = m.Ready(self.machine.base, cid, weight, False)
        self._take_up_plan()
        if not weight:
            self.machine.set_idle(now, True)
            return
        self.session.ports.exchange.freeze(self.log, 1, cid, vector)
        self.machine.set_idle(now, False)
        self.machine.contribute(now, cid, weight)

    def _take_up_plan(self) -> None:
        """What did not fit into what others may take here is the own script's affair now."""
        self.charged, deferred, self.deferred = None, self.deferred, None
        if deferred is not None and self.machine.open.plan is deferred[0]:
            self.execute(*deferred)

    def withdraw(self, now: float) -> None:
        """The caller waits no longer: take the contribution back unless a plan names it."""
        self.op_id, self.given, plan, contribution = (
            None,
            None,
            self.machine.open.plan,
            self.machine.contribution,
        )
        if contribution is None or (
            plan is not None and any(c.cid == contribution[0] for c in plan.contributors)
        ):
            return
        self.machine.withdraw()
        self.machine.set_idle(now, True)
        self.session.ports.exchange.release(contribution[0])

    @property
    def bound(self) -> bool:
        """Whether this member has called, promised or voted here: it cannot take part in another
        log of the operation.
        """
        return (
            self.op_id is not None
            or self.done
            or self.journal.spent
            or self.machine.contribution is not None
        )

    @property
    def under_way(self) -> bool:
        """Whether this member waits for a decision: it has called, or taken part."""
        return not self.done and (self.op_id is not None or self.machine.engaged)

    @property
    def hopeless(self) -> bool:
        """Whether those who called something else leave no quorum for this; or of a group, those
        who are gone.
        """
        machine, others = (
            self.machine,
            {peer for peer, log in self.others.items() if self.pinned or not self.alike(log)},
        )
        if self.spec.group and self.session.machine is not None:
            newest = self.session.machine.config
            others.update(
                who.peer for who in machine.config if who not in newest or self.suspected(who.peer)
            )
        return not self.done and not machine.quorum(
            [who for who in machine.config if who.peer not in others or who == machine.me]
        )

    @property
    def different(self) -> dict[PeerId, Spec]:
        """Who called something else under this id, and which."""
        found = {peer: parse(log) for peer, log in self.others.items()}
        return {peer: one[0] for peer, one in found.items() if one and one[0] != self.spec}

    @property
    def strict(self) -> bool:
        """Whether a call that differs ends this operation at all its callers, though there may be a
        quorum without it: where it has a tag, unless its rule is there for members that may do
        anything.
        """
        return bool(self.spec.tag) and not self.bears_liars

    @property
    def bears_liars(self) -> bool:
        """Whether its rule is there for members that may do anything: what is beyond all bounds is
        then theirs.
        """
        rule = parse_reducer(self.spec.reducer)
        return bool(rule and rule.f)

    def alike(self, log: str) -> bool:
        """Whether a log is of the same operation, under another configuration."""
        found = parse(log)
        return found is not None and found[0] == self.spec

    def leave_out(self, now: float, peer: PeerId) -> None:
        """A member will give nothing here."""
        machine = self.machine
        for who in machine.config:
            if who.peer == peer and not self.done:
                machine.on_silent(now, who)

    def standing(self) -> str:
        """Why it is not decided, as far as this member knows."""
        machine = self.machine
        if different := self.different:
            calls = "; ".join(
                f"{peer} calls it with {spec}" for peer, spec in sorted(different.items())
            )
            return f"{calls}; this peer with {self.spec}"
        if self.others:
            calls = "; ".join(
                f"{peer} calls it with {describe(log)}" for peer, log in sorted(self.others.items())
            )
            return f"{calls}; this peer with {describe(self.log)}"
        ready = {who.peer for who in machine.open.ready} | {self.session.me}
        waiting = sorted(peer for peer in self.peers if peer not in ready)
        if machine.open.plan is None and waiting:
            least = f"; it needs {machine.shape.least} callers" if machine.shape.least > 1 else ""
            return (
                f"{', '.join(waiting)} did not call"
                + (" and cannot be heard" if all(map(self.suspected, waiting)) else "")
                + least
            )
        if machine.waits_for_offers:
            return f"it needs {machine.shape.least} that give something"
        return (
            "a quorum has not voted"
            if machine.open.plan is not None
            else "nobody has given anything"
        )

    def serve(self, cid: bytes | None) -> None:
        """Give the script the result."""
        entry = self.entry
        assert entry is not None
        assert self.op_id is not None
        shares = shares_of(entry.contributors, self.weights.get(entry.part_digests, ()))
        counted = cid if any(c.cid == cid for c in entry.contributors) else None
        self.served = True
        if entry.part_digests in self.overflowed:
            return self.session.tell(
                ev.OperationRefused(self.op_id, self._beyond(entry), overflows=True)
            )
        self.session.tell(
            ev.OperationDone(
                self.op_id,
                shares,
                counted,
                entry.codec,
                entry.chunk_elements,
                self.results[entry.part_digests],
                self.machine.bulk_s,
                self.decision_s,
                config_key(self.whole),
                len(self.whole),
            )
        )

    def _beyond(self, entry: Entry) -> str:
        """Why nobody is given the result."""
        of = ", ".join(c.member.peer for c in entry.contributors[:MOST_NAMED])
        more = len(entry.contributors) - MOST_NAMED
        return (
            f"operation {self.op_id!r}: the {'sum' if entry.reducer == 'mean' else entry.reducer} "
            f"of the values of {of}"
            f"{f' and {more} others' if more > 0 else ''} overflows {entry.codec}"
        )

    def drop_results(self) -> None:
        """Nobody will ask for the bytes any more."""
        self.results.clear()
        if self.entry is not None:
            self._siblings.serving.withdraw(self.entry.hash())

    def end(self) -> None:
        """Take no more part in this life."""
        if self.machine.contribution:
            self.session.ports.exchange.release(self.machine.contribution[0])
        self.drop_results()
        self.session.transfer.drop_log(self.log)
        self.session.ports.exchange.close_round(self.log, 1)

    # ---- RoundActions
    def send(self, peer: PeerId, log: str, round_: int, body: m.Body) -> None:
        """Send a control message."""
        self.timeline.sent(self.session.clock(), self.session.me, body)
        self.session.actions.send(peer, log, round_, body)

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        """Carry out a plan, where it fits into what others may take here; once the own script has
        called it, in any case.
        """
        chunking = Chunking(plan.codec, plan.numel, plan.chunk_elements)
        own = sum(part.stop - part.first for part in plan.parts if part.owner == self.session.me)
        parts = len(plan.contributors) * own * chunking.nbytes // max(1, chunking.chunks)
        if not self._siblings.affordable(self, chunking.results.nbytes + parts):
            self.deferred = plan, audience
            return
        self.deferred = None
        self.timeline.planned(self.session.clock(), plan)
        self.session.ports.emit(
            ev.PlanTaken(plan, self.machine.convener_of(plan.ballot).peer, self.op_id or "")
        )
        self.session.ports.exchange.execute(plan, audience)

    def fetch_result(self, entry: Entry, holders: Sequence[PeerId]) -> None:
        """Fetch result bytes, where they fit into what others may take here."""
        chunking = Chunking(entry.codec, entry.numel, entry.chunk_elements)
        if self._siblings.affordable(self, chunking.results.nbytes):
            super().fetch_result(entry, holders)

    def apply(self, entry: Entry) -> None:
        """Deliver the result."""
        session, data = self.session, self.results.get(entry.part_digests)
        assert data is not None
        self.results = {entry.part_digests: data}  # not those of plans that came to nothing
        now = self.touched_at = session.clock()
        self.entry, self.done, self.decision_s = entry, True, max(0.0, now - self.complete_at)
        self._siblings.over(self)
        contribution = self.machine.contribution
        timed = self.timeline.finish(now, session.me, now, self.op_id or "")
        if timed is not None:
            session.ports.emit(ev.Timed(*timed))
        if self.op_id is not None:
            self.serve(contribution[0] if contribution else None)
        if contribution is not None:
            session.ports.exchange.release(contribution[0])
        self.given = None  # its memory is another operation's next
        self._say_held(now, entry)
        self.machine.on_applied(now)
        session.ports.exchange.close_round(self.log, 1)
        self._siblings.trim()

    def _say_held(self, now: float, entry: Entry) -> None:
        """Who learned the decision before the proposal has not voted: the others keep the result
        for it until they hear that it has it, too.
        """
        decided, journal = self.machine.open.decided, self.journal
        assert decided is not None
        ballot = decided.votes[0].ballot
        if ballot >= journal.promised and journal.accepted != (ballot, entry):
            with contextlib.suppress(
                StorageError
            ):  # then they keep it for as long as for one that is gone
                self.machine.acceptor.cast(now, ballot, entry)

    def decided(self, certified: Certified, counted: bool) -> None:
        """Told by `apply` already."""

    def closing(self, round_: int) -> None:
        """Scripts call operations by themselves."""

    def results_from(self) -> int:
        """The one result is kept as long as the operation."""
        return 0


def _genesis(run: RunId, log: str, acceptors: Config, shape: Shape) -> Entry:
    """Entry 0 of an operation's log: it follows from the operation, so nobody signs it."""
    base = blake3(b"atoll/op/1" + msgspec.msgpack.encode((run, log, acceptors))).digest()
    return Entry(
        log,
        0,
        base,
        NO_STATE,
        (),
        (),
        (),
        shape.numel,
        shape.chunk_elements,
        shape.codec,
        shape.reducer,
        acceptors,
    )
