"""What the owner of a part does with the masked sum: collect shares until there are enough, and
take off all masks that did not cancel.

The sum itself is the data plane's: modulo 2^bits, over exactly the survivors. A share or secret
that does not fit its commitment is refused and its author named; what comes out is the sum or an
error, never noise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations, islice

from ...collectives.errors import LocalProtocolError, NotEnoughPeersError, RemoteProtocolError
from ...collectives.identifiers import PeerId
from .binding import Binding
from .buckets import Buckets
from .client import pair_key
from .keys import Words, apply_mask
from .messages import Deal, Dealt, Keys, MaskReveal, check, share_hash
from .misdealt import Misdealt, misdealt, secret_of

MOST_TRIES = 64  # sets of shares that are looked at, of a dealer some of whose shares fit together


class DealerError(RemoteProtocolError):
    """A member's shares are not of the secret it committed to; ``proof`` convinces anybody."""

    def __init__(self, peer: PeerId, proof: Misdealt) -> None:
        super().__init__(
            f"{peer} dealt shares that are not of the secret it committed to", peer=peer
        )
        self.proof = proof


class Unmasking:
    """For one masking and one set of survivors; the same at every owner, whatever its part.

    ``keys`` and ``deals``: as all members were told them; ``buckets`` as they masked by, None: one
    sum of all. Raises BadSignatureError, RemoteProtocolError, naming the peer; NotEnoughPeersError
    below the threshold.
    """

    def __init__(
        self,
        binding: Binding,
        keys: Mapping[PeerId, Keys],
        deals: Mapping[PeerId, Deal],
        survivors: Collection[PeerId],
        buckets: Buckets | None = None,
    ) -> None:
        for peer, message in (*keys.items(), *deals.items()):
            check(message, binding, peer)
        if not set(survivors) <= deals.keys() or not deals.keys() <= keys.keys():
            raise LocalProtocolError(
                "secure aggregation: a survivor without shares, or shares without keys"
            )
        binding.enough(len(set(survivors)), "vectors")
        self.binding, self._keys, self._deals = binding, dict(keys), dict(deals)
        self.buckets = buckets or Buckets.one(deals)
        self.open = self.buckets.open(survivors)
        hidden = self.buckets.hidden(survivors)
        self._survivors = sorted(set(survivors) - hidden)
        self._dropped = sorted(deals.keys() - set(survivors) - hidden)
        self._dealt = {
            peer: {dealt.to: dealt for dealt in deal.shares} for peer, deal in deals.items()
        }
        # By who revealed: one share of each dealer.
        self._revealed: dict[int, dict[PeerId, bytes]] = {}
        self._secrets: dict[PeerId, bytes] | None = None

    @property
    def ready(self) -> bool:
        """Whether there are shares enough."""
        return len(self._revealed) >= self.binding.threshold

    def add(self, peer: PeerId, reveal: MaskReveal) -> None:
        """Shares of ``peer``. Raises BadSignatureError, or RemoteProtocolError where they are not
        those that were dealt to it; then they do not count."""
        check(reveal, self.binding, peer)
        number, roster = self.binding.number(peer), self.binding.roster
        for shares, dealers in ((reveal.seeds, self._survivors), (reveal.pairs, self._dropped)):
            if [entry[0] for entry in shares] != [
                self.binding.number(dealer) for dealer in dealers
            ]:
                raise RemoteProtocolError(
                    f"{peer} revealed shares of other members than it was asked for", peer=peer
                )
        found: dict[PeerId, bytes] = {}
        for of_seed, shares in ((True, reveal.seeds), (False, reveal.pairs)):
            for dealer, share in shares:
                promised: Dealt | None = self._dealt[roster[dealer]].get(number)
                if promised is None or share_hash(share) != (
                    promised.seed if of_seed else promised.pair
                ):
                    raise RemoteProtocolError(
                        f"{peer} revealed a share that {roster[dealer]} did not deal to it",
                        peer=peer,
                    )
                found[roster[dealer]] = share
        self._revealed[number] = found

    def unmask(self, total: Words, first: int = 0, bucket: int = 0) -> None:
        """Take the masks off ``total``, the masked sum of a bucket's survivors from element
        ``first`` on, in place.

        Raises NotEnoughPeersError without shares enough, or for a bucket of too few vectors;
        DealerError for a secret that is not the one committed to. Then ``total`` is as it was.
        """
        if not self.ready:
            raise NotEnoughPeersError(
                f"secure aggregation: shares of {len(self._revealed)} members, "
                f"{self.binding.threshold} are needed"
            )
        if bucket not in self.open:
            raise NotEnoughPeersError(
                f"secure aggregation: bucket {bucket} has fewer than {self.buckets.least} vectors"
            )
        if (
            total.dtype.itemsize * 8 != self.binding.bits
            or total.dtype.kind != "u"
            or not 0 <= first <= self.binding.numel - len(total)
        ):
            raise LocalProtocolError(
                f"secure aggregation: elements {first} to {first + len(total)} of {total.dtype}: "
                "not what was agreed on"
            )
        if self._secrets is None:
            self._secrets = self._reconstructed()
        among = self.buckets.members[bucket]
        survivors = [peer for peer in self._survivors if peer in among]
        for peer in survivors:
            apply_mask(total, self._secrets[peer], first, add=False)
        for peer in (peer for peer in self._dropped if peer in among):
            number = self.binding.number(peer)
            # each has the mask with `peer` in its vector still: added, if its own number is the
            # lower one
            for other in survivors:
                key = pair_key(self.binding, self._secrets[peer], number, other, self._keys[other])
                apply_mask(total, key, first, add=number < self.binding.number(other))

    def _reconstructed(self) -> dict[PeerId, bytes]:
        """The seeds of survivors, the pair keys of who dropped out."""
        threshold = self.binding.threshold
        secrets: dict[PeerId, bytes] = {}
        for peer in (*self._survivors, *self._dropped):
            pairs = peer not in self._survivors
            keys = self._keys[peer]
            wrong: dict[int, bytes] = {}
            for numbers in islice(combinations(sorted(self._revealed), threshold), MOST_TRIES):
                shares = {number: self._revealed[number][peer] for number in numbers}
                secret = secret_of(keys, pairs, shares, threshold)
                if secret is not None:
                    secrets[peer] = secret
                    break
                wrong = wrong or shares
            else:
                raise DealerError(
                    peer, misdealt(self.binding, peer, keys, self._deals[peer], pairs, wrong)
                )
        return secrets
