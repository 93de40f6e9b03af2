"""The shape of a run's log, and of the logs beside it, by the names of codec and reducer."""

from __future__ import annotations

from collections.abc import Callable

from ...collectives.errors import VersionMismatchError
from ...collectives.group import TopologyKind
from ...collectives.reduce import Reducer, least_of
from ...collectives.round.state import Shape

FindReducer = Callable[[str], Reducer | None]
"""Finds a reducer by its name; None where there is none such."""


def shape_of(
    numel: int, chunk: int, codec: str, name: str, topology: TopologyKind, find: FindReducer
) -> Shape:
    """The vector and how it is reduced, by the name of a reducer: on trees only where it has
    partial sums. Raises VersionMismatchError.
    """
    reducer = find(name)
    if reducer is None:
        raise VersionMismatchError(
            f"the reducer {name!r} is not known to this atoll",
            why="A newer release has it.",
            hint="pip install -U atoll",
        )
    return Shape(
        numel,
        chunk,
        codec,
        name,
        topology if reducer.form == "streaming" else "butterfly",
        least_of(reducer),
    )


def witnesses_of(lying: int, shape: Shape, find: FindReducer) -> int:
    """How many members state the sum of each part beside its owner: as many as may lie,
    where a part's result follows from what is contributed to it, and no partial sums travel.
    """
    reducer = find(shape.reducer)
    by_parts = reducer is not None and reducer.form in ("streaming", "rows")
    return lying if by_parts and shape.topology == "butterfly" else 0
