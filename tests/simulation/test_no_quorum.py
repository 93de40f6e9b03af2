"""Without a quorum nothing is decided, and the work done meanwhile is counted, once, when a quorum
is back. Directed schedules; random ones are in test_rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kits.rounds.member import Disk
from quiet_stage import QuietStage

from atoll.collectives.identifiers import PeerId
from atoll.node.session.events import RoundCommitted

P0, P1, P2 = map(PeerId, ("p0", "p1", "p2"))
SEEN_S = 2.0
"""After it nothing is decided any more of what was under way when members were struck."""
BACK_S = 16.0


class Stage(QuietStage):
    """Three members, of whom some die or are cut off, until ``BACK_S``. ``decided``: entries at the
    beginning and at the end of the time without a quorum; ``waiting``: units of work that p2 has
    offered by then.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, peers=3, back_s=BACK_S)
        self.decided, self.waiting = list[int](), tuple[int, ...]()
        self.committed = 0
        heard = self.swarm.heard

        def hear(disk: Disk, event: object) -> None:
            self.committed += len(self.decided) == 1 and isinstance(event, RoundCommitted)
            heard(disk, event)

        self.swarm.heard = hear
        self.at(BACK_S - 0.01, self._look)

    def strike_and_look(self, what: Callable[[], object]) -> None:
        """Do it at a calm moment, and look a while later."""
        self.strike((0, what), (SEEN_S, self._look))

    def _look(self) -> None:
        self.decided.append(len(self.swarm.checker.entries))
        script = self.swarm.members[P2].disks[0].script
        self.waiting = script.pending[1] if script is not None and script.pending else ()

    def decides_nothing_and_loses_nothing(self) -> None:
        """Until a quorum is back. The checker looks that all work is counted once, or still held."""
        verdict = self.run()
        assert verdict.problem == ""
        [before, after] = self.decided
        assert (after, self.committed) == (before, 0)
        assert self.waiting
        assert all(self.swarm.checker.used.get(unit, after) >= after for unit in self.waiting)
        assert len(self.swarm.checker.entries) >= after + 2


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_a_lone_survivor_commits_nothing_until_a_quorum_is_back(seed: int) -> None:
    stage = Stage(seed)
    stage.strike_and_look(lambda: stage.die(P0, P1))
    stage.decides_nothing_and_loses_nothing()


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_members_that_are_each_alone_decide_nothing_until_they_meet(seed: int) -> None:
    stage = Stage(seed)
    stage.strike_and_look(lambda: stage.swarm.network.partition({P0: 0, P1: 1, P2: 2}))
    stage.decides_nothing_and_loses_nothing()
