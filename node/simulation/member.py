"""One simulated peer: a disk that stays, and processes that come and go, each with a script; all of it watched by the checker."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ...collectives.group import Certified, Entry, Member
from ...collectives.identifiers import PeerId
from ..session.events import BranchEnded, EarlierSettled, StateReady
from ..session.record import BranchRecord
from ..session.replica import ModelReplica
from .checker import Frozen, Violation
from .process import NodeProcess
from .script import Script, Units
from .storage import Observer, SimStorage

if TYPE_CHECKING:
    from .swarm import SimSwarm

ASK_S = 0.01  # a script that outlived its node enters the next one so long after the state is there
LATE_S = 0.8  # a script that reuses its buffers (a planted bug) does so after this time


class SimMember(Observer):
    """A peer with a disk. ``process`` and ``script`` are None while it is dead."""

    def __init__(self, swarm: SimSwarm, peer: PeerId) -> None:
        self.swarm, self.peer = swarm, peer
        self.storage = SimStorage(swarm.settings.outer, self)
        self.units = Units()
        self.process: NodeProcess | None = None
        self.script: Script | None = None
        self.leaving = False
        self.life = -1
        self.undecided: list[bytes] = []  # contributions of earlier lives whose fate a script still wants to know

    @property
    def me(self) -> Member:
        """This peer in its present incarnation."""
        return Member(self.peer, self.storage.incarnation)

    @property
    def log(self) -> list[Certified]:
        """Entries on disk."""
        return self.storage.journal().entries

    # ---- life
    def boot(self) -> None:
        """Start a process."""
        if self.process is not None:
            return
        swarm, self.life = self.swarm, self.life + 1
        now, rng = swarm.world.now, swarm.world.stream(f"{self.peer}/{self.life}")
        process = self.process = NodeProcess(
            swarm.place, self.peer, self.storage, rng, emit=self._hear, died=lambda back_after_s: swarm.died(self.peer, back_after_s)
        )
        self.script = Script(swarm, rng, self, self.units, peer=self.peer, life=self.life)
        process.start(swarm.contacts(self.peer))
        if process.ended:  # a trap struck at once
            return
        with process.alive():
            known = process.session.attach(now, swarm.layout)
            if not known and self.peer == swarm.organiser and not swarm.checker.entries:
                process.session.found(now, swarm.layout, swarm.initial)
            if self.leaving:
                process.session.leave(now)

    def die(self) -> None:
        """End the process at once."""
        if self.process is not None and self.script is not None:
            if self.script.pending is not None:
                self.undecided.append(self.script.pending[0])
            self.script.die()
            self.process.end()
            self.process = self.script = None
            self.storage.end_of_life()
            self.swarm.plant.crashed(self.storage)

    def leave(self) -> None:
        """The user lets the member leave."""
        process = self.process
        self.leaving = True
        if process is not None and process.runs(self.leave):
            with process.alive():
                process.session.leave(self.swarm.world.now)

    def contribute(self, cid: bytes, contribution: Frozen, base: int | None) -> None:
        """The script offers a contribution."""
        process, script = self.process, self.script
        if process is None or script is None or not process.runs(lambda: self.contribute(cid, contribution, base)):
            return
        vector = contribution.vector.clone()  # the checker keeps what was frozen, whatever becomes of the buffer
        self.swarm.checker.freeze(cid, contribution)
        with process.alive():
            process.session.contribute(self.swarm.world.now, cid, contribution.weight, vector, base)
        self.swarm.world.after(LATE_S, lambda: script.late(cid, vector))

    def _hear(self, event: object) -> None:
        self.swarm.heard(self, event)
        match event:
            case StateReady() if self.undecided and self.process is not None:
                process = self.process
                self.swarm.world.after(ASK_S, lambda: self._ask(process))
            case BranchEnded():
                self.swarm.checker.lost(self.peer, event.lost)
            case EarlierSettled():
                self.undecided.remove(event.cid)
                self.swarm.checker.settled(self.peer, event.cid, event.counted)
            case _:
                pass
        if self.script is not None:
            self.script.on_event(event)

    def _ask(self, process: NodeProcess) -> None:
        """A script that outlived its node asks the next one what became of its work."""
        if process.runs(lambda: self._ask(process)):
            with process.alive():
                for cid in list(self.undecided):
                    process.session.earlier.ask(self.swarm.world.now, cid)

    # ---- Observer: what reaches the disk
    def before_write(self, kind: str) -> None:
        """Traps may strike between any two writes."""
        self.swarm.event("write", self.peer, None)

    def voted(self, ballot: int, entry: Entry) -> None:
        """A vote was recorded."""
        self.swarm.voted(self.me, ballot, entry)
        replica = self.storage.replica_now
        generation = replica.generation if replica is not None else -1
        if self.process is not None and self.process.session.branching.base_state is not None:
            generation = len(self.log) - 1  # it is put aside while the replica is on a branch
        self.swarm.checker.voted(self.me, ballot, entry, holds_bytes=self.storage.holds(entry), generation=generation)

    def appended(self, certified: Certified, last: int) -> None:
        """An applied entry was recorded."""
        if certified.entry.round == 0:
            if not self.swarm.checker.entries:
                replica = cast(ModelReplica, self.storage.replica_now)
                self.swarm.checker.found(certified, replica.anchor)
        else:
            self.swarm.checker.applied(self.me, certified, last=last)
            self.swarm.recorded(self.peer)

    def branched(self, record: BranchRecord) -> None:
        """A round of a branch was recorded, or where a fork begins."""
        branch = self.process.session.branching.branch if self.process is not None else None
        decided = branch.machine.open.decided if branch is not None else None
        if branch is not None and decided is not None and branch.machine.open.applying and record.tip is not None:
            self.swarm.checker.branched(self.peer, record.tip, decided, branch.genesis.entry)

    def published(self, replica: ModelReplica, round_: int) -> None:
        """An anchor became current."""
        tip = self.process.session.branching.at if self.process is not None else b""
        if tip:
            self.swarm.checker.shown(self.peer, tip, replica.anchor)
        else:
            self.swarm.published(self.peer, round_, replica.anchor)

    def forgot(self) -> None:
        """A kill -9 must never cost the journal."""
        raise Violation("durability", f"{self.peer} gave up a journal that was in order")
