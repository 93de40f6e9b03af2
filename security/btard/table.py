"""Everything signed that a peer has in one attempt, by slot; and the vectors that were committed
to.
"""

from __future__ import annotations

from typing import TypeVar

from blake3 import blake3

from .draw import aggregate_commitment, part_commitment
from .finished import Finished
from .messages import (
    SLOTTED,
    Bundle,
    Commit,
    CommittedVector,
    Context,
    Fault,
    Item,
    Kind,
    Result,
    Signed,
    Slotted,
    Vector,
)

S = TypeVar("S", bound=Slotted)


class Table:
    """One slot for each sender and kind of message. What is in it has a valid signature."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.size = len(context.roster)
        self._slots: dict[tuple[Kind, int], tuple[Signed, Slotted]] = {}
        self._counts: dict[Kind, int] = dict.fromkeys(SLOTTED, 0)
        self._views: dict[Kind, bytes] = {}

    def put(self, kind: Kind, signed: Signed, body: Slotted) -> Bundle | None:
        """Keep a message. Returns the proof of equivocation where its slot holds another; the first
        stays.
        """
        held = self._slots.get((kind, signed.sender))
        if held is None:
            self._slots[kind, signed.sender] = (signed, body)
            self._counts[kind] += 1
        elif held[0].body != signed.body:
            return Bundle(self.context, Fault.EQUIVOCATION, signed.sender, None, (held[0], signed))
        return None

    def replace(self, kind: Kind, signed: Signed, body: Slotted) -> None:
        """Take another message of an equivocator: what it told others."""
        self._slots[kind, signed.sender] = (signed, body)
        self._views.pop(kind, None)

    def signed(self, kind: Kind, sender: int) -> Signed | None:
        """A message as it was signed."""
        held = self._slots.get((kind, sender))
        return None if held is None else held[0]

    def content(self, kind: Kind, sender: int) -> Slotted | None:
        """What a message says."""
        held = self._slots.get((kind, sender))
        return None if held is None else held[1]

    def body(self, kind: Kind, sender: int, type_: type[S]) -> S | None:
        """What a message of a known type says."""
        held = self._slots.get((kind, sender))
        return held[1] if held is not None and isinstance(held[1], type_) else None

    def all(self, kind: Kind, type_: type[S]) -> list[S]:
        """What all peers said, in order; only when nobody is missing."""
        return [
            body
            for sender in range(self.size)
            if (body := self.body(kind, sender, type_)) is not None
        ]

    def full(self, kind: Kind) -> bool:
        """Whether everybody's message is here."""
        return self._counts[kind] == self.size

    def view(self, kind: Kind) -> bytes:
        """32 bytes that name what everybody said; only when nobody is missing."""
        if kind not in self._views:
            bodies = (self._slots[kind, sender][0].body for sender in range(self.size))
            self._views[kind] = blake3(b"".join(blake3(body).digest() for body in bodies)).digest()
        return self._views[kind]


class AttemptVectors:
    """Vectors of an attempt, each held only if it is what its maker committed to. Those that come
    before their commitment wait, one a place.
    """

    def __init__(self, table: Table, bounds: list[int], previous: Finished | None) -> None:
        self._table, self._bounds, self._previous = table, bounds, previous
        self.paths: dict[Item, tuple[bytes, ...]] = {}
        self._early: dict[Item, Vector] = {}
        self.held: dict[Item, Vector] = {}

    def put(self, piece: CommittedVector, *, by_maker: bool) -> bool:
        """Take a vector; whether it is held now. ``by_maker``: it came from who committed to it, so
        it may wait for the commitment.
        """
        kind, whose, part = piece.item
        if kind == Kind.STATES:
            return self._put_states(piece)
        place = whose if kind == Kind.AGGREGATE else part
        if (
            kind not in (Kind.PART, Kind.AGGREGATE)
            or max(whose, part) >= self._table.size
            or piece.item in self.held
        ):
            return False
        if len(piece.values) != self._bounds[place + 1] - self._bounds[place]:
            return False
        opened = self._opens(piece.item, piece.values)
        if opened:
            self.held[piece.item] = piece.values
        elif opened is None and by_maker:
            self._early[piece.item] = piece.values
        return bool(opened)

    def _put_states(self, piece: CommittedVector) -> bool:
        _, whose, part = piece.item
        roster, previous = self._table.context.roster, self._previous
        if (
            previous is None
            or part
            or whose >= len(roster)
            or roster[whose] not in previous.trails
            or piece.item in self.held
        ):
            return False
        if not previous.intervals or not previous.shows(roster[whose], piece.values, piece.path):
            return False
        self.held[piece.item], self.paths[piece.item] = piece.values, piece.path
        return True

    def settle(self) -> None:
        """Look again at what waited for its commitment."""
        for item, values in list(self._early.items()):
            opened = self._opens(item, values)
            if opened is not None:
                del self._early[item]
            if opened:
                self.held[item] = values

    def _opens(self, item: Item, values: Vector) -> bool | None:
        """Whether these values are what was committed to; None: nothing was yet."""
        kind, whose, part = item
        context = self._table.context
        if kind == Kind.AGGREGATE:
            result = self._table.body(Kind.RESULT, whose, Result)
            return (
                None
                if result is None
                else result.aggregate
                == aggregate_commitment(context, context.roster[whose], values)
            )
        commit = self._table.body(Kind.COMMIT, whose, Commit)
        if commit is None:
            return None
        return commit.parts[32 * part : 32 * part + 32] == part_commitment(
            context, context.roster[whose], part, values
        )
