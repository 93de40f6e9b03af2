"""Federated methods in numpy, float64, from the formulas of their papers: what runs are held
against. Nothing of the product is used here.

Patients have ``D`` measurements and an outcome 0 or 1; the model is logistic regression, ``w`` its
weights and bias, (D + 1,). A site is its patients and the batches that it takes, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
D = 6


@dataclass(frozen=True)
class Patients:
    """``x``: float64 (n, D); ``y``: 0 or 1, float64 (n,)."""

    x: Array
    y: Array


def patients(seed: int, count: int, shift: float) -> Patients:
    """Of one hospital: what they have differs by ``shift``, and so does what follows from it."""
    rng = np.random.default_rng(seed)
    x = rng.normal(shift, 1.0, (count, D))
    slope = np.linspace(-1.0, 1.0, D) + shift * np.linspace(0.5, -0.5, D)
    return Patients(x, (rng.random(count) < 1 / (1 + np.exp(-(x @ slope)))).astype(np.float64))


def batches(seed: int, count: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Indices without end: a permutation an epoch, its last batch as long as what is left."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(count)
        yield from (order[at : at + size] for at in range(0, count, size))


def gradient(w: Array, of: Patients, batch: NDArray[np.int64]) -> Array:
    """Of the mean log-loss of a batch."""
    x, y = of.x[batch], of.y[batch]
    error = 1 / (1 + np.exp(-(x @ w[:D] + w[D]))) - y
    return np.append(error @ x, error.sum()) / len(batch)


def log_loss(w: Array, of: Patients) -> float:
    """The mean over patients."""
    z = of.x @ w[:D] + w[D]
    return float(np.mean(np.logaddexp(0, z) - of.y * z))


@dataclass
class Site:
    """``work``: the indices of the batches of each round. ``n``: what it counts."""

    patients: Patients
    work: Sequence[Sequence[NDArray[np.int64]]]
    n: float

    def local(
        self, w: Array, round_: int, lr: float, turn: Callable[[Array, Array], Array]
    ) -> Array:
        """Where plain SGD leads from ``w``; ``turn``: what is made of a gradient at a point."""
        at = w.copy()
        for batch in self.work[round_]:
            at -= lr * turn(gradient(at, self.patients, batch), at)
        return at


def plain(g: Array, _: Array) -> Array:
    return g


def averaged(values: Sequence[Array], sites: Sequence[Site]) -> Array:
    """Σ pᵢ vᵢ, pᵢ = nᵢ / Σ n."""
    total = sum(site.n for site in sites)
    return sum(
        (site.n / total * value for site, value in zip(sites, values, strict=True)), np.zeros(D + 1)
    )


def fedavg(sites: Sequence[Site], w: Array, rounds: int, lr: float) -> list[Array]:
    """McMahan et al. 2017: w ← Σ pᵢ wᵢ."""
    found = list[Array]()
    for t in range(rounds):
        w = averaged([site.local(w, t, lr, plain) for site in sites], sites)
        found.append(w)
    return found


def fedavgm(sites: Sequence[Site], w: Array, rounds: int, lr: float, beta: float) -> list[Array]:
    """Hsu et al. 2019: v ← β v + Σ pᵢ (w - wᵢ), w ← w - v."""
    found, v = list[Array](), np.zeros(D + 1)
    for t in range(rounds):
        v = beta * v + averaged([w - site.local(w, t, lr, plain) for site in sites], sites)
        w = w - v
        found.append(w)
    return found


def fedadam(
    sites: Sequence[Site],
    w: Array,
    rounds: int,
    lr: float,
    eta: float,
    b1: float,
    b2: float,
    tau: float,
) -> list[Array]:
    """Reddi et al. 2021, without bias correction; v begins at 0, which the product says."""
    found, m, v = list[Array](), np.zeros(D + 1), np.zeros(D + 1)
    for t in range(rounds):
        delta = averaged([site.local(w, t, lr, plain) - w for site in sites], sites)
        m = b1 * m + (1 - b1) * delta
        v = b2 * v + (1 - b2) * delta**2
        w = w + eta * m / (np.sqrt(v) + tau)
        found.append(w)
    return found


def fedprox(sites: Sequence[Site], w: Array, rounds: int, lr: float, mu: float) -> list[Array]:
    """Li et al. 2020: each site minimises its loss + μ/2 |y - w|²."""
    found = list[Array]()
    for t in range(rounds):
        start = w.copy()
        pulled = [site.local(w, t, lr, lambda g, y, x=start: g + mu * (y - x)) for site in sites]
        w = averaged(pulled, sites)
        found.append(w)
    return found


def fednova(sites: Sequence[Site], w: Array, rounds: int, lr: float) -> list[Array]:
    """Wang et al. 2020 of plain steps: w ← w - (Σ pᵢ τᵢ) Σ pᵢ (w - wᵢ) / τᵢ."""
    found, total = list[Array](), sum(site.n for site in sites)
    for t in range(rounds):
        effective = sum(site.n / total * len(site.work[t]) for site in sites)
        steps = [(w - site.local(w, t, lr, plain)) / len(site.work[t]) for site in sites]
        w = w - effective * averaged(steps, sites)
        found.append(w)
    return found


def scaffold(sites: Sequence[Site], w: Array, rounds: int, lr: float) -> list[Array]:
    """Karimireddy et al. 2020, option II, everybody in each round, global step 1: y ← y - η (g - cᵢ
    + c); cᵢ ← cᵢ - c + (w - yᵢ) / (Kᵢ η); w ← Σ pᵢ yᵢ; c ← Σ pᵢ cᵢ."""
    found, c, own = list[Array](), np.zeros(D + 1), [np.zeros(D + 1) for _ in sites]
    for t in range(rounds):
        ends = [
            site.local(w, t, lr, lambda g, _, mine=mine, common=c: g - mine + common)
            for site, mine in zip(sites, own, strict=True)
        ]
        own = [
            mine - c + (w - end) / (len(site.work[t]) * lr)
            for site, mine, end in zip(sites, own, ends, strict=True)
        ]
        w, c = averaged(ends, sites), averaged(own, sites)
        found.append(w)
    return found
