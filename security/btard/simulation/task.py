"""What a simulated swarm trains: a quadratic with noisy gradients, each a function of the state and
a public seed.
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from ..messages import Vector

SIZE = 64
RATE = np.float32(0.1)


class Quadratic:
    """Half of the squared distance from an optimum; gradients have noise of unit variance. Noise of
    machines is relative, and their own.
    """

    def __init__(self, seed: int, size: int = SIZE) -> None:
        self.optimum = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 3

    def gradient(self, state: Vector, seed: bytes, *, flipped: bool = False) -> Vector:
        """At ``state``; ``flipped``: as if all labels were wrong."""
        noise = np.random.default_rng(list(seed)).standard_normal(len(state))
        away = state - (-self.optimum if flipped else self.optimum)
        return (away + noise).astype(np.float32)


LOCAL = 2  # local steps in an interval
LOCAL_RATE = np.float32(0.05)


def walked(task: Quadratic, state: Vector, seed: bytes, interval: int) -> Vector:
    """The state after an interval of local steps."""
    for step in range(LOCAL):
        gradient = task.gradient(state, blake3(seed + bytes([interval, step])).digest())
        state = np.subtract(state, LOCAL_RATE * gradient, dtype=np.float32)
    return state


def stepped(state: Vector, vector: Vector) -> Vector:
    """The state after a step: the same bits for the same bits."""
    return np.subtract(state, RATE * vector, dtype=np.float32)


def computed_with_noise(gradient: Vector, noise: float, rng: np.random.Generator) -> Vector:
    """A gradient as another machine computes it."""
    if not noise:
        return gradient
    return (gradient * (1 + noise * rng.standard_normal(len(gradient)))).astype(np.float32)
