"""Signed membership records and the messages that carry them: typed, bounded, nothing with
behaviour.

A record says where a member of a run is and which round is open there. It is a hint; it never
counts in a quorum (that is the configuration in the log).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import structs

from ...collectives.errors import BadSignatureError, RemoteProtocolError
from ...collectives.foreign import PLAIN, quoted
from ...collectives.group import MAX_CERTIFICATE, MAX_MEMBERS, Count, Hash, Peer
from ...collectives.identifiers import PeerId, RunId
from ..net.transport.dialable import MAX_ADDRESS_CHARS, MAX_ADDRESSES, usable

MAX_RECORD_BYTES = 4096
MAX_RECORDS = MAX_MEMBERS + 1024  # members of one run a node keeps in mind, and who comes
RECORDS_PER_MESSAGE = 64
SHORT_BYTES, LINE_BYTES = 8, 16
LIFE_BYTES = 8
FIRST_BATCH_BYTES = 16
MAX_MESSAGE_BYTES = RECORDS_PER_MESSAGE * (MAX_RECORD_BYTES + 128)
DOMAIN = b"atoll/membership/1\0"

Sign = Callable[[bytes], bytes]
Verify = Callable[[PeerId, bytes, bytes], bool]
"""(peer, message, signature) -> whether the peer signed the message."""

Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS, pattern=PLAIN)]


FirstBatch = tuple[Count, Annotated[bytes, msgspec.Meta(max_length=FIRST_BATCH_BYTES)]]
"""Committed rounds before a round, and the digest of the first batch that a script read in it."""
NAME_BYTES = 8
MOST_PARTNERS = 3 * math.isqrt(MAX_MEMBERS) + 3  # of a member that stands in two rows
MOST_BYTES = MOST_PARTNERS // 8 + 1


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of itself: where others can dial it, without its peer id, and its open
    round (0: no state yet).

    ``life``: a nonce of its process. ``beside``: that of another process that spoke under the same
    key. Where each of two names the other, both have lived since both began: ``doubled``.
    ``certificate``: by which it came; nobody believes one who is no member without.
    ``first_batch``: which data its script read first in a round (`same_order`). ``spent``: its
    signature that it may spend no more of its privacy in this run. Of the last two
    those are left out of the bytes, from the end, that say nothing.
    """

    run: Annotated[str, msgspec.Meta(max_length=64, pattern=PLAIN)]
    peer: Peer
    sequence: Count
    expires_unix_ms: Count
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()
    round: Count = 0
    life: Annotated[bytes, msgspec.Meta(max_length=LIFE_BYTES)] = b""
    beside: Annotated[bytes, msgspec.Meta(max_length=LIFE_BYTES)] = b""
    doubled: bool = False
    certificate: Annotated[bytes, msgspec.Meta(max_length=MAX_CERTIFICATE)] = b""
    first_batch: FirstBatch | None = None
    spent: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class SignedRecord(msgspec.Struct, frozen=True, array_like=True):
    """The encoded record and its member's signature over DOMAIN + record."""

    record: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]

    def hash(self) -> bytes:
        """blake3 of record and signature."""
        return blake3(self.signature + self.record).digest()


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """I live. ``answer`` asks for a beat in return from one that does not watch me."""

    answer: bool


class HeardBeat(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    """A beat in a large run: I live, and have heard those of my partners lately whose bit is set
    (`PartnerMesh.bits`, the lowest first), in the mesh of this name.
    """

    mesh: Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    bits: Annotated[bytes, msgspec.Meta(max_length=MOST_BYTES)]


Nonce = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Do you hear ``target``? Ask it for me. ``nonce``: nobody could know it before."""

    target: Peer
    nonce: Nonce


class ProbePing(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """From a helper to the target: answer me, ``asker`` does not hear you."""

    asker: Peer
    nonce: Nonce


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """From the target to the helper, which passes it on to ``asker``: the application of ``target``
    answered. It has signed `alive_payload`: a helper cannot keep a dead one alive by its word.
    """

    target: Peer
    asker: Peer
    nonce: Nonce
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]


class TableHash(msgspec.Struct, frozen=True, array_like=True, tag="hash"):
    """The hash of the sender's table: nothing to do when it is also the receiver's."""

    hash: Hash


class Digest(msgspec.Struct, frozen=True, array_like=True, tag="digest"):
    """All the sender knows, a line of 16 bytes each (`line`). The receiver answers with what is
    newer here and asks for what is newer there.
    """

    lines: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORDS * LINE_BYTES)]


class Records(msgspec.Struct, frozen=True, array_like=True, tag="records"):
    """Signed records, and the peers (`short`) whose records the sender would like in return."""

    records: Annotated[tuple[SignedRecord, ...], msgspec.Meta(max_length=RECORDS_PER_MESSAGE)]
    wanted: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORDS * SHORT_BYTES)] = b""


Message = Beat | HeardBeat | Probe | ProbePing | Alive | TableHash | Digest | Records

_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message)
_record_decoder = msgspec.msgpack.Decoder(Record)


def encode(message: Message) -> bytes:
    """Wire bytes of a membership message."""
    return _encoder.encode(message)


def decode(data: bytes, peer: PeerId) -> Message:
    """Validated message from a peer's bytes. Raises RemoteProtocolError naming the peer."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"membership message of {len(data)} bytes, limit {MAX_MESSAGE_BYTES}", peer=peer
        )
    try:
        return _message_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed membership message: {quoted(error)}", peer=peer
        ) from None


@lru_cache(maxsize=4 * MAX_RECORDS)
def short(peer: PeerId) -> bytes:
    """What stands for a peer in digests, where its name would be most of the bytes. Two that share
    one are a nuisance to themselves only.
    """
    return blake3(peer.encode()).digest(SHORT_BYTES)


def alive_payload(run: RunId, alive: Alive) -> bytes:
    """The bytes under a target's signature."""
    said = (alive.target, alive.asker, alive.nonce)
    return _encoder.encode(("atoll/alive/1", run, *said))


def order(sequence: int, hash_: bytes) -> bytes:
    """8 bytes that compare like (sequence, first byte of the hash): of two records of one peer the
    larger is the newer.
    """
    return sequence.to_bytes(7, "big") + hash_[:1]


def line(record: Record, hash_: bytes) -> bytes:
    """What a digest says of a record."""
    return short(record.peer) + order(record.sequence, hash_)


def split(data: bytes, size: int, peer: PeerId) -> list[bytes]:
    """``data`` of ``peer`` in pieces of ``size`` bytes. Raises RemoteProtocolError."""
    if len(data) % size:
        raise RemoteProtocolError(f"{len(data)} bytes are not pieces of {size}", peer=peer)
    return [data[start : start + size] for start in range(0, len(data), size)]


def sign_record(record: Record, sign: Sign) -> SignedRecord:
    fields = structs.astuple(record)
    said = 0 if record.spent else 1 if record.first_batch is not None else 2
    data = _encoder.encode(fields[: len(fields) - said])
    return SignedRecord(data, sign(DOMAIN + data))


_signed_decoder = msgspec.msgpack.Decoder(SignedRecord)


def pack(signed: SignedRecord) -> bytes:
    """A signed record by itself, for a greeting."""
    return _encoder.encode(signed)


def unpack(data: bytes, sender: PeerId) -> SignedRecord:
    """What `pack` made, not opened yet. Raises RemoteProtocolError naming the sender."""
    try:
        return _signed_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed membership record: {quoted(error)}", peer=sender
        ) from None


def open_record(signed: SignedRecord, sender: PeerId) -> Record:
    """The record inside, validated, *not* verified. Raises RemoteProtocolError with its sender."""
    try:
        return _record_decoder.decode(signed.record)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed membership record: {quoted(error)}", peer=sender
        ) from None


def verify_record(signed: SignedRecord, record: Record, run: RunId, verify: Verify) -> None:
    """Raises BadSignatureError when the record is of another run or not signed by the peer it
    names, RemoteProtocolError when it names an address that nobody could dial."""
    if record.run != run:
        raise BadSignatureError(
            f"membership record of run {record.run!r}, not {run!r}", peer=record.peer
        )
    if not verify(record.peer, DOMAIN + signed.record, signed.signature):
        raise BadSignatureError(
            "membership record is not signed by the peer it names", peer=record.peer
        )
    if usable(record.addresses) != record.addresses:
        raise RemoteProtocolError("membership record holds unusable addresses", peer=record.peer)
