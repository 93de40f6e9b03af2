"""The thread that moves a relay's bytes: whatever comes in at one end of a circuit goes out at the
other, unread.

Packets on a slow link come one by one, and a turn for each of them costs a quarter of a core at 100
Mbit/s: so after a turn that moved little the thread rests for 2 ms. Losses on the way from the
relay to an end are the relay's to cope with, and nobody tells it how the other leg fares: so both
have bbr from the start, where the system lets us (1 % of loss leaves cubic a thirtieth of 100
Mbit/s at 50 ms). A leg on which nothing is lost goes over to cubic, which uses a clean link better
(0.95 and 0.92 of it), until `Path` says otherwise.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

from ....collectives.engine.congestion import Path
from ....collectives.engine.meter import LaneCounters, read_socket
from ....collectives.engine.settings import control

PIECE_BYTES = 1 << 18
MOVES = 8
"""Of one direction in one turn, then the next one has its turn."""
REST_S = 0.002
MUCH_BYTES = 1 << 20
CHECK_S = 1.0
CLEAN_SEGMENTS = 3000
"""So many without a loss, and a leg has cubic: of those that lose one in a thousand, one in twenty
is taken in, for a while.
"""
TEND_S = 0.2


class _OneWay:
    """One direction of a circuit."""

    def __init__(self, source: socket.socket, drain: socket.socket) -> None:
        self.source, self.drain = source, drain
        self.buffer = memoryview(bytearray(PIECE_BYTES))
        self.start = self.end = 0
        self.ended = self.closed = False

    @property
    def pending(self) -> bool:
        return self.end > self.start

    def move(self, allowed: int) -> int:
        """Move what goes without waiting, at most ``allowed`` bytes and a little; how many. Raises
        OSError.
        """
        moved = 0
        for _ in range(MOVES):
            before = moved
            with contextlib.suppress(BlockingIOError):
                if not self.pending and not self.ended and moved < allowed:
                    count = self.source.recv_into(self.buffer)
                    self.start, self.end, self.ended = 0, count, not count
                if self.pending:
                    count = self.drain.send(self.buffer[self.start : self.end])
                    self.start += count
                    moved += count
            if moved == before:
                break
        if self.ended and not self.pending and not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self.drain.shutdown(socket.SHUT_WR)
        return moved


class Leg:
    """Which congestion control what goes to one end needs: sans-IO. It begins with bbr."""

    def __init__(self) -> None:
        self._path: Path | None = None  # while it has cubic
        self._settled = False

    def read(self, reading: LaneCounters) -> str | None:
        """New counters. The one to go over to, if any."""
        if self._settled:
            return None
        if self._path is not None:
            self._settled = self._path.read(reading)
            return "bbr" if self._settled else None
        if reading.again:
            self._settled = True
        elif reading.segments >= CLEAN_SEGMENTS:
            self._path = Path()
            return "cubic"
        return None


class _SplicedPair:
    """Two sockets and what may still pass."""

    def __init__(
        self,
        one: socket.socket,
        other: socket.socket,
        nbytes: int,
        until: float,
        ended: Callable[[], None],
    ) -> None:
        self.sockets = (one, other)
        self.directions = (_OneWay(one, other), _OneWay(other, one))
        self.left, self.until, self.moved_at, self.ended = nbytes, until, time.monotonic(), ended
        for sock in self.sockets:
            control(sock, "bbr")
        self.legs = [(sock, Leg()) for sock in self.sockets]

    @property
    def over(self) -> bool:
        return self.left <= 0 or all(way.closed for way in self.directions)

    def move(self) -> int:
        """How many bytes went on. Raises OSError."""
        moved = 0
        for way in self.directions:
            moved += way.move(self.left - moved)
        self.left -= moved
        return moved

    def tend(self) -> None:
        """Look at what was sent."""
        for sock, leg in self.legs:
            if (reading := read_socket(sock)) is not None and (
                other := leg.read(reading)
            ) is not None:
                control(sock, other)

    def events(self, sock: socket.socket) -> int:
        """What to wait for at one of the sockets."""
        way, back = self.directions if sock is self.sockets[0] else self.directions[::-1]
        wanted = 0 if way.ended or way.pending else selectors.EVENT_READ
        return wanted | (selectors.EVENT_WRITE if back.pending else 0)


class Splice:
    """Owns the sockets of all circuits. `add` and `stop` from any thread."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._selector = selectors.DefaultSelector()
        self._near, self._wake = socket.socketpair()
        for sock in (self._near, self._wake):
            sock.setblocking(False)
        self._selector.register(self._near, selectors.EVENT_READ)
        self._new: list[_SplicedPair] = []
        self._circuits = set[_SplicedPair]()
        self._stopping = threading.Event()
        self._tended_at = 0.0
        self.nbytes = 0
        """Bytes moved since the start."""
        self._thread = threading.Thread(target=self._run, name="atoll-relay", daemon=True)
        self._thread.start()

    def add(
        self,
        one: socket.socket,
        other: socket.socket,
        nbytes: int,
        seconds: float,
        ended: Callable[[], None],
    ) -> None:
        """A circuit between two non-blocking sockets. ``ended`` is called in the splice's thread,
        after both were closed.
        """
        self._new.append(_SplicedPair(one, other, nbytes, time.monotonic() + seconds, ended))
        self._rouse()

    def stop(self) -> None:
        """Cut everything."""
        self._stopping.set()
        self._rouse()
        self._thread.join()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake
            self._wake.send(b"x")

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._turn() < MUCH_BYTES:
                    self._stopping.wait(REST_S)
        finally:
            for circuit in [*self._circuits, *self._new]:
                self._end(circuit)
            self._selector.close()
            self._near.close()
            self._wake.close()

    def _turn(self) -> int:
        moved = 0
        ready = self._selector.select(CHECK_S)
        while self._new:
            circuit = self._new.pop()
            self._circuits.add(circuit)
            for sock in circuit.sockets:
                self._selector.register(sock, selectors.EVENT_READ, circuit)
            moved += self._move(circuit)
        for circuit in {key.data for key, _ in ready if key.data is not None}:
            if circuit in self._circuits:
                moved += self._move(circuit)
        if any(key.data is None for key, _ in ready):
            with contextlib.suppress(BlockingIOError):
                self._near.recv(1024)
        now = time.monotonic()
        if now - self._tended_at >= TEND_S:
            self._tended_at = now
            for circuit in self._circuits:
                circuit.tend()
        for circuit in [
            found
            for found in self._circuits
            if now > found.until or now - found.moved_at > self._idle_s
        ]:
            self._end(circuit)
        return moved

    def _move(self, circuit: _SplicedPair) -> int:
        moved = 0
        try:
            moved = circuit.move()
            self.nbytes += moved
            if not circuit.over:
                for sock in circuit.sockets:
                    self._watch(sock, circuit.events(sock), circuit)
                circuit.moved_at = time.monotonic() if moved else circuit.moved_at
                return moved
        except OSError:
            pass
        self._end(circuit)
        return moved

    def _watch(self, sock: socket.socket, events: int, circuit: _SplicedPair) -> None:
        key = self._selector.get_map().get(sock)
        if key is None:
            if events:
                self._selector.register(sock, events, circuit)
        elif not events:
            self._selector.unregister(sock)
        elif key.events != events:
            self._selector.modify(sock, events, circuit)

    def _end(self, circuit: _SplicedPair) -> None:
        self._circuits.discard(circuit)
        for sock in circuit.sockets:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
        circuit.ended()
