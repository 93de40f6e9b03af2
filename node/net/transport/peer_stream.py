"""A libp2p stream behind a small surface. Errors of libp2p end here."""

from __future__ import annotations

import logging
from typing import Any

import trio

from ....collectives.errors import PeerLostError
from ....collectives.identifiers import PeerId
from .door import machine_of

log = logging.getLogger("atoll.net")


class PeerStream:
    """An ordered, authenticated, encrypted byte stream to one peer."""

    def __init__(self, peer: PeerId, stream: Any) -> None:
        self.peer = peer
        self._stream = stream

    @property
    def remote(self) -> tuple[str, int] | None:
        """Host and port at the other end of the connection it runs on; None where that goes through
        a relay.
        """
        muxed = self._stream.muxed_conn
        try:
            found = muxed.get_remote_address()
            return (
                None
                if found is None or muxed.get_connection_type().value == "relayed"
                else (found[0].removeprefix("::ffff:"), found[1])
            )
        except Exception:
            return None

    @property
    def machine(self) -> str:
        """The machine at the other end, as places are shared out by (`door.machine_of`)."""
        remote = self.remote
        return machine_of(remote[0]) if remote else "by relay"

    async def send_all(self, data: bytes) -> None:
        """Send everything. Raises PeerLostError. Cancelled in the middle it leaves the stream
        unusable: close it then.
        """
        try:
            await self._stream.write(data)
        except Exception as error:
            raise PeerLostError(
                f"the stream to {self.peer} broke: {error}", peer=self.peer
            ) from None

    async def receive_some(self, max_bytes: int = 65_536) -> bytes:
        """Up to ``max_bytes``; b"" when the stream has ended, in whatever way. Cancellation loses
        nothing.
        """
        try:
            return await self._stream.read(max_bytes)
        except Exception:
            return b""

    async def finish(self) -> None:
        """Say that nothing more will be sent; the other side can still read what was sent."""
        try:
            await self._stream.close()
        except Exception as error:
            raise PeerLostError(
                f"the stream to {self.peer} broke: {error}", peer=self.peer
            ) from None

    async def aclose(self) -> None:
        """End the stream in both directions, at once. Never raises and never waits for the peer."""
        with trio.move_on_after(0.5, shield=True):
            try:
                await self._stream.reset()
            except Exception as error:
                log.debug("reset failed: %r", error)
