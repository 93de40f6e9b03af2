"""Vouchers: who may send how much through our relay, until when, with whom, for which run. Without
I/O.

A relay makes two for every circuit, one for each end, and is the only one that can read them: it
signs them for itself, with a key that lives as long as its process (HMAC-SHA256). The ends show
them where their bytes go in; each is good once.
"""

from __future__ import annotations

import hmac
import struct
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from ....collectives.identifiers import PeerId

CIRCUIT_BYTES = 16
MAC_BYTES = 32
_FIELDS = struct.Struct(">16sB16sQQ")
VOUCHER_BYTES = _FIELDS.size + MAC_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """What a relay gives away."""

    circuits: int = 64
    circuits_of_one: int = 16
    bytes_each: int = 16 << 30
    """Of one circuit, both ways together; then it is cut, and who needs more asks again."""
    seconds_each: float = 3600.0
    idle_s: float = 60.0
    show_s: float = 30.0
    """A voucher must be shown, by both ends, within so long."""


class VoucherGrant(NamedTuple):
    """What a good voucher entitles to."""

    circuit: bytes
    side: int
    bytes_left: int
    until: float


class NoVoucherError(Exception):
    """The relay gives no voucher; the text says why."""


class Vouchers:
    """Of one relay. ``key``: 32 secret bytes."""

    def __init__(self, key: bytes, limits: Limits) -> None:
        self._key, self.limits = key, limits
        self._open: dict[bytes, tuple[PeerId, PeerId, float]] = {}
        """Circuits that may be or are in use: the two ends, and until when they count."""
        self._shown = dict[tuple[bytes, int], float]()

    def issue(
        self, now: float, circuit: bytes, run: str, ends: tuple[PeerId, PeerId]
    ) -> tuple[bytes, bytes]:
        """Vouchers for the two ends of a new circuit (``circuit``: 16 random bytes). Raises
        NoVoucherError where limits are reached.
        """
        self._expire(now)
        used = Counter(end for first, second, _ in self._open.values() for end in (first, second))
        if len(self._open) >= self.limits.circuits:
            raise NoVoucherError("this relay is full")
        if any(used[end] >= self.limits.circuits_of_one for end in ends):
            raise NoVoucherError(f"more than {self.limits.circuits_of_one} circuits of one peer")
        self._open[circuit] = (*ends, now + self.limits.show_s)
        bound = blake2b("|".join((run, *ends)).encode(), digest_size=16).digest()
        first, second = (
            _FIELDS.pack(
                circuit, side, bound, self.limits.bytes_each, int((now + self.limits.show_s) * 1000)
            )
            for side in (0, 1)
        )
        return first + self._mac(first), second + self._mac(second)

    def show(self, now: float, voucher: bytes) -> VoucherGrant | None:
        """What a voucher that is shown is worth; None: nothing, it is forged, too old, or was shown
        before.
        """
        self._expire(now)
        if len(voucher) != VOUCHER_BYTES or not hmac.compare_digest(
            self._mac(voucher[:-MAC_BYTES]), voucher[-MAC_BYTES:]
        ):
            return None
        circuit, side, _, nbytes, until_ms = _FIELDS.unpack(voucher[:-MAC_BYTES])
        if until_ms < now * 1000 or circuit not in self._open or (circuit, side) in self._shown:
            return None
        self._shown[circuit, side] = now + self.limits.show_s
        return VoucherGrant(circuit, side, nbytes, now + self.limits.seconds_each)

    def begun(self, now: float, circuit: bytes) -> None:
        """Both ends are there: the circuit counts until `ended`, at most as long as it may last."""
        if circuit in self._open:
            self._open[circuit] = (*self._open[circuit][:2], now + self.limits.seconds_each)

    def ended(self, circuit: bytes) -> None:
        """It is over."""
        self._open.pop(circuit, None)

    @property
    def circuits(self) -> int:
        """How many are open or expected."""
        return len(self._open)

    def _mac(self, fields: bytes) -> bytes:
        return hmac.digest(self._key, b"atoll/voucher/1" + fields, "sha256")

    def _expire(self, now: float) -> None:
        self._open = {circuit: ends for circuit, ends in self._open.items() if ends[2] >= now}
        self._shown = {key: until for key, until in self._shown.items() if until >= now}
