"""What comes out of secure rounds, for simulations: vectors as of a real one, bounded, rounded,
with noise; added up without masks, which cancel.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from ....collectives.identifiers import PeerId
from ....collectives.swarm import PrivacySettings, SecureSettings
from ....security.masking import Buckets
from .bound import held
from .vectors import RingLayout, Summed, least_buckets, threshold_of


class SecureMeans:
    """Round after round. ``seed`` in place of the members' secret chances."""

    def __init__(self, terms: SecureSettings, privacy: PrivacySettings | None, seed: int) -> None:
        """Tensors that are played have other names: all have one reach and one bound."""
        self._terms = msgspec.structs.replace(terms, reaches={})
        self._privacy = privacy and msgspec.structs.replace(
            privacy, clip=privacy.norm(privacy.clip), clips={}
        )
        self._rng = random.Random(seed)
        self._bound = privacy.clip if privacy is not None else 0.0

    def __call__(self, rows: Sequence[Tensor], samples: Sequence[int], asked: int) -> Tensor | None:
        """What the outer step gets of contributions, float32 (numel,) each, of ``asked`` members of
        the round. None: there are too few, and nothing is unmasked.
        """
        if not rows:
            return None
        enough = threshold_of(self._terms, asked)
        smallest = self._terms.threshold if self._terms.buckets > 1 else enough
        vectors = RingLayout(
            self._terms, self._privacy, rows[0].numel(), asked, smallest, self._bound
        )
        made = [
            vectors.words(row.to(torch.float32), count, self._rng)
            for row, count in zip(rows, samples, strict=True)
        ]
        # One beyond the reach is refused.
        words = [each for each in made if not isinstance(each, str)]
        if len(words) < enough:
            return None
        peers = [PeerId(str(number)) for number in range(len(words))]
        buckets = Buckets.one(peers)
        if self._terms.buckets > 1:
            buckets = Buckets.dealt(
                self._rng.randbytes(32), peers, self._terms.buckets, self._terms.threshold
            )
        dealt = [[int(peer) for peer in buckets.members[index]] for index in buckets.open(peers)]
        if len(dealt) < least_buckets(self._terms):
            return None
        sums = [
            np.array([words[number] for number in numbers]).sum(axis=0, dtype=words[0].dtype)
            for numbers in dealt
        ]
        return self._taken(
            vectors,
            vectors.ruled(sums) if self._terms.buckets > 1 else vectors.summed(sums[0]),
            len(words),
        )

    def _taken(self, vectors: RingLayout, found: Summed, members: int) -> Tensor:
        if self._privacy is not None and vectors.moving is not None and found.within is not None:
            self._bound = held(self._privacy, vectors.moving.next(found.within, members).bound)
        return found.mean
