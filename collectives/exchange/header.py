"""The fixed 48-byte header of every record on a lane.

version u8 | kind u8 | packed u16 | length u32 | chunk u64 | key 16 bytes | sub 16 bytes     (little
endian)

PART     key = slot (log and round), sub = cid of the contribution
PARTIAL  key = first halves of slot and plan id, sub = the partial sum's id
RESULT   key = plan id, sub = slot
MEASURE  key = plan id, sub = slot, chunk = index of the part: what its owner says of it
         (measuring.py)
ACCOUNT  key = first halves of slot and plan id, sub = the account's id: what was added up to a
         partial sum (checking.py)
BLOB     key = first 16 bytes of blake3(name), sub = zeros
BEAT     everything zero, no payload; used by the lane itself

packed   1: the payload is compressed and ``length`` is that of the compressed bytes; the lane
         unpacks it, nobody else sees such headers
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
from blake3 import blake3

from ..errors import RemoteProtocolError
from ..identifiers import PeerId

VERSION = 1
PART, RESULT, BLOB, BEAT, PARTIAL, MEASURE, ACCOUNT = 1, 2, 3, 4, 5, 6, 7
KEY_BYTES = 16
HALF = KEY_BYTES // 2
NO_KEY = bytes(KEY_BYTES)
MAX_PAYLOAD_BYTES = 17 << 20
"""Longest payload: a chunk of 2^22 float32 values, or int8 with its scales; state chunks are at
most 4 MiB.
"""

_layout = struct.Struct("<BBHIQ16s16s")
_start = struct.Struct("<BBHI")
HEADER_BYTES = _layout.size


class Header(NamedTuple):
    """A parsed header."""

    kind: int
    length: int
    chunk: int
    key: bytes
    sub: bytes


def pack(kind: int, length: int, chunk: int, key: bytes, sub: bytes) -> bytes:
    return _layout.pack(VERSION, kind, 0, length, chunk, key, sub)


def repack(header: bytes, length: int, *, packed: bool) -> bytes:
    """The same header for a payload that was packed or unpacked."""
    version, kind, _, _, chunk, key, sub = _layout.unpack(header)
    return _layout.pack(version, kind, int(packed), length, chunk, key, sub)


BEAT_HEADER = pack(BEAT, 0, 0, NO_KEY, NO_KEY)


def payload_length(data: memoryview, start: int, peer: PeerId) -> int:
    """Length of the payload that follows a header at ``start``, within bounds; the rest is
    `parse`'s. Raises RemoteProtocolError.
    """
    version, _, packed, length = _start.unpack_from(data, start)
    if version != VERSION or packed > 1 or length > MAX_PAYLOAD_BYTES:
        raise RemoteProtocolError(f"record of version {version} and {length} bytes", peer=peer)
    return length


def parse(
    data: bytes | bytearray | memoryview, peer: PeerId, *, packed_too: bool = False
) -> Header:
    """A header from a peer, all fields in bounds; that of a packed record only with ``packed_too``.
    Raises RemoteProtocolError.
    """
    if len(data) != HEADER_BYTES:
        raise RemoteProtocolError(f"record header of {len(data)} bytes", peer=peer)
    version, kind, packed, length, chunk, key, sub = _layout.unpack(data)
    if version != VERSION or packed > packed_too or not PART <= kind <= ACCOUNT:
        raise RemoteProtocolError(f"unknown record: version {version}, kind {kind}", peer=peer)
    if length > MAX_PAYLOAD_BYTES:
        raise RemoteProtocolError(f"record of {length} bytes, limit {MAX_PAYLOAD_BYTES}", peer=peer)
    if kind == BEAT and (packed or length or chunk or key != NO_KEY or sub != NO_KEY):
        raise RemoteProtocolError("heartbeat with content", peer=peer)
    return Header(kind, length, chunk, key, sub)


def slot_id(log: str, round_: int) -> bytes:
    """16 bytes that name (log, round) in headers."""
    return blake3(b"atoll/slot/1" + msgspec.msgpack.encode((log, round_))).digest(KEY_BYTES)


def partial_key(slot: bytes, plan_id: bytes) -> bytes:
    """16 bytes that name the round and the plan a partial sum was made for."""
    return slot[:HALF] + plan_id[:HALF]


def blob_key(name: bytes) -> bytes:
    """16 bytes that name a blob in headers."""
    return blake3(b"atoll/blob/1" + name).digest(KEY_BYTES)
