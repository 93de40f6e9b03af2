"""What the flat vector means: names, shapes and offsets, fixed when a run is founded."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from blake3 import blake3

MAX_TENSORS = 65_536
MAX_DIMS = 8

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Dim = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Shape = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=MAX_DIMS)]
Role = Literal["parameter", "mean", "variance"]
"""How the outer step treats a tensor: parameters take the outer optimizer, running statistics are averaged (a variance stays >= 0)."""


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
    """The flat vector of a model: its tensors in order, without gaps, and its length in elements."""

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    numel: Annotated[int, msgspec.Meta(ge=1)]

    def digest(self) -> bytes:
        """blake3 of the canonical encoding; equal digests mean the same model."""
        return blake3(b"atoll/layout/1" + msgspec.msgpack.encode(self)).digest()

    def check(self) -> str | None:
        """Why the layout is not well formed, or None. Run on every layout that comes from outside."""
        offset = 0
        for spec in self.tensors:
            if spec.offset != offset:
                return f"tensor {spec.name!r} starts at {spec.offset}, expected {offset}"
            offset += spec.numel
        return None if offset == self.numel else f"tensors cover {offset} elements, not {self.numel}"


def make_layout(shapes: list[tuple[str, tuple[int, ...]]]) -> Layout:
    """A layout of tensors in the given order."""
    offset, specs = 0, list[TensorSpec]()
    for name, shape in shapes:
        spec = TensorSpec(name, shape, offset)
        specs.append(spec)
        offset += spec.numel
    return Layout(tuple(specs), offset)


def differences(mine: Layout, theirs: Layout) -> list[str]:
    """Human-readable differences between two layouts, one line a tensor: name, this shape, the run's shape."""
    a, b = {t.name: t.shape for t in mine.tensors}, {t.name: t.shape for t in theirs.tensors}
    lines = [f"{name}  yours {list(a[name])}  run {list(b[name])}" for name in a if name in b and a[name] != b[name]]
    lines += [f"{name}  only in your model {list(a[name])}" for name in a if name not in b]
    lines += [f"{name}  missing in your model, run has {list(b[name])}" for name in b if name not in a]
    if not lines and mine != theirs:
        lines.append("the tensors are the same but in another order or of another role")
    return lines
