"""Models of one's own in a federated run. Pure functions on flat vectors of one shape and dtype;
nothing here leaves a member.

Ditto (arXiv 2012.04221) keeps a personal model and pulls it to the anchor; Reptile (arXiv
1803.02999) is FedAvg whose server steps with an lr below 1, and each member makes some steps from
the anchor. Per-FedAvg, which trains the anchor for being stepped from, is a method (`methods`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...collectives.errors import ConfigError
from .inner import proximal

Gradient = Callable[[Tensor], Tensor]
"""Parameters -> the gradient there, of a batch that is another one in every call."""


def ditto(
    personal: Tensor, anchor: Tensor, gradient: Gradient, steps: int, lr: float, pull: float
) -> Tensor:
    """The personal model after so many steps on its own loss plus ``pull``/2 |v - x|². pull = 0:
    the member's own training, and no more.
    """
    return _stepped(personal, steps, lr, lambda v: proximal(gradient(v), v, anchor, pull))


def fine_tuned(anchor: Tensor, gradient: Gradient, steps: int, lr: float) -> Tensor:
    """The anchor after plain steps: what a member uses after Reptile or `per_fedavg`, and what
    Reptile contributes anchor - this of.
    """
    return _stepped(anchor, steps, lr, gradient)


def _stepped(start: Tensor, steps: int, lr: float, direction: Gradient) -> Tensor:
    _check(steps, lr, "lr")
    y = start
    for _ in range(steps):
        y = y - lr * direction(y)
    return y


def _check(steps: int, lr: float, key: str) -> None:
    if steps < 0 or not lr > 0:
        raise ConfigError(
            f"{steps} steps of {lr}", key=key, why="steps are counted from 0, rates are above 0"
        )
