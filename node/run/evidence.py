"""Proof that a peer lied, which needs nobody's word, and is checked offline, by anybody. Six
kinds:

*Twice*: two payloads for one slot, both under its signature. Each kind of signed payload is a
msgpack array that begins with its domain; `SLOTS` says how many of its elements name the slot, of
which an honest peer fills each once. A peer that works on a copy of its journal, an old backup,
say, fills one twice, too: that is no way to run a member. The entry before is part of a slot: a
peer that lost its disk, or was removed and let in again, may have voted under the same number in a
history that is no more. Only logs of a run have slots: what a member has said in an operation
whose votes are volatile, it does not know any more after a while, or after a restart.

*Relabelled*: an entry that a convener has signed as its proposal, and what the digest of one of its
parts was made of, which is not what the entry says. A digest binds bytes and what they are the
result of, and an honest convener makes the digests that it proposes itself.

*Missummed*: a sum of a part that a peer has signed, and another one of the same inputs that one
more member has signed than may lie. A sum follows from its inputs bit for bit, and one of those is
honest, if all were members of one configuration.

*Unfounded*: a sum of a part that a peer has signed, of inputs of which one is not what its
contributor has signed. An honest member states a sum once all contributors have signed its inputs,
and shows their signatures.

*Misdealt*: shares of a masking that do not give the secret that their dealer committed to
(`security.masking.misdealt`).

*Removed*: what BTARD removes a peer on (`security.btard.evidence`), in a run whose manifest names
its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any

import msgspec

from ...collectives.digest import digest_of, part_meaning
from ...collectives.errors import RemoteProtocolError, SecurityError
from ...collectives.foreign import PLAIN, quoted
from ...collectives.group import MAX_PEER_ID, Entry
from ...collectives.identifiers import PeerId, RunId
from .proof import MAX_EVIDENCE, Payload, Signature, Twice

MAIN = "main/"  # how the names of a run's logs begin (`session/actions.py`, `session/fragments.py`)
SLOTS = {
    "atoll/vote/2": 6,
    "atoll/contribution/1": 5,
    "atoll/given/1": 8,
    "atoll/propose/2": 6,
    "atoll/echo/2": 6,
}
"""By domain: vote, propose and echo = domain, run, log, round, hash of the entry before, ballot |
hash of the entry; contribution = domain, run, log, entry, cid | Merkle root; given = domain, run,
log, round, hash of the entry before, cid, first and last chunk | Merkle root."""
WHAT = {
    "atoll/vote/2": "it has voted for two values of one ballot",
    "atoll/contribution/1": "it has signed two contributions under one id",
    "atoll/given/1": "it has contributed two things under one id",
    "atoll/propose/2": "it has proposed two values in one ballot",
    "atoll/echo/2": "it has echoed two values of one ballot",
}
RELABELLED = "it has proposed bytes as another result than they are"

Verify = Callable[[PeerId, bytes, bytes], bool]


class Relabelled(msgspec.Struct, frozen=True, array_like=True, tag="relabelled"):
    """What ``peer`` has signed as its proposal, the entry of which that has the hash, and the
    Merkle root and meaning under the digest of the part ``index``."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    payload: Payload
    signature: Signature
    entry: Entry
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    root: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    meaning: Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)]


def relabelled(
    peer: PeerId,
    proposal: tuple[bytes, bytes],
    entry: Entry,
    index: int,
    root: bytes,
    meaning: bytes,
) -> bytes:
    """Of what a convener has proposed (payload, signature), as it is kept and handed on; b"" where
    that is longer than evidence may be.
    """
    found = Relabelled(peer, *proposal, entry, index, root, meaning)
    data = msgspec.msgpack.encode(found)
    return data if len(data) <= MAX_EVIDENCE else b""


@dataclass(frozen=True, slots=True)
class EvidenceClaim:
    """What is known where evidence is checked. ``peers``: of a run with BTARD, those its manifest
    names; ``lying``: how many may lie, and ``configurations``: of which members, as far as they are
    known.
    """

    run: RunId
    verify: Verify
    sender: PeerId
    peers: Sequence[PeerId] = ()
    lying: int = 0
    configurations: Iterable[Collection[PeerId]] = ()


@dataclass(frozen=True, slots=True)
class EvidenceKind:
    """One kind of evidence: its type; whom a value of it accuses, which is not checked, None where
    it names nobody; and its check, as `check`.
    """

    type: type[msgspec.Struct]
    accused: Callable[[Any], PeerId | None]
    check: Callable[[Any, EvidenceClaim], tuple[PeerId, str]]


@cache
def _known() -> tuple[dict[type[msgspec.Struct], EvidenceKind], msgspec.msgpack.Decoder[Any]]:
    """The kinds of evidence, and what decodes them: the kernel's two, and those of the modes that
    are registered, which are loaded once somebody shows evidence.
    """
    from .registry import MODES

    kinds = [
        EvidenceKind(Twice, lambda found: found.peer, _check_slot),
        EvidenceKind(Relabelled, lambda found: found.peer, _check_label),
        *(MODES.find("byzantine.evidence", "KINDS") or ()),
        *(MODES.find("secure.evidence", "KINDS") or ()),
        *(MODES.find("btard.evidence", "KINDS") or ()),
    ]
    union = reduce(or_, (kind.type for kind in kinds))
    return {kind.type: kind for kind in kinds}, msgspec.msgpack.Decoder(union)


def accused(data: bytes) -> PeerId | None:
    """Whom ``data`` is about, which is not checked; None where that cannot be read."""
    kinds, decoder = _known()
    try:
        found = decoder.decode(data) if len(data) <= MAX_EVIDENCE else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return None if found is None else kinds[type(found)].accused(found)


def check(
    data: bytes,
    run: RunId,
    verify: Verify,
    sender: PeerId,
    peers: Sequence[PeerId] = (),
    lying: int = 0,
    configurations: Iterable[Collection[PeerId]] = (),
) -> tuple[PeerId, str]:
    """Against whom ``data`` is proof, and of what in words. Raises RemoteProtocolError, naming the
    sender, where it proves nothing of this run.

    The others: as of `EvidenceClaim`."""
    if len(data) > MAX_EVIDENCE:
        raise RemoteProtocolError(f"evidence of {len(data)} bytes", peer=sender)
    kinds, decoder = _known()
    try:
        found = decoder.decode(data)
        claim = EvidenceClaim(run, verify, sender, peers, lying, configurations)
        return kinds[type(found)].check(found, claim)
    except SecurityError as error:
        raise RemoteProtocolError(error.message, peer=sender) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed evidence: {quoted(error)}", peer=sender) from None


def _check_slot(found: Twice, claim: EvidenceClaim) -> tuple[PeerId, str]:
    run, verify, sender = claim.run, claim.verify, claim.sender
    one, other = (_parsed(payload) for payload in (found.one, found.other))
    length = SLOTS[str(one[0])]
    of_run = one[1] == run and str(one[2]).startswith(MAIN)
    if found.one >= found.other or one[:length] != other[:length] or not of_run:
        raise RemoteProtocolError("evidence that is not of one slot of this run", peer=sender)
    for payload, signature in (
        (found.one, found.one_signature),
        (found.other, found.other_signature),
    ):
        if not verify(found.peer, payload, signature):
            raise RemoteProtocolError(
                f"evidence that {found.peer[-8:]} has not signed", peer=sender
            )
    return found.peer, WHAT[str(one[0])]


def _check_label(found: Relabelled, claim: EvidenceClaim) -> tuple[PeerId, str]:
    run, verify, sender = claim.run, claim.verify, claim.sender
    entry, (domain, of_run, log, round_, base, _, digest) = found.entry, _parsed(found.payload)
    slot = (domain, of_run, log, round_, base, digest)
    same = ("atoll/propose/2", run, entry.log, entry.round, entry.base, entry.hash())
    if slot != same or not entry.log.startswith(MAIN) or found.index >= len(entry.parts):
        raise RemoteProtocolError("evidence that is not of a proposal of this run", peer=sender)
    if len(entry.parts) != len(entry.part_digests) or (
        digest_of(found.root, found.meaning) != entry.part_digests[found.index]
    ):
        raise RemoteProtocolError("evidence with what the digest is not made of", peer=sender)
    if found.meaning == part_meaning(entry, entry.parts[found.index]):
        raise RemoteProtocolError("evidence of bytes that are what the entry says", peer=sender)
    if not verify(found.peer, found.payload, found.signature):
        raise RemoteProtocolError(f"evidence that {found.peer[-8:]} has not signed", peer=sender)
    return found.peer, RELABELLED


def _parsed(payload: bytes) -> list[object]:
    fields = msgspec.msgpack.decode(payload, type=list[object])
    if not fields or not all(isinstance(field, str | int | bytes) for field in fields):
        raise ValueError("not a payload")
    if (
        len(fields) != SLOTS.get(str(fields[0]), -1) + 1
        or msgspec.msgpack.encode(fields) != payload
    ):
        raise ValueError("not a payload of a slot")
    return fields
