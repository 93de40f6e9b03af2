"""What is committed to, and what follows from the draw: directions, seeds, validators. Hashes
throughout, so the same on every machine.

The draw of an attempt is a hash of a share of each peer, all committed to before any is revealed:
nobody chooses it, and who does not reveal is removed and the attempt made anew with fresh shares.
It comes after aggregates are committed to, so that nobody knows the directions in which residuals
are looked at, nor the next validators, while it can still change what they look at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ...collectives.identifiers import PeerId, RunId
from .messages import FLOAT, Context, Vector

_ROOT3 = 3.0**0.5


def part_commitment(context: Context, maker: PeerId, part: int, values: Vector) -> bytes:
    """Of a part of a gradient. It binds its maker: a copied commitment cannot be opened."""
    return _hash(b"part", context.digest, maker.encode(), part.to_bytes(2, "big"), _raw(values))


def aggregate_commitment(context: Context, owner: PeerId, values: Vector) -> bytes:
    """Of the aggregate of its owner's part."""
    return _hash(b"aggregate", context.digest, owner.encode(), _raw(values))


def share_commitment(context: Context, peer: PeerId, share: bytes) -> bytes:
    """Of a peer's share of the draw; 32 random bytes hide themselves."""
    return _hash(b"share", context.digest, peer.encode(), share)


def drawn(context: Context, shares: Sequence[bytes]) -> bytes:
    """The draw of an attempt from all shares, in the order of the roster."""
    return _hash(b"draw", context.digest, *shares)


def first_draw(run: RunId) -> bytes:
    """What stands for the draw of the step before the first."""
    return _hash(b"first", run.encode())


def seed_of(draw: bytes, step: int, peer: PeerId) -> bytes:
    """The public seed of a peer's gradient; ``draw``: of the step before."""
    return _hash(b"seed", draw, step.to_bytes(8, "big"), peer.encode())


def direction(draw: bytes, part: int, length: int) -> NDArray[np.float64]:
    """The direction on which residuals of a part are projected: independent, uniform, of variance
    1. Not normal as the paper's: these are exact.
    """
    data = blake3(b"atoll/btard/direction\0" + draw + part.to_bytes(2, "big")).digest(
        length=4 * length
    )
    return np.frombuffer(data, "<i4") * (_ROOT3 / 2**31)


def validators(
    draw: bytes, roster: Sequence[PeerId], contributors: Collection[PeerId], count: int
) -> dict[PeerId, PeerId]:
    """Who computes no gradient in the next step but checks whose last one; all arguments are of the
    step that is over.
    """
    chosen = sorted(roster, key=lambda peer: _hash(b"validator", draw, peer.encode()))[
        : min(count, (len(roster) - 1) // 2)
    ]
    targets: dict[PeerId, PeerId] = {}
    for validator in chosen:
        left = [
            peer
            for peer in roster
            if peer in contributors and peer != validator and peer not in targets.values()
        ]
        if left:
            targets[validator] = min(
                left, key=lambda peer: _hash(b"target", draw, validator.encode(), peer.encode())
            )
    return targets


def bounds(size: int, parts: int) -> list[int]:
    """Where the parts of ``size`` values begin, and the end: as equal as can be."""
    return [size * part // parts for part in range(parts + 1)]


def _raw(values: Vector) -> bytes:
    return np.ascontiguousarray(values, FLOAT).tobytes()


def _hash(purpose: bytes, *fields: bytes) -> bytes:
    hasher = blake3(b"atoll/btard/" + purpose + b"\0")
    for field in fields:
        hasher.update(len(field).to_bytes(8, "big"))
        hasher.update(field)
    return hasher.digest()
