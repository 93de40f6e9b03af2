"""What a plan's routes are made of: what is added up where. A plan without partial sums is a star;
`trees` has all others, and is found in `rows` where a plan asks for one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .group import Entry, Plan
from .identifiers import PeerId
from .rows import ROWS

if TYPE_CHECKING:
    from .reduce import Factors, StreamingReducer


@dataclass(frozen=True, slots=True)
class Term:
    """Something to be added up: a contribution or a partial sum."""

    peer: PeerId  # who sends it
    cid: bytes
    weight: int


@dataclass(frozen=True, slots=True)
class PartialSum:
    """What a member that has others below adds up, in this order, and the weight of all
    contributions in it.
    """

    terms: tuple[Term, ...]
    factors: Factors
    sent: Term | None  # what it is to the member above; None at the root
    total: int


@dataclass(frozen=True, slots=True)
class CheckedSum:
    """A partial sum, used if two accounts of it are equal: its maker's and a witness's."""

    partial: Term
    of: PartialSum
    accounts: tuple[Term, Term]

    @property
    def witness(self) -> PeerId:
        """Who adds up the same."""
        return self.accounts[1].peer


class SumTree(ABC):
    """Over which members the contributions to one part are added up, and its result handed down:
    `trees.Tree`.
    """

    owner: PeerId

    @abstractmethod
    def above(self, peer: PeerId) -> PeerId:
        """Who sends the result to a member other than the owner."""
        ...

    @abstractmethod
    def below(self, peer: PeerId, audience: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Those of ``audience`` to whom a member sends the result."""
        ...

    @abstractmethod
    def sum(self, peer: PeerId) -> PartialSum | None:
        """What a member adds up; None where nobody is below it."""
        ...

    @abstractmethod
    def checks(self) -> tuple[CheckedSum, ...]:
        """Which partial sums are checked, in the order of the plan."""
        ...

    @abstractmethod
    def check_by(self, peer: PeerId) -> CheckedSum | None:
        """The check in which a member is head or witness."""
        ...

    @abstractmethod
    def wants(self, peer: PeerId) -> tuple[Term, ...]:
        """All that others send a member for this part, and its own if it adds that up."""
        ...

    @abstractmethod
    def sends(self, peer: PeerId) -> tuple[tuple[Term, PeerId], ...]:
        """All that a member sends for this part, and to whom."""
        ...


def trees_of(plan: Plan | Entry, reducer: StreamingReducer) -> tuple[SumTree, ...]:
    """The tree of each part of a plan with partial sums, or of the entry made from it. Raises
    ConfigError where they are not installed.
    """
    return ROWS.load("trees", "trees_of", key="[exchange] plan")(plan, reducer)


def senders_of(plan: Plan, me: PeerId) -> dict[bytes, frozenset[PeerId]]:
    """By cid, who sends what ``me`` adds up, and what it sends itself (a partial sum may be made by
    several, for a part each).
    """
    found = {c.cid: frozenset((c.member.peer,)) for c in plan.contributors}
    if plan.topology.kind == "butterfly":
        return found
    from .reduce import find_reducer  # loads torch

    reducer = find_reducer(plan.reducer)
    if reducer is not None and reducer.form == "streaming":
        for tree in trees_of(plan, reducer):
            for term in (*tree.wants(me), *(term for term, _ in tree.sends(me))):
                found[term.cid] = found.get(term.cid, frozenset()) | {term.peer}
    return found
