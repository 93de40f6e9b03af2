"""The page's connections. Whoever is on this machine can make some and leave them there: so many
are kept, and the newest always is.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 64
"""Connections that are kept. A browser has six."""
UNASKED_S = 10.0
"""So long a connection may be without a whole request."""
OWNERS = "atoll.owners"
"""Set in the scope of a request that has the token."""


class PageConnection(H11Protocol):
    """Where one comes that has no place, another ends at once: the oldest one on which no whole
    request waits for its answer, else the oldest that never showed the token.
    """

    def connection_made(self, transport: Any) -> None:
        """As asyncio calls it."""
        super().connection_made(transport)
        self._asked_at, self._owners = self.loop.time(), False
        self._timer = self.loop.call_later(UNASKED_S, self._look)
        connections: Any = self.connections
        others: list[PageConnection] = [one for one in connections if one is not self]
        if len(others) >= MOST:
            min(others, key=lambda one: (one._claim(), one._asked_at)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio calls it."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """As uvicorn calls it."""
        self._asked_at = self.loop.time()
        self._claim()
        super().on_response_complete()

    def _claim(self) -> int:
        """0: nothing is under way; 1: a request; 2: it has had one of the owner's."""
        cycle: Any = self.cycle
        self._owners = self._owners or (cycle is not None and OWNERS in cycle.scope)
        if self._owners:
            return 2
        return 0 if cycle is None or cycle.response_complete else 1

    def _look(self) -> None:
        left = UNASKED_S if self._claim() else self._asked_at + UNASKED_S - self.loop.time()
        if left <= 0:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(left, self._look)
