"""A node whose syncs are as a file says, at every call: ``_synced_node.py FILE [arguments of python
-m atoll.node]``.

The file holds one letter: ``r`` real, ``n`` none (the call returns at once), ``s`` slow (none
returns before SLOW_S). For measurements only: a node that does not sync forgets votes in a power
cut.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

SLOW_S = 0.010


def wrap(how: Callable[[], str]) -> None:
    """From now on this process syncs as ``how`` says."""
    for name in ("fsync", "fdatasync"):
        if (real := getattr(os, name, None)) is not None:
            setattr(os, name, _wrapped(real, how))


def _wrapped(real: Callable[[int], None], how: Callable[[], str]) -> Callable[[int], None]:
    def sync(file: int) -> None:
        now = how()
        if now == "n":
            return
        began = time.monotonic()
        real(file)
        if now == "s":
            time.sleep(max(0.0, began + SLOW_S - time.monotonic()))

    return sync


def mapped(path: Path) -> mmap.mmap:
    """The file's first byte, as all who map it see it."""
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 1)


if __name__ == "__main__":
    from atoll.node.__main__ import main

    letter = mapped(Path(sys.argv.pop(1)))
    wrap(lambda: chr(letter[0]))
    sys.exit(main())
