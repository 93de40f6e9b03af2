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
from typing import Annotated

import msgspec

from ...collectives.digest import digest_of, meaning_of, part_meaning
from ...collectives.errors import RemoteProtocolError, SecurityError
from ...collectives.foreign import quoted
from ...collectives.group import Contributor
from ...collectives.identifiers import PeerId, RunId
from ...collectives.seeded import MOST_PEERS
from ...security.btard import Bundle, Fault, verify_removals
from ...security.identity import verify as verify_for
from ...security.masking import Misdealt, verify_misdealt
from .proof import MAX_EVIDENCE, Missummed, Relabelled, Twice, Unfounded, Voice

DOMAIN = "atoll/run/1"
"""Of what members sign in a run: votes, proposals, statements."""
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
FAULTS = {
    Fault.EQUIVOCATION: "it has signed two messages for one slot",
    Fault.NONSENSE: "it has signed what is no message",
    Fault.REVEAL: "its share of the draw is not the one it committed to",
    Fault.WITHHELD: "it has withheld what it owes, as most of the others testify",
    Fault.RESIDUAL: "it has stated of its vector what is not so, as most of the others have found",
    Fault.AGGREGATE: (
        "its aggregate is not that of the vectors it was sent, as most of the others have found"
    ),
    Fault.GRADIENT: (
        "its vector is not what follows from its seed, as most of the others have computed"
    ),
    Fault.ACCUSATION: "it has accused a peer falsely, as most of the others have found",
}

MISSUMMED = "it has stated a sum that its inputs do not have"
UNFOUNDED = "it has stated a sum of what was not contributed"
RELABELLED = "it has proposed bytes as another result than they are"
MISDEALT = "it dealt shares of a mask that do not fit each other"

Verify = Callable[[PeerId, bytes, bytes], bool]


class BtardRemoval(msgspec.Struct, frozen=True, array_like=True, tag="btard"):
    """On what BTARD has removed a peer: the last of these; those before are against peers that were
    gone by then.
    """

    bundles: Annotated[tuple[Bundle, ...], msgspec.Meta(min_length=1, max_length=MOST_PEERS)]


_decoder = msgspec.msgpack.Decoder(
    Twice | Relabelled | Missummed | Unfounded | BtardRemoval | Misdealt
)
_meant = msgspec.msgpack.Decoder(
    tuple[
        str,
        int,
        bytes,
        tuple[Contributor, ...],
        tuple[tuple[int, int], ...],
        int,
        int,
        str,
        str,
    ]
)


def removal(bundles: Sequence[Bundle], bundle: Bundle) -> bytes:
    """The evidence of one removal, as it is kept and handed on; ``bundles``: what a peer has of the
    run, in order.
    """
    before = [
        each for each in bundles if each.context.roster[each.whom] not in bundle.context.roster
    ]
    return msgspec.msgpack.encode(BtardRemoval((*before, bundle)))


def accused(data: bytes) -> PeerId | None:
    """Whom ``data`` is about, which is not checked; None where that cannot be read."""
    try:
        found = _decoder.decode(data) if len(data) <= MAX_EVIDENCE else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if isinstance(found, BtardRemoval):
        last = found.bundles[-1]
        return last.context.roster[last.whom] if last.whom < len(last.context.roster) else None
    if isinstance(found, Misdealt):
        return found.roster[found.dealer] if found.dealer < len(found.roster) else None
    if isinstance(found, Missummed):
        return found.wrong.peer
    return None if found is None else found.peer


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

    ``peers``: of a run with BTARD, those its manifest names; ``lying``: how many may lie, and
    ``configurations``: of which members, as far as they are known."""
    if len(data) > MAX_EVIDENCE:
        raise RemoteProtocolError(f"evidence of {len(data)} bytes", peer=sender)
    try:
        found = _decoder.decode(data)
        if isinstance(found, BtardRemoval):
            return _check_removal(found.bundles, run, sender, peers)
        if isinstance(found, Misdealt):
            return verify_misdealt(found, run), MISDEALT
        if isinstance(found, Relabelled):
            return _check_label(found, run, verify, sender)
        if isinstance(found, Missummed):
            return _check_sum(found, run, verify, sender, lying, configurations)
        if isinstance(found, Unfounded):
            return _check_founded(found, run, verify, sender)
        one, other = (_parsed(payload) for payload in (found.one, found.other))
    except SecurityError as error:
        raise RemoteProtocolError(error.message, peer=sender) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed evidence: {quoted(error)}", peer=sender) from None
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


def _check_label(
    found: Relabelled, run: RunId, verify: Verify, sender: PeerId
) -> tuple[PeerId, str]:
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


def _check_sum(
    found: Missummed,
    run: RunId,
    verify: Verify,
    sender: PeerId,
    lying: int,
    configurations: Iterable[Collection[PeerId]],
) -> tuple[PeerId, str]:
    wrong, voices = found.wrong, {voice.peer: voice for voice in found.others}
    named = {wrong.peer, *voices}
    if not lying or len(voices) != len(found.others) or len(named) < lying + 2:
        raise RemoteProtocolError("evidence with too few voices", peer=sender)
    if not any(named <= set(each) for each in configurations):
        raise RemoteProtocolError("evidence with voices of no members", peer=sender)
    stated = _stated(wrong, found.index)
    others = {_stated(voice, found.index) for voice in found.others}
    if stated is None or len(others) > 1 or None in others:
        raise RemoteProtocolError("evidence of no one part", peer=sender)
    (other,) = others
    assert other is not None
    if other[1] != stated[1] or other[0] == stated[0]:
        raise RemoteProtocolError("evidence of sums that may both be so", peer=sender)
    from ...collectives.modes.byzantine.signed import (
        account_payload,  # loads what commands do not need
    )

    for voice in (wrong, *found.others):
        payload = account_payload(
            run, voice.peer, found.meaning, voice.parts, voice.inputs, voice.receipts
        )
        if not verify(voice.peer, payload, voice.signature):
            raise RemoteProtocolError(
                f"evidence that {voice.peer[-8:]} has not signed", peer=sender
            )
    return wrong.peer, MISSUMMED


def _stated(voice: Voice, index: int) -> tuple[bytes, tuple[bytes, ...]] | None:
    """Digest and inputs of a part."""
    pairs = zip(voice.parts, voice.inputs, strict=False)
    return next(((digest, inputs) for (at, digest), inputs in pairs if at == index), None)


def _check_founded(
    found: Unfounded, run: RunId, verify: Verify, sender: PeerId
) -> tuple[PeerId, str]:
    from ...collectives.modes.byzantine.signed import (
        account_payload,
        given_payload,
        receipts_digest,
    )

    log, round_, base, contributors, ranges, *_ = _meant.decode(found.preimage)
    peer, account, of = found.peer, found.account, meaning_of(found.preimage)
    at = [index for index, _ in found.parts].index(found.index)
    if found.index >= len(ranges):
        raise ValueError("a part that there is not")
    if not log.startswith(MAIN):
        raise RemoteProtocolError("evidence that is not of a log of this run", peer=sender)
    digest = receipts_digest(account.receipts)
    payload = account_payload(run, peer, of, found.parts, account.inputs, digest)
    if not verify(peer, payload, account.signature):
        raise RemoteProtocolError(f"evidence that {peer[-8:]} has not signed", peer=sender)
    rows, (first, stop) = (account.inputs, account.receipts), ranges[found.index]
    whole = all(
        len(each) == len(found.parts) and len(each[at]) == len(contributors) for each in rows
    )
    if whole and all(
        verify(
            c.member.peer, given_payload(run, log, round_, base, c.cid, first, stop, root), receipt
        )
        for c, root, receipt in zip(contributors, *(each[at] for each in rows), strict=True)
    ):
        raise RemoteProtocolError("evidence of a sum of what was contributed", peer=sender)
    return peer, UNFOUNDED


def _check_removal(
    bundles: Sequence[Bundle], run: RunId, sender: PeerId, peers: Sequence[PeerId]
) -> tuple[PeerId, str]:
    last = bundles[-1]
    try:
        verify_removals(run, peers, bundles, verify_for)
    except SecurityError as error:
        raise RemoteProtocolError(error.message, peer=sender) from None
    return last.context.roster[last.whom], f"{FAULTS[Fault(last.fault)]} (step {last.context.step})"


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
