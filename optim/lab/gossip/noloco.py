"""NoLoCo (Kolehmainen et al. 2025, arXiv 2506.10911): DiLoCo whose mean is over a random pair.

After some inner steps from its slow weights p to the live weights w, peer i averages with one other
peer both its progress d = w - p and p itself, and steps with Nesterov's momentum and a pull to the
pair's mean:

    m <- alpha m + beta mean(d) + gamma (mean(p) - p)
    p <- p + m,   w <- p

The pull is what keeps peers together: without it (gamma = 0) they drift apart like random walks.
For pairs the paper finds alpha < gamma < sqrt(2 + alpha^2) stable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .exchange import Exchange


class NoLoCo:
    """One peer's outer optimizer in a run without a shared anchor: every peer has a model of its
    own, and each outer step averages with one other peer.

        exchange = over_swarm(swarm, "noloco")
        outer = NoLoCo(torch.nn.utils.parameters_to_vector(model.parameters()))
        ...                                     # H inner steps
        live = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        outer.step(live, exchange)
        torch.nn.utils.vector_to_parameters(live, model.parameters())

    ``slow``: this peer's slow weights, float32, at first a copy of what it was made with. They are
    what this peer evaluates, keeps and exports. ``momentum``: of the same shape.
    """

    def __init__(
        self, weights: Tensor, *, alpha: float = 0.5, beta: float = 0.7, gamma: float = 0.7
    ) -> None:
        """The defaults are the authors' code's. Raises ValueError where pairs would not stay
        together."""
        if not 0 <= alpha < gamma < math.sqrt(2 + alpha**2):
            raise ValueError(
                f"alpha {alpha:g}, gamma {gamma:g}: 0 <= alpha < gamma < sqrt(2 + alpha^2)"
            )
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self.slow = weights.detach().to(torch.float32, copy=True)
        self.momentum = torch.zeros_like(self.slow)

    @torch.no_grad()
    def step(self, live: Tensor, exchange: Exchange) -> None:
        """The outer step: ``live``, as inner steps left it, becomes the new slow weights. One
        exchange of 8 bytes a parameter in fp32.
        """
        both = torch.stack([live.detach().float() - self.slow, self.slow])
        exchange(both)
        progress, slow = both
        self.momentum.mul_(self.alpha).add_(progress, alpha=self.beta)
        self.momentum.add_(slow - self.slow, alpha=self.gamma)
        self.slow += self.momentum
        live.copy_(self.slow)
