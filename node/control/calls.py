"""Who answers which request: one row a request. A row names the request's class, what does it, and
what makes the reply of its value.

    CallTable(
        answers(p.Ping, node.ping, p.Document),  # async def ping(self, peer: str) -> dict[str, Any]
        does(p.Leave, node.leave),
        hears(p.Report, script.report),
    )

What does it takes the request's fields, but for ``id``, by their names. The signatures below hold a
row together: a type checker refuses one whose function takes other fields, or whose value makes
another reply than the request's class names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

from ...collectives.errors import LocalProtocolError
from . import protocol as p

P = ParamSpec("P")
V = TypeVar("V")
R = TypeVar("R", bound=p.Reply)


class WithMemory(NamedTuple, Generic[R]):
    """A reply, and the descriptors that go beside it. They are duplicated, if they are to outlive
    the call.
    """

    reply: R
    fds: Sequence[int]


@dataclass(frozen=True, slots=True)
class CallRow:
    """``do`` is given the fields; ``reply``: of the request's id and of what ``do`` has returned,
    None where nothing answers.
    """

    kind: type[p.Request]
    do: Callable[..., Any]
    reply: Callable[[int, Any], p.Reply | WithMemory[Any]] | None


@overload
def answers(
    kind: Callable[Concatenate[int, P], p.Ask[R]],
    do: Callable[P, Awaitable[V]],
    reply: Callable[[int, V], R | WithMemory[R]],
) -> CallRow: ...


@overload
def answers(
    kind: Callable[Concatenate[int, P], p.Ask[R]],
    do: Callable[P, V],
    reply: Callable[[int, V], R | WithMemory[R]],
) -> CallRow: ...


def answers(kind: Any, do: Callable[..., Any], reply: Callable[[int, Any], Any]) -> CallRow:
    """A request whose reply ``reply`` makes, the reply's class mostly."""
    return CallRow(kind, do, reply)


def does(
    kind: Callable[Concatenate[int, P], p.Ask[p.Done]], do: Callable[P, Awaitable[None] | None]
) -> CallRow:
    """A request of which is only said that it is done."""
    made: Any = kind
    return CallRow(made, do, lambda id_, _: p.Done(id_))


def hears(kind: Callable[P, p.Say], do: Callable[P, Awaitable[None] | None]) -> CallRow:
    """A request that nothing answers."""
    made: Any = kind
    return CallRow(made, do, None)


class CallTable:
    """What one object answers. A request that has no row is refused by its name."""

    def __init__(self, *rows: CallRow) -> None:
        self._rows = dict[type[p.Request], CallRow]()
        self.add(*rows)

    def add(self, *rows: CallRow) -> None:
        """More rows, for requests that have none yet."""
        for row in rows:
            assert row.kind not in self._rows, f"{row.kind.__name__} has a row already"
            self._rows[row.kind] = row

    @property
    def kinds(self) -> frozenset[type[p.Request]]:
        """The requests that have a row."""
        return frozenset(self._rows)

    def __contains__(self, request: p.Request) -> bool:
        return type(request) in self._rows

    async def answer(self, request: p.Request) -> p.Reply | WithMemory[Any] | None:
        """Do it. What it raises passes."""
        row = self._rows.get(type(request))
        if row is None:
            raise LocalProtocolError(f"{type(request).__name__} is out of place here")
        id_ = request.id if isinstance(request, p.Ask) else 0
        fields = (name for name in request.__struct_fields__ if name != "id")
        value = row.do(**{name: getattr(request, name) for name in fields})
        if isawaitable(value):
            value = await value
        return row.reply(id_, value) if row.reply is not None else None
