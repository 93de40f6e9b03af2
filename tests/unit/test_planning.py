"""The planner: its arithmetic against hand-computed values, the ladder, and that what it decides is
a manifest.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import statistics
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from house import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seeds import daily

from atoll.collectives.codec_costs import PLANNED, most_bytes
from atoll.collectives.errors import ConfigError
from atoll.collectives.group import MAX_MEMBERS
from atoll.collectives.round import Timing
from atoll.collectives.swarm import RunSettings
from atoll.node.manifest import parse_manifest
from atoll.node.session.durations import durations
from atoll.optim.planning import (
    Choice,
    Conditions,
    Machine,
    PeerConditions,
    TrainingPlan,
    balance,
    estimate,
    plan,
    price,
    seconds_a_sample,
)
from atoll.optim.planning.estimate import ASK_S, EFFICIENCY, ROUND_TRIPS, SCRIPT_S, WORK_S, round_of
from atoll.optim.planning.planner import LEAST_STEPS, judged_s
from atoll.optim.planning.price import PLAIN, PLAIN_EXPONENT, with_plain_mean
from atoll.optim.planning.waiting import grace_s

MBIT = 1e6 / 8
INT8 = most_bytes("int8_dither", 1 << 22)[0] / (1 << 22)  # bytes a value


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


def test_the_slower_the_link_the_less_is_sent() -> None:
    """Fast links: int8, a result a step late; then two bits; where nothing helps it says so."""
    fast = plan(alike(4, 1000, 0.5, 10_000_000))
    assert fast.choice == Choice(LEAST_STEPS, "int8_dither", "late", 1)
    slow = plan(alike(8, 20, 0.2, 10_000_000, rtt_s=0.05))
    assert (slow.choice.codec, slow.choice.overlap) == ("stat2_both", "late")
    hopeless = plan(alike(4, 5, 0.05, 50_000_000))
    assert hopeless.choice.sync_every == 100
    assert hopeless.reached  # nobody asked for more
    assert hopeless.why[-1].startswith("Train on p0 alone")


def test_where_nothing_reaches_the_wanted_share_the_most_there_is_is_planned() -> None:
    few = plan(alike(16, 2, 0.1, 10_000_000))
    assert few.reached
    assert "of the time is training: faster links" in few.why[-1]
    wanted = plan(alike(16, 2, 0.1, 10_000_000, share=0.9))
    assert not wanted.reached
    assert "Nothing reaches 90%" in wanted.why[-1]
    assert wanted.estimate.share >= few.estimate.share


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 0.99])
def test_of_what_reaches_the_wanted_share_the_soonest_is_taken(share: float) -> None:
    conditions = alike(4, 100, 0.5, 10_000_000, rtt_s=0.1, share=share)
    found = plan(conditions)
    assert found.reached
    assert found.estimate.share >= share
    free = plan(alike(4, 100, 0.5, 10_000_000, rtt_s=0.1))
    assert seconds_a_sample(conditions, found.choice) >= seconds_a_sample(conditions, free.choice)


TABLE = {  # rows of docs/benchmarks-training.md
    "diloco": Choice(10, "fp32"),
    "diloco_h20": Choice(20, "fp32"),
    "diloco_int8": Choice(10, "int8"),
    "diloco_int4": Choice(10, "int4"),
    "diloco_2bit_ef": Choice(10, "stat2"),
    "diloco_2bit_both": Choice(10, "stat2_both"),
    "streaming": Choice(10, "fp32", fragments=2),
    "sparseloco": Choice(10, "sparse128"),
    "late": Choice(10, "fp32", "late", 3),
    "eager": Choice(10, "fp32", "eager", 3),
    "late_round": Choice(10, "fp32", "late"),
    "eager_round": Choice(10, "fp32", "eager"),
    "streaming_late": Choice(10, "fp32", "late", 3, 2),
}


def test_prices_are_within_a_hundredth_of_what_was_measured() -> None:
    page = (ROOT / "docs" / "benchmarks-training.md").read_text(encoding="utf-8")
    for name, choice in TABLE.items():
        row = re.search(rf"(?m)^\| `{name}`[ :|].*$", page)
        assert row is not None, name
        # the first number like a ratio: that of the loss to synchronous training's
        measured = float(re.findall(r"\b(1\.0\d{3})\b", row[0])[0])
        assert price(43_000, choice, 4).loss == pytest.approx(measured, rel=0.01), name


def test_prices_rise_with_steps_and_delay_and_fall_with_size() -> None:
    for parameters in (1_000, 43_000, 10**7, 10**9, 10**11):
        losses = [price(parameters, Choice(steps)).loss for steps in (10, 20, 50, 100, 500, 2000)]
        assert losses == sorted(losses)
        assert losses[0] > 1
        late = [price(parameters, Choice(50, overlap="late", delay=d)).loss for d in range(51)]
        assert late == sorted(late)
        assert late[0] == price(parameters, Choice(50)).loss
    by_size = [price(10**power, Choice(100)).loss for power in range(3, 13)]
    assert by_size == sorted(by_size, reverse=True)
    assert price(10**6, Choice(500, "sparse64", "late"), peers=1).loss == 1


@pytest.mark.parametrize(
    ("count", "mbit", "step_s", "parameters"),
    daily(
        2,
        (
            (20, 50, 10.0, 7_000_000_000),
            (4, 100, 0.25, 10_000_000),
            (20, 50, 2.0, 7_000_000_000),
            (20, 50, 60.0, 7_000_000_000),
            (20, 50, 300.0, 7_000_000_000),
            (8, 20, 0.2, 10_000_000),
        ),
    ),
)
def test_no_settings_of_a_grid_are_there_sooner(
    count: int, mbit: float, step_s: float, parameters: int
) -> None:
    conditions = alike(count, mbit, step_s, parameters, rtt_s=0.1)
    best = judged_s(conditions, plan(conditions).choice)
    for codec in PLANNED:
        for overlap in ("none", "late", "eager"):
            for fragments in range(1, 17) if overlap == "late" else (1,):
                one = round_of(conditions, codec, fragments)
                lengths = (*range(1, 60), *range(60, conditions.longest, 10), conditions.longest)
                for steps in (each for each in lengths if each <= conditions.longest):
                    most = (steps - 1) // fragments
                    delays = range(1, most + 1, max(1, most // 12))
                    for delay in delays if overlap != "none" else (None,):
                        choice = Choice(steps, codec, overlap, delay, fragments)
                        if fragments == 1 or parameters >= fragments * 1_000_000:
                            assert best <= judged_s(conditions, choice, one) * (1 + 1e-9)


def test_samples_are_shared_as_no_other_way_is_faster() -> None:
    """A thousand small fleets, against all ways that there are."""
    rng = random.Random(0)
    for _ in range(1000):
        machines = [
            Machine(
                rng.choice([0.1, 0.2, 0.35, 1.0]) * rng.uniform(0.9, 1.1),
                rng.choice([0.0, 0.05, 0.5]),
                rng.choice([None, 0, 1, 2, 4]),
            )
            for _ in range(rng.randint(1, 4))
        ]
        batch = rng.randint(1, 7)
        ways = [
            counts
            for counts in product(range(batch + 1), repeat=len(machines))
            if sum(counts) == batch
            and all(m.most is None or n <= m.most for m, n in zip(machines, counts, strict=True))
        ]

        def seconds(counts: Sequence[int], machines: list[Machine] = machines) -> float:
            return max(m.seconds(n) for m, n in zip(machines, counts, strict=True))

        if not ways:
            with pytest.raises(ConfigError):
                balance(machines, batch)
            continue
        found = balance(machines, batch)
        assert tuple(found) in ways
        assert seconds(found) == min(map(seconds, ways))


@pytest.mark.slow
def test_no_other_group_is_there_sooner() -> None:
    """Small fleets of unequal links, steps and batches, against plans for every part of them. (A
    thousand were tried once, too.)
    """
    rng = random.Random(1)
    for _ in range(8):
        rates = [rng.choice([0.5, 2, 20, 100, 1000]) * MBIT for _ in range(rng.randint(2, 4))]
        steps = rng.choice([[0.2], [0.02, 0.2, 2.0, 20.0]])
        peers = [
            PeerConditions(f"p{i}", rate, rate, rng.choice(steps), rng.choice([1, 8]))
            for i, rate in enumerate(rates)
        ]
        conditions = Conditions(rng.choice([10**5, 10**7]), tuple(peers), 0.05, max_steps=20)
        found = plan(conditions)
        mine = judged_s(conditions.only(set(found.group)), found.choice)
        for size in range(1, len(peers) + 1):
            for group in combinations([peer.name for peer in peers], size):
                part = conditions.only(set(group))
                best = plan(part)
                whole = part.only(set(best.group))
                assert mine <= judged_s(whole, best.choice) * (1 + 1e-9)


def test_up_and_down_cost_what_they_carry() -> None:
    """Who owns no part sends one contribution and receives one result, whose codecs differ."""
    values, rate = 1 << 22, MBIT
    peers = (
        *(PeerConditions(f"p{i}", rate, 1000 * MBIT, 0.1) for i in range(3)),
        PeerConditions("owner", 1000 * MBIT, 1000 * MBIT, 0.1),
    )
    found = estimate(Conditions(values, peers), Choice(50, "sparse64"))
    up, down = most_bytes("sparse64", values)
    assert found.round.transfer_s == pytest.approx(up / rate / EFFICIENCY)
    assert found.round.nbytes == round(3 * down)  # of the owner
    assert found.round.received == round(down)  # of each other
    chosen = plan(Conditions(10**8, peers, 0.05)).choice
    assert chosen.codec.startswith("sparse")


def test_the_steps_of_unequal_peers_follow_from_their_speeds() -> None:
    peers = [PeerConditions(f"p{i}", 1e8, 1e8, step) for i, step in enumerate([0.1, 0.2, 0.45])]
    conditions = Conditions(10**6, tuple(peers), max_steps=20)
    found = plan(conditions)
    h = found.choice.sync_every
    assert found.steps(conditions) == {"p0": h, "p1": h // 2, "p2": int(h / 4.5)}


def test_a_peer_that_costs_more_than_it_brings_is_left_out() -> None:
    peers = (
        *(PeerConditions(f"p{i}", 100 * MBIT, 100 * MBIT, 0.2) for i in range(3)),
        PeerConditions("slow", MBIT / 2, MBIT, 0.2),
    )
    found = plan(Conditions(10_000_000, peers))
    assert found.group == ("p0", "p1", "p2")
    assert found.why[-1].startswith("Without slow the others are at the same loss ")
    assert plan(Conditions(10_000, peers)).group == (
        "p0",
        "p1",
        "p2",
        "slow",
    )  # where its link suffices it is welcome


@pytest.mark.parametrize("count", [2, 4, 9])
@pytest.mark.parametrize("share", [None, 0.95])
def test_where_a_run_is_slower_than_one_machine_the_plan_is_to_train_alone(
    count: int, share: float | None
) -> None:
    """7 billion parameters at 10 Mbit/s: what the others add is spent on waiting."""
    peers = [PeerConditions(f"p{i}", 10 * MBIT, 10 * MBIT, 0.3) for i in range(count - 1)]
    fast = PeerConditions("fast", 10 * MBIT, 10 * MBIT, 0.1)
    conditions = Conditions(7_000_000_000, (*peers, fast), 0.05, share)
    found = plan(conditions)
    assert found.group == ("fast",)
    assert found.why[-1].startswith("Train on fast alone: it is at the same loss ")
    assert found.reached
    near = plan(alike(count, 100, 0.3, 1_000_000))
    assert len(near.group) == count  # a small model is worth the others' work


def test_of_many_a_machine_that_is_slow_in_compute_is_left_out() -> None:
    """Each round would wait for a step of it."""
    peers = [PeerConditions(f"p{i}", 100 * MBIT, 100 * MBIT, 0.2) for i in range(5)]
    slow = PeerConditions("slow", 100 * MBIT, 100 * MBIT, 40.0)
    found = plan(Conditions(10_000_000, (*peers, slow), 0.05))
    assert found.group == ("p0", "p1", "p2", "p3", "p4")


def test_grace_is_that_of_a_convener() -> None:
    for round_s in (0.1, 3.9, 4.1, 12.0, 21.0, 1000.0):
        assert grace_s(round_s) == Timing().grace(round_s)
        for steps in (2, 10, 100):
            timing = durations(RunSettings(sync_every=steps))
            assert grace_s(round_s, steps) == timing.grace(round_s)
    assert grace_s(160.0, 10) == 32.0  # two steps of sixteen seconds


def test_a_round_waits_for_nobody_who_costs_more_than_it_brings() -> None:
    """Twenty times slower: it stands aside, and makes a step in every other round of 21 steps."""
    peers = [PeerConditions(f"p{i}", 1e9, 1e9, 0.25) for i in range(4)]
    slow = PeerConditions("slow", 1e9, 1e9, 5.0)
    fast, both = Conditions(10_000, tuple(peers)), Conditions(10_000, (*peers, slow))
    for steps in (10, 21):
        alone, beside = estimate(fast, Choice(steps)), estimate(both, Choice(steps))
        assert beside.share == pytest.approx(alone.share, abs=1e-3)
        assert alone.rate < beside.rate < alone.rate + 1 / 5.0
    near = Conditions(10_000, (*peers, PeerConditions("near", 1e9, 1e9, 0.375)))
    waited = estimate(near, Choice(20)).waiting_s - estimate(fast, Choice(20)).waiting_s
    assert waited == pytest.approx(0.375 / 2, rel=0.01)
    assert not near.rounds.waits(20, 0.0, may_stand_aside=True).aside


def test_three_others_are_said_with_what_they_would_take() -> None:
    conditions = alike(4, 100, 0.25, 10_000_000, rtt_s=0.05)
    found = plan(conditions)
    assert [row.what for row in found.rejected] == [
        "without p3",
        "p0 alone",
        "gradients in every step",
    ]
    alone = found.rejected[1]
    mine_s = seconds_a_sample(conditions, found.choice)
    assert alone.long == pytest.approx(0.25 / mine_s, rel=0.01)
    steps_s = 0.25 + round_of(conditions, "int8_dither").seconds + SCRIPT_S * 10**7 + ASK_S
    assert found.rejected[2].long == pytest.approx(steps_s / 4 / mine_s, rel=0.05)  # and the codec
    assert not plan(alike(1, 100, 0.25, 10_000_000)).rejected


def test_who_trains_alone_waits_for_nobody() -> None:
    found = plan(alike(1, 1, 0.1, 1_000_000))
    assert (found.estimate.waiting_s, found.estimate.nbytes, found.reached) == (0.0, 0, True)
    assert found.choice.sync_every == 100  # the longest: nothing is dearer
    assert plan(alike(1, 1, 0.1, 10**9)).choice.sync_every == 500


rates = st.floats(0.1, 10_000)
peers_ = st.lists(st.tuples(rates, rates, st.floats(1e-3, 30)), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@example(1000, [(1.0, 1.0, 1.0), (1.0, 1.0, 1.0)], 0.0, None, 1)
@given(
    st.integers(1_000, 1 << 36),
    peers_,
    st.floats(0, 1),
    st.one_of(st.none(), st.floats(0.1, 0.999)),
    st.one_of(st.none(), st.integers(1, 5000)),
)
def test_any_plan_is_a_manifest_and_alike_for_whoever_makes_it(
    parameters: int, rows: Any, rtt_s: float, share: Any, longest: Any
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
    assert (
        found.reached is False
        or found.estimate.share >= (share or 0) - 1e-6
        or len(found.group) == 1
    )
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
        (
            {"peers": tuple(PeerConditions(f"p{i}", 1e6, 1e6, 1) for i in range(MAX_MEMBERS + 1))},
            "peers",
        ),
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


def test_a_coarser_codec_must_be_clearly_sooner() -> None:
    """With int4 the same loss is 0.03 % sooner: no reason to lose 15 % of each round."""
    tie = alike(4, 1000, 2.0, 10_000_000)
    found = plan(tie)
    coarse = Choice(LEAST_STEPS, "int4")
    assert found.choice == Choice(LEAST_STEPS, "int8_dither")
    ratio = seconds_a_sample(tie, coarse) / seconds_a_sample(tie, found.choice)
    assert 0.99 < ratio < 1
    [said] = [line for line in found.why if line.startswith("int4, waiting")]
    assert said.endswith("; only 0.0% sooner to the same loss, and coarser.")


def test_the_settings_name_nothing_that_was_not_decided() -> None:
    found: TrainingPlan = plan(alike(4, 1000, 2.0, 10_000_000))
    assert found.settings() == {
        "train": {"sync_every": LEAST_STEPS, "overlap": "none"},
        "exchange": {"codec": "int8_dither", "fragments": 1},
    }


def test_beside_one_that_stands_aside_one_machine_alone_waits_for_thin_links() -> None:
    """Played: 0.86 at 20 steps and 0.65 at 10 (`bench_plan.py`, fleet 6); with another machine on
    a usual link nobody waits for a thin one.
    """
    slow = PeerConditions("slow", 972 * MBIT, 972 * MBIT, 2.689)
    thin = PeerConditions("thin", 14 * MBIT, 14 * MBIT, 0.178)
    fast = [PeerConditions(f"p{number}", 584 * MBIT, 584 * MBIT, 0.178) for number in range(2)]

    def waits_s(*peers: PeerConditions) -> float:
        return estimate(Conditions(1_817_948, peers, 0.05), Choice(20)).waiting_s

    one, two = waits_s(fast[0], slow, thin), waits_s(*fast, slow, thin)
    assert estimate(Conditions(1_817_948, (fast[0], slow, thin)), Choice(20)).waits.aside
    assert one > two + 0.4
    share = estimate(Conditions(1_817_948, (fast[0], slow, thin), 0.05), Choice(20)).share
    assert share == pytest.approx(0.8591, abs=0.05)


def test_what_is_rejected_for_dearer_settings_says_so() -> None:
    """More samples a second are no reason to leave something."""
    peers = (
        PeerConditions("a", 20 * MBIT, 200 * MBIT, 0.4),
        PeerConditions("b", 40 * MBIT, 250 * MBIT, 0.5),
        PeerConditions("c", 10 * MBIT, 50 * MBIT, 6.0),
    )
    rows = plan(Conditions(124_000_000, peers, 0.05)).rejected
    [why] = [row.why for row in rows if row.what == "all together"]
    assert why == "1.2% more loss by its settings, for 106% of the samples"


def test_the_plain_mean_costs_what_the_recorded_sweep_says() -> None:
    """Over the arm that "auto" takes: its short rounds at 1 and 10 million parameters, times the
    momentum in them at 42 thousand, each where the record has both of a seed.
    """
    text = gzip.decompress((ROOT / "docs" / "benchmarks-outer.jsonl.gz").read_bytes())
    lines = [line for line in map(json.loads, text.splitlines()) if not line["tune"]]
    runs = dict[tuple[Any, ...], dict[str, float]]()
    for line in lines:
        key = tuple(line[each] for each in ("h", "size", "optimizer", "k", "steps", "seed"))
        runs.setdefault(key, {})[line["arm"]] = line["ratio"]

    def mean(above: str, below: str, h: int | None = None) -> float:
        return statistics.fmean(
            arms[above] / arms[below]
            for key, arms in runs.items()
            if {above, below} <= set(arms) and (h is None or key[0] == h)
        )

    momentum = mean("1/0 grow=20", "0.9/0.6 grow=20 hold=40 warm=40")
    for h, factor in PLAIN:
        assert factor == pytest.approx(mean("1/0", "1/0 grow=20", int(h)) * momentum, abs=0.01)
    for length, exponent in PLAIN_EXPONENT:
        quarter = [
            arms["alone"]
            for (_, size, inner, k, steps, _), arms in runs.items()
            if (size, inner, k, steps) == ("1m", "adamw", 4, round(math.exp(length)))
            and "alone" in arms
        ]
        assert 4**exponent == pytest.approx(statistics.fmean(quarter), abs=0.01)


def test_a_swarm_with_the_plain_mean_is_sooner_than_a_member_alone() -> None:
    """As it was in all 39 runs of the sweep, on links that cost nothing."""
    for h, steps in product((10, 20, 50), (1000, 8000, None)):
        found = with_plain_mean(price(1_000_000, Choice(h), 4), h, steps)
        assert found.samples < 4
