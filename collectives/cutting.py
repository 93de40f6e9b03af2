"""A model cut into fragments."""

from __future__ import annotations

from .errors import ConfigError
from .layout import Layout, TensorSpec


def cut(layout: Layout, fragments: int) -> list[Layout]:
    """The layout in so many ranges of whole tensors, each a layout of its own: as near as can be to
    equal lengths, none empty.

    Raises ConfigError where there are fewer tensors with elements than fragments.
    """
    full = [spec for spec in layout.tensors if spec.numel]
    if not 1 <= fragments <= len(full):
        raise ConfigError(f"{len(full)} tensors do not make {fragments} fragments", key="fragments")
    parts, left, numel = list[Layout](), list(layout.tensors), layout.numel
    for more in range(fragments, 0, -1):
        taken, length = list[TensorSpec](), 0
        while left and (more == 1 or _fits(left, length, numel / more, more)):
            spec = left.pop(0)
            taken.append(TensorSpec(spec.name, spec.shape, length, spec.role))
            length += spec.numel
        parts.append(Layout(tuple(taken), length, layout.base, layout.traits))
        numel -= length
    return parts


def _fits(left: list[TensorSpec], length: int, target: float, more: int) -> bool:
    """Whether the next tensor still belongs to this fragment: it has none yet, or is nearer to its
    share with it, and the others keep one each.
    """
    if not length:
        return True
    enough = sum(spec.numel > 0 for spec in left[1:]) >= more - 1
    return enough and length + left[0].numel / 2 <= target
