"""A plain lane: only headers are sealed, and payloads go from their memory into the socket, and
from there to where they stay.

On the wire: 48-byte header, the 16 bytes that authenticate it, then the payload. So it is known who
sends what, and where it goes, before the payload is read. What follows it is read by the same
system call.
"""

from __future__ import annotations

from ..errors import RemoteProtocolError
from ..exchange import Exchange
from ..exchange import header as wire_header
from ..exchange.header import BEAT, HEADER_BYTES
from ..record_layer import TAG_BYTES
from .lane import EMPTY, Lane, PeerFaultError

NOWHERE = memoryview(bytearray())  # where nothing is opened to
HEAD_BYTES = HEADER_BYTES + TAG_BYTES
LEAST_BORROWED = 8_192  # shorter payloads are copied, so that several go in one call
STAGED = 4_096  # read behind a payload: what of the next one is among it is copied


class PlainLane(Lane):
    """See `Lane`. While bytes of the present record's payload have not come, none are staged."""

    plain = True

    def _append(self, start: int, header: bytes, payload: memoryview) -> int:
        end = super()._append(start, header, EMPTY)
        if len(payload) >= LEAST_BORROWED:
            self._borrowed = payload
            return end
        self._make_room(end, end + len(payload))
        self._tx[end : end + len(payload)] = payload
        return end + len(payload)

    # ---- receiving

    def _wanted(self) -> int:
        return self._left + STAGED - self._have

    def _read(self, source: Exchange, room: int) -> int:
        if not self._left:
            return self.sock.recv_into(self._rx[self._have : self._have + room])
        place = self._target(source)
        if place is None:  # nobody wants it, or not any more
            return self.sock.recv_into(self._rx[: min(room, self._left)])
        start = len(place) - self._left
        rest = place[start : start + room]
        return self.sock.recvmsg_into((rest, self._rx[: room - len(rest)]))[0]

    def _came(self, source: Exchange, count: int) -> None:
        if self._left:
            body = min(count, self._left)
            self._left -= body
            self._have = count - body
            if self._left:
                return
            self._ended(source)
        else:
            self._have += count
        self._take(source)

    def _take(self, source: Exchange) -> None:
        """Handle what is staged."""
        position = 0
        while self._have - position >= HEAD_BYTES:
            body = position + HEAD_BYTES
            self._begin(
                source,
                bytes(self._rx[position : position + HEADER_BYTES]),
                self._rx[position + HEADER_BYTES : body],
            )
            position = min(body + self._left, self._have)
            if not self._left:
                continue
            place, here = self._target(source), position - body
            if place is not None:
                place[:here] = self._rx[body:position]
            self._left -= here
            if not self._left:
                self._ended(source)
        rest = self._have - position
        if position and rest:
            self._rx[:rest] = self._rx[position : self._have]
        self._have = rest

    def _begin(self, source: Exchange, header: bytes, tag: memoryview) -> None:
        self._opener.open(header, tag, NOWHERE, self.peer)
        try:
            record = wire_header.parse(header, self.peer, packed_too=True)
            if record.kind == BEAT:
                self.up = True
                return
            if not self.up:
                raise RemoteProtocolError("data before the first heartbeat", peer=self.peer)
            self._header, self._left = header, record.length
            if header[2]:
                self._packed = memoryview(bytearray(record.length))
            else:
                source.destination(self.peer, header, self.number)
            if not self._left:
                self._ended(source)
        except RemoteProtocolError as error:
            raise PeerFaultError(error.message, peer=self.peer) from None
