"""A libp2p stream that plays the part of a socket, where no direct connection can be made."""

from __future__ import annotations

import contextlib
import socket

import trio

from ...collectives.errors import PeerLostError
from .transport.host import PeerStream

PIECE_BYTES = 65_536
LINGER_S = 5.0
"""When one direction has ended, the other one has so long."""


async def bridge(stream: PeerStream, first: bytes, far: socket.socket) -> None:
    """Carry bytes both ways between ``stream`` and ``far`` (one end of a socket pair). The end of
    one direction is passed on; both are closed when both have ended, or LINGER_S after the first.

    ``first`` was received from the stream already. Cancelled, it closes both too.
    """
    with trio.socket.from_stdlib_socket(far) as near:

        async def outward() -> None:
            with contextlib.suppress(OSError, PeerLostError):
                while data := await near.recv(PIECE_BYTES):
                    await stream.send_all(data)
                await stream.finish()
            nursery.cancel_scope.deadline = trio.current_time() + LINGER_S

        async def inward(data: bytes) -> None:
            with contextlib.suppress(OSError):
                while True:
                    while data:
                        data = data[await near.send(data) :]
                    data = await stream.receive_some(PIECE_BYTES)
                    if not data:
                        near.shutdown(socket.SHUT_WR)
                        break
            nursery.cancel_scope.deadline = trio.current_time() + LINGER_S

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(outward)
                nursery.start_soon(inward, first)
        finally:
            await stream.aclose()
