"""Partial sums that are checked: two members of a site add up the same and give the owner an
account of it, hash by hash.

An account of a chunk is the hash of what came of it and that of each thing that was added up, in
their order: 32 bytes each. Additions have a fixed order and the same bits on every machine, so two
honest accounts differ only where somebody sent the two different things. The owner uses a partial
sum if both accounts of it are the same and it hashes to what they say. If not, the round is planned
again without partial sums. Then every contribution comes to the owner itself, which adds them up as
the two should have, and so finds whose account is not true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..codecs.codec import Codec, EncodedChunk
from ..digest import chunk_hash
from ..identifiers import HASH_BYTES, PeerId
from ..messages import Disputed
from ..terms import CheckedSum
from .routes import Job

if TYPE_CHECKING:
    from .slot import RoundSlot


def account_of(result: EncodedChunk, terms: Sequence[EncodedChunk]) -> bytes:
    """What a member says of a chunk that it added up."""
    return b"".join(chunk_hash(wire.data) for wire in (result, *terms))


@dataclass(frozen=True, slots=True)
class Dispute:
    """A chunk of a partial sum that was not used. ``result``: the hash of what its maker sent;
    ``accounts``: its own, and the witness's.
    """

    plan_id: bytes
    chunk: int
    check: CheckedSum
    result: bytes
    accounts: tuple[bytes, bytes]
    wrong: tuple[PeerId, ...] = ()

    @property
    def report(self) -> Disputed:
        return Disputed(
            self.plan_id, self.chunk, self.check.partial.peer, self.check.witness, self.wrong
        )

    def settled(
        self, held: Mapping[bytes, Mapping[int, EncodedChunk]], codec: Codec, out: EncodedChunk
    ) -> Dispute | None:
        """Who is wrong, where all that was to be added up is here, by cid; else None. ``out``: room
        for the sum.

        Whose account has the right terms and another result is wrong, and who sent what its own
        account does not say. Who says that it was given other terms is not: it may be so.
        """
        factors = self.check.of.factors
        terms = [held.get(term.cid, {}).get(self.chunk) for term in self.check.of.terms]
        wires = [wire for wire in terms if wire is not None]
        if len(wires) < len(terms) or not codec.weighted_mean(
            wires, factors.multipliers, factors.divisor, out
        ):
            return None
        true = account_of(out, wires)
        wrong = [
            term.peer
            for term, account in zip(self.check.accounts, self.accounts, strict=True)
            if account != true
            and (len(account) != len(true) or account[HASH_BYTES:] == true[HASH_BYTES:])
        ]
        if self.result != self.accounts[0][:HASH_BYTES]:
            wrong.append(self.check.partial.peer)
        return replace(self, wrong=tuple(dict.fromkeys(wrong)))


def disagreement(plan_id: bytes, here: RoundSlot, job: Job, chunk: int) -> Dispute | None:
    """The first of the partial sums to a chunk of which accounts or bytes differ, if any."""
    for check in job.checks:
        result = chunk_hash(here.parts_of(check.partial.peer, check.partial.cid)[chunk].data)
        one, other = (
            here.accounts.of(account.peer, account.cid)[chunk] for account in check.accounts
        )
        if one != other or one[:HASH_BYTES] != result:
            return Dispute(plan_id, chunk, check, result, (one, other))
    return None
