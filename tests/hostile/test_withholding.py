"""Real nodes, one of which is a member and offers what it does not send: rounds go on without its
contribution, and without waiting for it for long. With figures: `scripts/bench/bench_hostile.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostile.kit import Swarm, hostile_swarm

from atoll.collectives.layout import make_layout

pytestmark = [pytest.mark.slow, pytest.mark.flaky(reruns=1)]

LAYOUT = make_layout([("w", (4 << 20,))])  # several chunks, so that some may come and others not
SECONDS = 4.0


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with hostile_swarm(tmp_path_factory.mktemp("withholding"), member=True, layout=LAYOUT) as swarm:
        yield swarm


@pytest.mark.parametrize("kind", ["hold", "trickle"])
def test_rounds_go_on_without_what_a_member_offers_and_does_not_send(
    within: Swarm, kind: str
) -> None:
    cost = within.suffer(kind, SECONDS)
    assert cost.rounds, "a round waits for what never comes"
    assert cost.lost == 0, cost
    assert len(within.honest) in cost.shares, "it was withheld"
