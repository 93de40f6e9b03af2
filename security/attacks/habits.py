"""Attacks that are no function of one round: contributions that come late, and data with other
labels.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from ...collectives.errors import ConfigError


class Delayed:
    """Sends what it had ``steps`` rounds ago, and until then the first of it."""

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"a delay of {steps} rounds", key="steps")
        self._kept: deque[Tensor] = deque(maxlen=steps + 1)

    def send(self, own: Tensor) -> Tensor:
        """What is sent in the round in which an honest member would send ``own``; a copy of that is
        kept.
        """
        self._kept.append(own.clone())
        return self._kept[0]


def flipped_labels(labels: Tensor, classes: int) -> Tensor:
    """Every label y becomes classes - 1 - y: an honest procedure on poisoned data. Raises
    ConfigError for labels of other classes.
    """
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ConfigError(
            f"labels from {int(labels.min())} to {int(labels.max())} of {classes} classes",
            key="classes",
        )
    return classes - 1 - labels
