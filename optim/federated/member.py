"""A member's turn in a round of any method: each gradient corrected, and what is kept afterwards.
Pure; for real runs and simulations alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .inner import (
    controlled,
    met_ahead,
    next_control,
    next_control_with_momentum,
    proximal,
    variance_reduced,
    with_momentum,
)
from .methods import Method


@dataclass(frozen=True, slots=True)
class Served:
    """What a member gets for a turn. ``anchor``: the flat model, (numel,). The others are as long
    as its parameters, which come first in it, or None where the method has none: SCAFFOLD's c, the
    mean direction G of the round before, the anchor before. ``version``: outer steps so far."""

    anchor: Tensor
    common: Tensor | None = None
    momentum: Tensor | None = None
    before: Tensor | None = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class Knobs:
    """A run's values for inner steps: learning rate, FedProx' mu, the share beta of the own
    direction in those of FedAvg-M and SCAFFOLD-M, Per-FedAvg's step ahead."""

    lr: float = 0.1
    mu: float = 0.01
    beta: float = 0.1
    ahead: float = 0.01


class InnerSteps:
    """One member's inner steps in one round. ``own``: its c_i, None where the method keeps none."""

    def __init__(
        self, method: Method, knobs: Knobs, served: Served, own: Tensor | None = None
    ) -> None:
        self._method, self._knobs, self._served, self._own = method, knobs, served, own
        # Of the uncorrected gradients, where the steps do not tell it.
        self._sum: Tensor | None = None

    def second_at(self, gradient: Tensor, live: Tensor) -> Tensor | None:
        """Where the method wants another gradient of the same batch, the first being ``gradient``
        at ``live``: variance reduced ones at the anchor before, Per-FedAvg further down. None: it
        wants none."""
        if self._method.ahead:
            return met_ahead(live, gradient, self._knobs.ahead)
        return self._served.before if self._method.reduced else None

    def direction(self, gradient: Tensor, live: Tensor, second: Tensor | None = None) -> Tensor:
        """What to step along, from the gradient at ``live``; ``second``: the one at `second_at`,
        where the method wants it. None is changed.
        """
        method, knobs, served = self._method, self._knobs, self._served
        if method.ahead:
            assert second is not None
            return second
        d = (
            proximal(gradient, live, served.anchor[: live.shape[-1]], knobs.mu)
            if method.proximal
            else gradient
        )
        if method.reduced:
            assert second is not None
            assert served.momentum is not None
            if method.control:
                assert self._own is not None
                assert served.common is not None
                self._sum = gradient.clone() if self._sum is None else self._sum.add_(gradient)
                d = d - knobs.beta * (self._own - served.common)
            return variance_reduced(d, second, served.momentum, knobs.beta)
        if method.control:
            assert self._own is not None
            assert served.common is not None
            d = controlled(d, self._own, served.common)
        if method.momentum:
            assert served.momentum is not None
            d = with_momentum(d, served.momentum, knobs.beta)
        return d

    def control(self, pseudo: Tensor, steps: int, lr: float | None = None) -> Tensor | None:
        """The c_i of afterwards, from anchor - parameters after so many steps, of ``lr`` on average
        (None: the knobs'). None where the method keeps none."""
        method, knobs, served, own = self._method, self._knobs, self._served, self._own
        lr = knobs.lr if lr is None else lr
        if not method.control:
            return None
        assert own is not None
        assert served.common is not None
        if self._sum is not None:
            return self._sum / steps
        if method.momentum:
            assert served.momentum is not None
            return next_control_with_momentum(
                own, served.common, served.momentum, pseudo, steps, lr, knobs.beta
            )
        return next_control(own, served.common, pseudo, steps, lr)


def first_control(
    method: Method, parameters: int, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """The c_i that a member begins with."""
    return torch.zeros(parameters, dtype=dtype) if method.control else None
