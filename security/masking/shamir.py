"""Shamir's secret sharing (1979): any ``threshold`` shares give the secret back, fewer say nothing
about it.

Over the integers modulo 2^521 - 1, a prime, in Python's own integers. They are not constant in
time; who could time them runs on the member's own machine, where the secret lies in memory.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

PRIME = (1 << 521) - 1
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, threshold: int, places: Sequence[int], rng: random.Random) -> list[bytes]:
    """A share of ``secret`` (32 bytes) for each of ``places`` (distinct, above 0): 66 bytes each.

    ``rng`` draws the coefficients: `random.SystemRandom()`, except in a test.
    """
    if (
        len(secret) != SECRET_BYTES
        or not 1 <= threshold <= len(places)
        or len(set(places)) < len(places)
        or min(places) < 1
    ):
        raise ValueError(
            f"{len(secret)} bytes as {len(places)} shares of which {threshold} are needed"
        )
    coefficients = [
        int.from_bytes(secret, "big"),
        *(rng.randrange(PRIME) for _ in range(threshold - 1)),
    ]
    return [_value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places]


def _value(coefficients: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * x + coefficient) % PRIME
    return total


def weights_of(places: Sequence[int]) -> list[int]:
    """What each place's share is multiplied by in the sum that is the secret: Lagrange's
    polynomials at 0. The same for all secrets.
    """
    weights: list[int] = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def join(shares: Mapping[int, bytes], weights: Sequence[int]) -> bytes:
    """The secret from shares by place and the weights of these places. Raises ValueError where they
    are no shares of 32 bytes.
    """
    total = (
        sum(
            int.from_bytes(share, "big") * weight
            for share, weight in zip(shares.values(), weights, strict=True)
        )
        % PRIME
    )
    if total >> (8 * SECRET_BYTES):
        raise ValueError("shares that do not belong together")
    return total.to_bytes(SECRET_BYTES, "big")
