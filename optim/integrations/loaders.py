"""What the integrations do with a trainer's loader: another order of samples at each member, or the
samples that the run leases to this one; and how many samples each batch has.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ...collectives.errors import ConfigError
from ...collectives.script_swarm import Swarm
from ..data.shard import Shard

SEED_BITS = 62  # samplers add the number of an epoch to a seed


def batch_size(batch: Any) -> int:
    """Length of the first tensor in ``batch`` (a tensor, or a mapping or sequence that holds one);
    1 when there is none.
    """
    found = _first(batch)
    return len(found) if found is not None and found.dim() else 1


def _first(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = cast("Mapping[Any, Any]", batch).values()
    elif not isinstance(batch, (list, tuple)):
        return None
    return next(
        (found for part in cast("Iterable[Any]", batch) if (found := _first(part)) is not None),
        None,
    )


# ---- another order at each member


def seed_of(swarm: Swarm, seed: int) -> int:
    """A seed of this member's own that follows from ``seed``: the same in each of its runs of the
    script, and at all ranks of a job.
    """
    told = f"{swarm.run_id}/{swarm.peer}/{seed}".encode()
    return int.from_bytes(blake3(told).digest(8), "big") >> (64 - SEED_BITS)


def reseed(swarm: Swarm) -> None:
    """Go on from other global random numbers (torch's, numpy's and Python's) than other members
    that have set the same seed: for shuffling, augmentation and dropout.
    """
    seed = seed_of(swarm, torch.initial_seed())
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def reorder(loader: Any, swarm: Swarm) -> bool:
    """Give the samplers and generators of a loader seeds of this member's own. Returns whether its
    order depends on chance.
    """
    waiting, seen, shuffles = [loader], set[int](), False
    while waiting:
        thing = waiting.pop()
        if thing is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        generator = getattr(thing, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in seen:
            seen.add(id(generator))
            generator.manual_seed(seed_of(swarm, generator.initial_seed()))
            shuffles = True
        # accelerate's and torch's distributed samplers, and detectron2's
        for name in ("initial_seed", "seed", "_seed"):
            if thing is not loader and isinstance(seed := getattr(thing, name, None), int):
                setattr(thing, name, seed_of(swarm, seed))
                shuffles = True
        shuffles |= hasattr(thing, "replacement")  # a RandomSampler
        waiting += [getattr(thing, name, None) for name in ("batch_sampler", "sampler")]
    return shuffles


# ---- batches that are counted


class CountedBatch(NamedTuple):
    """A batch that a trainer was given and has not trained yet."""

    batch: Any
    samples: int


def sharded(swarm: Swarm, loader: Any) -> Shard:
    """A shard of a trainer's own loader. Raises ConfigError, with what to do in a trainer."""
    try:
        return Shard(swarm, loader)
    except ConfigError as error:
        error.key, error.hint = (
            "shard",
            "Leave shard=True out: each member then reads in an order of its own. Or let the "
            "trainer's loader draw from a map-style data set, at random or in turn.",
        )
        error.annotate()
        raise


class CountedLoader:
    """Stands for a loader, as a trainer sees it, and gives ``batches`` in place of its own. What
    was given and not taken is kept, in order: trainers read ahead.
    """

    def __init__(
        self, base: Any, batches: Callable[[], Iterator[Any]] | None, *, whole: int | None = None
    ) -> None:
        """``batches``: for each pass over the loader, of which it takes ``len(base)``; None: the
        loader's own. ``whole``: the samples of a batch that is not the last one of a pass, where
        that is known.
        """
        self._base, self._batches = base, batches
        self._sizes = None if batches is not None else sizes_of(base)
        self._whole = whole
        self.waiting = deque[CountedBatch]()

    def __iter__(self) -> Iterator[Any]:
        self.waiting.clear()
        found = iter(self._base) if self._batches is None else islice(self._batches(), len(self))
        for index, batch in enumerate(found):
            self.waiting.append(CountedBatch(batch, self._samples(index, batch)))
            yield batch

    def _samples(self, index: int, batch: Any) -> int:
        if self._sizes is not None:
            whole, last, count = self._sizes
            return last if index == count - 1 else whole
        return self._whole or batch_size(batch)

    def __len__(self) -> int:
        return len(self._base)

    def __getattr__(self, name: str) -> Any:
        if name == "_base":
            raise AttributeError(name)
        return getattr(self._base, name)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The loader's: trainers ask for its type."""
        return type(self._base)


def sizes_of(loader: Any) -> tuple[int, int, int] | None:
    """Samples of a whole batch and of the last one of a pass, and how many batches there are, by
    the loader's sampler; None where it does not say. Batches of one of several ranks are filled up.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches = cast("Any", loader).batch_sampler
    size = loader.batch_size or getattr(batches, "batch_size", None)
    if type(batches).__name__ == "BatchSamplerShard":
        return (size, size, len(batches)) if size else None
    if not size or type(batches) is not BatchSampler:
        return None
    samples, count = len(cast("Any", batches.sampler)), len(batches)
    return size, size if batches.drop_last else samples - (count - 1) * size, count
