"""A quorum is lost for ever, and the organiser recertifies: what its user does, with what happens
around it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from atoll.collectives.errors import RecertifyError
from atoll.collectives.group import is_quorum
from atoll.collectives.identifiers import PeerId
from atoll.node.modes.recertifying import recertify
from atoll.node.simulation.process import NodeProcess

from .deaths import STILL_S
from .injection import FaultKind
from .member import SimMember, SwarmView, Watch

AGAIN_S = 0.5
RENEWS = 0.25  # in so many of the seeds the organiser's home turns out to be an old copy, too


class Removal:
    """Kills members until no quorum is left, some cut off from the organiser first, so that they
    may decide what it never hears of; waits; then whoever is dead is declared so, loses its disk,
    and is removed. Once a run."""

    def __init__(self, swarm: SwarmView, rng: random.Random) -> None:
        self.swarm, self.rng = swarm, rng
        self.at_s: float | None = None
        # the name of a stream is part of every seed
        self.renews = swarm.world.stream("reboot").random() < RENEWS
        self.lost: Sequence[SimMember] = ()

    @property
    def planned(self) -> bool:
        """Whether it is to happen: then no other journal is lost."""
        return self.at_s is not None

    def stops(self, watch: Watch) -> bool:
        """Whether a log may wait for ever, and has had time to say so: who was given up for lost
        took the newest decided entry along, and no member that is left has it (assumption 4 of the
        law of liveness).
        """
        late = self.swarm.world.now > self.swarm.faults.plan.heal_s + STILL_S
        return bool(self.lost) and late and not watch.holding(PeerId(""))

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
        """Members die, until those left are no quorum (of one of the fragments)."""
        swarm = self.swarm
        config = self.rng.choice(swarm.watches).config
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
        if self.renews and all(
            len(watch.config) > 3 for watch in swarm.watches
        ):  # else nobody goes on after it unless its user says so
            swarm.world.after(self.rng.random() * 0.3, partial(swarm.renew, swarm.organiser))

    def _crash(self, peer: PeerId) -> None:
        self.swarm.crash(peer)

    def ask(self) -> None:
        """Whoever is dead now is lost, and the organiser is told so, if the others are no
        quorum.
        """
        swarm, process = self.swarm, self._organiser()
        if (
            self.lost
            or swarm.faults.healed
            or self._others_wiped()
            or process is None
            or not self._known_to(process)
        ):
            return
        dead = [
            member
            for member in swarm.members.values()
            if member.process is None and member.life >= 0
        ]
        if not self._say(process, dead):
            return
        self.lost = dead
        swarm.count("recertify asked")
        for watch, disk in zip(swarm.watches, swarm.members[swarm.organiser].disks, strict=True):
            record = disk.storage.journal().sealed
            watch.checker.retired.update(member.disks[watch.number].me for member in dead)
            watch.checker.retired.update(
                who for who in (record.removed if record else ()) if who.peer == swarm.organiser
            )
        for member in dead:
            swarm.wipe(member)
            for disk in member.disks:
                disk.units.destroyed.update(disk.units.produced)
                disk.undecided.clear()

    def _say(self, process: NodeProcess, dead: Sequence[SimMember]) -> bool:
        """Whether the word was given, for one fragment at least: where the organiser died before it
        was for all, or its disk refused it, its user repeats it.
        """
        given = False
        try:
            with process.alive():
                recertify(
                    process.run.sessions, self.swarm.world.now, [member.peer for member in dead]
                )
                given = True
        except RecertifyError:
            # the others are enough, or one of the dead still seems to be there, or was never a
            # member
            return False
        if not given:
            self.swarm.world.after(AGAIN_S, self._repeat)
        disks = self.swarm.members[self.swarm.organiser].disks
        return any(
            (record := disk.storage.journal().sealed) is not None and record.asked for disk in disks
        )

    def _repeat(self) -> None:
        process = self._organiser()
        if self.lost and process is not None:
            self._say(process, self.lost)
        elif self.lost:
            self.swarm.world.after(AGAIN_S, self._repeat)

    def _others_wiped(self) -> bool:
        return any(who.peer != self.swarm.organiser for who in self.swarm.wiped)

    def _organiser(self) -> NodeProcess | None:
        process = self.swarm.members[self.swarm.organiser].process
        return None if process is None or process.frozen else process

    def _known_to(self, process: NodeProcess) -> bool:
        """Its user knows the swarm, and waits until the node does."""
        alive = {
            member.peer for member in self.swarm.members.values() if member.process is not None
        }
        for session in process.run.sessions:
            config = session.machine.config if session.machine is not None else ()
            if not alive <= {
                session.me,
                *(member.peer for member in config),
                *session.actions.nodes(),
            }:
                return False
        return True
