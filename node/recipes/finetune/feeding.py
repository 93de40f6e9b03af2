"""Which documents come next: all of this machine's own, shuffled anew in each pass, or those that
the run leases to it of one data set that all members have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader

from ....collectives.script_swarm import Swarm
from ....optim.data.order import Order
from .packing import Document
from .preparing import TokenStore
from .sharding import ONE_CARD, Cards


class DocumentFeed(Protocol):
    """Documents of a member, without end."""

    position: int
    """Of the next document; all that is to be kept to go on with it."""

    @property
    def shared(self) -> bool:
        """Whether samples are documents of one data set, which the run counts itself."""
        ...

    def take(self, tokens: int) -> list[Document]:
        """The next documents, of so many tokens together or a few more."""
        ...


class OwnFeed:
    """This machine's own documents: an order that follows from ``name``, and a position in it."""

    shared = False

    def __init__(self, store: TokenStore, name: str) -> None:
        self._store, self._order = store, Order(len(store), name)
        self.position = 0

    def take(self, tokens: int) -> list[Document]:
        """Goes on in the next pass where this one ends."""
        found = list[Document]()
        while tokens > 0:
            (index,) = self._order(np.array([self.position]))
            found.append(self._store[int(index)])
            tokens -= len(found[-1][0])
            self.position += 1
        return found


class LeasedFeed:
    """Documents that the run's log leases to this member (`optim.data.shard`). Where it stands is
    in the log and in what its attachment keeps.
    """

    shared = True
    position = 0

    def __init__(self, store: TokenStore, swarm: Swarm, cards: Cards = ONE_CARD) -> None:
        documents: Any = store  # which has what a map-style data set needs
        loader = DataLoader[Any](documents, batch_size=None, collate_fn=_as_it_is)
        self._shard: Any = swarm.shard(loader)
        self._cards = cards
        self._documents: Iterator[Document] | None = None

    def take(self, tokens: int) -> list[Document]:
        """A member's batches of a pass come from it, too."""
        if self._documents is None:
            self._documents = self._shard.endless()
        assert self._documents is not None
        found = list[Document]()
        while tokens > 0:
            given = self._cards.join(next(self._documents))
            found += given
            tokens -= sum(len(ids) for ids, _ in given)
        return found


def _as_it_is(sample: Any) -> Any:
    return sample
