"""What a run may ask of a replica beside the plain round: to change what is contributed, to drop
what is not worth contributing, to measure what encoding loses.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...collectives.outcomes import AnchorView


class Extras:
    """Nothing of it: a member contributes all of its progress as it is."""

    realised: Mapping[str, float] = {}
    """What a round of contributions like the one measured last loses, by its name in reports."""

    def take_anchor(self, anchor: AnchorView) -> None:
        """Progress is measured against ``anchor`` from now on."""

    def find_fault(self, base: AnchorView, samples: int, *, whole: bool, ordinary: bool) -> str:
        """Why progress of so many samples since ``base`` is not to be contributed, "" where it is.

        ``whole``: it is all of the live parameters' way from this one anchor, and the script has
        not declared that it changed them. ``ordinary``: each step of it was as long as ever.
        """
        return ""

    def carry_over(self, out: Tensor) -> None:
        """Add to a contribution, float32 (numel,), what those before leave in it. Nobody writes to
        it any more until `settle`.
        """

    def measure(self, out: Tensor, round: int) -> None:
        """A contribution, float32 (numel,), is complete, on the anchor of so many rounds."""

    def settle(self, counted: bool) -> None:
        """The contribution was decided."""

    def forget(self) -> None:
        """The live values have no history with the anchor: nothing is carried over."""
