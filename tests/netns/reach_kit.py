"""Peers of `netns.reach_peer` on hosts of a laboratory: started, spoken to, waited for, ended."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

from netns.warm import fork

PATIENCE_S = (
    240.0  # a bound for hangs: a machine with a lot to do needs a minute for what takes a second
)
POLL_S = 0.05
"""Between two questions for a status: what answers has something to do as well."""
STORY_LINES = 60


class Node:
    """One peer. ``events``: everything it said so far."""

    alive: ClassVar[list[Node]] = []
    """All that were started and not ended, whose stories a failure tells."""

    def __init__(self, place: Any, **start: Any) -> None:
        self.process = fork(place, "netns.reach_peer")
        self.place = place
        self.events: list[dict[str, Any]] = []
        self.alive.append(self)
        self.tell(**start)

    def tell(self, **what: Any) -> None:
        """One line to its stdin."""
        self.process.tell(json.dumps(what))

    def until(
        self,
        key: str,
        holds: Callable[[Any], bool] = lambda found: True,
        *,
        patience_s: float = PATIENCE_S,
    ) -> Any:
        """The first thing said under ``key`` that ``holds``, if it was said already or is within
        ``patience_s``.
        """
        for event in self.events:
            if key in event and holds(event[key]):
                return event[key]
        end = time.monotonic() + patience_s
        while (left := end - time.monotonic()) > 0:
            try:
                line = self.process.lines.get(timeout=left)
            except queue.Empty:
                break
            if not line:
                raise AssertionError(f"the peer ended: {self.events[-5:]}")
            event = json.loads(line)
            self.events.append(event)
            if key in event and holds(event[key]):
                return event[key]
        raise AssertionError(f"{self.name}: no {key} in {patience_s:g} s\n" + self.stories())

    @property
    def name(self) -> str:
        """Where it is, for people."""
        return f"the peer at {self.place.address}"

    def stories(self) -> str:
        """What all peers that are alive said, but for status documents: the last lines of each, a
        line each.
        """
        told: list[str] = []
        for node in self.alive:
            lines = [json.dumps(event) for event in node.events if "status" not in event]
            told += [f"--- {node.name}", *lines[-STORY_LINES:]]
        return "\n".join(told)

    def status_when(
        self, holds: Callable[[dict[str, Any]], bool], *, patience_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Its status document, asked for again and again until it ``holds``."""
        end = time.monotonic() + patience_s
        while True:
            count = sum("status" in event for event in self.events)
            self.tell(status=None)
            while sum("status" in event for event in self.events) == count:
                line = self.process.lines.get(timeout=PATIENCE_S)
                if not line:
                    raise AssertionError(f"the peer ended: {self.events[-5:]}")
                self.events.append(json.loads(line))
            found = self.events[-1]["status"]
            if holds(found):
                return found
            if time.monotonic() > end:
                raise AssertionError(
                    f"{self.name}: not within {patience_s:g} s: {found}\n" + self.stories()
                )
            time.sleep(POLL_S)

    @property
    def peer(self) -> str:
        """Its id."""
        self.until("up")
        return next(event["peer"] for event in self.events if "up" in event)

    @property
    def address(self) -> str:
        """Where it listens first of all, with its id."""
        return str(self.until("up")[0])

    def close(self) -> None:
        """End it. Idempotent."""
        if self in self.alive:
            self.alive.remove(self)
        self.process.kill()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
