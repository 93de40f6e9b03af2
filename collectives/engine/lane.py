"""One lane: a non-blocking socket, the records on it, and whether the other end lives.

On the wire: 48-byte header, then the sealed payload; nothing else (`plain.py`: of a plain lane). A
long payload is sealed in segments, each under its record's header and a nonce of its own, so that
bytes are sent, and opened, while they are still in the processor's cache. The first record each way
is a heartbeat: it proves that the other end has the keys, and no data is sent before it has come.
"""

from __future__ import annotations

import contextlib
import socket
import time

from ..errors import PeerLostError, RemoteProtocolError
from ..exchange import Exchange
from ..exchange import header as wire_header
from ..exchange.header import BEAT, BEAT_HEADER, HEADER_BYTES
from ..identifiers import PeerId
from ..record_layer import TAG_BYTES, LaneKeys, Opener, Sealer
from .bucket import Bucket
from .congestion import Path
from .packing import Packer, full_length, unpack
from .settings import on_this_machine

BATCH_BYTES = 65_536  # small records are sent and received together up to this
SEGMENT_BYTES = 270_336  # of a payload; a chunk of int8 is one, of fp32 four
EMPTY = memoryview(b"")
REPLACED = "replaced by a new lane"


class PeerFaultError(RemoteProtocolError):
    """A record that authenticates but breaks a rule: the peer did it, nobody on the path."""


class Lane:
    """A lane to one peer. Methods raise NetworkError when the connection is gone,
    RemoteProtocolError when a record is not valid.
    """

    plain = False

    def __init__(
        self,
        peer: PeerId,
        sock: socket.socket,
        keys: LaneKeys,
        path: str,
        now: float,
        number: int = 0,
        index: int = 0,
        limits: tuple[Bucket, Bucket] = (Bucket(0), Bucket(0)),
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.fd = sock.fileno()
        self.path = path
        self.number = number  # of the engine: no two have the same
        self.index = index  # among the lanes to this peer
        self.up = False  # the other end's first record has come
        self.limit_up, self.limit_down = limits
        self.can_read = True
        self.can_write = True
        self.dry = False  # the last time it asked, nobody had anything to send
        self.opened_at = self.heard_at = self.spoke_at = now
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sealer = Sealer(keys.send, keys.cipher)
        self._opener = Opener(keys.receive, keys.cipher)
        self._tx = memoryview(bytearray(2 * BATCH_BYTES))
        self._pending = EMPTY
        self._borrowed = EMPTY  # follows what is pending
        self._unsealed = EMPTY  # follows, once that is sent
        self._under = b""  # the header of what is unsealed
        self._broken = False
        self.leaving = False  # another lane is to take its place
        self.retired = False  # ... and has
        self.ended = False  # the other end has nothing more to say
        self.waited_s = 0.0  # while the socket took no more, as far as somebody looked
        self.packer = None if on_this_machine(sock) else Packer(time.perf_counter)
        self.way = Path()
        self._rx = memoryview(bytearray(2 * BATCH_BYTES))
        self._have = 0
        self._limit = BATCH_BYTES  # read at most this far
        self._next_end = HEADER_BYTES  # there is nothing to take before so much is here
        self._header = b""  # of the record that is arriving
        self._left = 0  # bytes of its payload that have not come
        self._packed = EMPTY  # where it goes, if it is packed
        self._whole = False  # a record has come to its end since `receive` was called
        self.beat()

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait for the socket to take them."""
        return not self._broken and self._begun

    @property
    def _begun(self) -> bool:
        """Whether a record has begun and is not sent to its end."""
        return bool(self._pending or self._borrowed or self._unsealed)

    def keep(self) -> None:
        """Copy what is sent from memory of the exchange: a command may change that."""
        if self._borrowed:
            self._pending, self._borrowed = (
                memoryview(b"".join((self._pending, self._borrowed))),
                EMPTY,
            )
        if self._unsealed and not self._unsealed.readonly:
            self._unsealed = memoryview(bytes(self._unsealed))

    def beat(self) -> None:
        """Put a heartbeat on its way, unless other bytes are (they say the same)."""
        if not self._begun:
            self._pending, self.dry = self._tx[: self._append(0, BEAT_HEADER, EMPTY)], False

    def retire(self) -> None:
        """Send what has been begun, then nothing more. The lane is gone when both ends have done
        so: no record is lost.
        """
        if not self.retired:
            self.leaving = self.retired = True
            self.dry = False
            if not self._begun:
                self._finish()

    def _finish(self) -> None:
        self._broken = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        if self.ended:
            raise PeerLostError(REPLACED, peer=self.peer)

    def send(self, source: Exchange, now: float) -> bool:
        """Send what the socket takes of one batch of records, or of one long record. True when
        anything moved.
        """
        moved = more = self._send(source, now)
        while more and self._unsealed:
            more = self._send(source, now)
        return moved

    def _send(self, source: Exchange, now: float) -> bool:
        if not self.can_write or self._broken:
            return False
        waiting = len(self._pending) + len(self._borrowed)
        if not waiting:
            if not self._unsealed and self.retired:
                self._finish()
                return False
            if not self._seal_on() and (not self.up or not self._fill(source)):
                if self.packer is not None:
                    self.packer.idle()
                return False
            waiting = len(self._pending) + len(self._borrowed)
        room = waiting if not self.limit_up.rate else self.limit_up.room(now, waiting)
        if not room:
            return False
        try:
            count = self._write(room)
        except (BlockingIOError, InterruptedError):
            self.can_write = False
            return False
        except OSError:
            # what the other end sent before it went may still be worth reading; that ends with an
            # error soon
            self._broken = True
            self.can_read = True
            return True
        self.limit_up.take(count)
        self.bytes_sent += count
        if self.packer is not None:
            self.packer.sent(count, now)
        self.spoke_at = now
        if count < room:
            self.can_write = False
        behind = count - len(self._pending)
        self._pending = self._pending[count:]
        if behind > 0:
            # An empty view would keep the memory from being used again.
            self._borrowed = self._borrowed[behind:] or EMPTY
        return True

    def _write(self, room: int) -> int:
        if not self._borrowed:
            return self.sock.send(
                self._pending if room == len(self._pending) else self._pending[:room]
            )
        own = self._pending[:room]
        return self.sock.sendmsg((own, self._borrowed[: room - len(own)]))

    def receive(self, source: Exchange, now: float, enough: int = 0) -> bool:
        """Receive what is there, up to one batch of records, or the end of a long one, once
        ``enough`` bytes have come. True when anything moved.

        Who takes in all that the only other end has sent, before it sends anything itself, leaves
        that end without anything to do. Among more, that end has others, and going from lane to
        lane costs more than it brings.
        """
        self._whole, before = False, self.bytes_received
        moved = more = self._receive(source, now)
        while more and self._left and not (self._whole and self.bytes_received - before >= enough):
            more = self._receive(source, now)
        return moved

    def _receive(self, source: Exchange, now: float) -> bool:
        if not self.can_read:
            return False
        room = self._wanted()
        if self.limit_down.rate:
            room = self.limit_down.room(now, room)
        if not room:
            return False
        try:
            count = self._read(source, room)
        except (BlockingIOError, InterruptedError):
            self.can_read = False
            return False
        except OSError as error:
            raise PeerLostError(f"lane broke: {error}", peer=self.peer) from None
        if count == 0 and self.leaving:
            self.ended, self.can_read = True, False
            if self.retired and not self.wants_write:
                raise PeerLostError(REPLACED, peer=self.peer)
            return False
        if count == 0:
            raise PeerLostError(
                "lane was closed" + (" in the middle of a record" if self._partial() else ""),
                peer=self.peer,
            )
        self.limit_down.take(count)
        self.bytes_received += count
        self.heard_at = now
        self._came(source, count)
        return True

    def close(self) -> None:
        """Close the socket at once; what was not sent is dropped."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    # ---- sending

    def _fill(self, source: Exchange) -> bool:
        size, self.dry = 0, False
        while size < BATCH_BYTES and not self._borrowed and not self._unsealed:
            record = source.next_record(self.peer, self.number)
            if record is None:
                break
            packed = self.packer.pack(record.payload) if self.packer is not None else None
            if packed is None:
                size = self._append(size, record.header, record.payload)
            else:
                size = self._append(
                    size,
                    wire_header.repack(record.header, len(packed), packed=True),
                    memoryview(packed),
                )
        self._pending, self.dry = self._tx[:size], not size
        return size > 0

    def _append(self, start: int, header: bytes, payload: memoryview) -> int:
        body = start + HEADER_BYTES
        first = payload[:SEGMENT_BYTES]
        end = body + len(first) + TAG_BYTES
        self._make_room(start, end)
        self._tx[start:body] = header
        self._sealer.encrypt(header, first, self._tx[body:end])
        self._unsealed, self._under = payload[SEGMENT_BYTES:] or EMPTY, header
        return end

    def _seal_on(self) -> bool:
        """The next segment of a long record; False where there is none."""
        segment, self._unsealed = (
            self._unsealed[:SEGMENT_BYTES],
            self._unsealed[SEGMENT_BYTES:] or EMPTY,
        )
        if not segment:
            return False
        end = len(segment) + TAG_BYTES
        self._make_room(0, end)
        self._pending = self._tx[:end]
        self._sealer.encrypt(self._under, segment, self._pending)
        return True

    def _make_room(self, start: int, end: int) -> None:
        if end > len(self._tx):
            grown = memoryview(bytearray(end + BATCH_BYTES))
            grown[:start] = self._tx[:start]
            self._tx = grown

    # ---- receiving

    def _wanted(self) -> int:
        """How much to read at most."""
        return self._limit - self._have

    def _read(self, source: Exchange, room: int) -> int:
        del source
        return self.sock.recv_into(self._rx[self._have : self._have + room])

    def _partial(self) -> bool:
        """Whether a record has begun and not ended."""
        return self._have > 0 or self._left > 0

    def _came(self, source: Exchange, count: int) -> None:
        """So much was read."""
        self._have += count
        if self._have >= self._next_end:
            self._take(source)

    def _take(self, source: Exchange) -> None:
        """Handle the complete segments in the buffer, and set how far to read next."""
        position = 0
        while True:
            body = position if self._left else position + HEADER_BYTES
            length = self._left
            if not length and self._have >= body:
                length = wire_header.payload_length(self._rx, position, self.peer)
            end = body + min(length, SEGMENT_BYTES) + TAG_BYTES
            if self._have < end:
                break
            sealed = self._rx[body:end]
            if self._left:
                self._open_on(source, sealed)
            else:
                self._open(source, bytes(self._rx[position:body]), sealed, length)
            position = end
        rest, total = self._have - position, end - position
        self._next_end = total
        # Read a segment to its end, and the next header with it: then nearly every one costs one
        # system call.
        limit = max(BATCH_BYTES, total + HEADER_BYTES)
        if limit > len(self._rx):
            grown = memoryview(bytearray(limit))
            grown[:rest] = self._rx[position : self._have]
            self._rx = grown
        elif position and rest:
            self._rx[:rest] = self._rx[position : self._have]
        self._have, self._limit = rest, limit

    def _open(self, source: Exchange, header: bytes, sealed: memoryview, length: int) -> None:
        """A record of ``length`` bytes begins: all of it, or its first segment."""
        plain = sealed[:-TAG_BYTES]
        if header[1] == BEAT:
            wire_header.parse(header, self.peer)
            self._opener.open(header, sealed, plain, self.peer)
            self.up = True
            return
        packed = header[2] != 0
        if packed:  # how long it is in full stands inside
            self._opener.open(header, sealed, plain, self.peer)
        target = None
        try:
            if not self.up:
                raise RemoteProtocolError("data before the first heartbeat", peer=self.peer)
            if packed:
                self._packed = memoryview(bytearray(length))
                self._packed[: len(plain)] = plain
            else:
                target = source.destination(self.peer, header, self.number)
        except RemoteProtocolError as error:
            if not packed:
                # A forged header is nobody's fault but the path's.
                self._opener.open(header, sealed, plain, self.peer)
            raise PeerFaultError(error.message, peer=self.peer) from None
        if not packed:
            self._opener.open(
                header, sealed, plain if target is None else target[: len(plain)], self.peer
            )
        self._header, self._left = header, length - len(plain)
        if not self._left:
            self._ended(source)

    def _open_on(self, source: Exchange, sealed: memoryview) -> None:
        """The next segment of a record."""
        plain, place = sealed[:-TAG_BYTES], self._target(source)
        if place is not None:  # somebody still wants it
            start = len(place) - self._left
            plain = place[start : start + len(plain)]
        self._opener.open(self._header, sealed, plain, self.peer)
        self._left -= len(plain)
        if not self._left:
            self._ended(source)

    def _target(self, source: Exchange) -> memoryview | None:
        return self._packed or source.place(self.peer, self.number)

    def _ended(self, source: Exchange) -> None:
        """The payload is here in full."""
        self._whole = True
        header, packed, self._packed = self._header, self._packed, EMPTY
        if header[2]:
            try:
                header = wire_header.repack(header, full_length(packed, self.peer), packed=False)
                target = source.destination(self.peer, header, self.number)
                if target is None:
                    return
                unpack(packed, target, self.peer)
            except RemoteProtocolError as error:
                raise PeerFaultError(error.message, peer=self.peer) from None
        source.received(self.peer, header, self.number)
