"""What the flat vector means: names, shapes and offsets, fixed when a run is founded."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from .errors import ModelMismatchError
from .foreign import WORDS

MAX_TENSORS = 65_536
MAX_DIMS = 8
MAX_FRAGMENTS = 16

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=WORDS)]
Dim = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Shape = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=MAX_DIMS)]
TraitName = Annotated[str, msgspec.Meta(max_length=512, pattern=WORDS)]
Trait = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=WORDS)]
Role = Literal["parameter", "mean", "variance", "sum"]
"""How the outer step treats a tensor: parameters take the outer optimizer, running statistics are
averaged (a variance stays >= 0). A sum is what members add to and no model has: each gives a change
over its weight, and the changes of all that are counted are added up."""
STEPS = "atoll.steps"
"""What travels beside the model where what sites give is divided by their inner steps: how many
those were, by weight on average (FedNova's τ_eff)."""
BufferClass = Literal["mean", "same", "own"]
"""How a buffer of a module takes part: averaged, in the vector; equal at all members, compared and
not sent; one member's own."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the flat float32 vector: elements [offset, offset + product(shape))."""

    name: Name
    shape: Shape
    offset: Annotated[int, msgspec.Meta(ge=0)]
    role: Role = "parameter"

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The flat vector of a model: its tensors in order, without gaps, and its length in
    elements. ``base``: the digest of what is frozen beside them, b"" where nothing is. ``traits``:
    what changes the model's function beside its tensors, by the name of a module, in words.
    """

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    numel: Annotated[int, msgspec.Meta(ge=1)]
    base: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    traits: Annotated[
        tuple[tuple[TraitName, Trait], ...], msgspec.Meta(max_length=MAX_TENSORS)
    ] = ()

    @property
    def model_numel(self) -> int:
        """Number of elements that a model has: all but sums."""
        return sum(spec.numel for spec in self.tensors if spec.role != "sum")

    def digest(self) -> bytes:
        """blake3 of the canonical encoding; equal digests mean the same model, on the same base."""
        vector = msgspec.msgpack.encode((self.tensors, self.numel))
        traits = msgspec.msgpack.encode(self.traits) if self.traits else b""
        return blake3(b"atoll/layout/1" + vector + self.base + traits).digest()

    def check(self) -> str | None:
        """Why the layout is not well formed, or None. Run on every foreign layout."""
        offset = 0
        for spec in self.tensors:
            if spec.offset != offset:
                return f"tensor {spec.name!r} starts at {spec.offset}, expected {offset}"
            offset += spec.numel
        return (
            None if offset == self.numel else f"tensors cover {offset} elements, not {self.numel}"
        )


def make_layout(shapes: list[tuple[str, tuple[int, ...]]]) -> Layout:
    """A layout of tensors in the given order."""
    offset, specs = 0, list[TensorSpec]()
    for name, shape in shapes:
        spec = TensorSpec(name, shape, offset)
        specs.append(spec)
        offset += spec.numel
    return Layout(tuple(specs), offset)


def pattern_of(name: str, patterns: Iterable[str]) -> str | None:
    """The shell pattern that decides for a tensor: of several that match the longest, then the last
    in the alphabet; None where none does.
    """
    matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
    return max(matching, key=lambda pattern: (len(pattern), pattern)) if matching else None


def ranges_of_patterns(layout: Layout, patterns: Iterable[str]) -> dict[str, list[slice]]:
    """Which elements each pattern decides for."""
    found: dict[str, list[slice]] = {pattern: [] for pattern in patterns}
    for spec in layout.tensors:
        if (pattern := pattern_of(spec.name, found)) is not None and spec.numel:
            found[pattern].append(slice(spec.offset, spec.offset + spec.numel))
    return found


def check_base(mine: Layout, theirs: Layout) -> None:
    """Raise ModelMismatchError E310 where two models train the same tensors on another base."""
    if mine.base != theirs.base and mine.tensors == theirs.tensors:
        digests = [layout.base.hex()[:12] or "nothing frozen" for layout in (mine, theirs)]
        raise ModelMismatchError(
            f"what is frozen in your model is not what the run has: yours {digests[0]}, the run's "
            f"{digests[1]}",
            code="E310",
            why="What members train fits the frozen parameters that it was trained on.",
            hint=(
                "Load the same checkpoint in the same revision, and call torch.manual_seed with "
                "the run's seed before frozen parameters are made: atoll explain E310"
            ),
        )


def differences(mine: Layout, theirs: Layout) -> list[str]:
    """Human-readable differences between two layouts, one line a tensor: name, this shape, the
    run's shape; then one a module whose settings differ.
    """
    a, b = {t.name: t.shape for t in mine.tensors}, {t.name: t.shape for t in theirs.tensors}
    lines = [
        f"{name}  yours {list(a[name])}  run {list(b[name])}"
        for name in a
        if name in b and a[name] != b[name]
    ]
    lines += [f"{name}  only in your model {list(a[name])}" for name in a if name not in b]
    lines += [
        f"{name}  missing in your model, run has {list(b[name])}" for name in b if name not in a
    ]
    ours, runs = dict(mine.traits), dict(theirs.traits)
    lines += [
        f"{name or 'the model'}  yours {ours.get(name, 'nothing')}  run {runs.get(name, 'nothing')}"
        for name in dict.fromkeys((*ours, *runs))
        if ours.get(name) != runs.get(name)
    ]
    if not lines and mine != theirs:
        lines.append("the tensors are the same but in another order or of another role")
    return lines
