"""What of a run may be shown to whoever looks: of a federated run what `validate --explain` tells
that members see of one another, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..manifest import Manifest


@dataclass(frozen=True, slots=True)
class Allowed:
    """``samples``: how much each member trained; ``timings``: who was slow, and by how much;
    ``losses``: of other members, where their files are there.
    """

    samples: bool = True
    timings: bool = True
    losses: bool = True


EVERYTHING = Allowed()


def allowed_of(manifest: Manifest) -> Allowed:
    """Of a run with this manifest."""
    if manifest.kind != "federated":
        return EVERYTHING
    return Allowed(samples=manifest.secure is None, timings=False, losses=False)
