"""Members that die for good, at any time, also long after the network is mended; and what the law
of liveness promises whoever is left.

Of some the home was deleted ("home"): their machines start again a little later, as peers that
nobody has met.

docs/internals/protocol/liveness.md: the living of a log go on if they are a quorum of the
newest configuration that one of them knows to be decided. Who is no quorum waits, and says why.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from atoll.collectives.group import Certified, Config, is_quorum, least_members
from atoll.collectives.identifiers import PeerId
from atoll.collectives.reduce import least_of
from atoll.security.rules.reducers import find_reducer

from .injection import FaultKind
from .member import SwarmView, Watch

LATE_S = 2.0  # the last deaths are so long after the network is mended
SILENT_S = 2.0  # whoever waits says why so long after it should
HEIRS = 0.3  # share of those who die whose machine comes back with an empty home
AWAY_S = (0.0, 0.5, 2.0)  # so long after
FOUND_S = 5.0
BEHIND = (10, 12, 14)  # entries that one member of a relay lacks when another dies
RELAY_S = 40.0  # after the network is mended: then a relay that has not come to its end is given up
TICK_S = 0.1
STILL_S = 15.0  # after the last death: whoever is no quorum by now will never be one


class Deaths:
    """Who dies for good, and when."""

    def __init__(self, swarm: SwarmView, rng: random.Random) -> None:
        self.swarm, self.rng = swarm, rng
        self.doomed: dict[PeerId, float] = {}
        self.heirs: dict[PeerId, float] = {}  # peers that begin late -> when
        self.relay: DyingHolders | None = None

    def plan(self, share: float, kinds: Sequence[FaultKind]) -> None:
        """In ``share`` of the seeds with deaths: some members, perhaps all but one, each at a time
        of its own. Where ``lying`` members lie a few only: a quorum needs so many that rounds would
        hardly ever go on."""
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

    def plan_relay(self, share: float) -> None:
        """In half of ``share`` of the seeds of four members and more, a `DyingHolders` in place of
        the others.
        """
        rng, names = self.swarm.world.stream("relay"), self.swarm.names
        if rng.random() >= share / 2 or len(names) < 4:
            return
        self.doomed, self.heirs = {}, {}
        self.relay = DyingHolders(self, rng.sample(names[1:], 3), rng)

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
            self.swarm.world.at(at_s, partial(self.bury, peer))
        if self.relay is not None:
            self.swarm.world.at(self.swarm.faults.plan.heal_s, self.relay.tick)

    def bury(self, peer: PeerId) -> None:
        """It dies for good."""
        self.doomed.setdefault(peer, self.swarm.world.now)
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
        running = self.relay is not None and self.relay.running
        return (
            bool(self.doomed)
            and not running
            and self.swarm.world.now
            > (
                max(*self.doomed.values(), *self.heirs.values(), self.swarm.faults.plan.heal_s)
                + STILL_S
            )
        )

    def promised(self, watch: Watch) -> bool:
        """Whether the law says that this log goes on: the living are a quorum of the newest
        configuration that one of them knows, and as many as the rule takes. Liars need not help,
        and a run that bears them has rounds only once it is founded."""
        config, lying, liars = self.newest(watch), self.swarm.options.lying, self.swarm.liars
        living = {
            disk.me
            for disk in watch.disks
            if not disk.member.buried
            and disk.member.peer not in liars
            and not self.swarm.twins.mute(disk.member.peer)
        }
        founded = not lying or len(config) >= least_members(lying)
        reducer = find_reducer(self.swarm.options.reducer)
        assert reducer is not None
        enough = len(living.intersection(config)) >= least_of(reducer)
        return founded and enough and is_quorum(config, living, self.swarm.organiser, lying)

    def silent(self) -> list[str]:
        """Living members in whose log nothing was decided for long, and that have not said what
        they wait for.
        """
        now, found = self.swarm.world.now, list[str]()
        for member in self.swarm.members.values():
            process = member.process
            if process is None or process.frozen or process.ended:
                continue
            if member.peer in self.swarm.liars:
                continue
            for session, disk in zip(process.run.sessions, member.disks, strict=True):
                waits, since = session.waits, max(session.began_at, disk.moved_at)
                if now - since > waits.quiet_s + SILENT_S and not waits.announced:
                    found.append(f"{member.peer} ({waits.look(now).state})")
        return found

    def newest(self, watch: Watch) -> Config:
        """The newest configuration that a living member knows to be decided."""
        mute = self.swarm.twins.mute
        logs = [
            disk.log
            for disk in watch.disks
            if not disk.member.buried and not mute(disk.member.peer) and disk.log
        ]
        return max(logs, key=len)[-1].entry.next_config if logs else ()


class DyingHolders:
    """Once the network is mended, all but three die for good, one after another. Of these one is
    away until it lacks more than anybody keeps results of; as it comes back another one dies, so
    that the third, no quorum by itself, is the only one that has the newest state."""

    def __init__(self, deaths: Deaths, left: Sequence[PeerId], rng: random.Random) -> None:
        self.deaths, self.swarm = deaths, deaths.swarm
        self.late, self.dying, self.holder = left
        self.behind = rng.choice(BEHIND)
        self.running = True
        self._away = False

    def tick(self) -> None:
        """Look again, until it is over."""
        swarm = self.swarm
        if swarm.world.now > swarm.faults.plan.heal_s + RELAY_S or swarm.left:
            self._end()
        elif not self._away:
            self._leave_three()
        elif swarm.members[self.late].process is not None:
            swarm.kill(swarm.members[self.late])  # an earlier fault had it begin again
        elif self._lacks() >= self.behind:
            swarm.count("relay")
            self.deaths.bury(self.dying)
            self._end()
        if self.running:
            swarm.world.after(TICK_S, self.tick)

    def _end(self) -> None:
        self.running = False
        self.swarm.restart(self.late)

    def _leave_three(self) -> None:
        """Where the living are the configuration and stand at the same round, the next one dies; at
        last one of the three goes away.
        """
        swarm = self.swarm
        living = [member for member in swarm.members.values() if not member.buried]
        peers = [member.peer for member in living]
        if not all(member.process is not None for member in living) or not all(
            {member.peer for member in watch.config} == set(peers)
            and min(len(self._log(watch, peer)) for peer in peers) >= len(watch.checker.entries) - 1
            for watch in swarm.watches
        ):
            return
        next_one = next(
            (peer for peer in peers if peer not in (self.late, self.dying, self.holder)), None
        )
        if next_one is not None:
            return self.deaths.bury(next_one)
        self._away = True
        return swarm.kill(swarm.members[self.late])

    def _lacks(self) -> int:
        return min(
            len(self._log(watch, self.holder)) - len(self._log(watch, self.late))
            for watch in self.swarm.watches
        )

    def _log(self, watch: Watch, peer: PeerId) -> Sequence[Certified]:
        return self.swarm.members[peer].disks[watch.number].log
