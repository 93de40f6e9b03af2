"""Files of the own copy of a run's base, for members that lack them. Sans I/O.

Who asks names a file by its sha256, or a segment by a hash of that: what is in the manifest, and
nothing else of this machine. A file is served as long as it is as it was when it was compared
(`own.unchanged`). Bounded: segments in memory, what each peer may have of them, and bytes, for each
peer and for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...collectives import messages as m
from ...collectives.digest import chunk_hash
from ...collectives.exchange.slot import unfold
from ...collectives.identifiers import PeerId
from ..manifest.tables import BaseTable
from ..net.transport.allowance import Allowance
from .own import stamp_of
from .pieces import Cutting, FileMessage, FilePieces, FilePorts, encode, pieces_of

AHEAD = 3  # segments that who fetches asks for at once
HELD_BYTES = 96 << 20  # of segments in memory; one at least
IDLE_S = 10.0  # a segment nobody has asked for this long is dropped
ASKING = 64  # peers that wait for one file's hashes, or one segment
EACH, ALL, AGAIN_S = 4, 64, 6 * 3600.0
"""A peer is sent so many times the base at once, all peers together so many times, and as much
again in AGAIN_S: who joins fetches it once.
"""
AGAIN = 8  # a chunk that is asked for again counts as this part of one

Stamp = tuple[int, int]


@dataclass
class HeldSegment:
    """One that is served. ``peers``: who fetches it now."""

    nbytes: int
    used_at: float
    peers: set[PeerId] = field(default_factory=set[PeerId])


class BaseServing:
    """What this member serves of a run's base."""

    def __init__(
        self,
        run: str,
        base: BaseTable,
        find: Callable[[str], Path | None],
        ports: FilePorts,
        cutting: Cutting,
    ) -> None:
        """``find``: the file of this name, if it is here, and may be given to others."""
        self._find, self._ports = find, ports
        pieces = [piece for piece in pieces_of(base, cutting) if piece.size]
        self._pieces = {piece.digest: piece for piece in pieces}
        self._segments = {
            piece.segment_name(run, number): (piece, number)
            for piece in pieces
            for number in range(piece.segments)
        }
        self._hashes: dict[bytes, tuple[Stamp, bytes]] = {}  # by a file's digest
        self._hashing: dict[bytes, set[PeerId]] = {}
        self._held: OrderedDict[bytes, HeldSegment] = OrderedDict()  # used last: last
        self._loading: dict[bytes, dict[PeerId, m.Spans]] = {}
        # By peer, the segments that it fetches now, oldest first, and the chunks that it asked for.
        self._recent: dict[PeerId, dict[bytes, set[int]]] = {}
        rate = base.size / AGAIN_S
        self._each = Allowance(EACH * base.size, EACH * rate)
        self._all = Allowance(ALL * base.size, ALL * rate)

    @property
    def held_bytes(self) -> int:
        """Of segments in memory."""
        return sum(held.nbytes for held in self._held.values())

    def on_get(self, now: float, peer: PeerId, body: m.Get) -> None:
        """A peer that is admitted to the run asks."""
        if (piece := self._pieces.get(body.name)) is not None:
            self._offer(peer, piece)
        elif (known := self._segments.get(body.name)) is not None and body.chunks:
            self._send(now, peer, body, *known)
        else:
            self._tell(peer, m.Gone(body.name))

    def tick(self, now: float) -> None:
        """Drop what nobody needs any more."""
        for name in [name for name, it in self._held.items() if now - it.used_at > IDLE_S]:
            self._drop(name)

    def drop_all(self) -> None:
        """Serve nothing any more."""
        for name in list(self._held):
            self._drop(name)

    # ---- hashes
    def _offer(self, peer: PeerId, piece: FilePieces) -> None:
        """Hash a file once, whoever asks and how often, unless it is written to."""
        path = self._find(piece.name)
        stamp, hashes = self._hashes.get(piece.digest, (None, b""))
        if path is None:
            self._tell(peer, m.Gone(piece.digest))
        elif stamp is not None and stamp == _stamp(path):
            self._tell(peer, m.Offer(piece.digest, hashes, None))
        elif (asking := self._hashing.get(piece.digest)) is not None:
            if len(asking) < ASKING:
                asking.add(peer)
        else:
            self._hashing[piece.digest] = {peer}
            self._ports.work(
                lambda: _hashed(path, piece), lambda now, found: self._hashed(piece, found)
            )

    def _hashed(self, piece: FilePieces, found: tuple[Stamp, bytes] | None) -> None:
        asking = sorted(self._hashing.pop(piece.digest, ()))
        if found is not None:
            self._hashes[piece.digest] = found
        for peer in asking:
            self._tell(
                peer,
                m.Gone(piece.digest) if found is None else m.Offer(piece.digest, found[1], None),
            )

    # ---- chunks
    def _send(self, now: float, peer: PeerId, body: m.Get, piece: FilePieces, number: int) -> None:
        name, path = body.name, self._find(piece.name)
        numbers = piece.numbers(number)
        asked = set(unfold(body.chunks, len(numbers)))
        before = self._recent.get(peer, {}).get(name, set[int]())
        # what is still on its way is asked for again now and then, most of it in vain
        again = sum(piece.nbytes(numbers[chunk]) for chunk in asked & before) // AGAIN
        nbytes = sum(piece.nbytes(numbers[chunk]) for chunk in asked - before) + again
        if not asked or path is None or not self._may(now, peer, nbytes):
            self._tell(peer, m.Gone(name))
            return
        self._moves_on(peer, name, asked)
        if (held := self._held.get(name)) is not None:
            held.used_at = now
            held.peers.add(peer)
            self._held.move_to_end(name)
            self._ports.content.send_blob(peer, name, body.chunks)
        elif (waiting := self._loading.get(name)) is not None:
            if len(waiting) < ASKING:
                waiting[peer] = body.chunks
        elif self._makes_room(now, piece, number):
            self._loading[name] = {peer: body.chunks}
            self._ports.work(
                lambda: _read(path, piece, number),
                lambda now, data: self._loaded(now, name, piece, data),
            )

    def _loaded(self, now: float, name: bytes, piece: FilePieces, data: bytes | None) -> None:
        waiting = self._loading.pop(name)
        if data is None:
            for peer in sorted(waiting):
                self._tell(peer, m.Gone(name))
            return
        self._ports.content.provide(name, memoryview(data), piece.chunk)
        self._held[name] = HeldSegment(len(data), now, set(waiting))
        for peer, spans in sorted(waiting.items()):
            self._ports.content.send_blob(peer, name, spans)

    def _may(self, now: float, peer: PeerId, nbytes: int) -> bool:
        """Whether a peer is sent so many bytes more; they are counted."""
        if self._each.some(peer, now, nbytes) < nbytes:
            return False
        return self._all.some("", now, nbytes) == nbytes

    def _moves_on(self, peer: PeerId, name: bytes, chunks: set[int]) -> None:
        """Who asks for one more segment than it has at once needs its first no more."""
        recent = self._recent.setdefault(peer, {})
        recent[name] = recent.get(name, set()) | chunks
        if len(recent) > AHEAD + 1:
            first = next(iter(recent))
            del recent[first]
            if (held := self._held.get(first)) is not None:
                held.peers.discard(peer)

    def _makes_room(self, now: float, piece: FilePieces, number: int) -> bool:
        """Whether one more segment is read: else all that are held are being fetched, and who
        asked asks again.
        """
        first, stop = piece.span(number)
        coming = sum(
            its_stop - its_first
            for name in self._loading
            for known, at in (self._segments[name],)
            for its_first, its_stop in (known.span(at),)
        )
        for name in list(self._held):
            if self.held_bytes + coming + stop - first <= HELD_BYTES:
                break
            if not self._held[name].peers or now - self._held[name].used_at > IDLE_S:
                self._drop(name)
        held = self.held_bytes + coming
        return not held or held + stop - first <= HELD_BYTES

    def _drop(self, name: bytes) -> None:
        del self._held[name]
        for recent in self._recent.values():
            recent.pop(name, None)
        self._recent = {peer: recent for peer, recent in self._recent.items() if recent}
        self._ports.content.withdraw(name)

    def _tell(self, peer: PeerId, body: FileMessage) -> None:
        self._ports.send(peer, encode(body))


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None


def _hashed(path: Path, piece: FilePieces) -> tuple[Stamp, bytes] | None:
    """The hashes of a file's chunks, joined; None where it cannot be read, or changes."""
    stamp, hashes = _stamp(path), list[bytes]()
    try:
        with path.open("rb") as file:
            while data := file.read(piece.chunk):
                hashes.append(chunk_hash(data))
                if len(hashes) > piece.chunks:
                    return None
    except OSError:
        return None
    if stamp is None or stamp[0] != piece.size or stamp != _stamp(path):
        return None
    return stamp, b"".join(hashes)


def _read(path: Path, piece: FilePieces, number: int) -> bytes | None:
    first, stop = piece.span(number)
    try:
        with path.open("rb") as file:
            file.seek(first)
            data = file.read(stop - first)
    except OSError:
        return None
    return data if len(data) == stop - first else None
