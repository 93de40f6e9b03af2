"""Small colluding drifts over 200 rounds: what they come to with an outer momentum, and that worker
momentum in its place bounds it.

The short version of `scripts/bench/bench_attacks.py --long 200`: a quadratic loss of 1 at best, noisy
gradients, the reducer and the outer step of a run.
"""

from __future__ import annotations

import math

import pytest
import torch

from atoll.optim import OuterStep
from atoll.optim.federated.simulation.attacks import drift, honest_radius, reverse
from atoll.optim.outer.presets import PRESETS
from atoll.security.rules import WorkerMomentum
from atoll.security.rules.reducers import find_reducer

N, F, D, ROUNDS, LAST = 7, 2, 40, 200, 10
NOISE, RATE = 0.5, 0.02
OUTER = {preset.name: preset.outer for preset in PRESETS}


def losses(attack: str, preset: str, beta: float, rounds: int = ROUNDS) -> list[float]:
    """The anchor's loss after each round of trimmed means. Half of the directions hardly push back,
    as those of a network.
    """
    rng = torch.Generator().manual_seed(0)
    reducer, step, running = (
        find_reducer(f"trimmed_mean:{F}"),
        OuterStep(OUTER[preset]),
        WorkerMomentum(beta),
    )
    assert reducer is not None
    assert reducer.form == "rows"
    state, anchor = torch.zeros(step.state_numel(D)), torch.full((D,), 0.4)
    curved = torch.cat([torch.ones(D // 2), torch.full((D // 2,), 0.02)])
    found = list[float]()
    for _ in range(rounds):
        noise = NOISE * torch.randn(N, D, generator=rng)
        rows = running(RATE * (curved * anchor + noise)).clone()
        if attack in ("drift", "reverse"):
            honest = rows[: N - F]
            sent = (drift if attack == "drift" else reverse)(honest, 0.9)
            rows = torch.cat([honest, sent.expand(F, -1)])
        elif attack == "climb":  # up the loss itself, farther than any honest member lies
            honest, up = rows[: N - F], curved * anchor
            sent = honest.mean(0) - 5 * honest_radius(honest) * up / up.norm()
            rows = torch.cat([honest, sent.expand(F, -1)])
        elif attack == "missing":
            rows = rows[: N - F]
        aggregate, new = torch.empty(D), torch.empty(D)
        reducer.reduce(rows.clone(), [1] * len(rows), aggregate)
        step.apply(anchor, aggregate, state, new)
        anchor = new
        found.append(1 + 0.5 * float((curved * anchor * anchor).sum()))
    return found


def ratio(attack: str, preset: str, beta: float) -> float:
    """Of the mean loss over the last rounds to that when nobody attacks."""
    return math.fsum(losses(attack, preset, beta)[-LAST:]) / math.fsum(
        losses("none", preset, beta)[-LAST:]
    )


def test_a_drift_within_the_honest_spread_builds_up_over_rounds() -> None:
    """Members that are merely missing cost 3 %; the same two, within 0.9 honest radii of the mean,
    make the loss 2.7 times as large.
    """
    assert ratio("missing", "published", 0.0) == pytest.approx(1.032, abs=0.01)
    assert ratio("drift", "published", 0.0) == pytest.approx(2.75, abs=0.1)
    harm = [
        a / b
        for a, b in zip(
            losses("drift", "published", 0.0), losses("none", "published", 0.0), strict=True
        )
    ]
    assert sum(harm[:5]) / 5 < 1.05 < 1.2 < sum(harm[20:30]) / 10 < 2 < sum(harm[-10:]) / 10


@pytest.mark.parametrize(
    ("attack", "most"), [("missing", 1.06), ("drift", 1.06), ("reverse", 1.06), ("climb", 1.2)]
)
def test_worker_momentum_in_place_of_the_outer_one_bounds_it(attack: str, most: float) -> None:
    assert 0.9 < ratio(attack, "worker-momentum", 0.8) < most
    assert losses("none", "worker-momentum", 0.8)[-1] < 1.01 * losses("none", "published", 0.0)[-1]


def test_both_momenta_on_top_of_each_other_swing() -> None:
    """Why a manifest with both is refused (`tests/unit/test_presets.py`): without an attack the
    anchor passes its goal again and again.
    """
    both, alone = losses("none", "published", 0.9), losses("none", "published", 0.0)
    assert max(both[50:]) > 1.2 * max(alone[50:])
