"""Operations that go by number, such as the exchanges of gossip: their names are ``NAME/0``,
``NAME/1`` and so on, and a tag of each tells the members that hear of it which number it is, though
they know its name by a hash only. So a member that is slow, or new, goes on at the number at which
others wait for it (`Series.next_number`), and not at one that they have long decided without it.
"""

from __future__ import annotations

import re
from typing import Protocol, cast, runtime_checkable

from blake3 import blake3

from .errors import LocalProtocolError
from .plain import check_swarm
from .script_swarm import MAX_TAG

MAX_SERIES_NAME = 48
"""Characters of a series' name: those of its operations have a number, too."""
_TAG = re.compile(r"#([0-9a-f]{8})\.([0-9]{1,12})\Z")


@runtime_checkable
class Series(Protocol):
    """A Swarm whose member hears how far the others are."""

    def next_number(self, name: str, least: int = 0) -> int:
        """The number, ``least`` or greater, of the operation of series ``name`` that this member
        can call next: the newest that another has called and that is not decided; else the one
        after the newest decided. None that it has called, or voted in and forgotten.
        """
        ...


class NumberedName(str):
    """A name that `numbered` made: of which series, and which number of it."""

    __slots__ = ("number", "series")

    def __new__(cls, series: str, number: int) -> NumberedName:
        self = super().__new__(cls, f"{series}/{number}")
        self.series, self.number = series, number
        return self


def numbered(swarm: Series, name: str) -> str:
    """The ``op_id`` of the next operation of series ``name``, for one call of anything but an
    average: at a script that begins again, or comes late, the one that others wait for.

        outcome = all_reduce(swarm, loss, op_id=numbered(swarm, "loss")).wait()

    The number is kept by the nodes, not by the script. Raises LocalProtocolError for a name longer
    than MAX_SERIES_NAME, SwarmClosedError without a node.
    """
    said = cast("object", name)  # of a script that no checker has seen
    if not isinstance(said, str) or not 0 < len(said) <= MAX_SERIES_NAME:
        raise LocalProtocolError(
            f"a series is named by 1 to {MAX_SERIES_NAME} characters, not {name!r}"
        )
    check_swarm(swarm)
    return NumberedName(name, swarm.next_number(name))


def series_tag(kind: str, name: str, number: int) -> str:
    """The tag of an operation of a series. ``kind``: what else callers must agree in."""
    end = f"#{_key(name)}.{number}"
    room = MAX_TAG - len(end)
    if len(kind) > room:
        kind = f"{kind[: room - 11]}...{blake3(kind.encode()).hexdigest(4)}"
    return kind + end


def number_of(tag: str, name: str) -> int | None:
    """Which operation of series ``name`` has this tag; None for a tag of anything else. Bytes of a
    peer: hostile.
    """
    found = _TAG.search(tag)
    return int(found[2]) if found is not None and found[1] == _key(name) else None


def _key(name: str) -> str:
    return blake3(name.encode()).hexdigest(4)
