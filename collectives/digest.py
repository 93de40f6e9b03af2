"""Digests: what names the bytes of a result and of a state. blake3 throughout, 32 bytes.

A part's digest binds what the bytes *mean* (log, round, base, contributors and their weights,
range, chunking, codec, reducer), so bytes reduced over another set of contributors can never match.
The run is bound by ``base``: the chain of entries starts at the run's genesis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from .group import Entry, Part, Plan
from .identifiers import RunId

BATCH_BYTES = 16  # of `batch_digest`


def chunk_hash(data: bytes | bytearray | memoryview) -> bytes:
    return blake3(data).digest()


def batch_digest(run: RunId, round_: int, content: bytes) -> bytes:
    """What a member says of the first batch that it reads after ``round_`` committed rounds, whose
    ``content`` is a hash: salted, so that it tells nothing to who has not the same batch.
    """
    salt = f"atoll/first-batch/{run}/{round_}/".encode()
    return blake3(salt + content).digest(BATCH_BYTES)


def merkle_root(hashes: Sequence[bytes]) -> bytes:
    """Root over 32-byte hashes, in order. The count is bound; inner nodes and the root are hashed
    under prefixes of their own.
    """
    level = list(hashes)
    while len(level) > 1:
        paired = [
            blake3(b"\x01" + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)
        ]
        if len(level) % 2:
            paired.append(level[-1])
        level = paired
    return blake3(b"\x02" + len(hashes).to_bytes(8, "big") + b"".join(level)).digest()


def meaning(bound: Plan | Entry) -> bytes:
    """What the bytes of a result are the result of: contributors (cids and weights), ranges,
    chunking, codec, reducer, round; where partial sums travel also owners and tree. Bytes that were
    reduced for a plan are those of an entry only where both mean the same."""
    return meaning_of(meaning_preimage(bound))


def meaning_of(preimage: bytes) -> bytes:
    """The meaning that `meaning_preimage` is the preimage of."""
    return blake3(b"atoll/meaning/1" + preimage).digest()


def meaning_preimage(bound: Plan | Entry) -> bytes:
    """What a meaning is the digest of: log, round, base, contributors, ranges, and the rest."""
    butterfly = bound.topology.kind == "butterfly"
    ranges = tuple((part.first, part.stop) for part in bound.parts)
    of = (
        bound.log,
        bound.round,
        bound.base,
        bound.contributors,
        ranges if butterfly else (bound.topology.named, bound.parts),
        bound.numel,
        bound.chunk_elements,
        bound.codec,
        bound.reducer,
    )
    return msgspec.msgpack.encode(of)


def part_meaning(bound: Plan | Entry, part: Part) -> bytes:
    """What the digest of one part binds beside its bytes: what they are the result of, encoded."""
    tree = bound.topology.kind != "butterfly"
    contributors, parts = bound.contributors, bound.parts if tree else ()
    if len(contributors) > MANY:  # a thousand of them, for each of a hundred parts
        contributors, parts = _encoded(contributors), _encoded(parts)
    of = (
        bound.log,
        bound.round,
        bound.base,
        contributors,
        part.first,
        part.stop,
        bound.numel,
        bound.chunk_elements,
        bound.codec,
        bound.reducer,
    )
    if tree:
        of = (*of, bound.topology.named, parts)
    return msgspec.msgpack.encode(of)


MANY = 32  # contributors whose encoding is kept for the other parts
_encodings: deque[tuple[object, msgspec.Raw]] = deque(maxlen=8)
"""What was encoded last."""


def _encoded(what: object) -> msgspec.Raw:
    for known, data in tuple(_encodings):
        if known is what:
            return data
    data = msgspec.Raw(msgspec.msgpack.encode(what))
    _encodings.append((what, data))
    return data


def digest_of(root: bytes, of: bytes) -> bytes:
    """The digest of a part whose chunks have the Merkle root ``root`` (32 bytes) and which is the
    result of what ``of`` says.
    """
    return blake3(b"atoll/part/1" + root + of).digest()


def part_digest(bound: Plan | Entry, part: Part, hashes: Sequence[bytes]) -> bytes:
    """Digest of one part of a result; ``hashes`` are those of its chunks, in order.

    A plan and the entry made from it give the same digest; ballot, revision and, in a butterfly,
    the owner's name do not matter, since the bytes do not depend on them. Where partial sums travel
    they depend on the tree, and that on the parts (`trees.py`).
    """
    return digest_of(merkle_root(hashes), part_meaning(bound, part))
