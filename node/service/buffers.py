"""Memory shared with scripts, used again: contributions and results of free-standing operations.

A fresh mapping costs a page fault and a zeroed page for every 4 KiB, as much as receiving them.
Memory comes back by itself when the last view of it is gone, whoever held it: nobody has to say so,
and nobody can say so too early.
"""

from __future__ import annotations

import weakref
from collections import deque
from pathlib import Path

import numpy as np

from ..control.shared_memory import PooledBuffer

MAX_FREE, MAX_FREE_BYTES = 4, 256 << 20  # buffers and bytes kept for the next taker


class BufferPool:
    """Writable memory in any length; content undefined. Calls may come from any thread."""

    def __init__(self, folder: Path | None = None, max_free_bytes: int = MAX_FREE_BYTES) -> None:
        self._folder, self._max_free_bytes = folder, max_free_bytes
        # Newest last; single operations on a deque or a dict are atomic.
        self._free: deque[PooledBuffer] = deque()
        self._lent: dict[int, PooledBuffer] = {}

    def take(self, nbytes: int) -> memoryview:
        """A flat view of ``nbytes`` > 0 writable bytes, aligned to a page. Raises StorageError when
        there is no room.
        """
        buffer = self._find(nbytes) or PooledBuffer(nbytes, self._folder)
        array = np.frombuffer(buffer.view(), dtype=np.uint8)
        self._lent[id(array)] = buffer
        weakref.finalize(array, self._give, id(array)).atexit = False
        return array.data

    def buffer_of(self, view: memoryview) -> PooledBuffer | None:
        """What a view that was taken here, or a part of it, lies in; None for other memory."""
        return self._lent.get(id(view.obj))

    def abandon(self, view: memoryview) -> None:
        """Somebody who cannot be asked may use this memory for ever: it is not given out again."""
        self._lent.pop(id(view.obj), None)

    def _find(self, nbytes: int) -> PooledBuffer | None:
        for buffer in reversed(list(self._free)):  # the newest is the warmest
            if buffer.nbytes == nbytes:
                try:
                    self._free.remove(buffer)
                except ValueError:
                    continue  # another thread was faster
                return buffer
        return None

    def _give(self, key: int) -> None:
        buffer = self._lent.pop(key, None)
        if buffer is None:
            return
        self._free.append(buffer)
        try:
            while len(self._free) > MAX_FREE or (
                sum(b.nbytes for b in list(self._free)) > self._max_free_bytes
                and len(self._free) > 1
            ):
                self._free.popleft()  # unmapped with its last reference
        except IndexError:
            pass  # another thread took it
