"""Who has which samples: partitions of a labelled data set over clients, from a seed. Pure numpy;
every sample has one owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....collectives.errors import ConfigError

Indices = npt.NDArray[np.int64]


def dirichlet(
    labels: Indices, clients: int, alpha: float, seed: int, least: int = 2
) -> list[Indices]:
    """Of every class, shares drawn from a Dirichlet distribution (Hsu et al. 2019, arXiv
    1909.06335). Small alpha: few classes a client.

    A client with fewer than ``least`` samples gets some from the client with most. Raises
    ConfigError where there are not so many.
    """
    _check(labels, clients, least)
    if not 1e-3 <= alpha <= 1e6:  # beyond, its gamma variables are 0 or no numbers
        raise ConfigError(
            f"a Dirichlet distribution with alpha {alpha}",
            key="alpha",
            why="0.1 is very uneven, 100 is even",
            hint="--alpha 0.1",
        )
    rng = np.random.default_rng(seed)
    owned: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(rows) + 1e-9).astype(np.int64)
        for client, part in enumerate(np.split(rows, cuts)):
            owned[client].extend(part.tolist())
    for rows in owned:
        while len(rows) < least:
            rows.append(max(owned, key=len).pop())
    return [np.sort(np.array(rows, np.int64)) for rows in owned]


def label_shards(labels: Indices, clients: int, each: int, seed: int) -> list[Indices]:
    """Rows sorted by label, cut into clients x ``each`` shards of one size, ``each`` to a client
    (McMahan et al. 2017, arXiv 1602.05629).
    """
    _check(labels, clients, each)
    if each < 1:
        raise ConfigError(f"{each} shards a client", key="shards")
    shards = np.array_split(np.argsort(labels, kind="stable"), clients * each)
    dealt = np.random.default_rng(seed).permutation(len(shards)).reshape(clients, each)
    return [np.sort(np.concatenate([shards[shard] for shard in mine])) for mine in dealt]


def sized(labels: Indices, sizes: Sequence[int], alpha: float, seed: int) -> list[Indices]:
    """Clients of exactly these sizes, each with shares of the classes drawn from a Dirichlet
    distribution, as far as there is enough of them. Raises ConfigError where there is not enough.
    """
    if sum(sizes) > len(labels):
        raise ConfigError(
            f"sites of {sum(sizes):,} examples together, and the task has {len(labels):,}",
            key="sites",
            hint="Smaller sites, or a --task with more samples",
        )
    rng, free = np.random.default_rng(seed), np.ones(len(labels), bool)
    classes, place = np.unique(labels, return_inverse=True)
    parts = list[Indices]()
    for size in sizes:
        shares = rng.dirichlet(np.full(len(classes), alpha)) + 1e-12
        # the smallest keys of an exponential race are a draw without replacement
        keys = rng.exponential(size=len(labels)) / shares[place]
        keys[~free] = np.inf
        part = np.sort(np.argpartition(keys, size - 1)[:size])
        free[part] = False
        parts.append(part)
    return parts


def _check(labels: Indices, clients: int, least: int) -> None:
    if clients < 1 or len(labels) < clients * max(1, least):
        raise ConfigError(
            f"{len(labels)} samples for {clients} clients",
            key="clients",
            hint="Fewer clients: --clients N",
        )
