"""Evidence of false sums, where members may lie: what `run.evidence` calls *missummed* and
*unfounded*.
"""

from __future__ import annotations

import msgspec

from ...collectives.digest import meaning_of
from ...collectives.errors import RemoteProtocolError
from ...collectives.group import Contributor
from ...collectives.identifiers import PeerId
from ...collectives.modes.byzantine.signed import account_payload, given_payload, receipts_digest
from ..run.evidence import MAIN, EvidenceClaim, EvidenceKind
from ..run.proof import Missummed, Unfounded, Voice

MISSUMMED = "it has stated a sum that its inputs do not have"
UNFOUNDED = "it has stated a sum of what was not contributed"

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


def _check_sum(found: Missummed, claim: EvidenceClaim) -> tuple[PeerId, str]:
    run, verify, sender = claim.run, claim.verify, claim.sender
    lying, configurations = claim.lying, claim.configurations
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


def _check_founded(found: Unfounded, claim: EvidenceClaim) -> tuple[PeerId, str]:
    run, verify, sender = claim.run, claim.verify, claim.sender
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


KINDS = (
    EvidenceKind(Missummed, lambda found: found.wrong.peer, _check_sum),
    EvidenceKind(Unfounded, lambda found: found.peer, _check_founded),
)
