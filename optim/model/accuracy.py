"""What a round really loses: how far a member's contribution is from what its encoding says,
measured where it is written; of all values, and of each class of tensors.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor

from ...collectives.codecs.codec import Chunking
from ...collectives.layout import Layout, TensorSpec
from ...collectives.swarm import RunSettings
from .feedback import contribution_grid

ENCODING_ERROR = "encoding_error"
MOST_CHUNKS = 64
EVERY = 8  # rounds in which it is measured once: it costs a pass over what is looked at
TWICE = math.sqrt(2)  # contributions are encoded, and so is their mean: squares add up


def measured_chunking(layout: Layout, settings: RunSettings) -> Chunking | None:
    """How contributions are encoded whose error is told: None where nothing is lost or what is lost
    comes later, and of members whose contributions are masked or noised.
    """
    hidden = settings.secure or settings.btard or settings.privacy
    if hidden or settings.has_feedback:
        return None
    chunking = contribution_grid(layout, settings)
    return None if chunking.name == "fp32" else chunking


def realised_error(chunking: Chunking, contribution: Tensor) -> float:
    """What a round of contributions like this one, float32 (numel,), loses, relative to their
    mean. Of a long vector `MOST_CHUNKS` chunks at equal distances are looked at.

    It is what encoding this one loses times √2, as many members who differ find it; of members
    with equal contributions errors average out, and a round loses less.
    """
    sums = _SquareSums()
    for _, values, lost in _looked_at(chunking, contribution):
        sums.add(values, lost)
    return sums.error


def realised_errors(chunking: Chunking, contribution: Tensor, layout: Layout) -> dict[str, float]:
    """`realised_error` by the name that it is reported under: of all values, and of matrices,
    vectors, statistics and sums alone, as far as they were looked at and are not zero.
    """
    ends = [spec.offset + spec.numel for spec in layout.tensors]
    every, classes = _SquareSums(), dict[str, _SquareSums]()
    for start, values, lost in _looked_at(chunking, contribution):
        every.add(values, lost)
        stop = start + len(values)
        for spec in layout.tensors[bisect_right(ends, start) :]:
            if spec.offset >= stop:
                break
            part = slice(max(0, spec.offset - start), spec.offset + spec.numel - start)
            classes.setdefault(_class_of(spec), _SquareSums()).add(values[part], lost[part])
    found = {ENCODING_ERROR: every} | {
        f"{ENCODING_ERROR}/{name}": sums for name, sums in classes.items()
    }
    return {
        name: sums.error for name, sums in found.items() if sums.whole and math.isfinite(sums.error)
    }


def _class_of(spec: TensorSpec) -> str:
    if spec.role != "parameter":
        return "sums" if spec.role == "sum" else "statistics"
    return "matrices" if len(spec.shape) > 1 else "vectors"


class _SquareSums:
    """Of squares: of values, and of what encoding loses of them."""

    def __init__(self) -> None:
        self.lost = self.whole = 0.0

    def add(self, values: Tensor, lost: Tensor) -> None:
        self.lost += float(torch.linalg.vector_norm(lost, dtype=torch.float64)) ** 2
        self.whole += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2

    @property
    def error(self) -> float:
        return TWICE * math.sqrt(self.lost / self.whole) if self.whole else 0.0


@torch.no_grad()
def _looked_at(chunking: Chunking, contribution: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The first element, the values and what encoding loses of them, of the chunks looked at."""
    stride = -(-chunking.chunks // MOST_CHUNKS)
    wire = memoryview(
        bytearray(max(chunking.wire_bytes(chunk) for chunk in range(chunking.chunks)))
    )
    for chunk in range(0, chunking.chunks, stride):
        start, codec = chunk * chunking.chunk_elements, chunking.codec(chunk)
        values = contribution[start : start + chunking.elements(chunk)]
        encoded = chunking.wire(wire[: chunking.wire_bytes(chunk)], chunk)
        decoded = torch.empty_like(values)
        codec.encode(values, encoded)
        codec.decode(encoded, decoded)
        yield start, values, decoded.sub_(values)
