"""Clusters of samples by their features: k-means (Lloyd 1982), begun with k-means++ (Arthur and
Vassilvitskii 2007).

Features are what an encoder says of a sample (the paper takes DINOv2's), or the sample itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....collectives.errors import ConfigError

BATCH = 4096  # samples whose distances are in memory at a time


@dataclass(frozen=True)
class Clusters:
    """Where the clusters of the data are, one for each expert. One person finds them and hands the
    file to every island: sums differ in their last bits between machines, so who finds them again
    may cut the data elsewhere.

    >>> import torch
    >>> features = torch.tensor([[0.0, 0.1], [0.1, 0.0], [5.0, 5.1], [5.1, 5.0]])
    >>> of = find_clusters(features, 2).of(features)
    >>> bool(of[0] == of[1]), bool(of[2] == of[3]), bool(of[0] == of[2])
    (True, True, False)

    centres: float32 (count, d).
    """

    centres: Tensor

    def of(self, features: Tensor) -> Tensor:
        """The cluster of each sample, int64 (n,). features: floating point (n, d)."""
        return self._nearest(features)[0]

    def save(self, path: str | Path) -> None:
        """Write the centres as a NumPy file."""
        with Path(path).open("wb") as file:
            np.save(file, self.centres.numpy(), allow_pickle=False)

    @staticmethod
    def load(path: str | Path) -> Clusters:
        """What `save` wrote. Raises ConfigError for any other file."""
        try:
            centres = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ConfigError(f"{path} holds no clusters: {error}", key="clusters") from None
        if centres.dtype != np.float32 or centres.ndim != 2:
            raise ConfigError(
                f"{path} holds {centres.dtype} {centres.shape}, clusters are float32 (count, d)",
                key="clusters",
            )
        return Clusters(torch.from_numpy(centres))

    def _nearest(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Of each sample: its cluster, and the squared distance to its centre."""
        # Each (batch, count).
        found = [torch.cdist(part.float(), self.centres).min(1) for part in features.split(BATCH)]
        return torch.cat([each.indices for each in found]), torch.cat(
            [each.values for each in found]
        ).square()


def find_clusters(
    features: Tensor, count: int, *, seed: int = 0, tries: int = 4, steps: int = 100
) -> Clusters:
    """So many clusters of alike samples, the best of ``tries`` beginnings. features: floating point
    (n, d), finite. Raises ConfigError where there are fewer different samples than clusters.
    """
    features = features.detach().float()
    if features.ndim != 2 or not features.isfinite().all():
        raise ConfigError("features are finite numbers, (samples, d)", key="features")
    if not 1 <= count <= len(features):
        raise ConfigError(f"{count} clusters of {len(features)} samples", key="count")
    rng = torch.Generator().manual_seed(seed)
    best: tuple[float, Clusters] | None = None
    for _ in range(tries):
        clusters = _begun(features, count, rng)
        of, squared = clusters._nearest(features)
        for _ in range(steps):
            sizes = torch.bincount(of, minlength=count)
            sums = torch.zeros(count, features.shape[1]).index_add_(0, of, features)
            # A cluster that nobody is nearest to stays where it is.
            moved = torch.where(
                sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], clusters.centres
            )
            clusters, before = Clusters(moved), of
            of, squared = clusters._nearest(features)
            if torch.equal(of, before):
                break
        total = float(squared.double().sum())
        if best is None or total < best[0]:
            best = total, clusters
    assert best is not None
    return best[1]


def _begun(features: Tensor, count: int, rng: torch.Generator) -> Clusters:
    """k-means++: each centre is a sample drawn by its squared distance to the centres before it."""
    centres = features[torch.randint(len(features), (1,), generator=rng)]
    while len(centres) < count:
        weights = Clusters(centres)._nearest(features)[1].double()
        if not weights.sum() > 0:
            raise ConfigError(f"{count} clusters of {len(centres)} different samples", key="count")
        drawn = torch.multinomial(weights, 1, generator=rng)
        centres = torch.cat([centres, features[drawn]])
    return Clusters(centres)
