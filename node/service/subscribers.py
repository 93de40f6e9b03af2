"""Who is told of a node's events, and what the slow of them miss."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from ..run.events import RunEvent, document

EVENT_QUEUE = 1024


class Subscribers:
    """Each has a queue of its own. What does not fit into it is dropped and counted: the next event
    that fits says so as ``missed``.
    """

    def __init__(self) -> None:
        self._missed: dict[trio.MemorySendChannel[dict[str, Any]], int] = {}

    def publish(self, event: RunEvent) -> None:
        for channel, missed in list(self._missed.items()):
            try:
                channel.send_nowait(
                    document(msgspec.structs.replace(event, missed=missed) if missed else event)
                )
            except trio.WouldBlock:
                self._missed[channel] += 1

    @asynccontextmanager
    async def subscribe(self) -> AsyncGenerator[AsyncIterator[dict[str, Any]]]:
        """Events from now on."""
        send, receive = trio.open_memory_channel[dict[str, Any]](EVENT_QUEUE)
        self._missed[send] = 0
        try:
            yield receive
        finally:
            self._missed.pop(send, None)
            send.close()
            receive.close()
