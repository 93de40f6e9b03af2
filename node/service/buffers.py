"""Memory for encoded results of free-standing operations, used again.

A fresh mapping costs a page fault and a zeroed page for every 4 KiB, as much as receiving them. A mapping comes back by itself when the last
view of it is gone, whoever held it: nobody has to say so, and nobody can say so too early.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np

MAX_FREE_BYTES = 256 << 20


class BufferPool:
    """Writable memory in any length; content undefined. Calls may come from any thread."""

    def __init__(self, max_free_bytes: int = MAX_FREE_BYTES) -> None:
        self._max_free_bytes = max_free_bytes
        self._free: deque[mmap.mmap] = deque()  # newest last; single operations on a deque are atomic

    def take(self, nbytes: int) -> memoryview:
        """A flat view of ``nbytes`` > 0 writable bytes, aligned to a page."""
        memory = self._find(nbytes) or mmap.mmap(-1, nbytes)
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, self._give, memory).atexit = False
        return array.data

    def _find(self, nbytes: int) -> mmap.mmap | None:
        for memory in list(self._free):
            if len(memory) == nbytes:
                try:
                    self._free.remove(memory)
                except ValueError:
                    continue  # another thread was faster
                return memory
        return None

    def _give(self, memory: mmap.mmap) -> None:
        self._free.append(memory)
        try:
            while sum(len(kept) for kept in list(self._free)) > self._max_free_bytes and len(self._free) > 1:
                self._free.popleft()  # unmapped with its last reference
        except IndexError:
            pass  # another thread took it
