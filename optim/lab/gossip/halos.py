"""Two-level groups as in HALoS (arXiv 2506.04531): members near one another step together often,
the groups rarely, each level with a momentum of its own.

After some inner steps from the group's weights p to the live weights w:

    g = mean over the group of (p - w),   m <- mu m + g,   p <- p - lr (g + mu m),   w <- p

and at every K-th such step, with p' the group's weights after the last merge and q those of all:

    c = mean over all of (p' - p),   M <- nu M + c,   q <- q - LR (c + nu M)
    p <- (1 - alpha) p + alpha q,   p' <- p

HALoS has a server a group, at which each worker's push is a step by itself. Here a group steps
together: in an island of like machines, which is what groups are for, that is the same but for the
order, and needs no server. ``alpha`` 1 is DiLoCo over groups; 0 never merges and is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .exchange import Exchange


class TwoLevel:
    """One member's outer optimizer.

        outer = TwoLevel(live, every=4, alpha=0.75)
        within, across = over_group(island, "halos"), over_group(world, "halos")
        ...                                     # inner steps on live, as one vector
        outer.step(live, within, across)

    ``slow``: the group's weights, float32; ``common``: those of all, what is evaluated, kept and
    exported. Both begin as a copy of what it was made with, which all members have alike.
    """

    def __init__(
        self,
        weights: Tensor,
        *,
        lr: float = 0.9,
        momentum: float = 0.6,
        every: int = 4,
        common_lr: float = 1.0,
        common_momentum: float = 0.0,
        alpha: float = 0.75,
    ) -> None:
        """``every``: steps of the group to one of all. Raises ValueError for values out of
        range."""
        if not (every >= 1 and 0 < alpha <= 1 and lr > 0 and common_lr > 0):
            raise ValueError(
                f"every {every}, alpha {alpha:g}, lr {lr:g} and {common_lr:g}: "
                "every >= 1, 0 < alpha <= 1, and rates above 0"
            )
        if not (0 <= momentum < 1 and 0 <= common_momentum < 1):
            raise ValueError(f"momenta {momentum:g} and {common_momentum:g}: from 0 to below 1")
        self.lr, self.mu, self.every = lr, momentum, every
        self.common_lr, self.common_mu, self.alpha = common_lr, common_momentum, alpha
        self.slow = weights.detach().to(torch.float32, copy=True)
        self.common, self.merged = self.slow.clone(), self.slow.clone()
        self.momentum = torch.zeros_like(self.slow)
        self.common_momentum = torch.zeros_like(self.slow)
        self.steps = 0

    @torch.no_grad()
    def step(self, live: Tensor, within: Exchange, across: Exchange) -> None:
        """The outer step: ``live``, as inner steps left it, becomes the group's new weights.
        ``within``: the mean over the group, ``across``: over all (of groups of unequal size the
        mean by their members). What travels across is 8 bytes a parameter: with the change the
        common weights, so that who misses an exchange has them again after the next.
        """
        change = self.slow - live.detach().float()
        within(change)
        self.momentum.mul_(self.mu).add_(change)
        self.slow -= self.lr * (change + self.mu * self.momentum)
        self.steps += 1
        if self.steps % self.every == 0:
            both = torch.stack([self.merged - self.slow, self.common])
            across(both)
            change, self.common = both[0], both[1].clone()
            self.common_momentum.mul_(self.common_mu).add_(change)
            self.common -= self.common_lr * (change + self.common_mu * self.common_momentum)
            self.slow.mul_(1 - self.alpha).add_(self.common, alpha=self.alpha)
            self.merged = self.slow.clone()
        live.copy_(self.slow)
