"""One accepted connection of the control socket (trio).

Three tasks: the reader turns bytes into requests, the worker does them one after the other, the
writer sends answers and pushes. Whatever the client sends or fails to read, only its own connection
ends.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable, Sequence

import trio
from msgspec.structs import replace

from ...collectives.errors import AtollError, LocalProtocolError, RemoteProtocolError
from ..home.failures import failure
from ..home.last_resort import refused
from . import protocol as p
from .address import check_peer, peer_pid
from .descriptors import close_all, files_of
from .requests import ConnectionRequests
from .service import NodeService

HELLO_S = 10.0  # a connection that says nothing is closed
LAST_WORDS_S = 1.0  # time for the error to get out before a bad connection is closed
WAITING_REQUESTS = 16
WAITING_ANSWERS = 256  # a client that leaves more unread is closed: pushes to scripts are few
_READ_BYTES = 65_536

Defect = Callable[[Exception], None]


class Connection:
    """Serve one client until it closes, breaks a rule or stops reading. ``run`` never raises but
    for cancellation.
    """

    def __init__(
        self, service: NodeService, sock: trio.socket.SocketType, on_defect: Defect
    ) -> None:
        self._sock = sock
        self._service = service
        self._on_defect = on_defect
        self._requests = ConnectionRequests(service, self._post, self._fail)
        self._scope = trio.CancelScope()
        self._outbox, self._to_write = trio.open_memory_channel[tuple[bytes, list[int]]](
            WAITING_ANSWERS
        )
        self._inbox, self._to_do = trio.open_memory_channel[p.Request](WAITING_REQUESTS)
        self._written = trio.Event()
        self._failed = False

    async def run(self) -> None:
        """Until the client is gone. Cancellation closes the connection; the session is detached in
        any case.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._converse(nursery)
                    nursery.cancel_scope.cancel()
        finally:
            try:
                self._requests.close()
            except Exception as error:  # a defect of the service must not end the node
                self._on_defect(error)
            self._sock.close()
            self._drop_unsent()

    def end(self, reason: str) -> None:
        """Tell the client that the node is shutting down."""
        self._post(p.Ending(reason), ())

    def _fail(self, error: AtollError) -> None:
        """What the client has open does not go on: tell it, and close once that is written."""
        self._post(failure(0, error), ())
        self._failed = True
        self._outbox.close()

    async def _converse(self, nursery: trio.Nursery) -> None:
        """Handshake, then requests until the stream ends; the last error is sent first."""
        frames = p.request_frames()
        try:
            check_peer(self._sock)
            with trio.fail_after(HELLO_S):
                first = await self._first(frames)
            if not first:
                return
            self._post(self._requests.hello(first[0], peer_pid(self._sock)), ())
            nursery.start_soon(self._work)
            for request in first[1:]:
                await self._take(request)
            while data := await self._sock.recv(_READ_BYTES):
                for request in frames.feed(data):
                    await self._take(request)
        except AtollError as error:
            await self._last_words(failure(0, error))
        except trio.TooSlowError:
            await self._last_words(
                failure(0, RemoteProtocolError(f"no hello within {HELLO_S:g} s"))
            )
        except OSError:
            return  # reset: gone like at the end of the stream

    async def _take(self, request: p.Request) -> None:
        if isinstance(request, p.Farewell):  # nobody works on what waits once the stream ends
            self._requests.farewell(request)
        else:
            await self._inbox.send(request)

    async def _first(self, frames: p.Frames[p.Request]) -> list[p.Request]:
        while data := await self._sock.recv(_READ_BYTES):
            if requests := frames.feed(data):
                return requests
        return []

    async def _last_words(self, answer: p.Failure) -> None:
        self._post(answer, ())
        self._outbox.close()
        with trio.move_on_after(LAST_WORDS_S):
            await self._written.wait()

    async def _work(self) -> None:
        async for request in self._to_do:
            try:
                if isinstance(request, p.Subscribe):
                    await self._subscribe(request)
                else:
                    await self._requests.handle(request)
            except Exception as error:  # the client is told, the node goes on
                asked = type(request).__name__
                told: AtollError | None = refused(error, f"the node could not do {asked}")
                if told is None:  # a defect of ours
                    self._on_defect(error)
                    told = LocalProtocolError(
                        f"the node failed at {asked}: {error!r}",
                        hint="The log of the node has the traceback.",
                    )
                self._post(failure(getattr(request, "id", 0), told), ())

    async def _subscribe(self, request: p.Subscribe) -> None:
        async with self._service.subscribe() as events:
            self._post(p.Done(request.id), ())
            async for event in events:
                # Waits for a slow reader: the service's queue is bounded.
                await self._outbox.send((p.frame(p.EventPush(event)), []))

    def _post(self, answer: p.Answer, fds: Sequence[int]) -> None:
        try:
            if fds:  # every message that has descriptors has the field
                answer = replace(answer, files=files_of(fds))
            data = p.frame(answer)
        except LocalProtocolError as error:
            data, fds = p.frame(failure(getattr(answer, "id", 0), error)), ()
        copies = [os.dup(fd) for fd in fds]  # the session may close its own before they are sent
        try:
            self._outbox.send_nowait((data, copies))
        except trio.WouldBlock:  # the client does not read
            close_all(copies)
            self._scope.cancel()
        except (trio.ClosedResourceError, trio.BrokenResourceError):  # the connection is ending
            close_all(copies)

    async def _write(self) -> None:
        try:
            async for data, fds in self._to_write:
                try:
                    await self._send(data, fds)
                finally:
                    close_all(fds)
            self._written.set()
            if self._failed:
                self._scope.cancel()
        except OSError:
            self._scope.cancel()

    async def _send(self, data: bytes, fds: list[int]) -> None:
        sent = 0
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
            sent = await self._sock.sendmsg([data], rights)
        view = memoryview(data)
        while sent < len(data):
            sent += await self._sock.send(view[sent:])

    def _drop_unsent(self) -> None:
        self._outbox.close()
        while True:
            try:
                _, fds = self._to_write.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                return
            close_all(fds)
