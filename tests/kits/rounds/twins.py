"""Twins: at any moment a second process begins from a copy of a live member's home, with its key.

Both hear all that is sent to that peer. Both must say that there are two, as all others must
(E308), and the others go on without them as the law of liveness says. Until they have met nothing
keeps the two from voting differently (assumption 3 of the law): where they did, and that broke a
promise, the seed says nothing and is counted as such. Drawn from a stream of its own.
"""

from __future__ import annotations

from typing import Any

from atoll.collectives.group import Entry
from atoll.collectives.identifiers import PeerId

from .member import Disk, SimMember, SwarmView

LIFE = 1000  # of the twin's process: another stream of random numbers
UNITS = 1 << 20  # the twin's script counts its work from here on
AGAIN_S = 0.1  # where it cannot begin at its time, it may soon after
KNOWN_S = 20.0  # so long after both are there and the network is mended all know of them


class Twins:
    """Whether a seed has them, and what becomes of them: once a run, since both stay mute until
    their user ends one and starts the other again.
    """

    def __init__(self, swarm: SwarmView) -> None:
        self.swarm = swarm
        self.rng = swarm.world.stream("twins")
        self.peer: PeerId | None = None
        self.twin: SimMember | None = None
        self.apart = False  # they have voted for different entries of one round
        self._began = 0.0
        self._votes: dict[tuple[int, int], set[tuple[bool, bytes]]] = {}  # of (log, round)

    def plan(self, share: float) -> None:
        """In ``share`` of the seeds, a member that does not die for good."""
        swarm = self.swarm
        left = [peer for peer in swarm.names if peer not in swarm.deaths.doomed]
        if self.rng.random() < share and left and len(swarm.names) >= 3:
            self.peer = self.rng.choice(left)

    def start(self) -> None:
        """Schedule the second process."""
        plan = self.swarm.faults.plan
        if self.peer is not None:
            self.swarm.world.at(self.rng.uniform(plan.start_s, plan.heal_s), self._begin)

    def disks(self, number: int) -> list[Disk]:
        """What the second process keeps of a log."""
        return [self.twin.disks[number]] if self.twin is not None else []

    def mute(self, peer: PeerId) -> bool:
        """Whether nobody need count on this peer any more: it was two, at some moment."""
        return self.twin is not None and peer == self.peer

    @property
    def still(self) -> bool:
        """Whether it has been so for long enough that all may be held to it."""
        begun = max(self._began, self.swarm.faults.plan.heal_s)
        return self.twin is not None and self.swarm.world.now > begun + KNOWN_S

    def voted(self, disk: Disk, entry: Entry) -> None:
        """A process records a vote."""
        if self.twin is None or disk.member.peer != self.peer:
            return
        votes = self._votes.setdefault((disk.watch.number, entry.round), set())
        votes.add((disk.member is self.twin, entry.hash()))
        processes, entries = ({each[part] for each in votes} for part in (0, 1))
        self.apart |= len(processes) == 2 and len(entries) > 1

    def unknown(self) -> list[PeerId]:
        """Who lives and does not know that there are two, while both live and somebody is there to
        tell them: gossip is between members.
        """
        members, found = self.swarm.members, list[PeerId]()
        if self.peer is None or self.twin is None:
            return []
        if members[self.peer].process is None or self.twin.process is None:
            return []
        told = {who.peer for watch in self.swarm.watches for who in watch.config}
        between = [
            member
            for peer, member in members.items()
            if peer != self.peer and peer in told and member.process is not None
        ]
        if not between:
            return []
        for member in (self.twin, members[self.peer], *between):
            process = member.process
            if process is not None and not process.frozen:
                told = [
                    session.membership.is_doubled
                    if member.peer == self.peer
                    else session.membership.doubled(self.peer)
                    for session in process.run.sessions
                ]
                found += [] if all(told) else [member.peer]
        return found

    def hear(self) -> None:
        """Both processes hear what is sent to their peer; called whenever one of them has begun or
        ended.
        """
        if self.peer is None or self.twin is None:
            return
        both = [self.swarm.members[self.peer].process, self.twin.process]
        heard = [process.deliver for process in both if process is not None and not process.ended]

        def deliver(sender: PeerId, channel: str, payload: Any) -> None:
            for hear in heard:
                hear(sender, channel, payload)

        if heard:
            self.swarm.network.attach(self.peer, deliver)

    def died(self) -> None:
        """A trap killed the second process inside a call. It does not come back."""
        if self.twin is not None:
            self.twin.die()
            self.hear()

    def end(self) -> None:
        """The run is over."""
        if self.twin is not None and self.twin.process is not None:
            self.twin.process.end()

    def _begin(self) -> None:
        assert self.peer is not None
        swarm, member = self.swarm, self.swarm.members[self.peer]
        copies = [disk.storage.backup() for disk in member.disks]
        whole = [copy for copy in copies if copy is not None]
        if swarm.faults.healed or member.buried or swarm.left or swarm.removal.planned:
            return
        if member.process is None or member.process.frozen or len(whole) < len(copies):
            swarm.world.after(AGAIN_S, self._begin)
            return
        swarm.count("twin")
        swarm.world.note(f"twin {self.peer}".encode())
        twin = self.twin = SimMember(swarm, self.peer)
        twin.life, self._began = LIFE, swarm.world.now
        for disk, copy in zip(twin.disks, whole, strict=True):
            disk.units.first = UNITS
            disk.restore(copy)
        twin.boot(died=self.died)
        self.hear()
