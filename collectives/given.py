"""What a reduction is given: tensors of any number type, as the one vector that travels, and how
its result gets back into them.

float32 travels as it is. bfloat16 and float16 are reduced in float32 and rounded once, at the end.
float64 and integers travel as words of 64 bits, which reducers of their own add up: exactly, or to
float64's rounding in the order of the contributors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import LocalProtocolError
from .plain import (
    CPU,
    DEVICES,
    check_plain,
    kind_of,
    plainly,
    read_words,
    texts,
    tree_kind,
    whole,
    words_of,
)
from .script_swarm import Operating, Reduction
from .swarm import CoordinateRule, GramRule
from .target import Target

if TYPE_CHECKING:
    from torch import Tensor

Rule = Literal[CoordinateRule, GramRule]
RULES: tuple[str, ...] = get_args(Rule)
REDUCED_IN = {
    "float32": "float32",
    "bfloat16": "float32",
    "float16": "float32",
    "float64": "float64",
    **dict.fromkeys(("int8", "uint8", "int16", "int32", "int64"), "int64"),
}
"""The number types that a reduction takes, and which it is carried out in."""


@dataclass(frozen=True, slots=True)
class Given:
    """``vector``: float32 values, or words of 32 bits. ``kind``: what callers must agree in.
    ``take``: writes the result into what was given; raises LocalProtocolError, and writes nothing,
    where that cannot hold it.
    """

    vector: Tensor
    reducer: str
    kind: str
    take: Callable[[Operating], None]


def check_reduction(op: str, weight: int, f: int | None = None) -> None:
    """Raises LocalProtocolError. No ``f``: robust rules are not taken."""
    if op not in (*get_args(Reduction), *(RULES if f is not None else ())):
        raise LocalProtocolError(
            f"a reduction is a mean, sum, max, min or product, not {op!r}",
            hint="modular_sum is for integers under masks",
        )
    if f and (whole(f, "f") < 0 or op not in RULES):
        raise LocalProtocolError(
            f"{op} with f = {f}",
            why=(
                "Robust rules know how many values may be hostile; others follow every one of them."
            ),
        )
    if whole(weight, "weight") < 1 or (op != "mean" and weight != 1):
        raise LocalProtocolError(
            f"{op} of weight {weight}: "
            + (
                "a mean takes a weight of at least 1"
                if op == "mean"
                else f"a {op} takes no other than 1"
            ),
            hint="who has nothing to give does not call, or gives zeros and a 0 to a sum of values "
            "times counts, and of counts",
        )


def given_of(given: Tensor | Mapping[str, Tensor], op: str) -> Given:
    """Named tensors are reduced as one, in the order of their names. Raises LocalProtocolError."""
    import torch

    named = isinstance(given, Mapping)
    if named and not given:
        raise LocalProtocolError("a reduction takes at least one tensor")
    tensors = (
        [given[name] for name in texts(given, "a reduction takes tensors by name")]
        if named
        else [given]
    )
    types = {_reduced_in(tensor, op) for tensor in tensors}
    kind = tree_kind(given) if named else kind_of(given, devices=DEVICES)
    if len(types) > 1:
        raise LocalProtocolError(
            f"one reduction of {' and '.join(sorted(types))}",
            hint="call it once for floats of 16 and 32 bits, once for float64, once for integers",
        )
    wide, parts = types.pop(), [Target(tensor, devices=DEVICES) for tensor in tensors]
    if len(parts) == 1 and parts[0].flat.dtype == torch.float32:
        flat = parts[0].flat
    else:
        with plainly():
            flat = torch.cat([part.flat.to(getattr(torch, wide)) for part in parts])
    if wide == "float32":
        vector, reducer = flat, op
    else:
        vector, reducer = words_of(flat), _of_words(op, wide)
        if wide == "float64" and not torch.isfinite(flat).all():
            raise LocalProtocolError("the tensor holds NaN or infinity")

    def take(operating: Operating) -> None:
        for part in parts:
            part.check()
        if wide == "float32":
            operating.copy_into(flat)
            values = flat
        else:
            values = read_words(operating, 0, flat.dtype, flat.shape)
        if flat is not parts[0].flat:
            _put_back(values, [part.flat for part in parts], op)

    return Given(vector, reducer, kind, take)


def _reduced_in(tensor: Any, op: str) -> str:
    """In which number type. Raises LocalProtocolError for what is no plain tensor of numbers, and
    for what cannot be done with its type.
    """
    check_plain(tensor, devices=DEVICES)
    name = str(tensor.dtype).removeprefix("torch.")
    wide = REDUCED_IN.get(name)
    if wide is None:
        raise LocalProtocolError(
            f"a reduction takes {', '.join(REDUCED_IN)}, not {name}",
            hint="view complex numbers as floats, and give booleans as int8",
        )
    if wide == "float32":
        return wide
    check_plain(tensor, devices=CPU)
    if op in RULES or (op == "mean" and wide == "int64"):
        raise LocalProtocolError(
            f"{op} of {name}",
            why="Robust rules are for float32." if op in RULES else "It is no integer.",
            hint="give it as float32, or float64" if op not in RULES else "give it as float32",
        )
    return wide


def _of_words(op: str, wide: str) -> str:
    """The reducer's name. Sums of integers are those of `modular_sum`."""
    if wide == "int64":
        return "wrap64" if op == "sum" else f"i64{op}"
    return f"f64{op}"


def _put_back(values: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Write a result into the tensors that were given, all of them or none."""
    pieces = values.split([part.numel() for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        _check_fits(piece, part.dtype, op)
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(piece)


def _check_fits(values: Tensor, dtype: Any, op: str) -> None:
    import torch

    if dtype == values.dtype and not (dtype == torch.float64 and values.numel()):
        return
    least, most = values.min().item(), values.max().item()
    if dtype == torch.float64:
        fits = math.isfinite(least) and math.isfinite(most)
    elif dtype.is_floating_point:
        fits = bool(torch.isfinite(values.to(dtype)).all())
    else:
        fits = torch.iinfo(dtype).min <= least and most <= torch.iinfo(dtype).max
    if not fits:
        raise LocalProtocolError(
            f"the {op} does not fit {str(dtype).removeprefix('torch.')}",
            why=f"It lies between {least:g} and {most:g}; nothing was written into the tensor.",
            hint="give it as a wider type, such as float32 or int64",
        )
