"""Handles of operations under asyncio and trio, and those that nobody waits for."""

from __future__ import annotations

import sys
import warnings
from typing import TypeVar

from .outcomes import Pending

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05


async def awaited(pending: Pending[T]) -> T:
    """The result. Looks for it now and then, so that the tasks of the loop run meanwhile: there is
    no thread that could tell.
    """
    pause_s = FIRST_PAUSE_S
    while not pending.done():
        await _sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return pending.wait(0.0)


async def _sleep(seconds: float) -> None:
    """Under whichever library runs the task."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        await trio.sleep(seconds)
        return
    import asyncio  # a script without it need not load it

    await asyncio.sleep(seconds)


def warn_of_dropped(op_id: str) -> None:
    """Tell of a handle that is gone before anybody had its result."""
    warnings.warn(
        f"operation {op_id!r} was never waited for: your tensors keep what they held, while the "
        "other members may get what you gave. Keep its handle and wait() for it, or cancel() it.",
        RuntimeWarning,
        stacklevel=3,
    )
