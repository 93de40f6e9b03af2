"""What a relay has promised to whom, and what it refuses. Sans-IO."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ....collectives.identifiers import PeerId


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """``circuit_bytes`` counts both directions. ``open_to_all``: for anybody, not only for peers of
    runs that this node knows.
    """

    reservations: int = 128
    reservations_per_host: int = 8
    reservation_s: float = 3600.0
    circuits: int = 64
    circuits_per_peer: int = 8
    circuit_s: float = 3600.0
    circuit_bytes: int = 1 << 30
    open_to_all: bool = False


class RelayLedger:
    """Reservations and circuits of a relay. ``now``: monotonic seconds."""

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        self._reserved: dict[PeerId, tuple[str, float]] = {}
        self._circuits: Counter[PeerId] = Counter()
        self.open = 0
        self.carried = 0
        """Bytes since the start."""
        self.refused: Counter[str] = Counter()

    def reserve(self, peer: PeerId, host: str, now: float) -> bool:
        """Whether ``peer``, who comes from ``host``, has a place from now on; a renewal counts as
        none of the limits.
        """
        self._expire(now)
        if peer not in self._reserved:
            here = sum(other == host for other, _ in self._reserved.values())
            if (
                len(self._reserved) >= self.limits.reservations
                or here >= self.limits.reservations_per_host
            ):
                self.refused["reservations"] += 1
                return False
        self._reserved[peer] = host, now + self.limits.reservation_s
        return True

    def holds(self, peer: PeerId, now: float) -> bool:
        self._expire(now)
        return peer in self._reserved

    def drop(self, peer: PeerId) -> None:
        """Its connection is gone, and so is its place. Idempotent."""
        self._reserved.pop(peer, None)

    def begin(self, a: PeerId, b: PeerId) -> bool:
        """Whether there is room for a circuit between these; if so it is open until `end`."""
        limits = self.limits
        if (
            self.open >= limits.circuits
            or max(self._circuits[a], self._circuits[b]) >= limits.circuits_per_peer
        ):
            self.refused["circuits"] += 1
            return False
        self.open += 1
        self._circuits.update((a, b))
        return True

    def end(self, a: PeerId, b: PeerId) -> None:
        """A circuit is over."""
        self.open -= 1
        self._circuits.subtract((a, b))
        self._circuits = +self._circuits

    def reserved(self) -> list[PeerId]:
        return sorted(self._reserved)

    def _expire(self, now: float) -> None:
        for peer in [peer for peer, (_, until) in self._reserved.items() if until < now]:
            del self._reserved[peer]
