"""The messages of circuit relay v2 (libp2p specification "relay/circuit-v2"): what a relay is
asked, and what it asks in turn.

HOP is spoken to a relay: RESERVE a place there, or CONNECT me to somebody who has one. STOP is
spoken by the relay to that somebody. Either is answered by a STATUS; after a CONNECT's the stream
is the connection's bytes.

py-libp2p 0.8.1 has this protocol, too. What is wrong with it, so that we speak it ourselves: a
relay's circuits are kept by peer, so that the end of one closes another of the same peer
(relay/circuit_v2/protocol.py:672, 722, 925); the one who is called takes its own id for the relay's
(:470); addresses of a reservation are dropped (transport.py:868); connections are held by a service
of their own. `tests/unit/test_upstream.py` tells when the first is mended.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....collectives.errors import RemoteProtocolError
from ....collectives.foreign import quoted
from ....collectives.identifiers import PeerId
from ....security.identity import decode_base58, encode_base58, is_peer_id
from ..transport.packed import pack, unpack
from ..transport.peer_stream import PeerStream
from . import protobuf
from .protobuf import Fields, number, octets

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
HOP_RESERVE, HOP_CONNECT, HOP_STATUS = 0, 1, 2
STOP_CONNECT, STOP_STATUS = 0, 1
OK, RESERVATION_REFUSED, LIMIT_EXCEEDED, PERMISSION_DENIED, CONNECTION_FAILED, NO_RESERVATION = (
    100,
    200,
    201,
    202,
    203,
    204,
)
UNEXPECTED = 401
WORDS = {
    RESERVATION_REFUSED: "refuses the reservation",
    LIMIT_EXCEEDED: "is full",
    PERMISSION_DENIED: "relays only for peers of runs it knows",
    CONNECTION_FAILED: "cannot reach the peer",
    NO_RESERVATION: "holds no reservation of the peer",
}
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """``expires_s``: seconds since 1970; ``addresses``: of the relay, by its own account."""

    expires_s: int
    addresses: tuple[str, ...]


def peer_field(peer: PeerId) -> bytes:
    """The message Peer, without addresses."""
    return protobuf.encode({1: decode_base58(peer)})


def peer_in(fields: Fields, sender: PeerId) -> PeerId:
    """Whom field 2 of a message names. Raises RemoteProtocolError."""
    try:
        raw = octets(protobuf.decode(octets(fields, 2)), 1)
        peer = encode_base58(raw) if len(raw) <= 64 else ""
    except ValueError as error:
        raise RemoteProtocolError(f"malformed peer: {quoted(error)}", peer=sender) from None
    if not is_peer_id(peer):
        raise RemoteProtocolError("a message that names no peer", peer=sender)
    return PeerId(peer)


def kind_of(fields: Fields, sender: PeerId) -> int:
    """The type of a message. Raises RemoteProtocolError."""
    try:
        return number(fields, 1)
    except ValueError as error:
        raise RemoteProtocolError(quoted(error), peer=sender) from None


def status_in(fields: Fields, field: int) -> int:
    """The status that an answer gives; 0 when it gives none."""
    try:
        return number(fields, field)
    except ValueError:
        return 0


def reservation_fields(expires_s: int, addresses: list[str]) -> bytes:
    """The message Reservation."""
    return protobuf.encode({1: expires_s, 2: pack(addresses)})


def reservation_in(fields: Fields, sender: PeerId) -> Reservation:
    """What field 3 of an answer grants. Raises RemoteProtocolError."""
    try:
        inner = protobuf.decode(octets(fields, 3))
        return Reservation(number(inner, 1), unpack(inner.get(2, [])))
    except ValueError as error:
        raise RemoteProtocolError(f"malformed reservation: {quoted(error)}", peer=sender) from None


async def answer(
    stream: PeerStream,
    status: int,
    *,
    hop: bool,
    more: dict[int, protobuf.Value | list[protobuf.Value]] | None = None,
) -> None:
    """Send a STATUS. Raises PeerLostError."""
    fields: dict[int, protobuf.Value | list[protobuf.Value]] = {
        1: HOP_STATUS if hop else STOP_STATUS,
        **(more or {}),
    }
    await protobuf.send(stream, fields | {5 if hop else 4: status})
