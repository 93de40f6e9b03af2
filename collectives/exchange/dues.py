"""What is still to come under a plan, and when the last of it came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..identifiers import PeerId

EVEN_AHEAD, EVEN_S = 3, 0.01  # chunks; of silence
Kind = Literal["part", "result"]


class Dues:
    """Of one plan at one member: contributions and results that others have to send here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._due: dict[tuple[Kind, PeerId], int] = {}  # chunks still to come
        self._finished: dict[tuple[Kind, PeerId], float] = {}
        self._incoming: dict[PeerId, int] = {}  # of contributions, as the plan began
        self._outgoing: dict[PeerId, int] = {}  # what there was to send when this plan began
        self._heard: dict[PeerId, float] = {}  # when a contribution of a peer came last

    @property
    def seconds(self) -> float:
        """Since the plan began."""
        return self._clock() - self._began

    def expect(self, kind: Kind, peer: PeerId) -> None:
        """One chunk more."""
        self._due[kind, peer] = self._due.get((kind, peer), 0) + 1

    def begin(self) -> None:
        """All is expected, and contributions alone go between two members, but for results: who
        gives how much is compared from now on (`even`).
        """
        self._incoming = {peer: due for (kind, peer), due in self._due.items() if kind == "part"}

    def came(self, kind: Kind, peer: PeerId) -> None:
        """One of them is here."""
        left = self._due[kind, peer] = self._due[kind, peer] - 1
        if kind == "part":
            self._heard[peer] = self._clock()
        if not left:
            self._finished[kind, peer] = self._clock()

    def even(self, peer: PeerId, left: int) -> bool:
        """Whether the exchange of contributions with the only other peer is about even, where I
        have ``left`` chunks for it: else it has other things to do than to take in mine, its own
        for me above all, and who runs ahead has to wait for all it sends at the end.

        Only while they come: a peer from which nothing has come for a while may be waiting for
        mine. And only between two: among more, who waits for one does something for another
        meanwhile.
        """
        incoming, due = self._incoming.get(peer, 0), self._due.get(("part", peer), 0)
        if not incoming or not due or len(self._incoming) > 1:
            return True
        total = self._outgoing.setdefault(peer, left)
        given, got = total - left, incoming - due
        return (
            given * incoming < (got + EVEN_AHEAD) * total
            or self._clock() - self._heard.get(peer, self._began) > EVEN_S
        )

    def since(self) -> tuple[tuple[Kind, PeerId, float], ...]:
        """For how long all has been here that a peer had to send of a kind."""
        now = self._clock()
        return tuple((kind, peer, now - at) for (kind, peer), at in self._finished.items())
