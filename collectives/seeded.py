"""Work that follows from a public seed: what the members of a run with BTARD give to a round, and
compute of each other.

A step of such a run is the average of vectors that anybody can compute who has the anchor
(docs/internals/protocol/btard.md). So a member's node asks its script for vectors by seed: for the
member's own, and for another's that it looks into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, runtime_checkable

import msgspec

from .foreign import PLAIN
from .identifiers import PeerId

if TYPE_CHECKING:
    from torch import Tensor

MOST_PEERS = 32
SEED_BYTES = 32


class BtardSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who takes part, and the protocol's numbers (`security.btard.AttemptSettings`), in seconds."""

    peers: Annotated[
        tuple[Annotated[PeerId, msgspec.Meta(max_length=128, pattern=PLAIN)], ...],
        msgspec.Meta(min_length=1, max_length=MOST_PEERS),
    ]
    radius: float = 1.0
    validators: int = 1
    tolerance: float = 1e-2
    timeout_s: float = 10.0
    compute_s: float = 120.0
    intervals: int = 0


class SeededTask(NamedTuple):
    """A vector to compute: what comes of training from the anchor of ``round``, with ``seed`` (32
    bytes) for all that is random. ``number``: of the request. In a run whose work is in intervals:
    all states after these; with ``interval`` (counted from 0; else -1) the state after that one
    alone, which begins at another state than the anchor (`Seeded.begin`)."""

    number: int
    round: int
    seed: bytes
    interval: int = -1


@runtime_checkable
class Seeded(Protocol):
    """A Swarm whose node asks for vectors by seed."""

    def asked(self, timeout_s: float | None, until: Callable[[], bool]) -> SeededTask | None:
        """The oldest request that is not answered; waits for one. None: ``until()``, or the time is
        up. Raises SwarmClosedError without a node.
        """
        ...

    def begin(self, work: SeededTask, read: Callable[[Tensor], None]) -> bool:
        """``read`` is given the state that an interval begins at, float32 (numel,), to be copied
        before it returns. False: nobody wants this work any more. Raises SwarmClosedError without a
        node."""
        ...

    def answer(self, work: SeededTask, write: Callable[[Tensor], None], part: int = 0) -> None:
        """``write`` fills a float32 tensor of shape (numel,): the vector, or the state after an
        interval; ``part``: of all intervals, which one, in order. Raises SwarmClosedError without a
        node."""
        ...
