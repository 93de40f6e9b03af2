"""A signed message with one field changed, whatever message it is: for liars that leave everything
else true.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, cast

import msgspec

Path = tuple[int | str, ...]
DEEPEST = 6


def paths(value: object, before: Path = ()) -> list[Path]:
    """Where something can be changed in a message: of its structs the fields, of its tuples the
    whole and a few elements.
    """
    found: list[Path] = [before] if before else []
    if len(before) >= DEEPEST:
        return found
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name != "signature":
                found += paths(getattr(value, name), (*before, name))
    elif isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        for index in range(min(len(items), 3)):
            found += paths(items[index], (*before, index))
    return found


def bent(body: Any, dice: Random) -> tuple[Any, str]:
    """The message with one field changed, and which one. It may be one that cannot be encoded or
    decoded.
    """
    path = dice.choice(paths(body))
    return _put(body, path, dice), ".".join(str(step) for step in path if isinstance(step, str))


def _put(value: Any, path: Path, dice: Random) -> Any:
    if not path:
        return _other(value, dice)
    step = path[0]
    if isinstance(step, str):
        return msgspec.structs.replace(value, **{step: _put(getattr(value, step), path[1:], dice)})
    items = list(cast("Sequence[object]", value))
    items[step] = _put(items[step], path[1:], dice)
    return tuple(items)


def _other(value: Any, dice: Random) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return dice.choice((0, 1, max(0, value - 1), value + 1, 1000 * value + 1, 1 << 40))
        case float():
            return dice.choice((0.0, value / 2, 2 * value + 1))
        case str():
            return dice.choice((value + "x", "x", value[::-1]))
        case bytes() if value:
            at = dice.randrange(len(value))
            return value[:at] + bytes([value[at] ^ (1 + dice.randrange(255))]) + value[at + 1 :]
        case tuple() if value:
            kept = list(cast("tuple[object, ...]", value))
            at = dice.randrange(len(kept))
            change = dice.randrange(4)
            if change == 0:
                del kept[at]
            elif change == 1:
                kept.insert(at, kept[at])
            elif change == 2:
                kept.reverse()
            else:
                kept = []
            return tuple(kept)
        case msgspec.Struct():
            return _put(value, dice.choice(paths(value)), dice)
        case _:
            return value
