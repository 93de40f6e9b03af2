"""One simulated peer: disks that stay, one for each log, and processes that come and go, each with
scripts; each log of the run is watched by a checker. `SwarmView`: what they see of their seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from torch import Tensor

from atoll.collectives.group import Certified, Config, Entry, Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import Layout
from atoll.collectives.messages import Said
from atoll.collectives.round import RECENT, LastSaid
from atoll.collectives.simulation import Network, World
from atoll.collectives.swarm import RunSettings
from atoll.node.session.events import EarlierSettled, InFragment, StateReady
from atoll.node.session.replica import ModelReplica
from atoll.node.session.session import Session
from atoll.node.session.shapes import shape_of, witnesses_of
from atoll.node.simulation.process import NodeProcess, Place
from atoll.security.rules.reducers import find_reducer

from .checker import Checker, FrozenContribution, Violation
from .injection import FaultInjector
from .liars import Lie, LyingProcess
from .plant import Plant
from .script import Script, Units
from .storage import Backup, Observer, SimStorage

ASK_S = 0.01  # a script that outlived its node enters the next one so long after the state is there
LATE_S = 0.8  # a script that reuses its buffers (a planted bug) does so after this time


class MemberOptions(Protocol):
    """What the parts of a seed read of its options."""

    @property
    def reducer(self) -> str:
        """What becomes of contributions."""
        ...

    @property
    def lying(self) -> int:
        """So many members tell lies."""
        ...

    @property
    def lies(self) -> tuple[Lie, ...]:
        """Which."""
        ...


class TwinsView(Protocol):
    """Second processes under a member's key (`twins.Twins`)."""

    def voted(self, disk: Disk, entry: Entry) -> None:
        """A disk is about to keep a vote."""
        ...

    def disks(self, number: int) -> list[Disk]:
        """What twins keep of a log."""
        ...

    def mute(self, peer: PeerId) -> bool:
        """Whether a peer takes no part, as it has a twin."""
        ...


class LossesView(Protocol):
    """Homes from a backup, disks that fail (`losses.SeedLosses`)."""

    @property
    def restored(self) -> set[Member]:
        """Lives that came back from a backup."""
        ...

    def assumed(self, disk: Disk, copy: Backup) -> bool:
        """Whether a copy of a disk is as old as may be assumed."""
        ...


class RemovalView(Protocol):
    """Members that the organiser removes (`removal.Removal`)."""

    @property
    def planned(self) -> bool:
        """Whether this seed has any."""
        ...


class DeathsView(Protocol):
    """Members that die for good (`deaths.Deaths`)."""

    @property
    def doomed(self) -> dict[PeerId, float]:
        """Who, and when."""
        ...


class SwarmView(Protocol):
    """A seed (`swarm.SimSwarm`), as its members, watches and kinds of faults see it."""

    world: World
    network: Network
    names: list[PeerId]
    organiser: PeerId
    settings: RunSettings
    layout: Layout
    initial: Tensor
    place: Place
    plant: Plant
    faults: FaultInjector
    members: dict[PeerId, SimMember]
    watches: list[Watch]
    liars: frozenset[PeerId]
    wiped: set[Member]
    left: bool

    @property
    def options(self) -> MemberOptions:
        """What the seed is run with."""
        ...

    @property
    def train_s(self) -> float:
        """How long a stretch of training takes."""
        ...

    @property
    def twins(self) -> TwinsView:
        """Second processes."""
        ...

    @property
    def losses(self) -> LossesView:
        """Lost and restored disks."""
        ...

    @property
    def removal(self) -> RemovalView:
        """Removed members."""
        ...

    @property
    def deaths(self) -> DeathsView:
        """Dead members."""
        ...

    def count(self, what: str, by: int = 1) -> None:
        """Statistics."""
        ...

    def heard(self, disk: Disk, event: object) -> None:
        """An event of a session."""
        ...

    def event(self, kind: str, sender: PeerId, receiver: PeerId | None) -> bool:
        """Something a trap may wait for; whether it is lost. Raises ProcessDied."""
        ...

    def contacts(self, peer: PeerId) -> Sequence[PeerId]:
        """What discovery tells a starting process."""
        ...

    def peers(self) -> Sequence[PeerId]:
        """All peers."""
        ...

    def expendable(self, peer: PeerId) -> bool:
        """Whether majorities hold all that was decided without this peer's disks."""
        ...

    def add(self, peer: PeerId) -> None:
        """A peer more, that has not begun."""
        ...

    def boot(self, member: SimMember) -> None:
        """Start its process; the others have new connections to it."""
        ...

    def kill(self, member: SimMember, *, power: bool | None = None) -> None:
        """End its process, as kill -9 does, or with the power of its machine."""
        ...

    def crash(self, peer: PeerId, *, amnesia: bool = False) -> bool:
        """Kill a process; with amnesia its disk is lost too."""
        ...

    def restart(self, peer: PeerId) -> None:
        """Start a process again."""
        ...

    def renew(self, peer: PeerId) -> None:
        """A member's home turns out to be an old copy: it goes on in a new life."""
        ...

    def wipe(self, member: SimMember) -> None:
        """The disks of a dead member are lost."""
        ...

    def died(self, peer: PeerId, back_after_s: float) -> None:
        """A trap killed the process inside a call."""
        ...


class Watch:
    """Of the run's log, or of the log of fragment ``number``. Implements `Scene` for its
    scripts.
    """

    def __init__(self, swarm: SwarmView, number: int, layout: Layout) -> None:
        self.swarm, self.number, self.layout = swarm, number, layout
        self.target = 0  # so many entries are wanted at the end
        self.world, self.plant, self.train_s = swarm.world, swarm.plant, swarm.train_s
        self.checker = Checker(
            organiser=swarm.organiser,
            outer=swarm.settings.outer,
            holders=self._holders,
            lying=swarm.options.lying,
            witnesses=self._witnesses,
            liars=swarm.liars,
            stored=self._stored,
        )
        self._votes: dict[bytes, set[Member]] = {}
        self._first_ballot: dict[bytes, int] = {}
        self._unchecked: dict[Disk, tuple[int, Tensor]] = {}

    @property
    def config(self) -> Config:
        """The newest configuration that was decided."""
        return self.checker.entries[-1].entry.next_config if self.checker.entries else ()

    @property
    def disks(self) -> list[Disk]:
        """What all members keep of it."""
        return [member.disks[self.number] for member in self.swarm.members.values()]

    def published(self, disk: Disk, round_: int, anchor: Tensor) -> None:
        """An anchor became current; the entry may be recorded a moment later."""
        if round_ < len(disk.log):
            self.checker.published(disk.peer, round_, anchor)
        else:
            self._unchecked[disk] = (round_, anchor.clone())

    def recorded(self, disk: Disk) -> None:
        """An entry was recorded: check the anchor that was published before it."""
        waiting = self._unchecked.pop(disk, None)
        if waiting is not None:
            self.checker.published(disk.peer, *waiting)

    def died(self, disk: Disk) -> None:
        """What its process published and did not record is gone."""
        self._unchecked.pop(disk, None)

    def voted(self, who: Member, ballot: int, entry: Entry) -> None:
        """A vote was recorded."""
        self.swarm.count("votes")
        if ballot > 0:
            self.swarm.count("votes above ballot 0")
        if entry.contributors and self._witnesses(entry):
            self.swarm.count("votes for sums with witnesses")
        first = self._first_ballot.setdefault(entry.hash(), ballot)
        if first != ballot:
            self.swarm.count("votes for an adopted value")
        self._votes.setdefault(entry.hash(), set()).add(who)

    def _witnesses(self, entry: Entry) -> int:
        """How many members state each part of an entry beside its owner."""
        settings = self.swarm.settings
        size = entry.numel, entry.chunk_elements
        shape = shape_of(*size, entry.codec, entry.reducer, settings.plan, find_reducer)
        return witnesses_of(settings.lying, shape, find_reducer)

    def _holders(self, entry: Entry) -> set[Member]:
        digest = entry.hash()
        found = {
            who
            for who in self._votes.get(digest, ())
            if who in self.checker.retired or who in self.swarm.losses.restored
        }  # it did hold it, and will never vote in this round again
        for disk in (*self.disks, *self.swarm.twins.disks(self.number)):
            journal = disk.storage.journal()
            accepted = (
                journal.accepted is not None
                and journal.accepted[1].hash() == digest
                and len(journal.entries) == entry.round
            )
            if accepted and disk.storage.results.holds(entry):
                found.add(disk.me)
        return found

    def _stored(self, entry: Entry) -> memoryview | None:
        """An entry's bytes, which members have checked against its digests when they came."""
        honest = [disk for disk in self.disks if disk.member.peer not in self.swarm.liars]
        return next((data for disk in honest if (data := disk.storage.results.kept(entry))), None)

    def proposed(self) -> list[Config]:
        """The configurations that members have voted for in their open rounds."""
        accepted = [disk.storage.journal().accepted for disk in self.disks]
        return [vote[1].next_config for vote in accepted if vote is not None]

    def holding(self, without: PeerId) -> list[Member]:
        """Whoever else of the configuration has all that was decided."""
        top = len(self.checker.entries)
        return [
            who
            for who in self.config
            if who.peer != without
            and self.swarm.members[who.peer].disks[self.number].me
            == who  # an earlier life holds nothing any more
            and len(self.swarm.members[who.peer].disks[self.number].log) >= top
        ]

    def settled(self) -> bool:
        """Whether every member that lives (but one that leaves) has so many entries and is in the
        configuration.
        """
        top = self.config
        for disk in self.disks:
            member = disk.member
            if (member.leaving and disk.me not in top) or member.peer in self.swarm.liars:
                continue
            if member.buried or self.swarm.twins.mute(member.peer):
                continue
            if len(disk.log) < self.target or (disk.me not in top and not member.leaving):
                return False
        return True

    def where(self) -> str:
        """How far everybody is: entries, and ! where a member is not in the configuration."""
        of = f"fragment {self.number}: " if len(self.swarm.watches) > 1 else ""
        return f"{of}{self.target} are wanted, " + ", ".join(
            f"{disk.member.peer}:{len(disk.log)}"
            f"{'' if disk.me in self.config else '!'}{'+' * disk.member.buried}"
            for disk in self.disks
        )

    def finish(self) -> None:
        """At the end: every unit of work is accounted for."""
        self.swarm.count("entries recertified", self.checker.recertified)
        self.swarm.count("chosen values lost with all who held them", self.checker.revoked)
        for disk in self.disks:
            units, held = disk.units, set(disk.script.held if disk.script is not None else ())
            self.checker.finished(
                disk.member.peer,
                produced=units.produced,
                held=held,
                destroyed=units.destroyed,
                log=len(disk.log),
            )


class SimMember:
    """A peer. ``process`` is None while it is dead."""

    def __init__(self, swarm: SwarmView, peer: PeerId) -> None:
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
        self.copied = False  # it held a backup at some moment
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

    def heard(self, peer: PeerId) -> Said | None:
        """The newest that this member can tell a peer to have said, from its log or its memory."""
        session = self._session
        if session is not None and session.machine is not None:
            return session.machine.recovery.heard_of.of(peer)
        at_once = self.swarm.settings.arrivals is None
        return LastSaid(self.log[-RECENT:], at_once=at_once).of(peer)

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
        self.copied = True

    def wipe(self) -> None:
        """It is lost."""
        self.storage.wipe()

    def contribute(self, cid: bytes, contribution: FrozenContribution, base: int | None) -> None:
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
                    process.run.sessions[self.watch.number].prior.ask(self.swarm.world.now, cid)

    # ---- Observer: what reaches the disk
    def before_write(self, kind: str) -> None:
        """Traps may strike between any two writes."""
        self.swarm.event("write", self.peer, None)

    def voted(self, ballot: int, entry: Entry) -> Callable[[], None]:
        """A vote was recorded; it is judged as it was recorded, once it is on the medium."""
        replica, me = self.storage.replica_now, self.me
        self.swarm.twins.voted(self, entry)
        generation = replica.generation if replica is not None else -1
        holds = self.storage.results.holds(entry)

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

    def published(self, replica: ModelReplica, round_: int) -> None:
        """An anchor became current."""
        self.moved_at = self.swarm.world.now
        self.watch.published(self, round_, replica.anchor)

    def forgot(self) -> None:
        """The session gave up its journal."""
        raise Violation("durability", f"{self.peer} gave up a journal that was in order")
