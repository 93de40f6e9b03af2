"""Worker momentum: what a member sends is its running mean, so that honest rows differ less and a
hostile one has less room.

Karimireddy, He and Jaggi 2021, arXiv 2012.10333; with (1 - beta), so the rows keep the gradients'
length (and a radius its meaning).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...collectives.errors import ConfigError


class WorkerMomentum:
    """A member's running mean of its gradients, which it sends in their place:
    m <- beta m + (1 - beta) g, from m = 0, as in the paper.

    >>> import torch
    >>> momentum = WorkerMomentum(beta=0.5)
    >>> momentum(torch.ones(2)), momentum(torch.ones(2)).clone()
    (tensor([0.7500, 0.7500]), tensor([0.7500, 0.7500]))
    """

    def __init__(self, beta: float = 0.9) -> None:
        if not 0 <= beta < 1:
            raise ConfigError(
                f"worker momentum: beta is {beta}",
                key="beta",
                why="it must be at least 0 and below 1",
            )
        self.beta = beta
        self.value: Tensor | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        """The row to send, float32 (d,): this object's own, overwritten by the next call.
        ``gradient`` is not modified.
        """
        if self.value is None:
            self.value = torch.zeros_like(gradient)
        if self.value.shape != gradient.shape:
            raise ConfigError(
                f"worker momentum: {tuple(gradient.shape)} after {tuple(self.value.shape)}",
                why="one object serves one vector",
            )
        self.value.mul_(self.beta).add_(gradient * (1 - self.beta))
        return self.value
