"""Worker momentum in a run (`[robust] momentum`): what a member contributes is the running mean of
what it would have contributed.

Of parameters only: running statistics follow their differences to the anchor directly. The mean is
this member's own state, like a residual: nobody else has it, and a contribution that is not counted
leaves it as it was, since its progress comes again, or is dropped. It is of no one anchor, so it
stays when another is adopted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...collectives.errors import ConfigError


class ContributionMomentum:
    """Of one vector, whose first ``numel`` elements are parameters. Holds two vectors of that
    length: the mean, and that with what is under way. The same bits as
    `security.rules.WorkerMomentum`.
    """

    def __init__(self, numel: int, beta: float) -> None:
        if not 0 <= beta < 1:
            raise ConfigError(
                f"worker momentum: beta is {beta}",
                key="beta",
                why="it must be at least 0 and below 1",
            )
        self._beta = beta
        self.value = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._ahead = torch.zeros_like(self.value)
        self._under_way = False

    @torch.no_grad()
    def take(self, contribution: Tensor) -> None:
        """Make a contribution, float32, the running mean that ends with it, in place."""
        own = contribution[: self.value.numel()]
        self._ahead.copy_(self.value).mul_(self._beta).add_(own * (1 - self._beta))
        own.copy_(self._ahead)
        self._under_way = True

    def settle(self, counted: bool) -> None:
        """The contribution was decided, or given up (then it is taken for not counted)."""
        if counted and self._under_way:
            self.value, self._ahead = self._ahead, self.value
        self._under_way = False

    def restore(self, value: Tensor) -> None:
        """Go on from a saved mean, float32 of the same length."""
        self.value.copy_(value)
        self._under_way = False
