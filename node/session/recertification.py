"""The door at which a mode lets a run go on without a quorum. The other implementation is
`node.modes.recertifying`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...collectives.group import Certified
from ...collectives.identifiers import PeerId


@dataclass(frozen=True, slots=True)
class SealView:
    """The open round is sealed here. ``removed``: whose votes never come; ``awaited``: at the
    organiser, whose answers are not here yet.
    """

    removed: tuple[PeerId, ...]
    awaited: tuple[PeerId, ...]


class Recertification:
    """None: without a quorum nothing is decided. One object serves one log."""

    def view(self) -> SealView | None:
        """The seal of the open round, or one requested and to come; None if there is none."""
        return None

    def tick(self, now: float) -> None:
        """Give up lives that are over, where that is known."""

    def decided(self, certified: Certified) -> None:
        """An entry is applied."""
