"""A member's vector on its way into a masked sum: bounded, with noise where the manifest asks for
it, as whole numbers. Heavy: run beside.

Metrics of the members travel in the same vector, behind the same masks: of each name two elements,
the value and that there is one, both times the member's weight. Who has none puts chance into both,
so that nothing is known of the others' either: else the mean over a single one that has would be
its own. So what is known of them is their mean over all of the sum's members, and below the
threshold nothing. Where the bound follows a quantile, one more element says whether the vector was
within it, half a unit up or down, with noise of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....collectives.errors import SecurityError
from ....collectives.layout import Layout, ranges_of_patterns
from ....collectives.reduce import least_of
from ....collectives.swarm import LEAST_SITES, PrivacySettings, SecureSettings
from ....security.masking import Ring, bits_for
from ....security.masking.keys import Words
from ....security.privacy import AdaptiveBound, NoisePlan, add_noise, clip
from ....security.rules.reducers import ByCoordinate, find_reducer
from .bound import rule

HALF = 1 << 16  # steps in the half by which the count of those within the bound moves
# share of the ring's room that is left to noise: ten deviations of the sum's need a quarter of it
ROOM = 0.5


@dataclass(frozen=True, slots=True)
class Summed:
    """What a sum without masks says. ``mean``: float32 (numel,). ``weight``: of all its members
    together. ``metrics``: the mean of each, by weight, of those that all members had. ``within``:
    the noisy sum of (1 if within the bound else 0) - ½, of a bound that moves."""

    mean: Tensor
    weight: int
    metrics: Mapping[str, float]
    within: float | None = None


def threshold_of(terms: SecureSettings, members: int) -> int:
    """How many vectors a round over so many members needs: what the manifest asks for, for each
    bucket a rule needs, and more than two thirds.
    """
    return max(terms.threshold * least_buckets(terms), 2 * members // 3 + 1)


def fewest_sites(terms: SecureSettings) -> int:
    """How many sites the smallest sum of a run with noise needs."""
    return max(LEAST_SITES, terms.threshold * least_buckets(terms))


def least_buckets(terms: SecureSettings) -> int:
    """How many sums a round needs: those that a rule compares, or one."""
    reducer = find_reducer(terms.rule)
    return least_of(reducer) if reducer is not None else 1


def length_of(terms: SecureSettings, privacy: PrivacySettings | None, numel: int) -> int:
    """Words of a masked vector of ``numel`` values."""
    return (
        numel + 2 * len(terms.metrics) + (privacy is not None and privacy.quantile is not None) + 1
    )


def bits_of(
    terms: SecureSettings, privacy: PrivacySettings | None, members: int
) -> Literal[32, 64]:
    """Of a word of so many members' vectors. With noise all weigh 1, and 32 are enough for as many
    as a masking can have.
    """
    return bits_for(members, terms.max_weight) if privacy is None else 32


def in_bucket(words: Words, bucket: int, buckets: int) -> Words:
    """A masked vector at its bucket's place in the sums of all: (buckets * length,)."""
    length = buckets * len(words)
    wide = np.zeros(length, np.uint32) if words.dtype == np.uint32 else np.zeros(length, np.uint64)
    wide[bucket * len(words) : (bucket + 1) * len(words)] = words
    return wide


@dataclass(frozen=True, slots=True)
class RingLayout:
    """How the vectors of one attempt lie on their ring: the same at all members. ``threshold``: of
    the attempt. ``bound``: of a run with privacy, for tensors of no group. ``layout``: whose
    tensors have a reach or a bound of their own by their names.
    """

    terms: SecureSettings
    privacy: PrivacySettings | None
    numel: int
    members: int
    threshold: int
    bound: float = 0.0
    layout: Layout | None = None

    @property
    def moving(self) -> AdaptiveBound | None:
        """The bound, where it follows a quantile."""
        return rule(self.privacy, self.bound) if self.privacy is not None else None

    @property
    def multiplier(self) -> float:
        """Of the noise on the vectors: more than accounted if the count costs a part."""
        assert self.privacy is not None
        return self.moving.vector_noise(self.privacy.noise) if self.moving else self.privacy.noise

    @property
    def ring(self) -> Ring:
        """Steps fine enough for the values, and for the noise."""
        length = length_of(self.terms, self.privacy, self.numel) - 1
        if self.privacy is None:
            bits = bits_of(self.terms, None, self.members)
            return Ring(length, self.terms.reach, self.members, self.terms.max_weight, bits)
        return Ring(length, self.norm * max(1.0, self.multiplier), self.members, 1, spare=ROOM)

    @property
    def norm(self) -> float:
        """What a whole contribution is bounded by."""
        assert self.privacy is not None
        return self.privacy.norm(self.bound)

    def _groups(self, patterns: Mapping[str, float]) -> Iterator[tuple[float, list[slice]]]:
        """The number of each group of tensors, and its elements."""
        if self.layout is not None and patterns:
            for pattern, pieces in ranges_of_patterns(self.layout, patterns).items():
                yield patterns[pattern], pieces

    @property
    def noise(self) -> NoisePlan | None:
        """What each member adds, so that survivors who do not collude add what is accounted."""
        if self.privacy is None:
            return None
        honest = self.threshold - self.privacy.colluding
        return NoisePlan(self.multiplier, self.norm, self.ring.step, self.numel, honest)

    @property
    def count_noise(self) -> NoisePlan | None:
        """What each member adds to the count."""
        moving, noise = self.moving, self.noise
        return (
            NoisePlan(2 * moving.count_noise, 0.5, 0.5 / HALF, 1, noise.honest)
            if moving and noise
            else None
        )

    def words(
        self,
        vector: Tensor,
        samples: int,
        rng: random.Random,
        metrics: Mapping[str, float] | None = None,
    ) -> Words | str:
        """What is masked; or why the vector (float32, (numel,), which stays as it is) cannot be."""
        noise = self.noise
        if self.privacy is None or noise is None:
            values, groups = vector.numpy(), [*self._groups(self.terms.reaches)]
            values = values.copy() if groups else values
            for reach, pieces in groups:
                for piece in pieces:
                    values[piece] *= self.terms.reach / reach
            if not float(np.abs(values).max()) <= self.terms.reach:  # NaN, too
                return self._beyond(values, vector)
            reported = np.array(
                [(metrics or {}).get(name, math.nan) for name in self.terms.metrics], np.float32
            )
            there = np.abs(reported) <= self.terms.reach  # neither NaN nor beyond it
            pairs = np.zeros((len(reported), 2), np.float32)
            pairs[there, 0] = reported[there]
            multiples = self.ring.quantise(np.concatenate([values, pairs.reshape(-1)]), rng)
            multiples[self.numel + 1 :: 2] = self.ring.levels
            words = self.ring.encode(multiples, min(samples, self.terms.max_weight))
            hidden = np.flatnonzero(np.repeat(~there, 2)) + self.numel
            chance = rng.randbytes(words.dtype.itemsize * len(hidden))
            words[hidden] = np.frombuffer(chance, words.dtype)
            return words
        bounded = vector.clone()
        try:
            side = HALF if self._clip(bounded) else -HALF
        except ValueError:  # it counts as null: a site that stayed away would tell of its data
            bounded.zero_()
            side = 0  # a null is half a unit from either answer: what the count is accounted by
        # clipped first, then weighed by no more than 1: it moves the sum by no more than the bound
        bounded.mul_(self.privacy.share(samples))
        plan = self.count_noise
        multiples = self.ring.quantise(
            np.append(bounded.numpy(), np.zeros(1 if plan else 0, np.float32)), rng
        )
        add_noise(multiples[: self.numel], noise, rng)
        if plan is not None:
            multiples[self.numel] = side
            add_noise(multiples[self.numel :], plan, rng)
        return self.ring.encode(multiples, 1)

    def _beyond(self, values: NDArray[np.float32], vector: Tensor) -> str:
        """Which value is too large for the ring, and what holds it."""
        finite = np.isfinite(values)
        if not finite.all():
            return "it holds NaN or infinity"
        at = int(np.abs(values).argmax())
        value = abs(float(vector[at]))
        reach = self.terms.reach * value / abs(float(values[at]))
        told = f"it holds a value of {value:.3g}, and [secure] reach is {self.terms.reach:g}"
        for spec in () if self.layout is None else self.layout.tensors:
            if spec.offset <= at < spec.offset + spec.numel:
                room = 10.0 ** math.ceil(math.log10(2 * value))
                told = (
                    f"it holds a value of {value:.3g} in {spec.name}, whose reach is {reach:g}: a "
                    f'run with [secure] reaches = {{ "{spec.name}" = {room:.1f} }} has room for it'
                )
        return told

    def _clip(self, vector: Tensor) -> bool:
        """Bound a vector in place, group by group; whether all that is of no group was within its
        bound. Raises ValueError where it is not finite.
        """
        assert self.privacy is not None
        if not self.privacy.clips:
            return clip(vector, self.bound)
        rest = torch.ones(self.numel, dtype=torch.bool)
        for bound, pieces in self._groups(self.privacy.clips):
            if pieces:
                group = torch.cat([vector[piece] for piece in pieces])
                clip(group, bound)
                for piece in pieces:
                    length = piece.stop - piece.start
                    vector[piece], group = group[:length], group[length:]
                    rest[piece] = False
        others = vector[rest]
        within = clip(others, self.bound)
        vector[rest] = others
        return within

    def ruled(self, totals: Sequence[Words]) -> Summed:
        """What a robust rule makes of the means of buckets, each from a sum without masks. One that
        honest members cannot have is as good as any other hostile one."""
        rows, weight = torch.zeros(len(totals), self.numel), 0
        for row, total in zip(rows, totals, strict=True):
            with suppress(SecurityError):
                found = self.summed(total)
                row.copy_(found.mean)
                weight += found.weight
        robust, out = find_reducer(self.terms.rule), torch.empty(self.numel)
        assert isinstance(robust, ByCoordinate)
        robust.reduce(rows, [1] * len(rows), out)
        return Summed(out, weight, {})

    def summed(self, total: Words) -> Summed:
        """What an unmasked sum says. Raises SecurityError for one that nobody honest has."""
        means, weight = self.ring.decode(total)
        if self.privacy is not None and self.privacy.normaliser is not None:
            means *= weight / self.privacy.normaliser  # of the sum: their number is known
        if self.privacy is None:
            for reach, pieces in self._groups(self.terms.reaches):
                for piece in pieces:
                    means[piece] *= reach / self.terms.reach
        mean = torch.from_numpy(means[: self.numel].astype(np.float32))
        if self.moving is not None:
            return Summed(mean, weight, {}, int(total[self.numel :].view("<i4")[0]) / (2 * HALF))
        all_there = (total[self.numel + 1 : -1 : 2] == weight * self.ring.levels).tolist()
        values = means[self.numel :: 2].tolist()
        return Summed(
            mean,
            weight,
            {
                name: value
                for name, value, there in zip(self.terms.metrics, values, all_there, strict=True)
                if there
            },
        )
