"""What members sign where some may lie. Pure functions."""

from __future__ import annotations

from typing import Literal

import msgspec
from blake3 import blake3

from ... import messages as m
from ...group import Member
from ...identifiers import PeerId
from ...round.certificate import vote_payload

Kind = Literal["propose", "echo", "vote"]


def slot_payload(
    kind: Kind, run: str, log: str, round_: int, base: bytes, ballot: int, entry_hash: bytes
) -> bytes:
    """The bytes under the signature of what a member says once in a ballot: a proposal, an echo, a
    vote. Two of one slot prove that it lies.
    """
    if kind == "vote":
        return vote_payload(run, log, round_, base, ballot, entry_hash)
    return msgspec.msgpack.encode((f"atoll/{kind}/2", run, log, round_, base, ballot, entry_hash))


def pledge_payload(
    run: str, log: str, round_: int, base: bytes, ballot: int, accepted: int, entry_hash: bytes
) -> bytes:
    """The bytes under the signature of a pledge for ``ballot``: what was accepted last, in ballot
    ``accepted`` (-1: nothing).
    """
    return msgspec.msgpack.encode(
        ("atoll/pledge/2", run, log, round_, base, ballot, accepted, entry_hash)
    )


def reduced_payload(run: str, who: PeerId, meaning: bytes, parts: m.PartDigests) -> bytes:
    """The bytes under the signature of an owner's statement: its parts of a result, by index, which
    is of what ``meaning`` stands for.
    """
    return msgspec.msgpack.encode(("atoll/reduced/1", run, who, meaning, parts))


def given_payload(
    run: str, log: str, round_: int, base: bytes, cid: bytes, first: int, stop: int, root: bytes
) -> bytes:
    """The bytes under the signature of what a member contributes to the chunks [first, stop): their
    Merkle root. Two of one contribution and the same chunks prove that it lies.
    """
    return msgspec.msgpack.encode(("atoll/given/1", run, log, round_, base, cid, first, stop, root))


def receipts_digest(receipts: m.Receipts) -> bytes:
    """What an account's signature binds of its receipts: 32 bytes."""
    return blake3(msgspec.msgpack.encode(receipts)).digest()


def account_payload(
    run: str,
    who: PeerId,
    meaning: bytes,
    parts: m.PartDigests,
    inputs: m.Inputs,
    receipts: bytes,
) -> bytes:
    """The bytes under the signature of an account of what was stated so; ``receipts``: their
    digest."""
    return msgspec.msgpack.encode(("atoll/account/2", run, who, meaning, parts, inputs, receipts))


def claim_payload(run: str, log: str, round_: int, who: Member, claim: m.Claim) -> bytes:
    """The bytes under a claim's signature."""
    return msgspec.msgpack.encode(
        ("atoll/claim/2", run, log, round_, who, msgspec.structs.replace(claim, signature=b""))
    )
