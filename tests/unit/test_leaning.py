"""Who leans over rounds: attackers that stay within the honest spread are told apart, and honest
members are not named, whatever their data.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.collectives.errors import ConfigError
from atoll.optim.federated.simulation.attacks import drift, honest_radius, reverse
from atoll.security.rules.leaning import LEAST_ROUNDS, Leaning, chance, median_of_others

N, F, D = 7, 2, 48


def run(attack: str, rounds: int, own: float, beta: float = 0.0, seed: int = 0) -> Leaning[int]:
    """Updates about a direction that turns slowly. ``own``: how long each member's constant
    deviation is, as its data differ, beside noise of length 1; ``beta``: worker momentum."""
    chance_ = torch.Generator().manual_seed(seed)
    leaning = Leaning[int](F, rounds)
    offsets = torch.randn(N, D, generator=chance_) * own / D**0.5
    ways, sent = torch.randn(2, D, generator=chance_) / D**0.5, torch.zeros(N, D)
    for number in range(rounds):
        angle = 6.28 * number / rounds
        update = 0.5 * (ways[0] * np.cos(angle) + ways[1] * np.sin(angle))
        fresh = update + offsets + torch.randn(N, D, generator=chance_) / D**0.5
        sent = beta * sent + (1 - beta) * fresh
        rows = sent.clone()
        if attack == "drift":
            rows[N - F :] = drift(rows[: N - F], 0.9)
        elif attack == "reverse":
            rows[N - F :] = reverse(rows[: N - F], 0.9)
        leaning.saw(range(N), rows)
    return leaning


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("own", [0.0, 1.0])
@pytest.mark.parametrize(("attack", "figure"), [("drift", "constancy"), ("reverse", "against")])
def test_attackers_within_the_honest_spread_are_named_and_nobody_else(
    attack: str, figure: str, own: float, beta: float
) -> None:
    found = run(attack, 200, own, beta).found()
    assert {row.who for row in found[:F]} == {5, 6}
    assert [row.leans for row in found] == [(figure,)] * F + [()] * (N - F)
    assert [row.rounds for row in found] == [200] * N


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("own", [0.0, 1.0, 3.0])
def test_honest_members_are_not_named_in_a_thousand_rounds(own: float, beta: float) -> None:
    for seed in range(2):
        assert [row.leans for row in run("none", 1000, own, beta, seed).found()] == [()] * N


def test_ranks_alone_name_as_seldom_as_is_said() -> None:
    assert chance(7, 2) == pytest.approx(7 * ((2 / 7) ** 7 + (2 / 7) ** 8))
    assert chance(7, 2) < 0.0015
    assert chance(4, 4) == 1.0


def test_the_median_of_the_others() -> None:
    chance_ = np.random.default_rng(0)
    for n in range(2, 9):
        values = chance_.standard_normal((n, 50)).round(1)  # with equal ones among them
        want = [np.median(np.delete(values, i, 0), axis=0) for i in range(n)]
        np.testing.assert_allclose(median_of_others(values), want, rtol=0, atol=1e-15)


def test_figures_by_their_definition() -> None:
    """Two members opposite each other about a third: one round after another along one axis."""
    leaning = Leaning[str](1, LEAST_ROUNDS)
    for _ in range(LEAST_ROUNDS):
        leaning.saw(["left", "middle", "right"], torch.tensor([[-1.0, 1.0], [0, 1], [1, 1]]))
    found = {row.who: row for row in leaning.found()}
    assert "middle" not in found  # it is the others' median in every round: it points nowhere
    assert found["left"].constancy == pytest.approx(1.0)
    # The others' median is (0.5, 1): a deviation of (-1.5, 0) has the cosine 0.5 / sqrt(1.25) with
    # its opposite.
    assert found["left"].against == pytest.approx(0.5 / 1.25**0.5)
    assert [row.leans for row in found.values()] == [(), ()]


def test_who_is_not_there_in_every_window_has_no_figures_and_few_rounds_are_refused() -> None:
    leaning, rows = Leaning[int](1, LEAST_ROUNDS), torch.randn(4, 8)
    for number in range(LEAST_ROUNDS):
        there = 4 if number < LEAST_ROUNDS - 5 else 3
        leaning.saw(range(there), rows[:there] + 0.1 * torch.randn(there, 8))
    assert {row.who for row in leaning.found()} == {0, 1, 2}
    with pytest.raises(ConfigError) as caught:
        Leaning[int](1, LEAST_ROUNDS - 1)
    assert caught.value.key == "rounds"


def test_drift_and_reverse_stay_within_the_honest_spread() -> None:
    rows = torch.randn(5, 30, generator=torch.Generator().manual_seed(1)) + 0.3
    mean, radius = rows.double().mean(0), honest_radius(rows)
    assert radius == pytest.approx(float((rows - rows.mean(0)).square().sum(1).mean().sqrt()))
    for sent in (drift(rows, 0.7), reverse(rows, 0.7)):
        assert float((sent.double() - mean).norm()) == pytest.approx(0.7 * radius, rel=1e-5)
    onto = torch.dot(reverse(rows, 0.7).double() - mean, mean) / mean.norm()
    assert float(onto) == pytest.approx(-0.7 * radius, rel=1e-5)
    far = rows + 5.0
    a, b = drift(rows, 0.7) - rows.mean(0), drift(far, 0.7) - far.mean(0)
    assert torch.allclose(a, b, atol=1e-5)  # in every round the same direction
