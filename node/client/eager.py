"""Getting the interpreter's lock soon, for a thread that waits for the node while others of the
process compute in Python.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

EAGER_S = 0.0002
"""How long another thread may keep the lock when this one wants it. Every system call and every
step of torch gives it up: a reduction has some twenty of them, and Python's 5 ms each would be
longer than all the rest of it. Shorter than this, the others want it back too soon."""

_lock = threading.Lock()
_inside, _before = 0, 0.0


@contextmanager
def eager() -> Generator[None]:
    """Meanwhile the interpreter's switch interval is at most EAGER_S. Any thread; may nest."""
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(EAGER_S, _before))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if (
                not _inside and _before > EAGER_S and sys.getswitchinterval() < 2 * EAGER_S
            ):  # else somebody has set another meanwhile
                sys.setswitchinterval(_before)
