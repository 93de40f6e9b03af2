"""Error feedback: what a codec loses of a contribution is carried into the next one (arXiv
1901.09847).

c = Δ + β e is contributed; the node encodes it to Q(c); if it is counted ``e ← c - Q(c)``, else e
stays as it is and Δ comes again. β is 1, or less where old losses shall fade (SparseLoCo, arXiv
2508.15706: 0.95). Codecs are deterministic, so a member finds Q(c) by itself. e is its own: nobody
else has it, it is not sent, and it is nobody's when it leaves. It belongs to one history of the
anchor, so it is zeroed when a foreign anchor is adopted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...collectives.codecs.codec import Chunking, chunk_elements
from ...collectives.codecs.mixtures import mixture_of
from ...collectives.layout import Layout
from ...collectives.swarm import RunSettings


def contribution_grid(layout: Layout, settings: RunSettings) -> Chunking:
    """How a run's contributions are encoded."""
    name = mixture_of(layout, settings.codec, settings.codecs, settings.error, exact=settings.exact)
    return Chunking(name, layout.numel, chunk_elements(settings.codec, layout.numel))


def as_decoded(chunking: Chunking, contribution: Tensor, out: Tensor) -> None:
    """What the others make of a contribution: float32 (numel,) both; they may be the same."""
    for part, decoded in _decoded(chunking, contribution):
        out[part] = decoded


def _decoded(chunking: Chunking, contribution: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The same a chunk at a time, in memory that is used again for the next."""
    wire = memoryview(
        bytearray(max(chunking.wire_bytes(chunk) for chunk in range(chunking.chunks)))
    )
    scratch = torch.empty(
        min(chunking.chunk_elements, chunking.numel), dtype=torch.float32, device="cpu"
    )
    for chunk in range(chunking.chunks):
        codec, start = chunking.codec(chunk), chunk * chunking.chunk_elements
        part = slice(start, start + chunking.elements(chunk))
        decoded = scratch[: chunking.elements(chunk)]
        encoded = chunking.wire(wire[: chunking.wire_bytes(chunk)], chunk)
        codec.encode(contribution[part], encoded)
        codec.decode(encoded, decoded)
        yield part, decoded


class Feedback:
    """The residual of one vector: float32 (numel,). What encoding loses is computed when a
    contribution was counted, from the contribution as it still lies where it was offered: so there
    is never a second vector of its length."""

    def __init__(self, layout: Layout, settings: RunSettings) -> None:
        self._chunking = contribution_grid(layout, settings)
        self.residual = torch.zeros(layout.numel, dtype=torch.float32, device="cpu")
        self._kept = settings.feedback_kept
        self._offered: Tensor | None = None

    @torch.no_grad()
    def add_to(self, contribution: Tensor) -> None:
        """Add the residual to a contribution (float32 (numel,)), in place. Nobody may write to it
        any more until `settle`.
        """
        for into, residual in zip(
            contribution.split(self._chunking.chunk_elements),
            self.residual.split(self._chunking.chunk_elements),
            strict=True,
        ):
            into.add_(residual if self._kept == 1.0 else residual * self._kept)
        self._offered = contribution

    @torch.no_grad()
    def settle(self, counted: bool) -> None:
        """The contribution was decided, or given up (then it is taken for not counted)."""
        if counted and self._offered is not None:
            for part, decoded in _decoded(
                self._chunking, self._offered
            ):  # once more from the start, if this is interrupted
                torch.sub(self._offered[part], decoded, out=self.residual[part])
        self._offered = None

    def zero(self) -> None:
        """Forget everything: the anchor is another history's."""
        self.residual.zero_()
        self._offered = None
