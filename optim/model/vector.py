"""A model as one flat float32 vector, as those see it who change it in segments: what a round
contributes, and what the model becomes. `flat.FlatVector` makes one of a torch module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...collectives.layout import Layout

SEGMENT_ELEMENTS = 1 << 20


class RangeSource(Protocol):
    """Anything that can copy ranges of a flat vector: an AnchorView, or `FlatTensor`."""

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """Copy elements [start, start + destination.numel()) into ``destination`` (float32,
        contiguous, on the CPU).
        """
        ...


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A float32 tensor of shape (numel,) as a `RangeSource`."""

    flat: Tensor

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        destination.copy_(self.flat[start : start + destination.numel()])


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a segment and the live tensor, or the flat view of a range of it,
    they belong to. Where that has a master, ``live`` is the master, and ``rounded`` the tensor that
    is written along.
    """

    start: int
    stop: int
    live: Tensor
    rounded: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of the flat vector, all on one device."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


class ModelVector(ABC):
    """The live tensors of a model as one float32 vector; those of one fragment, where the model is
    cut. Nothing is copied but between `pull` and `push`, through one small scratch.
    """

    layout: Layout
    tensors: list[Tensor]
    """The live ones, in the layout's order."""
    masters: dict[int, Tensor]
    """Wider tensors that an optimizer makes live ones of, by the id of the live one."""
    numel: int
    parameters: int
    """How many elements are parameters; they come first."""

    @abstractmethod
    def pull(self) -> Iterator[tuple[Segment, Tensor]]:
        """Each segment with its live values: float32, shape (segment.numel,), contiguous, on the
        CPU: a scratch that the caller may overwrite and `push` back before it asks for the next.
        """
        ...

    @abstractmethod
    def push(self, segment: Segment, values: Tensor) -> None:
        """Write ``values``, the tensor that came with ``segment``, into the live tensors."""
        ...

    @abstractmethod
    def round_to_live(self, segment: Segment, values: Tensor) -> None:
        """Round ``values`` in place to what the segment's live tensors would hold."""
        ...

    @abstractmethod
    def write_to(self, out: Tensor) -> None:
        """Write the live values into ``out``: float32, shape (numel,), on the CPU."""
        ...

    @abstractmethod
    def write_initial(self, out: Tensor) -> None:
        """The same, as a run's first anchor. Raises ConfigError where they hold NaN or infinity."""
        ...

    @abstractmethod
    def read_from(self, source: RangeSource) -> None:
        """Make the live values those of ``source``, exactly (rounded to the live type where that is
        narrower).
        """
        ...

    @abstractmethod
    def sample(self, starts: Sequence[int], run: int) -> Tensor:
        """The live elements [start, start + run) for each of ``starts``, which ascend and are at
        least ``run`` apart: float32, shape (len(starts) * run,), on the CPU.
        """
        ...

    @abstractmethod
    def not_finite(self) -> str:
        """The first tensor that holds NaN or infinity, "" when none does."""
        ...

    @abstractmethod
    def agreed(self, found: str) -> str:
        """What was found in this vector; in a job of several ranks, in the vector of any of them
        ("": nothing).
        """
        ...
