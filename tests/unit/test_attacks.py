"""The attack kit: what each attack sends, by its definition; that the optimised ones do more harm;
and which rule withstands which.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from atoll.collectives.errors import ConfigError, NotEnoughPeersError
from atoll.optim.federated.simulation.attacks import (
    ATTACKS,
    Delayed,
    alie,
    flipped_labels,
    ipm,
    mimic,
    optimised_alie,
    optimised_ipm,
    random_direction,
    sign_flip,
)
from atoll.security.rules import aggregate

N, F, D = 16, 4, 300


def honest(seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(
        (rng.standard_normal(D) + 0.5 * rng.standard_normal((N - F, D))).astype(np.float32)
    )


def harm(rule: str, sent: torch.Tensor, rows: torch.Tensor, before: tuple[str, ...] = ()) -> float:
    """How far the result is from the honest mean, in standard deviations of the honest."""
    result = aggregate(torch.cat([rows, sent.expand(F, -1)]), rule, F, before=before).value
    return float((result - rows.mean(0)).norm() / rows.std(0).norm())


def test_what_is_sent() -> None:
    rows = honest()
    wide = rows.numpy().astype(np.float64)
    mean, deviation = wide.mean(0), wide.std(0, ddof=1)
    for sent, want in (
        (sign_flip(rows, 1000.0), -1000 * mean),
        (ipm(rows, 0.5), -0.5 * mean),
        (alie(rows, 1.5), mean - 1.5 * deviation),
        (mimic(rows, 3), wide[3]),
    ):
        assert sent.dtype == torch.float32
        np.testing.assert_allclose(sent.numpy(), want, rtol=1e-6, atol=1e-6)
    far = random_direction(rows, seed=5)
    assert torch.equal(far, random_direction(rows, seed=5))
    assert math.isclose(float(far.norm()), 1000 * np.linalg.norm(mean), rel_tol=1e-5)
    assert not bool(ATTACKS["nan"](rows).isfinite().all())
    assert int(ATTACKS["inf"](rows).isinf().sum()) == 1


def test_attacks_modify_nothing() -> None:
    rows = honest()
    before = rows.clone()
    for attack in ATTACKS.values():
        sent = attack(rows)
        assert sent.shape == (D,)
        sent.fill_(7.0)
        assert torch.equal(rows, before)


def test_delayed_and_flipped() -> None:
    delayed = Delayed(2)
    own = torch.zeros(1)
    sent = []
    for step in range(5):
        own.fill_(step)
        sent.append(float(delayed.send(own)))
    assert sent == [0, 0, 0, 1, 2]
    assert flipped_labels(torch.tensor([0, 3, 9]), 10).tolist() == [9, 6, 0]
    with pytest.raises(ConfigError):
        flipped_labels(torch.tensor([10]), 10)


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed_mean"])
def test_an_optimised_factor_does_at_least_as_much_harm(rule: str) -> None:
    rows = honest(1)

    def result(all_rows: torch.Tensor) -> torch.Tensor:
        return all_rows.mean(0) if rule == "mean" else aggregate(all_rows, rule, F).value

    def moved(sent: torch.Tensor) -> float:
        return float((result(torch.cat([rows, sent.expand(F, -1)])) - rows.mean(0)).norm())

    assert moved(optimised_alie(rows, F, result)) >= moved(alie(rows, 1.5))
    assert moved(optimised_ipm(rows, F, result)) >= max(
        moved(ipm(rows, 0.1)), moved(ipm(rows, 0.5))
    )


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in ("nan", "inf")])
def test_robust_rules_stay_near_the_honest_mean(attack: str) -> None:
    """Where data are alike: within a standard deviation of the honest, whatever the size of the
    attack. The mean is not.
    """
    rows = honest(2)
    sent = ATTACKS[attack](rows)
    for rule, before in (
        ("median", ()),
        ("trimmed_mean", ()),
        ("meamed", ()),
        ("multi_krum", ()),
        ("trimmed_mean", ("nnm",)),
    ):
        assert harm(rule, sent, rows, before) < 1.0, rule
    if attack in ("sign_flip_1000", "foe_10", "random_direction", "gaussian"):
        assert (
            float(
                (torch.cat([rows, sent.expand(F, -1)]).mean(0) - rows.mean(0)).norm()
                / rows.std(0).norm()
            )
            > 2
        )


def test_what_is_no_number_is_left_out() -> None:
    rows = honest(3)
    sent = ATTACKS["nan"](rows)
    found = aggregate(torch.cat([rows, sent[None]]), "median", 1)
    assert found.dropped == (N - F,)
    assert torch.equal(found.value, aggregate(rows, "median", 0).value)
    with pytest.raises(NotEnoughPeersError):
        aggregate(torch.cat([rows, sent.expand(2, -1)]), "median", 1)
