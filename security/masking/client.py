"""One member's part in a masking: five steps, each once, in order; and what it must remember beyond
one masking.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ...collectives.errors import LocalProtocolError, RemoteProtocolError, SecurityError
from ...collectives.identifiers import PeerId
from ..identity import Identity
from .binding import Binding
from .buckets import Buckets
from .keys import Words, agree, apply_mask, public_of, seal, unseal, way
from .messages import Deal, Dealt, Keys, MaskConsent, MaskReveal, check, share_hash, signed
from .shamir import SECRET_BYTES, SHARE_BYTES, split


@dataclass(slots=True)
class Memory:
    """What a member must not do twice, in this life or (its driver stores it) the next: both sets
    grow by an element a masking.

    ``begun``: digests of bindings. ``consented``: ids of vectors that the sender agreed to unmask;
    from two sums, one of them without one member, that member's vector would follow, however fresh
    the masks.
    """

    begun: set[bytes] = field(default_factory=set[bytes])
    consented: set[bytes] = field(default_factory=set[bytes])


class Client:
    """A member. Steps out of order, or twice, raise LocalProtocolError: secrets are made for one
    masking and die with this object.

    ``rng`` makes secrets: `random.SystemRandom()` (the default), except in a test.
    """

    def __init__(
        self,
        binding: Binding,
        identity: Identity,
        memory: Memory,
        rng: random.Random | None = None,
    ) -> None:
        """Raises SecurityError where this member was in a masking of this binding before: then it
        must be another attempt.
        """
        self.binding, self._identity, self._memory = binding, identity, memory
        self._chance = rng or random.SystemRandom()
        self._me = binding.number(identity.peer)
        if binding.digest in memory.begun:
            raise SecurityError(
                "secure aggregation: this attempt was begun before",
                peer=identity.peer,
                hint="try again as another attempt",
            )
        memory.begun.add(binding.digest)
        self._channel, self._pair, self._seed = (
            self._chance.randbytes(SECRET_BYTES) for _ in range(3)
        )
        self._keys: dict[PeerId, Keys] = {}
        self._shares: dict[PeerId, tuple[bytes, bytes]] = {}  # of others' seeds and pair keys
        self._cid = b""
        self._survivors: frozenset[PeerId] | None = None
        self._buckets = Buckets((), 0)
        self._step = 0

    def _advance(self, step: int, name: str) -> None:
        if self._step != step:
            raise LocalProtocolError(
                f"secure aggregation: {name}() is step {step}, this client is at {self._step}"
            )
        self._step += 1

    def keys(self) -> Keys:
        """The first step."""
        self._advance(0, "keys")
        return signed(
            Keys(public_of(self._channel), public_of(self._pair), share_hash(self._seed)),
            self.binding,
            self._identity,
        )

    def deal(self, keys: Mapping[PeerId, Keys]) -> Deal:
        """The second: ``keys`` of all members that sent some, this one among them.

        Raises BadSignatureError, RemoteProtocolError, naming the peer; NotEnoughPeersError below
        the threshold.
        """
        for peer, message in keys.items():
            check(message, self.binding, peer)
        self.binding.enough(len(keys), "keys")
        if self._identity.peer not in keys:
            raise LocalProtocolError("secure aggregation: this member's own keys are missing")
        self._advance(1, "deal")
        self._keys = dict(keys)
        numbers = sorted(self.binding.number(peer) for peer in keys)
        places = [number + 1 for number in numbers]
        seeds = split(self._seed, self.binding.threshold, places, self._chance)
        pairs = split(self._pair, self.binding.threshold, places, self._chance)
        shares = tuple(
            Dealt(
                to,
                share_hash(seed),
                share_hash(pair),
                seal(self._sealing(self.binding.roster[to], True), seed + pair),
            )
            for to, seed, pair in zip(numbers, seeds, pairs, strict=True)
        )
        return signed(Deal(shares), self.binding, self._identity)

    def _sealing(self, peer: PeerId, to: bool) -> bytes:
        """The key for shares to ``peer``, or from it."""
        other = self.binding.number(peer)
        purpose = b"share" + (way(self._me, other) if to else way(other, self._me))
        return agree(self._channel, self._keys[peer].channel, peer, self.binding.digest, purpose)

    def mask(
        self, words: Words, cid: bytes, deals: Mapping[PeerId, Deal], buckets: Buckets | None = None
    ) -> None:
        """The third: mask ``words`` (numel,), in place. ``cid``: the vector's id. ``deals`` of all
        who sent some, and ``buckets`` of these, the same at all members; None: one sum of all.

        Raises SecurityError where this vector was unmasked once; BadSignatureError and
        RemoteProtocolError, naming the peer; NotEnoughPeersError.
        """
        if (
            words.shape != (self.binding.numel,)
            or words.dtype.itemsize * 8 != self.binding.bits
            or words.dtype.kind != "u"
        ):
            raise LocalProtocolError(
                f"secure aggregation of {words.shape} {words.dtype}: not what was agreed on"
            )
        if cid in self._memory.consented:
            raise SecurityError(
                "secure aggregation: this vector was given for unmasking before",
                peer=self._identity.peer,
                why="two sums with it could differ by one member's vector only",
                hint="contribute another one",
            )
        self.binding.enough(len(deals), "shares")
        shares = {peer: self._opened(peer, deal) for peer, deal in deals.items()}
        if self._identity.peer not in shares:
            raise LocalProtocolError("secure aggregation: this member's own shares are missing")
        pair_keys = {
            peer: pair_key(self.binding, self._pair, self._me, peer, self._keys[peer])
            for peer in self._among(buckets, deals)
            if peer != self._identity.peer
        }
        self._advance(2, "mask")
        self._shares, self._cid = shares, cid
        apply_mask(words, self._seed, 0, add=True)
        for peer, key in pair_keys.items():
            apply_mask(words, key, 0, add=self._me < self.binding.number(peer))

    def _among(self, buckets: Buckets | None, deals: Mapping[PeerId, Deal]) -> frozenset[PeerId]:
        """With whom this member's masks cancel. Raises LocalProtocolError for buckets that are not
        of those who dealt.
        """
        buckets = buckets or Buckets.one(deals)
        if sorted(peer for members in buckets.members for peer in members) != sorted(deals):
            raise LocalProtocolError(
                "secure aggregation: buckets are of the members that dealt, each in one"
            )
        self._buckets = buckets
        return buckets.members[buckets.of(self._identity.peer)]

    def _opened(self, peer: PeerId, deal: Deal) -> tuple[bytes, bytes]:
        """This member's shares of the secrets of ``peer``, as promised by it."""
        check(deal, self.binding, peer)
        if peer not in self._keys:
            raise RemoteProtocolError(f"{peer} sent shares but no keys", peer=peer)
        mine = [dealt for dealt in deal.shares if dealt.to == self._me]
        if len(mine) != 1 or not all(low.to < high.to for low, high in pairwise(deal.shares)):
            raise RemoteProtocolError(
                f"{peer} dealt {len(mine)} shares to this member, or in no order", peer=peer
            )
        both = unseal(self._sealing(peer, False), mine[0].box, peer)
        seed, pair = both[:SHARE_BYTES], both[SHARE_BYTES:]
        if (share_hash(seed), share_hash(pair)) != (mine[0].seed, mine[0].pair):
            raise RemoteProtocolError(
                f"{peer} sent a share other than the one it committed to", peer=peer
            )
        return seed, pair

    def consent(self, survivors: Collection[PeerId]) -> MaskConsent:
        """The fourth: agree that the sum over ``survivors`` is unmasked, and never another one.
        Asked again for the same: the same.

        Raises SecurityError, naming a peer, when asked for other survivors: of that peer both
        shares would be known. NotEnoughPeersError.
        """
        chosen = frozenset(survivors)
        if self._survivors is not None:
            if chosen != self._survivors:
                peer = min(chosen ^ self._survivors)
                raise SecurityError(
                    f"secure aggregation: asked for both shares of {peer}",
                    peer=peer,
                    why="with both of them its vector could be unmasked",
                )
        else:
            if not chosen <= self._shares.keys() or self._identity.peer not in chosen:
                raise LocalProtocolError(
                    "secure aggregation: survivors are members that dealt, this one among them"
                )
            self.binding.enough(len(chosen), "vectors")
            self._advance(3, "consent")
            self._memory.consented.add(self._cid)
            self._survivors = chosen
        numbers = tuple(sorted(self.binding.number(peer) for peer in chosen))
        return signed(MaskConsent(numbers), self.binding, self._identity)

    def reveal(self, consents: Mapping[PeerId, MaskConsent]) -> MaskReveal:
        """The fifth, once at least ``threshold`` survivors have signed the same set: one share of
        each member, none in buckets that stay masked.

        Raises BadSignatureError, and RemoteProtocolError for another set or who is no survivor,
        naming the peer; NotEnoughPeersError.
        """
        if self._survivors is None:
            raise LocalProtocolError("secure aggregation: reveal() comes after consent()")
        wanted = tuple(sorted(self.binding.number(peer) for peer in self._survivors))
        for peer, message in consents.items():
            check(message, self.binding, peer)
            if message.survivors != wanted or peer not in self._survivors:
                raise RemoteProtocolError(f"{peer} agreed to other survivors", peer=peer)
        self.binding.enough(len(consents), "consents")
        hidden = self._buckets.hidden(self._survivors)
        ordered = sorted(
            (self.binding.number(peer), peer) for peer in self._shares if peer not in hidden
        )
        seeds = tuple(
            (number, self._shares[peer][0]) for number, peer in ordered if peer in self._survivors
        )
        pairs = tuple(
            (number, self._shares[peer][1])
            for number, peer in ordered
            if peer not in self._survivors
        )
        return signed(MaskReveal(seeds, pairs), self.binding, self._identity)


def pair_key(binding: Binding, secret: bytes, number: int, peer: PeerId, keys: Keys) -> bytes:
    """The key of the mask between the member ``number``, whose pair key is ``secret``, and
    ``peer``: the same from both ends.
    """
    other = binding.number(peer)
    return agree(
        secret,
        keys.pair,
        peer,
        binding.digest,
        b"mask" + way(min(number, other), max(number, other)),
    )
