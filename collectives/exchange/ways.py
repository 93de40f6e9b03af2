"""One member's view of a plan's ways: what it adds up, what it sends up, and who gives it the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..group import Plan
from ..identifiers import PeerId
from ..reduce import Factors, Reducer
from ..trees import Term, Tree, trees_of
from .slot import RoundSlot


class Job:
    """What I add up for the chunks of a part: as its owner, or (``sent``) as a partial sum for the member above."""

    def __init__(self, slot: RoundSlot, me: PeerId, terms: Sequence[Term], factors: Factors | None, sent: Term | None = None) -> None:
        self.sent = sent
        self.weights = tuple(term.weight for term in terms)
        self.factors = factors
        self.sources = [(term.peer, term.cid, slot.parts_of(term.peer, term.cid)) for term in terms]
        self.others = {(term.peer, term.cid) for term in terms if term.peer != me}
        self.own_cid = next((term.cid for term in terms if term.peer == me), None)


@dataclass(frozen=True, slots=True)
class Upload:
    """What I send up for a part: my contribution, or a partial sum."""

    cid: bytes
    partial: bool
    above: PeerId


@dataclass(slots=True)
class Way:
    """A part as I see it. ``above``: who gives me its result (for the owner: itself). ``tree``: None in a butterfly."""

    owner: PeerId
    above: PeerId
    job: Job | None
    upload: Upload | None
    tree: Tree | None

    def below(self, me: PeerId, audience: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Those of ``audience`` who get the result from me."""
        if self.tree is not None:
            return self.tree.below(me, audience)
        return tuple(peer for peer in audience if peer != me) if self.owner == me else ()


def ways_of(plan: Plan, slot: RoundSlot, me: PeerId, reducer: Reducer) -> list[Way]:
    """My way of each part. Raises ConfigError where the plan wants partial sums of a reducer or codec that has none."""
    if plan.topology.kind == "butterfly":
        return _star(plan, slot, me, reducer)
    if reducer.form != "streaming" or slot.results is not slot.grid:
        raise ConfigError(f"reducer {plan.reducer!r} of {plan.codec} works in a butterfly only", key="topology")
    ways: list[Way] = []
    for part, tree in zip(plan.parts, trees_of(plan, reducer), strict=True):
        total, term = tree.sum(me), tree.sent(me)
        job = Job(slot, me, total.terms, total.factors, total.sent) if total is not None else None
        above = me if part.owner == me else tree.above(me)
        upload = Upload(term.cid, job is not None, above) if term is not None else None
        ways.append(Way(part.owner, above, job, upload, tree))
    return ways


def _star(plan: Plan, slot: RoundSlot, me: PeerId, reducer: Reducer) -> list[Way]:
    """Everybody sends to the owners; those send to everybody."""
    terms = [Term(c.member.peer, c.cid, c.weight) for c in plan.contributors if reducer.form != "own" or c.member.peer == me]
    weights = tuple(term.weight for term in terms)
    factors = reducer.factors(weights) if reducer.form == "streaming" else Factors((1.0,), 1.0) if reducer.form == "own" else None
    job = Job(slot, me, terms, factors)
    sends = reducer.form != "own" and job.own_cid is not None
    return [
        Way(part.owner, part.owner, job, None, None)
        if part.owner == me
        else Way(part.owner, part.owner, None, Upload(job.own_cid, False, part.owner) if sends and job.own_cid else None, None)
        for part in plan.parts
    ]
