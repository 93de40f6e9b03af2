"""Members that die for good, at any time, also long after the network is mended; and what the law of liveness promises whoever is left.

Of some the home was deleted ("home"): their machines start again a little later, as peers that nobody has met.

docs/protocol.md, "The law of liveness": the living of a log go on if they are a quorum of the newest configuration that one of them knows
to be decided. Who is no quorum waits, and says why.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...collectives.group import Config, is_quorum, least_members
from ...collectives.identifiers import PeerId
from ...collectives.reduce import least_of
from ...collectives.simulation.faults import FaultKind
from ...security.rules.reducers import find_reducer

if TYPE_CHECKING:
    from .swarm import SimSwarm
    from .watch import Watch

LATE_S = 2.0  # the last deaths are so long after the network is mended
SILENT_S = 2.0  # whoever waits says why so long after it should
HEIRS = 0.3  # share of those who die whose machine comes back with an empty home
AWAY_S = (0.0, 0.5, 2.0)  # so long after
FOUND_S = 5.0
STILL_S = 15.0  # after the last death: whoever is no quorum by now will never be one


class Deaths:
    """Who dies for good, and when."""

    def __init__(self, swarm: SimSwarm, rng: random.Random) -> None:
        self.swarm, self.rng = swarm, rng
        self.doomed: dict[PeerId, float] = {}
        self.heirs: dict[PeerId, float] = {}  # peers that begin late -> when

    def plan(self, share: float, kinds: Sequence[FaultKind]) -> None:
        """In ``share`` of the seeds with deaths: some members, perhaps all but one, each at a time of its own. Where ``lying`` members lie
        a few only: a quorum needs so many that rounds would hardly ever go on."""
        if "death" not in kinds or self.rng.random() >= share:
            return
        names, plan = self.swarm.names, self.swarm.faults.plan
        lying = self.swarm.options.lying
        most = lying + 1 if lying else max(1, len(names) - 1)
        for peer in self.rng.sample(names, self.rng.randint(1, most)):
            early = self.rng.uniform(plan.start_s, plan.heal_s)
            late = plan.heal_s + self.rng.uniform(0.0, LATE_S)
            self.doomed[peer] = self.rng.choice((early, early, plan.heal_s, late))
        if "home" in kinds:
            self._plan_heirs(self.swarm.world.stream("heirs"))

    def _plan_heirs(self, rng: random.Random) -> None:
        for peer, at_s in self.doomed.items():
            if rng.random() < HEIRS:
                self.heirs[PeerId(f"p1{peer[1:]}")] = at_s + rng.choice(AWAY_S)

    def start(self) -> None:
        """Schedule them."""
        for peer, at_s in self.heirs.items():
            self.swarm.add(peer)
            self.swarm.world.at(at_s, partial(self._begin, peer))
        for peer, at_s in self.doomed.items():
            self.swarm.world.at(at_s, partial(self._bury, peer))

    def _bury(self, peer: PeerId) -> None:
        self.swarm.count("death for good")
        self.swarm.members[peer].buried = True
        self.swarm.crash(peer)
        self._discover()

    def _discover(self) -> None:
        """Discovery goes on, and names who lives."""
        for member in self.swarm.members.values():
            process = member.process
            if process is not None and process.runs(lambda: None):
                with process.alive():
                    process.run.add_contacts(self.swarm.world.now, self.living(member.peer))

    def _begin(self, peer: PeerId) -> None:
        self.swarm.count("home deleted")
        self.swarm.boot(self.swarm.members[peer])
        self.swarm.world.after(FOUND_S, self._discover)  # at its start it may hear of the dead only

    def living(self, without: PeerId) -> list[PeerId]:
        """Whoever else is not dead for good."""
        return [
            member.peer
            for member in self.swarm.members.values()
            if not member.buried and member.peer != without
        ]

    @property
    def still(self) -> bool:
        """Whether all are dead who will be, and what they said has arrived."""
        return bool(self.doomed) and self.swarm.world.now > (
            max(*self.doomed.values(), *self.heirs.values(), self.swarm.faults.plan.heal_s)
            + STILL_S
        )

    def promised(self, watch: Watch) -> bool:
        """Whether the law says that this log goes on: the living are a quorum of the newest configuration that one of them knows, and as many
        as the rule takes. Liars need not help, and a run that bears them has rounds only once it is founded."""
        config, lying, liars = self.newest(watch), self.swarm.options.lying, self.swarm.liars
        living = {
            disk.me
            for disk in watch.disks
            if not disk.member.buried and disk.member.peer not in liars
        }
        founded = not lying or len(config) >= least_members(lying)
        reducer = find_reducer(self.swarm.options.reducer)
        assert reducer is not None
        enough = len(living.intersection(config)) >= least_of(reducer)
        return founded and enough and is_quorum(config, living, self.swarm.organiser, lying)

    def silent(self) -> list[str]:
        """Living members in whose log nothing was decided for long, and that have not said what they wait for."""
        now, found = self.swarm.world.now, list[str]()
        for member in self.swarm.members.values():
            process = member.process
            if process is None or process.frozen or process.ended:
                continue
            if member.peer in self.swarm.liars:
                continue
            for session, disk in zip(process.run.sessions, member.disks, strict=True):
                waits, since = session.waits, max(session.began_at, disk.moved_at)
                if now - since > waits.quiet_s + SILENT_S and not waits.told:
                    found.append(f"{member.peer} ({waits.look(now).state})")
        return found

    def newest(self, watch: Watch) -> Config:
        """The newest configuration that a living member knows to be decided."""
        logs = [disk.log for disk in watch.disks if not disk.member.buried and disk.log]
        return max(logs, key=len)[-1].entry.next_config if logs else ()
