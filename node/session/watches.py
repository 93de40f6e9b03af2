"""Doors at which a session is watched. What stands at them decides nothing: it keeps proofs and
times, and says whose messages are of another log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

    splits: Mapping[PeerId, ev.HistorySplit] = {}
    """Where peers' logs part from ours."""

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
