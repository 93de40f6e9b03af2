"""Content-addressed bytes in chunks: state and results for those who catch up."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy

from ..digest import chunk_hash
from ..errors import LocalProtocolError, RemoteProtocolError
from ..identifiers import PeerId
from .events import BadChunk, BlobComplete, BlobProgress, ExchangeEvent
from .header import BLOB, MAX_PAYLOAD_BYTES, NO_KEY, blob_key, pack
from .slot import PlanState

# that are told: who fetches asks for fewer at a time, and looks at all of them each time that a
# chunk comes
MOST_GAPS = 256
AT_ONCE = 16  # chunks that are copied in one go: some milliseconds, and lanes stand still meanwhile

Bounds = int | tuple[int, ...]
"""How a blob is cut: the length of a chunk (the last one may be shorter), or where each chunk
begins and the last one ends.
"""


@dataclass(frozen=True, slots=True)
class ProvidedBlob:
    """A blob that can be had from me."""

    name: bytes
    key: bytes
    data: memoryview
    cuts: tuple[int, ...]

    @property
    def chunks(self) -> int:
        return len(self.cuts) - 1

    def chunk(self, index: int) -> memoryview:
        return self.data[self.cuts[index] : self.cuts[index + 1]]


class Wanted:
    """A blob being fetched. Chunks go straight to their place and count once hashed right."""

    def __init__(
        self,
        name: bytes,
        destination: memoryview,
        bounds: Bounds,
        hashes: Sequence[bytes],
        sources: Sequence[PeerId],
    ) -> None:
        self.cuts = cut(destination, bounds)
        self.name = name
        self.destination = destination
        self.chunks = len(self.cuts) - 1
        if hashes and len(hashes) != self.chunks:
            raise LocalProtocolError(f"{len(hashes)} hashes for {self.chunks} chunks")
        self.expected = tuple(hashes)
        self.sources = set(sources)
        self.barred: set[PeerId] = set()
        self.got: list[bytes | None] = [None] * self.chunks
        self.have = 0
        self.filling = False  # what is known of it is being copied, and nothing taken from peers
        self.asked = False  # how far it is, meanwhile
        self._gaps = [(0, self.chunks)]  # chunks that have not come, as ranges

    def same(self, other: Wanted) -> bool:
        """Whether the other is the same wish, sources aside."""
        mine, theirs = (
            (
                numpy.frombuffer(blob.destination, numpy.uint8).ctypes.data,
                len(blob.destination),
                blob.cuts,
                blob.expected,
            )
            for blob in (self, other)
        )
        return mine == theirs

    def view(self, peer: PeerId, chunk: int, length: int) -> memoryview | None:
        """Where a chunk from a peer goes, or None. Raises RemoteProtocolError if it is unfit."""
        if chunk >= self.chunks:
            raise RemoteProtocolError(f"blob chunk {chunk} of {self.chunks}", peer=peer)
        place = self._place(chunk)
        if len(place) != length:
            raise RemoteProtocolError(
                f"blob chunk {chunk} of {length} bytes, expected {len(place)}", peer=peer
            )
        if (
            self.filling
            or peer not in self.sources
            or peer in self.barred
            or self.got[chunk] is not None
        ):
            return None
        return place

    def arrived(self, peer: PeerId, chunk: int) -> bool:
        """Check a chunk in; False (and the peer barred) when its hash is wrong."""
        digest = chunk_hash(self._place(chunk))
        if self.expected and digest != self.expected[chunk]:
            self.barred.add(peer)
            return False
        self._check_in(chunk, digest)
        return True

    def fill(self, chunk: int, found: memoryview) -> None:
        """Copy a chunk that is known to have its hash."""
        place = self._place(chunk)
        if self.got[chunk] is None and len(found) == len(place):
            place[:] = found
            self._check_in(chunk, self.expected[chunk])

    def _place(self, chunk: int) -> memoryview:
        return self.destination[self.cuts[chunk] : self.cuts[chunk + 1]]

    def _check_in(self, chunk: int, digest: bytes) -> None:
        self.got[chunk] = digest
        self.have += 1
        index = bisect.bisect_right(self._gaps, chunk, key=lambda gap: gap[0]) - 1
        first, stop = self._gaps[index]
        self._gaps[index : index + 1] = [
            gap for gap in ((first, chunk), (chunk + 1, stop)) if gap[0] < gap[1]
        ]

    def progress(self, source: PeerId | None = None) -> BlobProgress:
        """How much is here and which chunks are missing; ``source`` brought the newest."""
        missing = tuple(self._gaps[:MOST_GAPS])
        return BlobProgress(self.name, self.have, self.chunks, missing, source)


def cut(data: memoryview, bounds: Bounds) -> tuple[int, ...]:
    """Where the chunks begin, and the end. Raises LocalProtocolError unless the memory is flat
    bytes and every chunk can travel.
    """
    if data.format != "B" or data.ndim != 1 or not data.contiguous:
        raise LocalProtocolError("a blob is a flat memoryview of bytes")
    if isinstance(bounds, int):
        cuts = (*range(0, len(data), bounds), len(data)) if bounds > 0 else ()
    else:
        cuts = bounds
    if not cuts or cuts[0] != 0 or cuts[-1] != len(data):
        raise LocalProtocolError(f"blob of {len(data)} bytes with bounds {bounds}")
    if any(not 1 <= stop - start <= MAX_PAYLOAD_BYTES for start, stop in pairwise(cuts)):
        raise LocalProtocolError(
            f"blob chunks of 1 to {MAX_PAYLOAD_BYTES} bytes, not those of {bounds}"
        )
    return cuts


class Blobs:
    """What can be had from me, and what I am fetching. ``post`` gets the events. What came under
    ``plans`` is not fetched.
    """

    def __init__(
        self, plans: Mapping[bytes, PlanState], post: Callable[[ExchangeEvent], None]
    ) -> None:
        self._plans, self._post = plans, post
        self._provided: dict[bytes, ProvidedBlob] = {}
        self._wanted: dict[bytes, Wanted] = {}  # by key
        # By key: all is here, with the right hashes, and whoever wants it may not know yet.
        self._complete: dict[bytes, Wanted] = {}
        self._filling: deque[tuple[bytes, Wanted, Iterator[None]]] = deque()  # by key

    def provide(self, name: bytes, data: memoryview, bounds: Bounds) -> None:
        self._provided[name] = ProvidedBlob(name, blob_key(name), data, cut(data, bounds))

    def withdraw(self, name: bytes) -> None:
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

    def want(
        self,
        name: bytes,
        destination: memoryview,
        bounds: Bounds,
        hashes: Sequence[bytes],
        sources: Sequence[PeerId],
    ) -> Wanted | None:
        """Returns the wish that this one replaces."""
        blob = Wanted(name, destination, bounds, hashes, sources)
        key = blob_key(name)
        done = self._complete.get(key)
        if done is not None and done.same(blob):
            return None  # the memory has been handed over
        self._complete.pop(key, None)
        known = self._wanted.get(key)
        if known is not None and known.same(blob):
            known.sources, known.barred = blob.sources, set()
            return None
        if blob.chunks == 0:
            self._post(BlobComplete(name))
            return None
        self._wanted[key] = blob
        if hashes and self._plans:
            blob.filling = True
            self._filling.append((key, blob, self._copied(blob)))
        return known

    def _copied(self, blob: Wanted) -> Iterator[None]:
        """Copies what came under the present plans, a chunk a step. Holds no plan meanwhile: its
        memory is another's once it is gone.
        """
        for plan_id in list(self._plans):
            here = self._plans[plan_id].here_by_hash() if plan_id in self._plans else {}
            for index, digest in enumerate(blob.expected):
                if digest in here and self._copy(blob, index, plan_id, here[digest]):
                    yield

    def _copy(self, blob: Wanted, index: int, plan_id: bytes, chunk: int) -> bool:
        plan = self._plans.get(plan_id)
        if plan is None or plan.hashes[chunk] != blob.expected[index]:
            return False
        blob.fill(index, plan.view(chunk))
        return True

    @property
    def filling(self) -> bool:
        """Whether there is something to copy."""
        return bool(self._filling)

    def work(self) -> None:
        """Copy a little of what is known."""
        if not self._filling:
            return
        key, blob, copied = self._filling[0]
        still = self._wanted.get(key) is blob
        if not still or sum(1 for _ in islice(copied, AT_ONCE)) < AT_ONCE:
            self._filling.popleft()
            blob.filling = False
            if still and (blob.asked or blob.have == blob.chunks):
                self._advanced(key, blob)

    def unwant(self, name: bytes) -> Wanted | None:
        """Returns what was wanted."""
        self._complete.pop(blob_key(name), None)
        return self._wanted.pop(blob_key(name), None)

    def report(self, name: bytes) -> None:
        """Say how far a wanted blob is: once what is known of it has been copied."""
        blob = self._wanted.get(blob_key(name))
        if blob is not None and blob.filling:
            blob.asked = True
        elif blob is not None:
            self._post(blob.progress())

    def wanted(self, key: bytes) -> Wanted | None:
        """The blob being fetched that headers name so."""
        return self._wanted.get(key)

    def arrived(self, key: bytes, blob: Wanted, peer: PeerId, chunk: int) -> None:
        """A chunk from a peer is in its place."""
        if not blob.arrived(peer, chunk):
            self._post(BadChunk(peer, blob.name, chunk))
            return
        self._advanced(key, blob, peer)

    def _advanced(self, key: bytes, blob: Wanted, source: PeerId | None = None) -> None:
        self._post(blob.progress(source))
        if blob.have == blob.chunks:
            del self._wanted[key]
            if blob.expected:
                self._complete[key] = blob
            self._post(
                BlobComplete(blob.name, tuple(digest for digest in blob.got if digest is not None))
            )
