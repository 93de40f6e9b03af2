"""What is open in an attempt after the checks."""

from __future__ import annotations

import msgspec


class Cases(msgspec.Struct):
    """By numbers in the roster. ``residuals``, ``gradients``: (accuser, accused); ``columns``:
    owners whose aggregate is looked into; ``impossible``: who said what no vector has; ``void``:
    who accused where it had no say."""

    residuals: set[tuple[int, int]] = msgspec.field(default_factory=set)
    gradients: set[tuple[int, int]] = msgspec.field(default_factory=set)
    columns: set[int] = msgspec.field(default_factory=set)
    impossible: set[int] = msgspec.field(default_factory=set)
    void: set[int] = msgspec.field(default_factory=set)
    exhibits: set[tuple[int, int]] = msgspec.field(default_factory=set)

    def any(self) -> bool:
        """Whether something is open."""
        return bool(
            self.residuals or self.gradients or self.columns or self.impossible or self.void
        )

    @property
    def targets(self) -> set[int]:
        """Whose last gradient is recomputed."""
        return {whom for _, whom in self.gradients}
