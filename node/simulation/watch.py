"""One log of a simulated run, as it is watched: its checker, who voted for what, and what the
scripts that contribute to it share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...collectives.group import Config, Entry, Member
from ...collectives.identifiers import PeerId
from ...collectives.layout import Layout
from .checker import Checker

if TYPE_CHECKING:
    from .member import Disk
    from .swarm import SimSwarm


class Watch:
    """Of the run's log, or of the log of fragment ``number``. Implements `Scene` for its scripts."""

    def __init__(self, swarm: SimSwarm, number: int, layout: Layout) -> None:
        self.swarm, self.number, self.layout = swarm, number, layout
        self.target = 0  # so many entries are wanted at the end
        self.world, self.plant, self.train_s = swarm.world, swarm.plant, swarm.train_s
        self.checker = Checker(
            organiser=swarm.organiser,
            outer=swarm.settings.outer,
            holders=self._holders,
            lying=swarm.options.lying,
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
        first = self._first_ballot.setdefault(entry.hash(), ballot)
        if first != ballot:
            self.swarm.count("votes for an adopted value")
        self._votes.setdefault(entry.hash(), set()).add(who)

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
            if accepted and disk.storage.holds(entry):
                found.add(disk.me)
        return found

    def _stored(self, entry: Entry) -> memoryview | None:
        """An entry's bytes, which members have checked against its digests when they came."""
        honest = [disk for disk in self.disks if disk.member.peer not in self.swarm.liars]
        return next((data for disk in honest if (data := disk.storage.kept(entry))), None)

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
            f"{disk.member.peer}:{len(disk.log)}{'' if disk.me in self.config else '!'}{'+' * disk.member.buried}"
            for disk in self.disks
        )

    def finish(self) -> None:
        """At the end: every unit of work is accounted for."""
        self.swarm.count("branches absorbed", self.checker.absorbed)
        self.swarm.count("entries recertified", self.checker.recertified)
        self.swarm.count("chosen values lost with all who held them", self.checker.revoked)
        self.swarm.count("rounds of branches", self.checker.branch_rounds)
        for disk in self.disks:
            units, held = disk.units, set(disk.script.held if disk.script is not None else ())
            if disk.member.leaving:  # it may have left before its branch was over
                held.update(
                    unit
                    for staked in units.staked.values()
                    for unit in staked
                    if unit not in self.checker.used
                )
            destroyed = units.destroyed | units.lost
            self.checker.finished(
                disk.member.peer,
                produced=units.produced,
                held=held,
                destroyed=destroyed,
                log=len(disk.log),
            )
