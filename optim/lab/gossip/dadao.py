"""DADAO (Nabli and Oyallon 2023, arXiv 2208.00779): n peers minimise the sum of their functions,
each L-smooth and mu-strongly convex, asynchronously and with acceleration in both gradients and
gossip.

A peer takes its gradient at the times of a Poisson process of rate 1, an edge is used at those of
a process of its own; neither waits for the other. A peer holds x, y, z and a momentum of each, X, Y
and Z. Between its events they follow a linear equation, which is solved exactly:

    dx = eta (X - x) dt       dX = eta (x - X) dt
    dy = alpha (Y - y) dt     dY = -theta (y + z + nu X) dt
    dz = alpha (Z - z) dt     dZ = alpha / 2 (z - Z) dt

At a gradient, with g = grad f_i(x) - nu x - Y:       x -= gamma g, X -= gamma' g, Y += delta g
When edge (i, j) is used, with m = (y + z)_i - (y + z)_j:  z_i -= m / 2, Z_i -= beta m, and j's += .
Only y + z travels. The constants are the paper's (its theorem, and the authors' code). It wants
chi1 chi2 <= 1/2 of the rates, which takes O(sqrt(chi1 chi2)) exchanges a unit of time, and then
needs O(sqrt(L / mu) log 1/e) units of time for a precision e.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .graph import Edges, Floats, spread_of

X, X_AHEAD, Y, Y_AHEAD, Z, Z_AHEAD = range(6)


@dataclass(frozen=True)
class Dadao:
    """Where a run of DADAO ended. ``weights``: x of every peer, float64 [peers, size].
    ``gradients``, ``exchanges``: how many it took, of all peers together; ``time``: in units in
    which a peer takes one gradient on the mean."""

    weights: Floats
    gradients: int
    exchanges: int
    time: float


def dadao(
    gradient: Callable[[int, Floats], Floats],
    start: Floats,
    edges: Edges,
    shares: Sequence[float] | Floats,
    *,
    mu: float,
    smooth: float,
    rng: np.random.Generator,
    events: int,
    until: Callable[[Floats], bool] = lambda weights: False,
) -> Dadao:
    """Play DADAO in virtual time, for at most so many ``events`` (gradients and exchanges).

    Args:
        gradient: of peer i's function at a vector: (i, float64 [size]) -> float64 [size].
        start: float64 [peers, size]: where x begins; all else begins at 0.
        edges, shares: the graph, and the share of all exchanges that each edge has (`gossip_rates`,
            or equal ones). How many exchanges there are follows from them: sqrt(2 chi1 chi2) a unit
            of time, the theorem's least.
        mu, smooth: of strong convexity and smoothness, for every peer's function.
        rng: draws times, peers and edges.
        until: looked at once every 100 events with all x; true ends the run.

    Raises:
        ValueError: not 0 < mu <= smooth, or a graph that does not connect all peers.
    """
    if not 0 < mu <= smooth:
        raise ValueError(f"0 < mu <= smooth, not {mu:g} and {smooth:g}")
    peers = len(start)
    if {node for edge in edges for node in edge} != set(range(peers)):
        raise ValueError(f"a graph over the nodes 0 to {peers - 1}")
    chances = np.asarray(shares, np.float64) / np.sum(shares)
    spread = spread_of(edges, chances)
    rate = math.sqrt(2 * spread.chi1 * spread.chi2)
    nu = mu / 2
    root = math.sqrt(nu / smooth)
    move = np.array([1 / (4 * smooth), 1 / (4 * math.sqrt(smooth * nu)), -(root / 4 + 1)])
    jump = 2 * spread.chi1 / rate / root
    flow = _flow(nu, root)
    values, vectors = np.linalg.eig(flow)
    moving = np.abs(values).argsort()[2:]  # in two modes nothing moves: x = X, and z = Z
    values = np.append(values[moving], [0, 0])
    vectors = np.hstack([vectors[:, moving], np.linalg.svd(flow)[2][4:].T])
    back = np.linalg.inv(vectors)
    state = np.zeros((peers, 6, start.shape[1]))
    state[:, X] = start
    at, now, gradients = np.zeros(peers), 0.0, 0

    def advance(peer: int) -> Floats:
        passed = (vectors * np.exp(values * (now - at[peer]))) @ back
        state[peer] = passed.real @ state[peer]
        at[peer] = now
        return state[peer]

    event = 0
    while event < events and not (event % 100 == 0 and until(state[:, X])):
        event += 1
        now += rng.exponential(1 / (peers + rate))
        if rng.random() * (peers + rate) < peers:
            gradients += 1
            peer = int(rng.integers(peers))
            mine = advance(peer)
            g = gradient(peer, mine[X]) - nu * mine[X] - mine[Y_AHEAD]
            mine[[X, X_AHEAD, Y_AHEAD]] -= move[:, None] * g
        else:
            one, other = (advance(end) for end in edges[int(rng.choice(len(edges), p=chances))])
            m = one[Y] + one[Z] - other[Y] - other[Z]
            for mine, sign in ((one, 1), (other, -1)):
                mine[Z] -= sign * m / 2
                mine[Z_AHEAD] -= sign * jump * m
    return Dadao(state[:, X].copy(), gradients, event - gradients, now)


def _flow(nu: float, root: float) -> Floats:
    """The linear equation between a peer's events, [6, 6]; ``root`` is sqrt(nu / L)."""
    eta, alpha, theta = root / 8, root / 4, 1 / (2 * root)
    flow = np.zeros((6, 6))
    flow[X, [X, X_AHEAD]] = flow[X_AHEAD, [X_AHEAD, X]] = -eta, eta
    flow[Y, [Y, Y_AHEAD]] = flow[Z, [Z, Z_AHEAD]] = -alpha, alpha
    flow[Y_AHEAD, [Y, Z, X_AHEAD]] = -theta, -theta, -theta * nu
    flow[Z_AHEAD, [Z_AHEAD, Z]] = -alpha / 2, alpha / 2
    return flow
