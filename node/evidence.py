"""Proof that a peer lied, which needs nobody's word: two payloads for one slot, both under its signature. Checked offline, by anybody.

Each kind of signed payload is a msgpack array that begins with its domain; `SLOTS` says how many of its elements name the slot, of which an honest
peer fills each once. A peer that works on a copy of its journal, an old backup, say, fills one twice, too: that is no way to run a member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from ..collectives.errors import RemoteProtocolError
from ..collectives.group import MAX_PEER_ID
from ..collectives.identifiers import PeerId, RunId

MAX_PAYLOAD, MAX_EVIDENCE = 2048, 8192
SLOTS = {"atoll/vote/1": 5, "atoll/contribution/1": 5, "atoll/propose/1": 5, "atoll/echo/1": 5}
"""By domain: vote, propose and echo = domain, run, log, round, ballot | hash of the entry; contribution = domain, run, log, entry, cid | Merkle
root."""
WHAT = {
    "atoll/vote/1": "it has voted for two values of one ballot",
    "atoll/contribution/1": "it has signed two contributions under one id",
    "atoll/propose/1": "it has proposed two values in one ballot",
    "atoll/echo/1": "it has echoed two values of one ballot",
}

Verify = Callable[[PeerId, bytes, bytes], bool]
Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class Twice(msgspec.Struct, frozen=True, array_like=True, tag="twice"):
    """Two payloads of ``peer``, in ascending order, and its signatures under them."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID)]
    one: Payload
    one_signature: Signature
    other: Payload
    other_signature: Signature

    def encode(self) -> bytes:
        """As it is kept and handed on."""
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(Twice)


def twice(peer: PeerId, first: tuple[bytes, bytes], second: tuple[bytes, bytes]) -> Twice:
    """Of two (payload, signature)."""
    low, high = sorted((first, second))
    return Twice(peer, *low, *high)


def check(data: bytes, run: RunId, verify: Verify, sender: PeerId) -> tuple[Twice, str]:
    """The proof in ``data``, and what it proves in words. Raises RemoteProtocolError, naming the sender, where it proves nothing of this run."""
    if len(data) > MAX_EVIDENCE:
        raise RemoteProtocolError(f"evidence of {len(data)} bytes", peer=sender)
    try:
        found = _decoder.decode(data)
        one, other = (_parsed(payload) for payload in (found.one, found.other))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed evidence: {error}", peer=sender) from None
    length = SLOTS[str(one[0])]
    if found.one >= found.other or one[:length] != other[:length] or one[1] != run:
        raise RemoteProtocolError("evidence that is not of one slot of this run", peer=sender)
    for payload, signature in ((found.one, found.one_signature), (found.other, found.other_signature)):
        if not verify(found.peer, payload, signature):
            raise RemoteProtocolError(f"evidence that {found.peer[-8:]} has not signed", peer=sender)
    return found, WHAT[str(one[0])]


def _parsed(payload: bytes) -> list[object]:
    fields = msgspec.msgpack.decode(payload, type=list[object])
    if not fields or not all(isinstance(field, str | int | bytes) for field in fields):
        raise ValueError("not a payload")
    if len(fields) != SLOTS.get(str(fields[0]), -1) + 1 or msgspec.msgpack.encode(fields) != payload:
        raise ValueError("not a payload of a slot")
    return fields
