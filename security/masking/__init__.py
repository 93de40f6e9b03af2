"""Secure aggregation: a sum of vectors of which nobody sees any one, though members drop out. State
machines without I/O.

Bonawitz et al. 2017, eprint 2017/281. Every two members agree on a mask that one adds and the other
subtracts, and every member adds one of its own; the keys of all masks lie with the others as
shares. Who drops out is cancelled by the shares of its pair key, who is there by those of its own
mask's seed; the other of the two keeps its vector hidden. Masks are addressed by element, so each
owner of a part in a butterfly unmasks its part of one and the same masked vector, and a coordinator
is an owner of all of it.

    1 keys     Client.keys       two public keys and a commitment, signed
    2 shares   Client.deal       shares of both secrets to every member, sealed for it, with
               commitments, signed
    3 masked   Client.mask       the vector on the ring, masked; summed modulo 2^bits, as
               `modular_sum` and the reducers wrap32 and wrap64 do
    4 consent  Client.consent    the one set of survivors, signed by everybody
    5 unmask   Client.reveal     one share for each member, never both; Unmasking takes the masks
               off the sum

For runs with ``[secure]`` (`node/modes/secure`). Whoever drives it carries messages between
members, tells all of them one set of members at each stage, and starts anew, with another attempt,
when too few are left.

binding    what a masking is for: run, round, attempt, members, threshold, ring
ring       float32 vectors as whole numbers modulo 2^bits, weights inside; room for the sum
shamir     a secret as shares, any ``threshold`` of which give it back
keys       agreement, sealed shares, mask streams
messages   what is said, bounded
buckets    members whose vectors are added up apart from the others', for robust rules
client     one member's part; what it must never do twice
misdealt   proof that a member dealt shares of no secret that it committed to
unmasking  what an owner does with a masked sum
"""

from __future__ import annotations

from .binding import Binding
from .buckets import Buckets
from .client import Client, Memory
from .misdealt import Misdealt, verify_misdealt
from .ring import Ring, bits_for
from .unmasking import DealerError, Unmasking

__all__ = [
    "Binding",
    "Buckets",
    "Client",
    "DealerError",
    "Memory",
    "Misdealt",
    "Ring",
    "Unmasking",
    "bits_for",
    "verify_misdealt",
]
