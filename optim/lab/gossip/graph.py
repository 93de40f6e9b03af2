"""How fast gossip spreads over a graph (the chi1, chi2 of arXiv 2208.00779 and 2306.08289), and
gossip rates that make it fast.

Edge (i, j) is used at the times of a Poisson process of rate r_ij: r_ij exchanges a unit of time,
on the mean. With the Laplacian L = sum r_ij (e_i - e_j)(e_i - e_j)^T

    chi1 = 1 / (its smallest positive eigenvalue)           how long plain gossip takes
    chi2 = max over edges of (e_i - e_j)^T L^+ (e_i - e_j) / 2     resistance; chi2 <= chi1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Edges = Sequence[tuple[int, int]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """What the speed of gossip over a graph depends on, in the unit of time of its rates. Plain
    gossip takes a time proportional to ``chi1``; accelerated gossip, to sqrt(chi1 chi2).

    >>> ring = spread_of([(0, 1), (1, 2), (2, 3), (3, 0)], [0.5] * 4)
    >>> round(ring.chi1, 6), round(ring.chi2, 6)
    (1.0, 0.75)
    """

    chi1: float
    chi2: float


def spread_of(edges: Edges, rates: Sequence[float] | Floats) -> Spread:
    """Of the graph over the nodes 0, 1, …, with a rate for each edge.

    Raises:
        ValueError: the edges with a positive rate do not connect all nodes.
    """
    values, _, resistance = _spectrum(_ends(edges), np.asarray(rates, np.float64))
    return Spread(float(1 / values[1]), float(resistance.max() / 2))


def gossip_rates(edges: Edges, *, steps: int = 2000) -> Floats:
    """Rates with sum 1 over the edges, for which sqrt(chi1 chi2), so the exchanges that accelerated
    gossip needs, is least: float64 [edges].

    The paper solves a semidefinite relaxation. Here it is multiplicative subgradient steps on
    log chi1 + log chi2 from equal rates, the best one kept: never worse than equal rates.
    Raises ValueError as `spread_of`.
    """
    ends = _ends(edges)
    rates = best = np.full(len(ends), 1 / len(ends))
    least = np.inf
    for step in range(steps):
        values, vectors, resistance = _spectrum(ends, rates)
        score = np.log(resistance.max() / 2) - np.log(values[1])
        if score < least:
            least, best = score, rates
        # of eigenvalues and resistances that are as bad, the mean is a subgradient too
        slow = vectors[:, 1:][:, values[1:] < values[1] * 1.001]
        worst = resistance > resistance.max() * 0.999
        inverse = _inverse(values, vectors)
        across = inverse[ends[:, 0]] - inverse[ends[:, 1]]
        pulled = (across[:, ends[:, 0]] - across[:, ends[:, 1]])[:, worst] ** 2
        gain = ((slow[ends[:, 0]] - slow[ends[:, 1]]) ** 2).mean(axis=1) / values[1]
        gain += pulled.mean(axis=1) / resistance.max()
        gain /= np.abs(gain).max()
        rates = rates * np.exp(0.2 / np.sqrt(step + 1) * gain)
        rates = rates / rates.sum()
    return best


def _ends(edges: Edges) -> NDArray[np.intp]:
    ends = np.asarray(edges, np.intp).reshape(-1, 2)
    if not len(ends) or ends.min() < 0 or (ends[:, 0] == ends[:, 1]).any():
        raise ValueError("edges join two different nodes, numbered from 0")
    return ends


def _spectrum(ends: NDArray[np.intp], rates: Floats) -> tuple[Floats, Floats, Floats]:
    """Eigenvalues (rising) and eigenvectors of the Laplacian, and each edge's resistance."""
    if rates.shape != (len(ends),) or not (rates >= 0).all():
        raise ValueError("an edge has one rate, not below 0")
    nodes = int(ends.max()) + 1
    laplacian = np.zeros((nodes, nodes))
    for (i, j), rate in zip(ends, rates, strict=True):
        laplacian[i, j] -= rate
        laplacian[j, i] -= rate
    laplacian -= np.diag(laplacian.sum(axis=1))
    values, vectors = np.linalg.eigh(laplacian)
    if values[1] <= 1e-12 * max(values[-1], 1e-300):
        raise ValueError("the graph is not connected")
    inverse = _inverse(values, vectors)
    one, other = ends.T
    resistance = inverse[one, one] + inverse[other, other] - 2 * inverse[one, other]
    return values, vectors, resistance


def _inverse(values: Floats, vectors: Floats) -> Floats:
    return (vectors[:, 1:] / values[1:]) @ vectors[:, 1:].T
