"""The planner: its arithmetic against hand-computed values, the ladder, and that what it decides is
a manifest.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.node.manifest import parse_manifest
from atoll.optim.planning import Choice, Conditions, PeerConditions, TrainingPlan, estimate, plan
from atoll.optim.planning.estimate import ASK_S, EFFICIENCY, ROUND_TRIPS, SCRIPT_S, WORK_S
from atoll.optim.planning.planner import LEAST_STEPS

MBIT = 1e6 / 8
INT8 = 1 + 4 / 256


def alike(count: int, mbit: float, step_s: float, parameters: int, **more: Any) -> Conditions:
    """So many equal peers."""
    return Conditions(
        parameters,
        tuple(PeerConditions(f"p{i}", mbit * MBIT, mbit * MBIT, step_s) for i in range(count)),
        **more,
    )


def test_a_round_of_equal_peers_is_what_a_butterfly_moves() -> None:
    """Each of four owns a quarter, so it sends and receives 1 + 2/4 vectors; of two, one vector."""
    for count, vectors in ((2, 1.0), (4, 1.5)):
        found = estimate(alike(count, 100, 0.1, 1 << 22, rtt_s=0.05), Choice(50))
        assert found.round.transfer_s == pytest.approx(
            vectors * (1 << 22) * INT8 / (100 * MBIT) / EFFICIENCY
        )
        assert found.round.nbytes == round(vectors * (1 << 22) * INT8)
        waiting_s = found.round.transfer_s + ROUND_TRIPS * 0.05 + WORK_S * (1 << 22)
        assert found.share == pytest.approx(5.0 / (5.0 + waiting_s + SCRIPT_S * (1 << 22) + ASK_S))


def test_the_slowest_link_bounds_a_round_and_is_named() -> None:
    peers = (
        PeerConditions("a", 100 * MBIT, 100 * MBIT, 0.1),
        PeerConditions("b", 100 * MBIT, 100 * MBIT, 0.1),
        PeerConditions("c", 5 * MBIT, 100 * MBIT, 0.1),
    )
    conditions = Conditions(1 << 22, peers)
    found = estimate(conditions, Choice(50))
    assert found.round.bound == "c's uplink"
    assert found.round.transfer_s == pytest.approx(
        (1 << 22) * INT8 / (5 * MBIT) / EFFICIENCY
    )  # too slow to own anything
    relayed = Conditions(1 << 22, peers[:2], links={("a", "b"): MBIT})
    assert estimate(relayed, Choice(50)).round.bound == "the link from a to b"
    assert estimate(relayed, Choice(50)).round.transfer_s == pytest.approx(
        (1 << 22) * INT8 / MBIT / EFFICIENCY
    )


def test_overlap_hides_what_fits_into_the_delay_and_no_more() -> None:
    conditions = alike(4, 100, 0.1, 1 << 22, rtt_s=0.05)
    round_s = estimate(conditions, Choice(50)).round.seconds
    enough = math.ceil(round_s / 0.1)
    assert estimate(conditions, Choice(50, "int8", "late", enough)).waiting_s == 0
    assert estimate(conditions, Choice(50, "int8", "late", enough - 1)).waiting_s == pytest.approx(
        round_s - (enough - 1) * 0.1
    )


def test_the_ladder() -> None:
    """Fast links: int8 and waiting; then int4; then training on meanwhile, in fragments; where
    nothing helps it says so.
    """
    fast = plan(alike(4, 1000, 0.5, 10_000_000))
    assert (fast.choice.codec, fast.choice.overlap, fast.choice.fragments, fast.reached) == (
        "int8",
        "none",
        1,
        True,
    )
    slower = plan(alike(4, 100, 0.25, 10_000_000))
    assert (slower.choice.codec, slower.choice.overlap) == ("int4", "none")
    slow = plan(alike(8, 20, 0.2, 10_000_000, rtt_s=0.05))
    assert (slow.choice.codec, slow.choice.overlap, slow.choice.fragments) == ("int8", "late", 8)
    hopeless = plan(alike(4, 5, 0.05, 50_000_000))
    assert not hopeless.reached
    assert "Nothing reaches 95%" in hopeless.why[-1]
    assert hopeless.choice.sync_every == 100


def test_the_round_is_the_shortest_that_reaches_the_share() -> None:
    conditions = alike(4, 100, 0.5, 10_000_000, rtt_s=0.1)
    found = plan(conditions)
    assert found.choice.overlap == "none"
    assert found.estimate.share >= 0.95
    assert (
        estimate(conditions, Choice(found.choice.sync_every - 1, found.choice.codec)).share < 0.95
    )


def test_a_peer_that_costs_more_than_it_brings_is_left_out() -> None:
    peers = (
        *(PeerConditions(f"p{i}", 100 * MBIT, 100 * MBIT, 0.2) for i in range(3)),
        PeerConditions("slow", MBIT / 2, MBIT, 0.2),
    )
    found = plan(Conditions(10_000_000, peers))
    assert found.group == ("p0", "p1", "p2")
    assert found.why[-1].startswith("Without slow the others make ")
    assert plan(Conditions(10_000, peers)).group == (
        "p0",
        "p1",
        "p2",
        "slow",
    )  # where its link suffices it is welcome


def test_who_trains_alone_waits_for_nobody() -> None:
    found = plan(alike(1, 1, 0.1, 1_000_000))
    assert (found.estimate.waiting_s, found.estimate.nbytes, found.reached) == (0.0, 0, True)


rates = st.floats(0.1, 10_000)
peers_ = st.lists(st.tuples(rates, rates, st.floats(1e-3, 30)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1_000, 1 << 36),
    peers_,
    st.floats(0, 1),
    st.floats(0.1, 0.999),
    st.one_of(st.none(), st.integers(1, 5000)),
)
def test_any_plan_is_a_manifest_and_alike_for_whoever_makes_it(
    parameters: int, rows: Any, rtt_s: float, share: float, longest: Any
) -> None:
    peers = [
        PeerConditions(f"p{i}", up * MBIT, down * MBIT, step_s)
        for i, (up, down, step_s) in enumerate(rows)
    ]
    found = plan(Conditions(parameters, tuple(peers), rtt_s, share, longest))
    random.Random(1).shuffle(peers)
    assert plan(Conditions(parameters, tuple(peers), rtt_s, share, longest)) == found
    tables = "\n".join(
        f"[{name}]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in table.items())
        for name, table in found.settings().items()
    )
    recipe = parse_manifest(f'schema = 1\nname = "p"\n[model]\nentry = "local:p"\n{tables}\n')
    assert (recipe.train.sync_every, recipe.exchange.codec) == (
        found.choice.sync_every,
        found.choice.codec,
    )
    assert 0 < found.estimate.share <= 1
    assert found.reached is False or found.estimate.share >= share - 1e-6 or len(found.group) == 1
    if found.choice.delay is not None and found.reached:
        assert found.choice.fragments * found.choice.delay < found.choice.sync_every


def bad(**fields: Any) -> Conditions:
    """Conditions of two peers with these fields changed."""
    return Conditions(
        **{
            "parameters": 1000,
            "peers": (PeerConditions("a", 1e6, 1e6, 0.1), PeerConditions("b", 1e6, 1e6, 0.1)),
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"parameters": 0}, "parameters"),
        ({"parameters": 1 << 50}, "parameters"),
        ({"peers": ()}, "peers"),
        ({"peers": tuple(PeerConditions(f"p{i}", 1e6, 1e6, 1) for i in range(257))}, "peers"),
        ({"peers": (PeerConditions("a", 1e6, 1e6, 1), PeerConditions("a", 1e6, 1e6, 1))}, "peers"),
        ({"peers": (PeerConditions("a", 0, 1e6, 1),)}, "up"),
        ({"peers": (PeerConditions("a", 1e6, math.inf, 1),)}, "down"),
        ({"peers": (PeerConditions("a", 1e6, 1e6, math.nan),)}, "step"),
        ({"rtt_s": -1.0}, "rtt"),
        ({"share": 1.0}, "share"),
        ({"share": math.nan}, "share"),
        ({"max_steps": 0}, "max_steps"),
        ({"links": {("a", "x"): 1e6}}, "links"),
        ({"links": {("a", "b"): 0.0}}, "links"),
    ],
)
def test_what_cannot_be_planned_is_refused(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bad(**fields)
    assert refused.value.key == key


def test_the_settings_name_nothing_that_was_not_decided() -> None:
    found: TrainingPlan = plan(alike(4, 1000, 2.0, 10_000_000))
    assert found.settings() == {
        "train": {"sync_every": LEAST_STEPS, "overlap": "none"},
        "exchange": {"codec": "int8", "fragments": 1},
    }
