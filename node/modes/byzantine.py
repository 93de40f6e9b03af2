"""Proofs that members lie, where they may: how a run's log makes them (`LogProofs`), and how those
of false sums are checked, which `run.evidence` calls *missummed* and *unfounded*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from ...collectives import messages as m
from ...collectives.digest import digest_of, meaning_of, merkle_root, part_meaning
from ...collectives.errors import RemoteProtocolError
from ...collectives.foreign import PLAIN
from ...collectives.group import MAX_PEER_ID, MAX_STAR, Contributor, Entry, Plan
from ...collectives.identifiers import PeerId
from ...collectives.messages import Account, Inputs, PartDigests
from ...collectives.modes.byzantine.signed import account_payload, given_payload, receipts_digest
from ...collectives.round import faults
from ..run.evidence import MAIN, EvidenceClaim, EvidenceKind, relabelled
from ..run.proof import MAX_EVIDENCE, Signature, twice
from ..session import events as ev
from ..session.serving import result_hashes

if TYPE_CHECKING:
    from ..session.session import Session

MISSUMMED = "it has stated a sum that its inputs do not have"
UNFOUNDED = "it has stated a sum of what was not contributed"


class Voice(msgspec.Struct, frozen=True, array_like=True):
    """What a member has stated of parts: their digests, and of its account the inputs, the digest
    of its receipts (`byzantine.signed.receipts_digest`), and its signature."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    parts: PartDigests
    inputs: Inputs
    receipts: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Signature


class Missummed(msgspec.Struct, frozen=True, array_like=True, tag="missummed"):
    """What ``wrong`` has stated of the part ``index``, which is of what ``meaning`` stands for, and
    what ``others`` have, who are one more than may lie."""

    meaning: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    wrong: Voice
    others: Annotated[tuple[Voice, ...], msgspec.Meta(min_length=1, max_length=MAX_STAR)]


class Unfounded(msgspec.Struct, frozen=True, array_like=True, tag="unfounded"):
    """What ``peer`` has stated of ``parts``, and how it came to it, of which the part ``index``
    has an input that its contributor has not signed; ``preimage``: what the meaning of all that is
    the digest of (`digest.meaning_preimage`)."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID, pattern=PLAIN)]
    parts: PartDigests
    account: Account
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    preimage: Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE)]


def missummed(
    meaning: bytes, part: int, voices: Iterable[tuple[PeerId, PartDigests, Inputs, bytes, bytes]]
) -> bytes:
    """Of what members have stated of a part, first the one who is wrong, as it is kept and handed
    on; b"" where that is longer than evidence may be.
    """
    wrong, *others = (Voice(*each) for each in voices)
    data = msgspec.msgpack.encode(Missummed(meaning, part, wrong, tuple(others)))
    return data if len(data) <= MAX_EVIDENCE else b""


def unfounded(
    peer: PeerId, parts: PartDigests, account: Account, preimage: bytes, index: int
) -> bytes:
    """Of what a member has stated, as it is kept and handed on; b"" where that is longer than
    evidence may be.
    """
    found = Unfounded(peer, parts, account, index, preimage)
    data = msgspec.msgpack.encode(found)
    return data if len(data) <= MAX_EVIDENCE else b""


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


class LogProofs(faults.Proofs):
    """Of the run's log: each becomes evidence that any member can check."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def caught(self, peer: PeerId, one: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> None:
        """A member has proved to lie."""
        self.session.ports.emit(ev.Equivocated(peer, twice(peer, one, other).encode()))

    def relabelled(
        self, peer: PeerId, proposal: tuple[bytes, bytes], entry: Entry, plan: Plan, index: int
    ) -> None:
        """A member has proposed an entry over bytes that are another result: a preimage of the
        digest proves it.
        """
        data = next(
            (
                data
                for of, data in self.session.actions.results.items()
                if entry.part_digests[index] in of
            ),
            None,
        )
        if data is None:
            return
        whole, digest = data, entry.part_digests[index]

        def work() -> bytes:
            hashes = result_hashes(plan, whole)
            for part in plan.parts:
                root = merkle_root(hashes[part.first : part.stop])
                if digest_of(root, of := part_meaning(plan, part)) == digest:
                    return relabelled(peer, proposal, entry, index, root, of)
            return b""

        def done(now: float, evidence: bytes) -> None:
            if evidence:
                self.session.ports.emit(ev.Equivocated(peer, evidence))

        self.session.ports.offload(work, done)

    def disputed(self, peers: Sequence[PeerId]) -> None:
        """Members state different sums of a part."""
        self.session.ports.emit(ev.SumsDiffer(tuple(peers)))

    def refuted(self, meaning: bytes, part: int, voices: Sequence[faults.Voice]) -> None:
        """The first has stated a sum that the others prove to be wrong."""
        evidence = missummed(meaning, part, voices)
        if evidence:
            self.session.ports.emit(ev.Equivocated(voices[0][0], evidence))

    def unfounded(
        self,
        peer: PeerId,
        parts: m.PartDigests,
        account: m.Account,
        preimage: bytes,
        index: int,
    ) -> None:
        """A member has stated a sum of inputs that were not contributed."""
        evidence = unfounded(peer, parts, account, preimage, index)
        if evidence:
            self.session.ports.emit(ev.Equivocated(peer, evidence))
