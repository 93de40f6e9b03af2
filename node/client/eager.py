"""Getting the interpreter's lock soon, for a thread that waits for the node while others of the
process compute in Python.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from weakref import ref

EAGER_S = 0.0002
"""How long another thread may keep the lock when this one wants it. Every system call and every
step of torch gives it up: a reduction has some twenty of them, and Python's 5 ms each would be
longer than all the rest of it. Shorter than this, the others want it back too soon."""

_STEP_S = 1e-6  # the interpreter keeps its interval in these


class _Inside:
    """Held by all that are inside."""


_lock = threading.RLock()  # a signal handler may come in anywhere, and call the client
_inside = ref(_Inside())  # of nobody, so far
_before = 0.0  # the interval to set again, once nobody is inside


@contextmanager
def eager() -> Generator[None]:
    """Meanwhile the interpreter's switch interval is at most EAGER_S. Any thread; may nest.

    An exception may come between any two lines. Who is inside is no number, which one could leave
    too high, but who holds an object: it ends with the frame. An interval that nobody has set again
    is set by the next that leaves.
    """
    global _inside, _before
    with _lock:
        held = _inside() or _Inside()
        _inside = ref(held)
        if (now := sys.getswitchinterval()) > EAGER_S + _STEP_S:
            _before = now
            sys.setswitchinterval(EAGER_S)
    try:
        yield
    finally:
        with _lock:
            del held
            if _inside() is None:
                # Any other interval than this one somebody has set meanwhile.
                if _before and abs(sys.getswitchinterval() - EAGER_S) < 2 * _STEP_S:
                    sys.setswitchinterval(_before)
                _before = 0.0
