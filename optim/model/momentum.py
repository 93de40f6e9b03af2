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

from ...security.rules.momentum import WorkerMomentum


class ContributionMomentum:
    """Of one vector, whose first ``numel`` elements are parameters. Holds two vectors of that
    length: the mean, and that with what is under way.
    """

    def __init__(self, numel: int, beta: float) -> None:
        self.value = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._ahead = WorkerMomentum(beta)
        self._ahead.value = torch.zeros_like(self.value)
        self._under_way = False

    @torch.no_grad()
    def take(self, contribution: Tensor) -> None:
        """Make a contribution, float32, the running mean that ends with it, in place."""
        assert self._ahead.value is not None
        self._ahead.value.copy_(self.value)
        own = contribution[: self.value.numel()]
        own.copy_(self._ahead(own))
        self._under_way = True

    def settle(self, counted: bool) -> None:
        """The contribution was decided, or given up (then it is taken for not counted)."""
        if counted and self._under_way:
            assert self._ahead.value is not None
            self.value, self._ahead.value = self._ahead.value, self.value
        self._under_way = False

    def restore(self, value: Tensor) -> None:
        """Go on from a saved mean, float32 of the same length."""
        self.value.copy_(value)
        self._under_way = False
