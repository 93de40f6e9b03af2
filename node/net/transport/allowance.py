"""What a peer may have done for it: so much at once, and so much a second from then on. Sans-IO."""

from __future__ import annotations

from ....collectives.identifiers import PeerId

SWEEP = 1024  # peers that are remembered before those are forgotten whose allowance is whole again


class Allowance:
    """Of each peer. ``now``: monotonic seconds."""

    def __init__(self, at_once: float, per_s: float) -> None:
        self._at_once, self._per_s = at_once, per_s
        self._left: dict[PeerId, tuple[float, float]] = {}  # and when it was that much

    def allows(self, peer: PeerId, now: float) -> bool:
        """Whether it may be done once more for ``peer``; if so it is counted."""
        left = self._of(peer, now)
        if left < 1:
            return False
        if len(self._left) >= SWEEP:
            self._left = {
                each: kept
                for each, kept in self._left.items()
                if self._of(each, now) < self._at_once
            }
        self._left[peer] = left - 1, now
        return True

    def _of(self, peer: PeerId, now: float) -> float:
        left, at = self._left.get(peer, (self._at_once, now))
        return min(self._at_once, left + (now - at) * self._per_s)
