"""The door at which a rule learns over rounds what a member states with its next contribution.
Other implementation: `node.modes.distances`.
"""

from __future__ import annotations

from ...collectives.group import Entry, Reading


class Measures:
    """Nothing is learnt: what a contribution says of itself is what its script said."""

    def weighed(self, digests: tuple[bytes, ...], spread: float | None) -> None:
        """A plan of the open round is done: the contributions' median distance from its result."""

    def decided(self, entry: Entry) -> None:
        """The entry of the open round is decided."""

    def with_radius(self, reading: Reading) -> Reading:
        """What goes with a contribution."""
        return reading
