"""Content-addressed bytes in chunks: state and results for those who catch up."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from ..digest import chunk_hash
from ..errors import LocalProtocolError, RemoteProtocolError
from ..identifiers import PeerId
from .events import BadChunk, BlobComplete, BlobProgress, ExchangeEvent
from .header import BLOB, MAX_PAYLOAD_BYTES, NO_KEY, Header, blob_key, pack
from .slot import MAX_SPANS


@dataclass(frozen=True, slots=True)
class Provided:
    """A blob that can be had from me."""

    name: bytes
    key: bytes
    data: memoryview
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-len(self.data) // self.chunk_bytes)

    def chunk(self, index: int) -> memoryview:
        """Bytes of one chunk."""
        return self.data[index * self.chunk_bytes : (index + 1) * self.chunk_bytes]


class Wanted:
    """A blob being fetched. Chunks go straight to their place and count only once their hash is right."""

    def __init__(self, name: bytes, destination: memoryview, chunk_bytes: int, hashes: Sequence[bytes], sources: Sequence[PeerId]) -> None:
        check_blob(destination, chunk_bytes)
        self.name = name
        self.destination = destination
        self.chunk_bytes = chunk_bytes
        self.chunks = -(-len(destination) // chunk_bytes)
        if hashes and len(hashes) != self.chunks:
            raise LocalProtocolError(f"{len(hashes)} hashes for {self.chunks} chunks")
        self.expected = tuple(hashes)
        self.sources = set(sources)
        self.barred: set[PeerId] = set()
        self.got: list[bytes | None] = [None] * self.chunks
        self.have = 0
        self._gaps = [(0, self.chunks)]  # chunks that have not come, as ranges

    def same(self, other: Wanted) -> bool:
        """Whether the other is the same wish, sources aside."""
        mine, theirs = (
            (numpy.frombuffer(blob.destination, numpy.uint8).ctypes.data, len(blob.destination), blob.chunk_bytes, blob.expected)
            for blob in (self, other)
        )
        return mine == theirs

    def view(self, peer: PeerId, chunk: int, length: int) -> memoryview | None:
        """Where a chunk from a peer goes, or None. Raises RemoteProtocolError when it does not fit."""
        if chunk >= self.chunks:
            raise RemoteProtocolError(f"blob chunk {chunk} of {self.chunks}", peer=peer)
        place = self.destination[chunk * self.chunk_bytes : (chunk + 1) * self.chunk_bytes]
        if len(place) != length:
            raise RemoteProtocolError(f"blob chunk {chunk} of {length} bytes, expected {len(place)}", peer=peer)
        if peer not in self.sources or peer in self.barred or self.got[chunk] is not None:
            return None
        return place

    def arrived(self, peer: PeerId, chunk: int) -> bool:
        """Check a chunk in; False (and the peer barred) when its hash is wrong."""
        start = chunk * self.chunk_bytes
        digest = chunk_hash(self.destination[start : start + self.chunk_bytes])
        if self.expected and digest != self.expected[chunk]:
            self.barred.add(peer)
            return False
        self.got[chunk] = digest
        self.have += 1
        index = bisect.bisect_right(self._gaps, chunk, key=lambda gap: gap[0]) - 1
        first, stop = self._gaps[index]
        self._gaps[index : index + 1] = [gap for gap in ((first, chunk), (chunk + 1, stop)) if gap[0] < gap[1]]
        return True

    def progress(self) -> BlobProgress:
        """How much is here and which chunks are missing."""
        return BlobProgress(self.name, self.have, self.chunks, tuple(self._gaps[:MAX_SPANS]))


def check_blob(data: memoryview, chunk_bytes: int) -> None:
    """Raises LocalProtocolError unless the memory is flat bytes and the chunk length can travel."""
    if data.format != "B" or data.ndim != 1 or not data.contiguous:
        raise LocalProtocolError("a blob is a flat memoryview of bytes")
    if not 1 <= chunk_bytes <= MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(f"blob chunks of {chunk_bytes} bytes, limit {MAX_PAYLOAD_BYTES}")


class Blobs:
    """What can be had from me, and what I am fetching. ``post`` gets the events."""

    def __init__(self, post: Callable[[ExchangeEvent], None]) -> None:
        self._post = post
        self._provided: dict[bytes, Provided] = {}
        self._wanted: dict[bytes, Wanted] = {}  # by key

    def provide(self, name: bytes, data: memoryview, chunk_bytes: int) -> None:
        """See `Exchange.provide`."""
        check_blob(data, chunk_bytes)
        self._provided[name] = Provided(name, blob_key(name), data, chunk_bytes)

    def withdraw(self, name: bytes) -> None:
        """See `Exchange.withdraw`."""
        self._provided.pop(name, None)

    def chunks(self, name: bytes) -> int:
        """Number of chunks of a provided blob; 0 for an unknown one."""
        blob = self._provided.get(name)
        return 0 if blob is None else blob.chunks

    def record(self, name: bytes, chunk: int) -> tuple[bytes, memoryview] | None:
        """Header and payload of one chunk, if it is (still) provided."""
        blob = self._provided.get(name)
        if blob is None or chunk >= blob.chunks:
            return None
        payload = blob.chunk(chunk)
        return pack(BLOB, len(payload), chunk, blob.key, NO_KEY), payload

    def want(self, name: bytes, destination: memoryview, chunk_bytes: int, hashes: Sequence[bytes], sources: Sequence[PeerId]) -> None:
        """See `Exchange.want`."""
        blob = Wanted(name, destination, chunk_bytes, hashes, sources)
        key = blob_key(name)
        known = self._wanted.get(key)
        if known is not None and known.same(blob):
            known.sources, known.barred = blob.sources, set()
        elif blob.chunks == 0:
            self._post(BlobComplete(name))
        else:
            self._wanted[key] = blob

    def unwant(self, name: bytes) -> None:
        """See `Exchange.unwant`."""
        self._wanted.pop(blob_key(name), None)

    def report(self, name: bytes) -> None:
        """Say how far a wanted blob is."""
        blob = self._wanted.get(blob_key(name))
        if blob is not None:
            self._post(blob.progress())

    def destination(self, peer: PeerId, record: Header) -> tuple[memoryview, Callable[[], None]] | None:
        """Where an arriving chunk goes and what to call when it is there; None: discard it."""
        blob = self._wanted.get(record.key)
        if blob is None:
            return None
        view = blob.view(peer, record.chunk, record.length)
        if view is None:
            return None
        return view, lambda: self._arrived(record.key, blob, peer, record.chunk)

    def _arrived(self, key: bytes, blob: Wanted, peer: PeerId, chunk: int) -> None:
        if self._wanted.get(key) is not blob:
            return
        if not blob.arrived(peer, chunk):
            self._post(BadChunk(peer, blob.name, chunk))
            return
        self._post(blob.progress())
        if blob.have == blob.chunks:
            del self._wanted[key]
            self._post(BlobComplete(blob.name, tuple(digest for digest in blob.got if digest is not None)))
