"""Typed events and one `emit`. Sinks subscribe and turn events into log lines, metrics, JSON;
nothing here does I/O.

An event is a frozen dataclass derived from `Event`: a name (its class) and fields, no message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from .identifiers import PeerId


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. Subclasses are frozen dataclasses too."""

    @property
    def name(self) -> str:
        return type(self).__name__


PHASES = ("ready", "part", "result", "vote")
"""Of a reduction: a contribution is offered; it has come to the owner of a part; the part's result
has come; a member has voted.
"""


@dataclass(frozen=True, slots=True)
class ReductionTimed(Event):
    """Where the time of one decided reduction went, as member ``peer`` saw it. Seconds after the
    first contribution was offered.

    ``op_id``: "" for a training round. ``ballot`` and ``revision`` count what was begun anew,
    ``asked_again`` how often this member asked for bytes that did not come. ``phases``: by phase
    (PHASES), when the last of it came from each peer. ``slowest``: who was furthest behind the
    others' median, in which phase, by how many seconds; None where there is nobody to compare.
    """

    peer: PeerId
    log: str
    round: int
    op_id: str
    reducer: str
    codec: str
    numel: int
    contributors: tuple[PeerId, ...]
    ballot: int
    revision: int
    asked_again: int
    planned_s: float
    reduced_s: float
    decided_s: float
    elapsed_s: float
    phases: dict[str, dict[PeerId, float]]
    slowest: tuple[PeerId, str, float] | None


Sink = Callable[[Event], None]

_lock = threading.Lock()
# Replaced as a whole, so that emit reads it without the lock.
_sinks: tuple[tuple[object, Sink], ...] = ()


def emit(event: Event) -> None:
    """Hand ``event`` to every sink, in the caller's thread, in order of subscription. Never raises
    for a failing sink.
    """
    for _, sink in _sinks:
        with suppress(Exception):
            sink(event)


def subscribe(sink: Sink) -> Callable[[], None]:
    """Add a sink and return what removes it again (idempotent). A sink may be called from any
    thread and must not block.
    """
    global _sinks
    token = object()
    with _lock:
        _sinks = (*_sinks, (token, sink))

    def unsubscribe() -> None:
        global _sinks
        with _lock:
            _sinks = tuple(item for item in _sinks if item[0] is not token)

    return unsubscribe
