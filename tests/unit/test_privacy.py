"""Privacy: epsilon against opacus', limits that are never passed, noise of the right distribution,
clipping.
"""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.collectives.errors import ConfigError
from atoll.security.privacy import (
    Accountant,
    AdaptiveBound,
    NoisePlan,
    add_noise,
    clip,
    discrete,
    discrete_gaussian,
    noise_for,
)
from atoll.security.privacy.rdp import ORDERS, epsilon_of, step_costs

OPACUS = json.loads((Path(__file__).parent / "privacy_opacus.json").read_text(encoding="utf-8"))


def test_epsilon_is_never_below_opacus_and_hardly_above() -> None:
    rows = OPACUS["noise, rate, steps, epsilon"]
    assert len(rows) == 90
    for noise, rate, steps, theirs in rows:
        account = Accountant(OPACUS["delta"])
        account.spend(rate, noise, steps)
        assert 1 <= account.epsilon / theirs <= 1.00001, (noise, rate, steps)


def test_costs_at_whole_orders_are_those_of_the_binomial_sum() -> None:
    """Section 3.3 of the paper, without its leading 1, in exact weights: also where a step costs
    next to nothing.
    """
    for rate, noise in ((1e-6, 5.0), (1e-3, 0.5), (0.3, 1.0), (0.9, 20.0)):
        for order in (2, 5, 17):
            q = Fraction(rate)
            terms = (
                float(math.comb(order, k) * q**k * (1 - q) ** (order - k))
                * math.expm1((k * k - k) / (2 * noise**2))
                for k in range(2, order + 1)
            )
            expected = math.log1p(math.fsum(terms)) / (order - 1)
            assert step_costs(rate, noise)[ORDERS.index(order)] == pytest.approx(
                expected, rel=1e-9
            ), (rate, noise, order)


def test_edges_of_costs() -> None:
    assert not step_costs(0.0, 1.0).any()
    assert np.isinf(step_costs(0.5, 0.0)).all()
    assert step_costs(1.0, 2.0)[ORDERS.index(2)] == 2 / 8
    for rate in (
        0.01,
        0.5,
    ):  # sampling never costs more than not sampling, and less noise never less than more
        assert (step_costs(rate, 0.7) <= step_costs(1.0, 0.7)).all()
        assert (step_costs(rate, 0.7) >= step_costs(rate, 0.8)).all()
    assert (step_costs(0.5, 0.099) >= step_costs(0.5, 0.1)).all()
    assert all(
        (step_costs(rate, noise) >= 0).all()
        for rate in (1e-12, 1e-6, 0.5)
        for noise in (0.1, 1.0, 100.0, 1e6)
    )
    unspent = Accountant(1e-5)
    assert unspent.epsilon == 0
    unspent.spend(0.5, 0.0)
    assert unspent.epsilon == math.inf


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: step_costs(1.1, 1.0),
        lambda: step_costs(math.nan, 1.0),
        lambda: step_costs(0.1, -1.0),
        lambda: step_costs(0.1, math.nan),
        lambda: Accountant(0.0),
        lambda: Accountant(1e-5, stop_at_epsilon=0.0),
        lambda: Accountant(1e-5, costs=np.zeros(3)),
        lambda: Accountant(1e-5, costs=np.full(len(ORDERS), -1.0)),
        lambda: noise_for(0.0, 1e-5, 0.1, 10),
        lambda: noise_for(1e-6, 1e-5, 0.1, 10),
        lambda: discrete_gaussian(-1, 1, random.Random(0)),
        lambda: discrete_gaussian(1 << 61, 1, random.Random(0)),
        lambda: clip(torch.ones(2), 0.0),
        lambda: AdaptiveBound(1.0, quantile=1.1),
        lambda: AdaptiveBound(1.0, count_noise=0.4).vector_noise(1.0),
        lambda: NoisePlan(noise=1.0, clip=1.0, step=1.0, numel=1, honest=4),
    ],
)
def test_what_promises_nothing_is_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ConfigError):
        wrong()


def test_a_thousand_random_schedules_never_pass_their_epsilon() -> None:
    rng = random.Random(7)
    kinds = [(rng.choice([0.002, 0.01, 0.05, 0.3, 1.0]), rng.uniform(0.5, 4)) for _ in range(20)]
    stopped = 0
    for _ in range(1000):
        account = Accountant(
            rng.choice([1e-3, 1e-5, 1e-7]), stop_at_epsilon=10 ** rng.uniform(-0.3, 1.3)
        )
        made: list[tuple[float, float]] = []
        for _ in range(8):
            kind = rng.choice(kinds)
            room = account.room(*kind)
            assert account.allows(*kind) == (room > 0)
            if room == 0:
                stopped += 1
                break
            for _ in range(min(room, rng.choice([1, 3, 8]))):
                assert account.allows(*kind)
                account.spend(*kind)
                made.append(kind)
        spent = [
            math.fsum(float(step_costs(*kind)[order]) for kind in made)
            for order in range(0, len(ORDERS), 5)
        ]
        assert account.costs[::5] == pytest.approx(spent, rel=1e-12)
        assert account.epsilon <= account.stop_at_epsilon
    assert stopped > 200


def test_room_is_the_largest_number_of_steps() -> None:
    for rate, noise, limit in (
        (0.01, 1.0, 2.0),
        (0.2, 1.5, 8.0),
        (1.0, 20.0, 3.0),
        (0.001, 0.6, 4.0),
    ):
        account = Accountant(1e-5, limit)
        account.spend(0.1, 3.0, 5)
        room = account.room(rate, noise)
        assert room > 0
        assert account.after(rate, noise, room) <= limit < account.after(rate, noise, room + 1)
    assert Accountant(1e-5, 0.5).room(1.0, 0.5) == 0
    assert Accountant(1e-5, 8.0).room(0.0, 1.0) == 10**9
    assert Accountant(1e-5).room(1.0, 0.5) == 10**9


def test_noise_for_is_enough_and_hardly_more() -> None:
    for epsilon, rate, steps in (
        (1.0, 0.01, 1000),
        (8.0, 0.1, 100),
        (0.3, 1.0, 1),
        (500.0, 1.0, 1),
    ):
        noise = noise_for(epsilon, 1e-5, rate, steps)
        assert epsilon_of(steps * step_costs(rate, noise), 1e-5) <= epsilon
        assert epsilon_of(steps * step_costs(rate, noise * 0.998), 1e-5) > epsilon


def chi_square(samples: np.ndarray, variance: float) -> tuple[float, int]:
    """The statistic of samples against the discrete Gaussian over cells expecting at least 10, and
    the degrees of freedom.
    """
    reach = int(8 * math.sqrt(variance)) + 4
    xs = np.arange(-reach, reach + 1)
    p = np.exp(-(xs.astype(float) ** 2) / (2 * variance))
    expected = p / p.sum() * len(samples)
    seen = np.array([(samples == x).sum() for x in xs])
    big = expected >= 10
    cells = np.append(seen[big], len(samples) - seen[big].sum())
    wanted = np.append(expected[big], max(1e-9, expected[~big].sum()))
    return float(((cells - wanted) ** 2 / wanted)[wanted >= 1].sum()), int((wanted >= 1).sum()) - 1


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(5, 2), Fraction(100)])
def test_samples_have_the_distribution(variance: Fraction) -> None:
    samples = discrete_gaussian(variance, 8_000, random.Random(3))
    statistic, freedom = chi_square(samples, float(variance))
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom), (
        statistic,
        freedom,
    )  # one in ten thousand, for this seed it holds
    assert chi_square(samples, 1.5 * float(variance))[0] > freedom + 10 * math.sqrt(
        2 * freedom
    )  # another variance is seen


@pytest.mark.parametrize("variance", [1 << 20, (1 << 21) + Fraction(1, 3)])
def test_wide_samples_have_the_distribution(variance: Fraction) -> None:
    """In cells of an eighth of the deviation, and in cells of the low four bits."""
    samples = discrete_gaussian(variance, 200_000, random.Random(6))
    deviation = math.sqrt(variance)
    xs = np.arange(-math.ceil(8 * deviation), math.ceil(8 * deviation) + 1)
    p = np.exp(-(xs.astype(float) ** 2) / (2 * float(variance)))
    p /= p.sum()
    for cells_of, count in (
        (lambda x: np.clip(np.floor(x / deviation * 8), -32, 31) + 32, 64),
        (lambda x: x & 15, 16),
    ):
        wanted = np.bincount(cells_of(xs).astype(int), p, count) * len(samples)
        seen = np.bincount(cells_of(samples).astype(int), minlength=count)
        held = wanted >= 5
        statistic = float(((seen - wanted) ** 2 / wanted)[held].sum())
        freedom = int(held.sum()) - 1
        assert statistic < freedom + 4.5 * math.sqrt(2 * freedom), (statistic, freedom)
    off = float(np.abs(samples).mean()) / deviation - math.sqrt(2 / math.pi)
    assert abs(off) < 4 * math.sqrt((1 - 2 / math.pi) / len(samples))


def test_blocks_of_wide_samples_are_drawn_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares add up as the exact ones do; where all coins are called near, all fall as before; a
    word in which several bounds lie is decided by the bits after it.
    """
    variance = Fraction(1 << 20)
    bits, bounds, rests = discrete._steps(variance)
    assert (1 << bits) * 64 == math.isqrt(1 << 20)
    firsts = [math.exp(-((at << bits) ** 2) / (2 << 20)) for at in range(len(bounds) + 1)]
    share = np.cumsum(firsts)[:-1] / sum(firsts)
    assert np.abs(bounds / 2.0**64 - share).max() < 1e-14
    assert (len(rests), bool((np.diff(bounds.astype(object)) >= 0).all())) == (len(bounds), True)
    quick = discrete_gaussian(variance, 300, random.Random(7))
    with monkeypatch.context() as near:
        near.setattr(discrete, "_NEAR", 2.0)
        again = discrete_gaussian(variance, 300, random.Random(7))
    assert (again == quick).mean() > 0.95  # the few that are drawn again meet other bits

    at = int(np.searchsorted(bounds, np.uint64(2**64 - 1), side="left"))
    assert len({*bounds[at:].tolist()}) == 1
    assert list(rests[at:]) == sorted(rests[at:])


def test_wide_samples_have_the_variance() -> None:
    samples = discrete_gaussian(1 << 40, 20_000, random.Random(4)).astype(float) / (1 << 20)
    assert abs(samples.mean()) < 4 / math.sqrt(20_000)
    assert samples.var() == pytest.approx(1, abs=4 * math.sqrt(2 / 20_000))
    assert discrete_gaussian(0, 5, random.Random(0)).tolist() == [0] * 5


def test_coins_near_their_probability_are_decided_by_fractions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all are called near, all are decided so, and fall as before."""
    quick = discrete_gaussian(Fraction(7, 3), 200, random.Random(5))
    monkeypatch.setattr(discrete, "_NEAR", 2.0)
    assert discrete_gaussian(Fraction(7, 3), 200, random.Random(5)).tolist() == quick.tolist()

    class Ends(random.Random):
        """Draws the same 64 bits whenever asked."""

        def getrandbits(self, k: int, /) -> int:
            return (1 << k) // 2

    half = Fraction(1, 1 << 53)
    assert discrete._decided(Fraction(1, 4), Fraction(1, 4) + half * Fraction(3, 4), Ends()) is True
    assert (
        discrete._decided(Fraction(1, 4), Fraction(1, 4) + half * Fraction(1, 4), Ends()) is False
    )


def test_the_members_parts_add_up_to_the_noise() -> None:
    plan = NoisePlan(noise=1.5, clip=2.0, step=2.0**-10, numel=4000, honest=5)
    total = np.zeros(4000, np.int64)
    for member in range(5):
        add_noise(total, plan, random.Random(member))
    wanted = (plan.noise * plan.sensitivity / plan.step) ** 2
    assert float((total.astype(float) ** 2).mean()) == pytest.approx(
        wanted, rel=5 * math.sqrt(2 / 4000)
    )
    assert plan.sensitivity > 2.0
    assert plan.share * 5 >= wanted
    with pytest.raises(ConfigError):
        add_noise(total[:5], plan, random.Random(0))
    # theorem 11 of arXiv 2102.06387: how far a sum of 1,000 is from one of the summed variance
    gap = 10 * sum(math.exp(-2 * math.pi**2 * 16.0 * k / (k + 1)) for k in range(1, 1000))
    assert gap * 1e9 < 1e-50


def test_clipping_ends_at_the_bound_and_leaves_what_is_below() -> None:
    vector = torch.tensor([3.0, 4.0])
    assert clip(vector, 5.0)
    assert vector.tolist() == [3.0, 4.0]
    assert not clip(vector, 1.0)
    assert vector.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
    big = torch.full((1000,), 1e30)
    clip(big, 7.0)
    assert 6.999 < float(big.double().norm()) <= 7.0
    with pytest.raises(ValueError, match="finite"):
        clip(torch.tensor([math.nan]), 1.0)


def test_the_adaptive_bound_finds_its_quantile() -> None:
    """Norms are uniform in 0 to 10: the bound goes to the quantile's, from above and from below."""
    rng = random.Random(1)
    for quantile, start in ((0.5, 0.1), (0.8, 60.0)):
        bound = AdaptiveBound(start, quantile)
        for _ in range(300):
            within = sum((rng.uniform(0, 10) <= bound.bound) - 0.5 for _ in range(50))
            bound = bound.next(within, 50)
        assert bound.bound == pytest.approx(10 * quantile, rel=0.15)
    assert AdaptiveBound(2.0).next(25, 50).bound == pytest.approx(2 * math.exp(-0.1), rel=1e-15)


def test_a_noisy_count_costs_what_the_vectors_noise_gives_up() -> None:
    """Two Gaussians at once cost the sum of 1 / 2z² each; the count's sensitivity is a half."""
    bound = AdaptiveBound(1.0, count_noise=2.0)
    z = bound.vector_noise(1.1)
    assert z > 1.1
    assert z**-2 + (2 * 2.0) ** -2 == pytest.approx(1.1**-2, rel=1e-12)
