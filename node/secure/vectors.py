"""A member's vector on its way into a masked sum: bounded, with noise where the manifest asks for it, as whole numbers. Heavy: run beside."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...collectives.swarm import PrivacySettings, SecureSettings
from ...security.masking import Ring
from ...security.masking.keys import Words
from ...security.privacy import NoisePlan, add_noise, clip

ROOM = 0.5  # share of the ring's room that is left to noise: ten deviations of the sum's need a quarter of it


@dataclass(frozen=True, slots=True)
class Vectors:
    """How the vectors of one attempt lie on their ring: the same at all members. ``threshold``: of the attempt."""

    terms: SecureSettings
    privacy: PrivacySettings | None
    numel: int
    members: int
    threshold: int

    @property
    def ring(self) -> Ring:
        """Steps fine enough for the values, and for the noise."""
        if self.privacy is None:
            return Ring(self.numel, self.terms.reach, self.members, self.terms.max_weight)
        return Ring(self.numel, self.privacy.clip * max(1.0, self.privacy.noise), self.members, 1, spare=ROOM)

    @property
    def noise(self) -> NoisePlan | None:
        """What each member adds: so much that those who survive and do not collude add what is accounted."""
        if self.privacy is None:
            return None
        honest = self.threshold - self.privacy.colluding
        return NoisePlan(self.privacy.noise, self.privacy.clip, self.ring.step, self.numel, honest)

    def words(self, vector: Tensor, samples: int, chance: random.Random) -> Words | str:
        """What is masked; or why the vector (float32, (numel,), which stays as it is) cannot be."""
        ring, noise = self.ring, self.noise
        if self.privacy is None or noise is None:
            largest = float(np.abs(vector.numpy()).max())
            if not largest <= self.terms.reach:  # NaN, too
                what = f"a value of {largest:.3g}" if np.isfinite(largest) else "NaN or infinity"
                return f"it holds {what}, and [secure] reach is {self.terms.reach:g}"
            return ring.encode(ring.quantise(vector.numpy(), chance), min(samples, self.terms.max_weight))
        bounded = vector.clone()
        try:
            clip(bounded, self.privacy.clip)
        except ValueError:
            return "it holds NaN or infinity"
        multiples = ring.quantise(bounded.numpy(), chance)
        add_noise(multiples, noise, chance)
        return ring.encode(multiples, 1)
