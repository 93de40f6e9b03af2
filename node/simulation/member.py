"""One simulated peer: disks that stay, one for each log, and processes that come and go, each with
scripts; all of it watched by checkers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from ...collectives.group import Certified, Entry, Member
from ...collectives.identifiers import PeerId
from ..session.events import BranchEnded, EarlierSettled, InFragment, StateReady
from ..session.record import BranchRecord
from ..session.replica import ModelReplica
from ..session.session import Session
from .checker import Frozen, Violation
from .liars import LyingProcess
from .process import NodeProcess
from .script import Script, Units
from .storage import Backup, Observer, SimStorage
from .watch import Watch

if TYPE_CHECKING:
    from .swarm import SimSwarm

ASK_S = 0.01  # a script that outlived its node enters the next one so long after the state is there
LATE_S = 0.8  # a script that reuses its buffers (a planted bug) does so after this time


class SimMember:
    """A peer. ``process`` is None while it is dead."""

    def __init__(self, swarm: SimSwarm, peer: PeerId) -> None:
        self.swarm, self.peer = swarm, peer
        self.disks = [Disk(self, watch) for watch in swarm.watches]
        self.process: NodeProcess | None = None
        self.leaving = False
        self.buried = False  # it never comes back
        self.life = -1

    @property
    def me(self) -> Member:
        """This peer in its present incarnation."""
        return Member(self.peer, self.storage.incarnation)

    @property
    def storage(self) -> SimStorage:
        """The disk of the first log."""
        return self.disks[0].storage

    # ---- life
    def boot(self, died: Callable[[], None] | None = None) -> None:
        """Start a process. ``died``: a trap killed it inside a call; it comes back after a while,
        unless something else is given.
        """
        if self.process is not None or self.buried:
            return
        swarm, self.life = self.swarm, self.life + 1
        now, rng = swarm.world.now, swarm.world.stream(f"{self.peer}/{self.life}")
        storage, *others = [disk.storage for disk in self.disks]
        make = (
            partial(LyingProcess, lies=swarm.options.lies, tell=swarm.count)
            if self.peer in swarm.liars
            else NodeProcess
        )
        process = self.process = make(
            swarm.place,
            self.peer,
            storage,
            rng,
            emit=self._hear,
            died=lambda back_after_s: died() if died else swarm.died(self.peer, back_after_s),
            others=others,
        )
        for disk in self.disks:
            disk.script = Script(disk.watch, rng, disk, disk.units, peer=self.peer, life=self.life)
        process.start(swarm.contacts(self.peer))
        if process.ended:  # a trap struck at once
            return
        with process.alive():
            known = process.run.attach(now, swarm.layout)
            if (
                not known
                and self.peer == swarm.organiser
                and not all(watch.checker.entries for watch in swarm.watches)
            ):
                process.run.found(now, swarm.layout, swarm.initial)
            if self.leaving:
                process.run.leave(now)

    def die(self, *, power: bool = False) -> None:
        """End the process at once; with ``power`` the machine, and what was not forced to the
        medium is lost, torn and reordered.
        """
        if self.process is not None:
            self.process.end()
            self.process = None
            for disk in self.disks:
                disk.die(power=power)

    def leave(self) -> None:
        """The user lets the member leave."""
        process = self.process
        self.leaving = True
        if process is not None and process.runs(self.leave):
            with process.alive():
                process.run.leave(self.swarm.world.now)

    def _hear(self, event: object) -> None:
        if isinstance(event, InFragment):
            self.disks[event.fragment].hear(event.event)
        else:
            self.disks[0].hear(event)


class Disk(Observer):
    """What a member keeps of one log, and while it lives the script that contributes to it."""

    def __init__(self, member: SimMember, watch: Watch) -> None:
        self.member, self.watch = member, watch
        self.swarm, self.peer, self.checker = member.swarm, member.peer, watch.checker
        self.storage = SimStorage(
            self.swarm.settings.outer,
            self,
            self.swarm.world.stream(f"disk/{self.peer}/{watch.number}"),
            self.swarm.plant.unforced,
        )
        self.units = Units()
        self.moved_at = 0.0  # when an entry was recorded or a model published last
        self.script: Script | None = None
        self.undecided: list[
            bytes
        ] = []  # contributions of earlier lives whose fate a script still wants to know

    @property
    def me(self) -> Member:
        """The member in its present incarnation, in this log: a backup may be found out in one
        fragment and not in another.
        """
        return Member(self.peer, self.storage.incarnation)

    @property
    def log(self) -> Sequence[Certified]:
        """Entries on disk."""
        return self.storage.journal().entries

    @property
    def _session(self) -> Session | None:
        return (
            self.member.process.run.sessions[self.watch.number]
            if self.member.process is not None
            else None
        )

    def die(self, *, power: bool) -> None:
        """The process is gone."""
        assert self.script is not None
        if self.script.pending is not None:
            self.undecided.append(self.script.pending[0])
        self.script.die()
        self.script = None
        self.watch.died(self)
        self.storage.end_of_life(power=power)
        self.swarm.plant.crashed(self.storage)

    def restore(self, copy: Backup) -> None:
        """A backup comes back: what was made since is on no disk. What the log had of it by then is
        still the member's.
        """
        self.storage.restore_backup(copy)

    def wipe(self) -> None:
        """It is lost, and with it what a branch had of it."""
        self.storage.wipe()
        self.units.destroyed.update(
            unit for staked in self.units.staked.values() for unit in staked
        )

    def contribute(self, cid: bytes, contribution: Frozen, base: int | None) -> None:
        """The script offers a contribution."""
        process, script = self.member.process, self.script
        if (
            process is None
            or script is None
            or not process.runs(lambda: self.contribute(cid, contribution, base))
        ):
            return
        vector = (
            contribution.vector.clone()
        )  # the checker keeps what was frozen, whatever becomes of the buffer
        self.checker.freeze(cid, contribution)
        with process.alive():
            process.run.sessions[self.watch.number].contribute(
                self.swarm.world.now, cid, contribution.weight, vector, base
            )
        self.swarm.world.after(LATE_S, lambda: script.late(cid, vector))

    def hear(self, event: object) -> None:
        """An event of the log's session."""
        self.swarm.heard(self, event)
        match event:
            case StateReady() if self.undecided and self.member.process is not None:
                process = self.member.process
                self.swarm.world.after(ASK_S, lambda: self._ask(process))
            case BranchEnded():
                self.checker.lost(self.peer, event.lost)
            case EarlierSettled():
                self.undecided.remove(event.cid)
                self.checker.settled(self.peer, event.cid, event.counted)
            case _:
                pass
        if self.script is not None:
            self.script.on_event(event)

    def _ask(self, process: NodeProcess) -> None:
        """A script that outlived its node asks the next one what became of its work."""
        if process.runs(lambda: self._ask(process)):
            with process.alive():
                for cid in list(self.undecided):
                    process.run.sessions[self.watch.number].earlier.ask(self.swarm.world.now, cid)

    # ---- Observer: what reaches the disk
    def before_write(self, kind: str) -> None:
        """Traps may strike between any two writes."""
        self.swarm.event("write", self.peer, None)

    def voted(self, ballot: int, entry: Entry) -> Callable[[], None]:
        """A vote was recorded; it is judged as it was recorded, once it is on the medium."""
        replica, session, me = self.storage.replica_now, self._session, self.me
        self.swarm.twins.voted(self, entry)
        generation = replica.generation if replica is not None else -1
        machine = session.machine if session is not None else None
        if session is not None and (
            session.branching.base_state is not None
            or (generation < 0 and machine is not None and machine.open.applying)
        ):
            generation = len(self.log) - 1  # put aside while the replica is on a branch, or back
        holds = self.storage.holds(entry)

        def told() -> None:
            self.watch.voted(me, ballot, entry)
            self.checker.voted(me, ballot, entry, holds_bytes=holds, generation=generation)

        return told

    def appended(self, certified: Certified, last: int) -> None:
        """An applied entry was recorded."""
        self.moved_at = self.swarm.world.now
        if certified.entry.round == 0:
            if not self.checker.entries:
                replica = cast(ModelReplica, self.storage.replica_now)
                self.checker.found(certified, replica.anchor)
        else:
            self.checker.applied(self.me, certified, last=last)
            self.watch.recorded(self)

    def branched(self, record: BranchRecord) -> None:
        """A round of a branch was recorded, or where a fork begins."""
        session = self._session
        branch = session.branching.branch if session is not None else None
        decided = branch.machine.open.decided if branch is not None else None
        if (
            branch is not None
            and decided is not None
            and branch.machine.open.applying
            and record.tip is not None
        ):
            self.checker.branched(self.peer, record.tip, decided, branch.genesis.entry)

    def published(self, replica: ModelReplica, round_: int) -> None:
        """An anchor became current."""
        self.moved_at = self.swarm.world.now
        session = self._session
        tip = session.branching.at if session is not None else b""
        if tip:
            self.checker.shown(self.peer, tip, replica.anchor)
        else:
            self.watch.published(self, round_, replica.anchor)

    def forgot(self) -> None:
        """The session gave up its journal."""
        raise Violation("durability", f"{self.peer} gave up a journal that was in order")
