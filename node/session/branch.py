"""A branch at one of its members: a log of its own for the time without a quorum, over the members
that can be reached.

It is decided by the round's rules among its own members. Its votes are volatile: a member that
restarts does not vote in it again, but holds its tip, from which the members fork once more. Each
of its rounds moves the replica; the certified state is put aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...collectives import exchange as x
from ...collectives import messages as m
from ...collectives.codecs.codec import Grid
from ...collectives.digest import chunk_hash, part_digest
from ...collectives.group import MAX_PATH, Certified, Contributor, Entry, Plan
from ...collectives.identifiers import HASH_BYTES, PeerId
from ...collectives.round import MemoryJournal, RoundMachine, Shape, tip_entry
from . import events as ev
from .beside import BesideRun

if TYPE_CHECKING:
    from .branching import Branching

Step = tuple[Entry, m.Tip | None, memoryview | None]
"""A decided entry of the branch, the tip after it, and its state where it is a new one."""


def measured(log: str, round_: int, blank: m.Tip, shape: Shape, state: memoryview) -> m.Tip:
    """``blank`` with the digest of the state reached: bytes of anchor and momentum. Heavy."""
    entry = tip_entry(log, round_, blank, shape)
    hashes = [
        chunk_hash(view)
        for view in Grid(entry.codec, entry.numel, entry.chunk_elements).results.views(state)
    ]
    return m.Tip(
        blank.log,
        blank.base,
        blank.length,
        blank.contributors,
        part_digest(entry, entry.parts[0], hashes),
    )


class Branch(BesideRun):
    """One branch at this member."""

    def __init__(
        self, branching: Branching, genesis: Certified, path: m.Tip | None, now: float
    ) -> None:
        session = branching.session
        main = session.machine
        assert main is not None
        self.branching, self.session = branching, session
        self.genesis, self.log, self.path, self.tip_now = genesis, genesis.entry.log, path, path
        self.began_at = self.moved_at = now
        # entry r+1 is certified, or this member went on to another branch: nothing of it happens
        # any more
        self.over = False
        self.seen: set[PeerId] = {session.me}  # who takes part as far as we heard
        self.results: dict[tuple[bytes, ...], memoryview] = {}  # of the open round
        self._waiting: Step | None = None  # it found no room on the disk
        self.kept: dict[
            bytes, tuple[Entry, memoryview]
        ] = {}  # of the last rounds, for those who lag
        self.journal = MemoryJournal(main.me.incarnation)
        self.journal.append(genesis)
        self.machine = RoundMachine(
            run=session.run,
            log=self.log,
            me=main.me,
            organiser=session.organiser,
            journal=self.journal,
            shape=main.shape,
            timing=session.timing,
            actions=self,
            rng=session.rng,
            now=now,
            site=session.site,
            root=genesis.entry.base_state,
            idle=session.script is None,
        )
        self.open_round()

    def open_round(self) -> None:
        """Let the data plane accept parts of the branch's open round."""
        shape, peers = self.machine.shape, [member.peer for member in self.machine.config]
        self.session.ports.exchange.open_round(
            self.log,
            self.machine.round,
            peers,
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            most=shape.most,
        )

    @property
    def full(self) -> bool:
        """Whether its path has no room for another round."""
        path = len(self.tip_now.contributors) if self.tip_now else 0
        return path + len(self.machine.config) > MAX_PATH

    def end(self) -> None:
        """Take no more part."""
        self.over = True
        self.session.ports.exchange.close_round(self.log, self.machine.round)
        self.results.clear()

    def on_result(self, now: float, event: x.ResultComplete) -> bool:
        """Result bytes of a plan; False when it is none of the branch's."""
        plan = self.machine.open.plan
        if self.over or plan is None or plan.plan_id != event.plan_id:
            return False
        self.results[event.digests] = event.data
        self.machine.on_result(now, plan, event.digests)
        return True

    # ---- RoundActions
    def send(self, peer: PeerId, log: str, round_: int, body: m.Body) -> None:
        """Send a control message."""
        self.session.actions.send(peer, log, round_, body)

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        """Carry out a plan."""
        self.session.ports.emit(ev.PlanTaken(plan, self.machine.convener_of(plan.ballot).peer))
        self.session.ports.exchange.execute(plan, audience)

    def apply(self, entry: Entry) -> None:
        """Outer step of a decided round of the branch; its state is kept before anybody hears of
        it.
        """
        session, branching, replica = self.session, self.branching, self.session.replica
        main = session.machine
        assert replica is not None
        assert main is not None
        data = self.results.get(entry.part_digests) if entry.contributors else None
        if data is not None:
            self.kept[entry.hash()] = (entry, data)
        before, log, round_, shape = self.tip_now, main.log, main.round, main.shape

        def step() -> Step:
            if data is None:
                return entry, before, None
            replica.apply(entry, data)
            replica.applied = round_ - 1
            state = replica.snapshot()
            blank = m.Tip(
                self.log,
                main.base,
                (before.length if before else 0) + 1,
                self.path_after(before, entry),
                bytes(HASH_BYTES),
            )
            tip = measured(log, round_, blank, shape, state)
            branching.at = tip.digest
            return entry, tip, state

        session.ports.offload(step, self._stepped)

    def path_after(self, before: m.Tip | None, entry: Entry) -> tuple[Contributor, ...]:
        """All contributions of the branch up to and with this entry."""
        return (*(before.contributors if before else ()), *entry.contributors)

    def retry(self, now: float) -> None:
        """A step found no room on the disk."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._stepped(now, waiting)

    def _stepped(self, now: float, done: Step) -> None:
        entry, tip, state = done
        session, machine = self.session, self.machine
        if self.over:
            return
        if tip is not None and state is not None:
            self._waiting = done
            self.branching.advance(tip, state)  # may raise StorageError: tried again
            self._waiting, self.tip_now = None, tip
        session.ports.exchange.close_round(self.log, entry.round)
        machine.on_applied(now)
        machine.on_root(
            now,
            machine.round,
            self.tip_now.digest if self.tip_now else self.genesis.entry.base_state,
        )
        for name in [
            name
            for name, (old, _) in self.kept.items()
            if old.round < machine.round - session.timing.keep_rounds
        ]:
            self.branching.serving.withdraw(name)
            del self.kept[name]
        self.results.clear()
        self.moved_at = now
        self.open_round()
        session.resume(now, machine)
        self.branching.offer(now)
        session.settle(now)

    def decided(self, certified: Certified, counted: bool) -> None:
        """A round of the branch is applied."""
        self.branching.decided(certified.entry, counted)

    def closing(self, round_: int) -> None:
        """A contribution to the open round was offered."""
        if self.machine.contribution is None:
            self.session.ports.emit(ev.RoundClosing(self.session.completed + 1))

    def results_from(self) -> int:
        """Those who lag further fork again."""
        return max(0, self.machine.round - self.session.timing.keep_rounds)
