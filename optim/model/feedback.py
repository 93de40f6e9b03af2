"""Error feedback: what a codec loses of a contribution is carried into the next one (arXiv 1901.09847).

c = Δ + β e is contributed; the node encodes it to Q(c); if it is counted ``e ← c - Q(c)``, else e stays as it is and Δ comes again. β is 1,
or less where old losses shall fade (SparseLoCo, arXiv 2508.15706: 0.95). Codecs are deterministic, so a member finds Q(c) by itself. e is
its own: nobody else has it, it is not sent, and it is nobody's when it leaves. It belongs to one history of the anchor, so it is zeroed
when a foreign anchor is adopted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...collectives.codec import Grid, chunk_elements
from ...collectives.codecs.mixtures import mixture_of
from ...collectives.codecs.names import RESULTS
from ...collectives.layout import Layout
from ...collectives.swarm import RunSettings


def has_feedback(settings: RunSettings) -> bool:
    """Whether members of a run carry what encoding loses: where its manifest says so, or a codec loses most of it."""
    return settings.feedback or not RESULTS.keys().isdisjoint({settings.codec, *settings.codecs.values()})


def contribution_grid(layout: Layout, settings: RunSettings) -> Grid:
    """How a run's contributions are encoded."""
    name = mixture_of(layout, settings.codec, settings.codecs)
    return Grid(name, layout.numel, chunk_elements(settings.codec, layout.numel))


def as_decoded(grid: Grid, contribution: Tensor, out: Tensor) -> None:
    """What the others make of a contribution: float32 (numel,) both; they may be the same. One chunk's bytes at a time."""
    for chunk in range(grid.chunks):
        codec, start = grid.codec(chunk), chunk * grid.chunk_elements
        part = slice(start, start + grid.elements(chunk))
        wire = grid.wire(memoryview(bytearray(grid.wire_bytes(chunk))), chunk)
        codec.encode(contribution[part], wire)
        codec.decode(wire, out[part])


class Feedback:
    """The residual of one vector: float32 (numel,). A second one of its length is there while a contribution is undecided."""

    def __init__(self, layout: Layout, settings: RunSettings) -> None:
        self._grid = contribution_grid(layout, settings)
        self.residual = torch.zeros(layout.numel, dtype=torch.float32, device="cpu")
        self._kept = settings.feedback_kept
        self._next: Tensor | None = None

    @torch.no_grad()
    def add_to(self, contribution: Tensor) -> None:
        """Add the residual to a contribution (float32 (numel,)), in place, and remember what encoding will lose of the sum."""
        contribution.add_(self.residual if self._kept == 1.0 else self.residual * self._kept)
        lost = torch.empty_like(self.residual)
        as_decoded(self._grid, contribution, lost)
        self._next = torch.sub(contribution, lost, out=lost)

    def settle(self, counted: bool) -> None:
        """The contribution was decided, or given up (then it is taken for not counted)."""
        if counted and self._next is not None:
            self.residual = self._next
        self._next = None

    def zero(self) -> None:
        """Forget everything: the anchor is another history's."""
        self.residual.zero_()
        self._next = None
