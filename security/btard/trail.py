"""DiLoCo's form: several local steps, whose states on the way are committed to, so that a validator
computes one interval of them again.

A peer's gradient is then its start less its last state. It commits to a hash of the hashes of all
its states; the draw, which comes later, chooses the interval whose two ends it shows to its
validator. Intervals join, since neighbours share a state; the first begins at the state that all
have, and the last ends where the committed gradient says. So who changes anything on the way is
found in one of as many intervals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from ...collectives.identifiers import PeerId
from .messages import FLOAT, Vector


class Trail:
    """The states of a peer's local steps: the start, and one an interval."""

    def __init__(self, states: Sequence[Vector]) -> None:
        self._states = states
        self.path = tuple(state_hash(state) for state in states)
        self.root = root_of(self.path)

    def show(self, interval: int) -> Vector:
        """Both ends of an interval, one after the other."""
        return np.concatenate(self._states[interval : interval + 2])


def state_hash(state: Vector) -> bytes:
    return blake3(b"atoll/btard/state\0" + np.ascontiguousarray(state, FLOAT).tobytes()).digest()


def root_of(path: Sequence[bytes]) -> bytes:
    """What is committed to: a hash of the hashes of all states."""
    return blake3(b"atoll/btard/trail\0" + b"".join(path)).digest()


def interval_of(draw: bytes, peer: PeerId, intervals: int) -> int:
    """Which interval of a peer's last trail is looked at."""
    digest = blake3(b"atoll/btard/interval\0" + draw + peer.encode()).digest(length=8)
    return int.from_bytes(digest, "big") % intervals


def opens(
    root: bytes, start: Vector, interval: int, intervals: int, values: Vector, path: Sequence[bytes]
) -> bool:
    """Whether ``values`` are both ends of an interval of the trail with this root, and the trail
    begins at ``start``.
    """
    if (
        len(path) != intervals + 1
        or len(values) != 2 * len(start)
        or root_of(path) != root
        or path[0] != state_hash(start)
    ):
        return False
    return tuple(path[interval : interval + 2]) == (
        state_hash(values[: len(start)]),
        state_hash(values[len(start) :]),
    )


def interval_error(values: Vector, end: Vector) -> float:
    """How far the interval's shown end is from the one computed from its beginning, relative to the
    way between.
    """
    first, last = values[: len(end)].astype(np.float64), values[len(end) :].astype(np.float64)
    way = float(np.linalg.norm(end - first))
    distance = float(np.linalg.norm(last - end))
    if distance == 0:
        return 0.0
    return distance / way if way > 0 and np.isfinite(distance) else float("inf")
