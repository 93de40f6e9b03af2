"""Doors at which a session is watched. What stands at them decides nothing: it keeps proofs and
times, and says whose messages are of another log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import Tensor

from ...collectives import messages as m
from ...collectives.codecs.encoded import EncodedVector
from ...collectives.group import Entry, Plan
from ...collectives.identifiers import PeerId
from ...collectives.telemetry import ReductionTimed
from . import events as ev


class OneHistory:
    """There is one log of the run. Other implementation: `histories`."""

    splits: dict[PeerId, ev.HistorySplit]
    """Where peers' logs part from ours."""

    def __init__(self) -> None:
        self.splits = {}

    def compare(self, now: float, targets: Callable[[], Sequence[PeerId]]) -> None:
        """Ask strangers for the beginning of their log. ``targets``: `PeerSelection.targets`."""

    def ignores(self, peer: PeerId, envelope: m.Envelope) -> bool:
        """Whether a message of the log comes from another history. Raises RemoteProtocolError."""
        return False


class VoteWatch:
    """No two votes are compared. Other implementation: `equivocation`."""

    def heard(self, peer: PeerId, round_: int, vote: m.Accepted) -> None:
        """A vote has come from ``peer`` itself. Raises RemoteProtocolError."""


class Retention:
    """Nothing is kept to recompute a round. Other implementation: `retaining`."""

    def offered(self, cid: bytes, vector: Tensor | EncodedVector) -> None:
        """The own contribution is frozen for the open round."""

    def heard(self, peer: PeerId, round_: int, retained: m.Retained) -> None:
        """What a member has signed of its contribution."""

    def decided(self, entry: Entry) -> None:
        """An entry is decided and applied."""


class RoundTimes:
    """No times are kept of a round. Other implementation: `timeline`."""

    def heard(self, now: float, peer: PeerId, body: m.Body) -> None:
        """A control message, of one's own too."""

    def sent(self, now: float, me: PeerId, body: m.Body) -> None:
        """A control message of ours."""

    def planned(self, now: float, plan: Plan) -> None:
        """A plan is carried out; one that was before it has come to nothing."""

    def reduced(
        self, now: float, since: Iterable[tuple[Literal["part", "result"], PeerId, float]]
    ) -> None:
        """All result bytes are here."""

    def finish(
        self, now: float, me: PeerId, decided_at: float, op_id: str = ""
    ) -> tuple[float, ReductionTimed] | None:
        """(when it began, where the time went), or None if this member took no part."""
        return None


class WaitWatch:
    """Nobody asks what this member waits for. Other implementation: `waiting`."""

    @property
    def quiet_s(self) -> float:
        """For so long without an entry nothing is told."""
        return 0.0

    @property
    def announced(self) -> bool:
        """Whether it was told that nothing comes on."""
        return False

    def tick(self, now: float) -> None:
        """Look, and tell what changed while nothing comes on."""

    def look(self, now: float) -> ev.Waiting:
        """What this member waits for now, and for whom."""
        return ev.Waiting("training", "", (), "", now)


class OneSource:
    """A state that is coming is taken from whoever offered it first. Other implementation: `race`,
    which tries other members' states, too. ``have``: its chunks that are here.
    """

    seeking = False
    """A rival is wanted."""
    rival_each_s = 0.0
    """What a chunk of the rival took."""

    def __init__(self, now: float, total: int, have: int = 0, each_s: float = 0.0) -> None:
        """``each_s``: what a chunk of it took so far."""

    def wants_rival(self, now: float, have: int) -> bool:
        """Whether a rival should be tried."""
        return False

    def may_ask(self, now: float) -> bool:
        """Whether to ask for rivals now."""
        return False

    def begin(self, now: float, have: int) -> None:
        """A rival is tried."""

    def won(self, now: float, have: int, rival: int) -> bool | None:
        """Whether the rival, of which ``rival`` chunks are here, takes over; None: not known."""
        return False
