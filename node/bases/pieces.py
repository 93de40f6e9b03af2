"""How a file of a pretrained model is cut to travel: into chunks, each with a hash, and these into
segments, which are read, asked for and written whole. Sizes are the manifest's, so both ends cut
alike, and nobody says how much another has to take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from ...collectives import messages as m
from ...collectives.errors import RemoteProtocolError
from ...collectives.identifiers import HASH_BYTES, PeerId
from ..manifest.tables import BaseTable
from ..session.ports import ContentPlane

FileMessage = m.Get | m.Offer | m.Gone
"""Get names a file by its sha256, and is answered by Offer with the hashes of its chunks; with
``chunks`` it names a segment (`FilePieces.segment_name`), whose chunks come over the lane.
"""
MOST_CHUNKS = m.MAX_HASHES // HASH_BYTES
FILES = b"F"
"""Before such a message, as one message of a run."""
_decoder = msgspec.msgpack.Decoder(FileMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(body: FileMessage) -> bytes:
    """As a message of the run."""
    return FILES + _encoder.encode(body)


def decode(data: bytes, peer: PeerId) -> FileMessage:
    """A message of the run that begins with FILES. Raises RemoteProtocolError."""
    try:
        return _decoder.decode(data[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RemoteProtocolError("no message about a file of the base", peer=peer) from None


@dataclass(frozen=True, slots=True)
class FilePorts:
    """What the node does for a transfer of files. ``send(peer, data)``: a message of the run
    (`encode`); may be lost; never blocks. ``work(job, done)``: run ``job``, which reads or writes
    files and raises nothing, beside the control loop, then call ``done(now, result)`` in it. In
    order.
    """

    content: ContentPlane
    send: Callable[[PeerId, bytes], None]
    work: Callable[[Callable[[], Any], Callable[[float, Any], None]], None]


@dataclass(frozen=True, slots=True)
class Cutting:
    """In bytes. Of a file that is larger than MOST_CHUNKS of these, chunks are longer."""

    chunk: int = 1 << 20
    segment: int = 4 << 20


@dataclass(frozen=True, slots=True)
class FilePieces:
    """One file. ``digest``: its sha256. ``chunk``: bytes of each but the last."""

    name: str
    digest: bytes
    size: int
    chunk: int
    per_segment: int

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk)

    @property
    def segments(self) -> int:
        return -(-self.chunks // self.per_segment)

    def span(self, segment: int) -> tuple[int, int]:
        """Bytes [first, stop) of a segment."""
        first = segment * self.per_segment * self.chunk
        return first, min(self.size, first + self.per_segment * self.chunk)

    def nbytes(self, chunk: int) -> int:
        """Of a chunk: the last one is shorter."""
        return min(self.chunk, self.size - chunk * self.chunk)

    def numbers(self, segment: int) -> range:
        """Its chunks."""
        first = segment * self.per_segment
        return range(first, min(self.chunks, first + self.per_segment))

    def segment_name(self, run: str, segment: int) -> bytes:
        """By which a segment is asked for and sent. ``run``: two runs may have the same base."""
        said = run.encode() + self.digest + segment.to_bytes(4, "big")
        return blake3(b"atoll/base/1" + said).digest()


def pieces_of(base: BaseTable, cutting: Cutting) -> list[FilePieces]:
    """The files of a base whose sizes are bound, small ones first; empty ones need not travel."""
    found = list[FilePieces]()
    for name, digest in base.files.items():
        size = base.sizes[name]
        chunk = max(cutting.chunk, -(-size // MOST_CHUNKS))
        per_segment = max(1, cutting.segment // chunk)
        found.append(FilePieces(name, bytes.fromhex(digest), size, chunk, per_segment))
    return sorted(found, key=lambda piece: (piece.size, piece.name))
