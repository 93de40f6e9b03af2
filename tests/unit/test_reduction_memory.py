"""A script's mappings of reductions."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.node.client.memory import MAPPED, ReductionMemory, VectorEncoding
from atoll.node.control.shared_memory import PooledBuffer

CHUNKING = VectorEncoding("fp32", 64, 64)


class Slow(dict[Any, Any]):
    """Gives other threads the time to change it while somebody looks through it."""

    def __iter__(self) -> Iterator[Any]:
        found = super().__iter__()
        time.sleep(0.0002)
        return found


def test_a_number_is_the_same_memory_and_the_oldest_mappings_go() -> None:
    memory, buffers = ReductionMemory(), [PooledBuffer(256, None) for _ in range(MAPPED + 1)]

    def mapped(buffer: PooledBuffer) -> object:
        return memory.contribution(buffer.number, os.dup(buffer.fd), CHUNKING)

    first = [mapped(buffer) for buffer in buffers]
    assert mapped(buffers[-1]) is first[-1]
    assert mapped(buffers[0]) is not first[0]


def test_threads_of_a_script_may_map_at_the_same_time() -> None:
    memory, buffers = ReductionMemory(), [PooledBuffer(256, None) for _ in range(4 * MAPPED)]
    memory._mapped = Slow()  # pyright: ignore[reportPrivateUsage]
    start = threading.Barrier(8)

    def work(index: int) -> int:
        start.wait()
        for turn in range(40):
            buffer = buffers[index + 8 * (turn % 4)]
            memory.result(buffer.number, os.dup(buffer.reader_fd), CHUNKING)
        return index

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(8))) == list(range(8))
