"""Where members make as many steps a turn as their speed allows (DyLU), what one says of its own
speed does not end the turns of others.
"""

from __future__ import annotations

from typing import Any

import pytest

from atoll.collectives.arrivals import ArrivalSettings, DynamicSteps, Fading, GraceWindow
from atoll.collectives.layout import make_layout
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm

pytestmark = pytest.mark.slow
STEP_S = 0.05
STEPS = 100
SPAN_S = 30.0
LAYOUT = make_layout([("w", (256,))])


def play(
    lie: float | None, *, rushes: bool = False, members: int = 4, window: float | None = None
) -> list[float]:
    """The share of a minute that each honest member trained. ``lie``: the seconds a step that the
    last member says; ``rushes``: it says so as soon as it can, and makes no step."""
    worked = [0.0] * members
    arrivals = ArrivalSettings(
        2,
        fading=Fading(1.0, "constant"),
        window=GraceWindow(window),
        dynamic=DynamicSteps(STEPS),
    )
    settings = RunSettings(codec="fp32", sync_every=STEPS, arrivals=arrivals)
    swarm = LocalSwarm(members, settings=settings, latency_s=0.05, seed=3)

    def script(member: Any) -> None:
        member.open(LAYOUT, lambda into: into.zero_())
        while len(member.members()) < members:
            member.sleep(0.1)
        member.sleep(max(0.0, 5.0 - member.clock()))
        lies = lie is not None and member.index == members - 1
        while member.clock() < 5.0 + SPAN_S:
            view = member.anchor()
            steps = view.steps or STEPS
            view.release()
            for _ in range(0 if lies and rushes else steps):
                member.sleep(STEP_S)
                worked[member.index] += STEP_S
            pending = member.contribute(
                samples=steps, write=lambda into: into.zero_(), lag=lie if lies else STEP_S
            )
            pending.wait(30.0)

    swarm.run(script, limit_s=200.0)
    return [seconds / SPAN_S for seconds in worked[: members - (lie is not None)]]


@pytest.mark.parametrize("members", [3, 4])
def test_a_false_word_costs_the_others_a_tenth_of_their_work_at_most(members: int) -> None:
    """Who says that a step takes it nothing, and rushes or does not, made it a fifth before; who
    says that it takes it for ever gets less to do itself."""
    alone = min(play(None, members=members))
    assert alone > 0.9
    for lie, rushes in ((1e-9, False), (1e-9, True), (1e9, False)):
        assert min(play(lie, rushes=rushes, members=members)) >= 0.9 * alone
