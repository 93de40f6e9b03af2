"""Forked children of a script must hold nothing of a node."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HasFork(Protocol):
    """Something that must drop its descriptors in a forked child."""

    def in_child(self) -> None:
        """Close descriptors without a word to the other end. Other threads may have held any lock:
        take none.
        """
        ...


_to_close: weakref.WeakSet[HasFork] = weakref.WeakSet()


def close_in_children(thing: HasFork) -> None:
    """From now on call ``thing.in_child()`` in every forked child (a DataLoader worker must not
    keep a node alive).
    """
    _to_close.add(thing)


def _after_fork_in_child() -> None:
    for thing in list(_to_close):
        thing.in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
