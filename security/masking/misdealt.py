"""Proof that a member dealt shares that do not give the secret it committed to: its own two signed
messages, and shares that it promised in them.

Of an honest member any ``threshold`` shares give the secret back, so nobody can prove it of one.
The shares are those that were revealed to unmask a sum: the proof tells no more than all members of
the masking know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from ...collectives.errors import AtollError, SecurityError
from ...collectives.foreign import PLAIN
from ...collectives.identifiers import PeerId, RunId
from .binding import MOST_MEMBERS, Binding
from .keys import public_of
from .messages import Deal, Keys, Number, Share, check, share_hash
from .shamir import join, weights_of

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[PeerId, msgspec.Meta(min_length=1, max_length=128, pattern=PLAIN)]


class Misdealt(msgspec.Struct, frozen=True, array_like=True, tag="misdealt"):
    """``dealer``: its number in the roster; ``pairs``: whether the shares are of its pair key, else
    of its seed. ``shares``: by the number of whom each was dealt to."""

    run: Annotated[RunId, msgspec.Meta(max_length=64, pattern=PLAIN)]
    round: Count
    attempt: Count
    roster: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_MEMBERS)]
    threshold: Count
    numel: Count
    bits: Literal[32, 64]
    dealer: Number
    keys: Keys
    deal: Deal
    pairs: bool
    shares: Annotated[tuple[tuple[Number, Share], ...], msgspec.Meta(max_length=MOST_MEMBERS)]


def misdealt(
    binding: Binding,
    dealer: PeerId,
    keys: Keys,
    deal: Deal,
    pairs: bool,
    shares: Mapping[int, bytes],
) -> Misdealt:
    """The proof; ``shares`` by member number."""
    return Misdealt(
        binding.run,
        binding.round,
        binding.attempt,
        binding.roster,
        binding.threshold,
        binding.numel,
        binding.bits,
        binding.number(dealer),
        keys,
        deal,
        pairs,
        tuple(sorted(shares.items())),
    )


def secret_of(keys: Keys, pairs: bool, shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """The secret of ``threshold`` shares by member number; None: not the committed one."""
    numbers = sorted(shares)[:threshold]
    places = [number + 1 for number in numbers]
    try:
        secret = join({number + 1: shares[number] for number in numbers}, weights_of(places))
    except ValueError:
        return None
    good = public_of(secret) == keys.pair if pairs else share_hash(secret) == keys.seed
    return secret if good else None


def verify_misdealt(proof: Misdealt, run: RunId) -> PeerId:
    """Whom it convicts. Raises SecurityError where it proves nothing of this run."""
    try:
        binding = Binding(
            proof.run,
            proof.round,
            proof.attempt,
            proof.roster,
            proof.threshold,
            proof.numel,
            proof.bits,
        )
        if proof.run != run or proof.dealer >= len(binding.roster):
            raise SecurityError("it is not of this run")
        dealer = binding.roster[proof.dealer]
        check(proof.keys, binding, dealer)
        check(proof.deal, binding, dealer)
    except AtollError as error:
        raise SecurityError(f"evidence of shares proves nothing: {error.message}") from None
    promised = {each.to: each.pair if proof.pairs else each.seed for each in proof.deal.shares}
    shares = dict(proof.shares)
    if (
        len(promised) != len(proof.deal.shares)
        or len(shares) != len(proof.shares)
        or len(shares) != proof.threshold
        or any(promised.get(number) != share_hash(share) for number, share in shares.items())
    ):
        raise SecurityError("evidence of shares that were not dealt so")
    if secret_of(proof.keys, proof.pairs, shares, proof.threshold) is not None:
        raise SecurityError("evidence of shares that are as they should be")
    return dealer
