"""Typed events and one `emit`. Sinks subscribe and turn events into log lines, metrics, JSON; nothing here does I/O.

An event is a frozen dataclass derived from `Event`: a name (its class) and fields, no message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. Subclasses are frozen dataclasses too."""

    @property
    def name(self) -> str:
        """The event's name: that of its class."""
        return type(self).__name__


Sink = Callable[[Event], None]

_lock = threading.Lock()
_sinks: tuple[tuple[object, Sink], ...] = ()  # replaced as a whole, so that emit reads it without the lock
_failures = 0


def emit(event: Event) -> None:
    """Hand ``event`` to every sink, in the caller's thread, in order of subscription. Never raises for a failing sink."""
    global _failures
    for _, sink in _sinks:
        try:
            sink(event)
        except Exception:
            with _lock:
                _failures += 1


def subscribe(sink: Sink) -> Callable[[], None]:
    """Add a sink and return what removes it again (idempotent). A sink may be called from any thread and must not block."""
    global _sinks
    token = object()
    with _lock:
        _sinks = (*_sinks, (token, sink))

    def unsubscribe() -> None:
        global _sinks
        with _lock:
            _sinks = tuple(item for item in _sinks if item[0] is not token)

    return unsubscribe


def sink_failures() -> int:
    """How many times a sink has raised in this process."""
    return _failures
