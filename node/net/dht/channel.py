"""One persistent kad stream per peer, pipelined: requests go out at once, answers come back in
order.

The first request on a stream names its sender's addresses, as the one peer that is closer (others
pass over it): who was dialled knows none of whoever dialled it, and could name it to nobody.

libp2p in Go and JavaScript does not answer ADD_PROVIDER, others do. A ping goes out right behind
it, which everybody answers; the other answer is passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio

from ....collectives.errors import NetworkError, PeerLostError, RemoteProtocolError
from ....collectives.identifiers import PeerId
from ..transport.faults import Faults
from ..transport.host import PeerStream
from .wire import ADD_PROVIDER, PING, Located, MessageReader, Rpc, encode

ANSWER_S = 2.0


class _Waiting:
    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: Rpc | None = None


class Channel:
    """Requests to one peer. Run `call` in a task that is not cancelled while it waits (only at the
    very end).
    """

    def __init__(
        self,
        peer: PeerId,
        open_stream: Callable[[PeerId], Awaitable[PeerStream]],
        nursery: trio.Nursery,
        faults: Faults,
        me: Callable[[], Located],
    ) -> None:
        self._peer, self._open_stream, self._nursery, self._faults, self._me = (
            peer,
            open_stream,
            nursery,
            faults,
            me,
        )
        self._introduced = False
        self._lock = trio.Lock()
        self._stream: PeerStream | None = None
        self._opening: trio.Event | None = None
        self._waiting: deque[_Waiting] = deque()

    @property
    def idle(self) -> bool:
        """Whether there is no stream, and none is being opened."""
        return self._stream is None and self._opening is None

    async def call(self, request: Rpc) -> Rpc:
        """The answer. A stream that was reset under us is opened once more. Raises NetworkError
        after 2 s or when the peer is gone.
        """
        fresh = self._stream is None
        try:
            return await self._attempt(request)
        except NetworkError:
            if fresh:
                raise
            return await self._attempt(request)

    async def _attempt(self, request: Rpc) -> Rpc:
        waiting = _Waiting()
        with trio.move_on_after(ANSWER_S):
            async with self._lock:  # the order of writing is the order of waiting
                stream = self._stream or await self._opened()
                self._waiting.append(waiting)
                first, self._introduced = not self._introduced, True
                sent = replace(request, closer=(self._me(),)) if first else request
                await stream.send_all(
                    encode(sent) + (encode(Rpc(PING)) if request.kind == ADD_PROVIDER else b"")
                )
            await waiting.done.wait()
        if waiting.answer is None:
            if not waiting.done.is_set() and self._stream is not None:
                await self._stream.aclose()  # it is out of step now; the reader sees the end
            raise PeerLostError(f"{self._peer} did not answer a DHT request", peer=self._peer)
        return Rpc(ADD_PROVIDER, request.key) if request.kind == ADD_PROVIDER else waiting.answer

    async def _opened(self) -> PeerStream:
        """A new stream. Its opening goes on when nobody waits any more: to give up and begin anew
        would make a busy peer busier.
        """
        if self._opening is None:
            self._opening = trio.Event()
            self._nursery.start_soon(self._open, self._opening)
        await self._opening.wait()
        if self._stream is None:
            raise PeerLostError(f"no DHT stream to {self._peer}", peer=self._peer)
        return self._stream

    async def _open(self, opening: trio.Event) -> None:
        try:
            self._stream = await self._open_stream(self._peer)
            self._introduced = False
            self._nursery.start_soon(self._read, self._stream)
        except NetworkError:
            pass  # those who wait see that there is none
        finally:
            self._opening = None
            opening.set()

    async def _read(self, stream: PeerStream) -> None:
        reader = MessageReader(stream.receive_some, self._peer)
        try:
            while (answer := await reader.next()) is not None:
                if answer.kind == ADD_PROVIDER:
                    continue
                if not self._waiting:
                    raise RemoteProtocolError("answer without a request", peer=self._peer)
                waiting = self._waiting.popleft()
                waiting.answer = answer
                waiting.done.set()
        except RemoteProtocolError:
            self._faults.count(self._peer, trio.current_time())
        finally:
            self._stream = None  # nobody opens another one before this
            while self._waiting:
                self._waiting.popleft().done.set()
            await stream.aclose()
