"""A simulated swarm for directed schedules: what a test does to it happens at a moment that has
what the test needs, not at one of the clock.

So a schedule does not hang on a seed: whatever the seed, and whatever shifts its timing, the
members are struck when all of them are in the configuration and no round is under way.
"""

from __future__ import annotations

from collections.abc import Callable

from kits.rounds.swarm import Options, SeedResult, SimSwarm

from atoll.collectives.identifiers import PeerId
from atoll.node.session.session import Session

QUIET = 3.0
"""Not before this second is anybody struck: until then rounds are certified."""
LOOK_S = 0.005


class QuietStage:
    """``peers`` members and no random faults. The dead come back at ``back_s``: late enough for
    whatever is struck to have its effect.
    """

    def __init__(
        self,
        seed: int,
        *,
        peers: int,
        back_s: float,
        fragments: int = 1,
    ) -> None:
        self.swarm = SimSwarm(
            seed, Options(peers=(peers, peers), faults=(), rounds=4, fragments=fragments)
        )
        self.swarm.faults.plan.heal_s = back_s
        self.struck_at: float | None = None

    def sessions(self, peer: PeerId) -> list[Session]:
        """Of a member that lives, one for each log."""
        process = self.swarm.members[peer].process
        assert process is not None
        return process.run.sessions

    def calm(self) -> bool:
        """Whether everybody is a member, is where the others are, and has neither a plan nor a
        vote: in every log.
        """
        if any(self.swarm.members[peer].process is None for peer in self.swarm.names):
            return False
        machines = [session.machine for peer in self.swarm.names for session in self.sessions(peer)]
        return all(
            machine is not None
            and machine.is_member
            and not machine.stateless
            and {who.peer for who in machine.config} == set(self.swarm.names)
            and (machine.open.plan, machine.journal.accepted, machine.open.decided)
            == (None, None, None)
            for machine in machines
        ) and len({machine.base for machine in machines if machine is not None}) == len(
            self.swarm.watches
        )

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Do something at a second of the world."""
        self.swarm.world.at(when, lambda: what() and None)

    def once(self, holds: Callable[[], bool], *acts: tuple[float, Callable[[], object]]) -> None:
        """Look again and again, from now on, and when it holds do each act so many seconds later."""
        now = self.swarm.world.now
        if not holds():
            return self.at(max(QUIET, now + LOOK_S), lambda: self.once(holds, *acts))
        for wait, act in acts:
            self.at(now + wait, act)
        return None

    def strike(self, *acts: tuple[float, Callable[[], object]]) -> None:
        """Do these so many seconds after the first calm moment from QUIET on."""

        def ready() -> bool:
            found = self.swarm.world.now >= QUIET and self.calm()
            self.struck_at = self.swarm.world.now if found else None
            return found

        self.once(ready, *acts)

    def die(self, *peers: PeerId) -> None:
        """Their processes are gone."""
        for peer in peers:
            self.swarm.crash(peer)

    def run(self) -> SeedResult:
        """Play it to its end."""
        verdict = self.swarm.run()
        assert self.struck_at is not None, "no calm moment came"
        return verdict
