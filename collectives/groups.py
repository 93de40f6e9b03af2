"""Groups of a configuration: lines of a grid, and pairs. Pure functions, so that all members of a
group compute the same acceptors.

A group is named by text, of which a member needs nothing but its configuration and the operation to
know its own:

* ``15x14.1``: members that differ in coordinate 1 only, on a grid of 15 x 14 that is filled in the
  order of the configuration, the last coordinate fastest; places may stay empty. ``d2.1``: the same
  on the grid of two dimensions that `grid_dims` makes of the configuration.
* ``p3``: the third pair. Where the configuration has 2^k members and the number is below k,
  neighbours on a hypercube; else pairs of a permutation seeded by the operation, and where the
  number is odd one member stays alone.

Averaging along each dimension of a full grid in turn gives everybody the mean of all (Moshpit
All-Reduce, arXiv 2103.03239).
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod

from blake3 import blake3

from .group import MAX_MEMBERS, Config, Member

MAX_GROUP_NAME = 24
MAX_DIMENSIONS = 8
MAX_PAIRS = 64
GROUPS = (
    rf"d[1-{MAX_DIMENSIONS}]\.[0-7]|p[0-9]{{1,2}}|"
    r"[1-9][0-9]{0,2}(?:x[1-9][0-9]{0,2}){0,7}\.[0-7]"
)
_GROUP = re.compile(GROUPS, re.ASCII)


def group_fault(name: str) -> str:
    """Why nothing can be the group of this name; "" when some configuration may have it."""
    if len(name) > MAX_GROUP_NAME or not _GROUP.fullmatch(name):
        return "no such group"
    kind, _, axis = name.partition(".")
    if name[0] == "p":
        return "" if int(name[1:]) < MAX_PAIRS else f"more than {MAX_PAIRS} pairs"
    dims = [1] * int(kind[1:]) if kind[0] == "d" else [int(size) for size in kind.split("x")]
    if int(axis) >= len(dims) or prod(dims) > 4 * MAX_MEMBERS:
        return "no such dimension" if int(axis) >= len(dims) else "too large a grid"
    return ""


def group_of(name: str, config: Config, me: Member, seed: str) -> Config:
    """The members of ``me``'s group, sorted. ``me`` is in ``config``; everybody where the grid is
    too small for it.
    """
    if name[0] == "p":
        return _pair(int(name[1:]), config, me, seed)
    kind, _, axis = name.partition(".")
    dims = (
        grid_dims(len(config), int(kind[1:]))
        if kind[0] == "d"
        else tuple(int(size) for size in kind.split("x"))
    )
    if prod(dims) < len(config):
        return config
    return _line(dims, int(axis), config, config.index(me))


def _line(dims: tuple[int, ...], axis: int, config: Config, place: int) -> Config:
    stride = prod(dims[axis + 1 :])
    first = place - place // stride % dims[axis] * stride
    return tuple(
        config[at] for at in range(first, first + dims[axis] * stride, stride) if at < len(config)
    )


def _pair(number: int, config: Config, me: Member, seed: str) -> Config:
    if is_cube(len(config)) and 1 << number < len(config):
        place = config.index(me)
        return tuple(config[at] for at in sorted((place, place ^ 1 << number)))
    order = sorted(
        config, key=lambda member: blake3(f"atoll/pairs/1/{seed}/{member.peer}".encode()).digest()
    )
    first = order.index(me) & ~1
    return tuple(sorted(order[first : first + 2]))


def is_cube(members: int) -> bool:
    """Whether so many members are the corners of a hypercube."""
    return members & (members - 1) == 0


@lru_cache(maxsize=64)
def grid_dims(members: int, dimensions: int = 2) -> tuple[int, ...]:
    """Sizes of the grid for so many members, largest first: without empty places where that costs
    at most a quarter more lanes, else as square as possible. 200 members: 20 x 10; 199: 15 x 14."""
    square, left = list[int](), members
    for more in range(dimensions, 0, -1):
        size = next(size for size in range(1, left + 1) if size**more >= left)
        square.append(size)
        left = -(-left // size)
    full = _factors(members, dimensions)
    return tuple(
        sorted(
            full if 4 * (sum(full) - dimensions) <= 5 * (sum(square) - dimensions) else square,
            reverse=True,
        )
    )


def _factors(members: int, dimensions: int) -> tuple[int, ...]:
    """The factors of least sum."""
    if dimensions == 1:
        return (members,)
    return min(
        (
            (size, *_factors(members // size, dimensions - 1))
            for size in range(1, members + 1)
            if members % size == 0
        ),
        key=lambda sizes: (sum(sizes), sizes),
    )
