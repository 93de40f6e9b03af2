"""Work of a script's process that a thread of its own does."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable
from weakref import ref

LOOK_S = 0.001


class _Frames:
    """Held by the frames of a thread: it ends with them, whatever ended them."""


class Beside:
    """``work``, from `start` on, in a thread that no process waits for at its end.

    No `threading.Thread`: the ``start`` of one waits until the new thread has spoken, for ever
    where an exception ends that before. CPython 3.11 sets one that is meant for the starting thread
    (PyThreadState_SetAsyncExc) in the thread being started. Nobody waits for this one's beginning.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._held: Callable[[], _Frames | None] = lambda: None

    def start(self) -> None:
        """Begin. Raises RuntimeError where the system has no thread left."""
        held = _Frames()
        self._held = ref(held)
        start_new_thread(_run, (self._work, held))

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._held() is not None

    def join(self) -> None:
        """Wait for its end."""
        while self.running:
            threading.Event().wait(LOOK_S)


def _run(work: Callable[[], None], held: _Frames) -> None:
    try:
        work()
    finally:
        # An error of the work that somebody keeps holds its frames, and by f_back this one, too.
        del held


def beside(work: Callable[[], None]) -> Beside | None:
    """``work``, begun; done by the caller (None) where there is no thread to be had."""
    thread = Beside(work)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or the interpreter ends
        work()
        return None
    return thread
