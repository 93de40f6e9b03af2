"""A quorum is lost for ever, and the organiser recertifies: what its user does, with what happens around it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...collectives.errors import RecertifyError
from ...collectives.group import Config, is_quorum
from ...collectives.identifiers import PeerId
from ...collectives.simulation.faults import FaultKind
from .member import SimMember

if TYPE_CHECKING:
    from .swarm import SimSwarm


class Removal:
    """Kills members until no quorum is left, some cut off from the organiser first, so that they may decide what it never hears of; waits;
    then whoever is dead is declared so, loses its disk, and is removed. Once a run."""

    def __init__(self, swarm: SimSwarm, rng: random.Random) -> None:
        self.swarm, self.rng = swarm, rng
        self.at_s: float | None = None
        self.done = False

    @property
    def planned(self) -> bool:
        """Whether it is to happen: then no other journal is lost."""
        return self.at_s is not None

    def plan(self, share: float, kinds: Sequence[FaultKind]) -> None:
        """In ``share`` of the seeds with crashes."""
        if "crash" in kinds and self.rng.random() < share:
            self.at_s = self.rng.uniform(0.2, 0.7)

    def start(self) -> None:
        """Schedule it."""
        if self.at_s is not None:
            plan = self.swarm.faults.plan
            span = plan.heal_s - plan.start_s
            self.swarm.world.at(plan.start_s + self.at_s * span, self.strike)
            for wait in (0.1, 0.2, 0.3, 0.6):
                self.swarm.world.at(plan.start_s + (self.at_s + wait) * span, self.ask)

    def strike(self) -> None:
        """Members die, until those left are no quorum."""
        swarm = self.swarm
        config = swarm.config()
        lost = [member for member in config if member.peer != swarm.organiser]
        self.rng.shuffle(lost)
        doomed: list[PeerId] = []
        for member in lost:
            if not is_quorum(config, {m for m in config if m.peer not in doomed}, swarm.organiser):
                break
            doomed.append(member.peer)
        for peer in doomed:
            if self.rng.random() < 0.5:
                swarm.network.cut(peer, swarm.organiser)
            swarm.world.after(self.rng.random() * 0.3, partial(self._crash, peer))

    def _crash(self, peer: PeerId) -> None:
        self.swarm.crash(peer)

    def ask(self) -> None:
        """Whoever is dead now is lost, and the organiser is told so, if the others are no quorum."""
        swarm = self.swarm
        organiser = swarm.members[swarm.organiser]
        process = organiser.process
        if self.done or swarm.faults.healed or swarm.wiped or process is None or process.frozen or process.session.machine is None:
            return
        dead = [member for member in swarm.members.values() if member.process is None and member.life >= 0]
        config = process.session.machine.config
        known = {organiser.peer, *(member.peer for member in config), *process.session.actions.nodes()}
        alive = {member.peer for member in swarm.members.values() if member.process is not None}
        if not dead or not self._refuses(config, dead) or not alive <= known:  # its user knows the swarm, and waits until the node does
            return
        removed = [member.me for member in dead]
        try:
            with process.alive():
                process.session.recertifying.ask(swarm.world.now, [who.peer for who in removed])
        except RecertifyError:
            return  # one of them still seems to be there, or was never a member
        if process.ended:  # a trap struck before its word was written down: nobody has heard it
            return
        self.done = True
        swarm.count("recertify asked")
        swarm.checker.retired.update(removed)
        for member in dead:
            swarm.wipe(member)
            member.units.destroyed.update(member.units.produced)
            member.undecided.clear()

    def _refuses(self, config: Config, dead: Sequence[SimMember]) -> bool:
        """Whether those that live are no quorum."""
        lost = {member.me for member in dead}
        return bool(lost & set(config)) and not is_quorum(config, set(config) - lost, self.swarm.organiser)
