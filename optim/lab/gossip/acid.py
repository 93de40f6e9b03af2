"""A²CiD² (Nabli, Belilovsky and Oyallon 2023, arXiv 2306.08289): a momentum that runs on in
continuous time makes asynchronous gossip spread faster.

A peer holds x, its weights, and a second vector y. Between two events, t apart, they mix:

    (x, y) <- (mean + e (x - y) / 2, mean - e (x - y) / 2),   mean = (x + y) / 2, e = exp(-2 eta t)

A gradient step moves both alike. An exchange with a peer that holds x' moves x to the mean of x and
x', and y by alpha (x' - x), alpha > 1/2: it overshoots, and the mixing brings that back into x.
With eta and alpha from the graph (`of_graph`), peers come together as fast as sqrt(chi1 chi2), not
chi1, says (`graph.py`): on a ring of 16 a bound 3.7 times as good, where all meet all none better.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .exchange import Exchange
from .graph import Spread


class ContinuousMomentum:
    """One peer's x and y. In a ring of 16 where each pair exchanges once in two steps:

        ring = [(i, (i + 1) % 16) for i in range(16)]
        peer = ContinuousMomentum(live, spread_of(ring, [0.5] * 16))
        peer.moved(-lr * gradient, now=step)    # in place of optimizer.step()
        peer.exchange(exchange, now=step)       # when the turn of a pair has come

    ``values``: x, changed in place (live parameters, as one vector). ``shadow``: y, float32, a copy
    at first. Times are the caller's, in the unit of the rates that ``spread`` was made of: inner
    steps, say.
    """

    def __init__(self, values: Tensor, spread: Spread, *, now: float = 0.0) -> None:
        self.values, self.shadow = values, values.detach().clone()
        self.eta = 1 / (2 * math.sqrt(spread.chi1 * spread.chi2))
        self.alpha = 0.5 * math.sqrt(spread.chi1 / spread.chi2)
        self._at = now

    @torch.no_grad()
    def mix(self, now: float) -> None:
        """Let time pass until ``now``. Raises ValueError where that is in the past."""
        if now < self._at:
            raise ValueError(f"time went back from {self._at:g} to {now:g}")
        towards = (1 - math.exp(-2 * self.eta * (now - self._at))) / 2
        moved = (self.shadow - self.values) * towards
        self.values += moved
        self.shadow -= moved
        self._at = now

    @torch.no_grad()
    def moved(self, step: Tensor, now: float) -> None:
        """A gradient step: ``step`` is added to both, such as what an optimizer would add to x."""
        self.mix(now)
        self.values += step
        self.shadow += step

    @torch.no_grad()
    def exchange(self, exchange: Exchange, now: float) -> None:
        """One exchange of x. Both peers of a pair do it."""
        self.mix(now)
        mean = self.values.clone()
        exchange(mean)
        self.shadow += 2 * self.alpha * (mean - self.values)
        self.values.copy_(mean)
