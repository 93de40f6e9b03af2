"""One member's view of a plan's routes: what it adds up, what it sends up, and who gives it the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..group import Plan
from ..identifiers import PeerId
from ..reduce import Factors, Reducer
from ..terms import CheckedSum, SumTree, Term, trees_of
from ..witnesses import stated_by

if TYPE_CHECKING:
    from .slot import RoundSlot


class Job:
    """What I add up for the chunks of a part: as its owner, or (``sent``) as a partial sum for the
    member above, or to check that.

    ``account``: the name of what I say of it. ``checks``: the partial sums among what I add up of
    which I am given accounts. ``witness``: as a witness of the part, where members may lie
    (`witnesses`): I state what comes of it, and send it to nobody.
    """

    def __init__(
        self,
        parts: RoundSlot,
        me: PeerId,
        terms: Sequence[Term],
        factors: Factors | None,
        sent: Term | None = None,
        *,
        account: bytes | None = None,
        checks: Sequence[CheckedSum] = (),
        witness: bool = False,
    ) -> None:
        self.sent, self.account, self.checks = sent, account, checks
        self.witness = witness
        self.weights = tuple(term.weight for term in terms)
        self.factors = factors
        self.sources = [
            (term.peer, term.cid, parts.parts_of(term.peer, term.cid)) for term in terms
        ]
        accounts = [account for check in checks for account in check.accounts]
        self.awaited = [source for source in self.sources if source[0] != me]
        self.awaited += [
            (account.peer, account.cid, parts.accounts.of(account.peer, account.cid))
            for account in accounts
        ]
        self.others = {(peer, cid) for peer, cid, _ in self.awaited}
        self.own_cid = next((term.cid for term in terms if term.peer == me), None)

    @property
    def owned(self) -> bool:
        """Whether what comes of it is the result."""
        return self.sent is None and self.account is None and not self.witness


@dataclass(frozen=True, slots=True)
class Upload:
    """What I send for a part: my contribution, or (``made``) my sum for it."""

    cid: bytes
    made: bool
    to: PeerId


@dataclass(slots=True)
class Route:
    """A part as I see it. ``above``: who gives me its result (for the owner: itself). ``tree``:
    None in a butterfly.
    """

    owner: PeerId
    above: PeerId
    job: Job | None
    uploads: tuple[Upload, ...]
    tree: SumTree | None

    def below(self, me: PeerId, audience: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Those of ``audience`` who get the result from me."""
        if self.tree is not None:
            return self.tree.below(me, audience)
        return tuple(peer for peer in audience if peer != me) if self.owner == me else ()


def routes_of(plan: Plan, parts: RoundSlot, me: PeerId, reducer: Reducer) -> list[Route]:
    """My route of each part. Raises ConfigError where the plan wants partial sums of a reducer or
    codec that has none.
    """
    if plan.topology.kind == "butterfly":
        return _star(plan, parts, me, reducer)
    if reducer.form != "streaming" or parts.results is not parts.chunking:
        raise ConfigError(
            f"reducer {plan.reducer!r} of {plan.codec} works in a butterfly only", key="topology"
        )
    routes: list[Route] = []
    own = {c.cid for c in plan.contributors if c.member.peer == me}
    for part, tree in zip(plan.parts, trees_of(plan, reducer), strict=True):
        above = me if part.owner == me else tree.above(me)
        uploads = tuple(Upload(term.cid, term.cid not in own, to) for term, to in tree.sends(me))
        routes.append(Route(part.owner, above, _job(parts, me, tree), uploads, tree))
    return routes


def _job(parts: RoundSlot, me: PeerId, tree: SumTree) -> Job | None:
    total, check = tree.sum(me), tree.check_by(me)
    if check is not None:
        account = next(account.cid for account in check.accounts if account.peer == me)
        return Job(
            parts,
            me,
            check.of.terms,
            check.of.factors,
            check.partial if total is not None else None,
            account=account,
        )
    return (
        Job(
            parts,
            me,
            total.terms,
            total.factors,
            total.sent,
            checks=tree.checks() if me == tree.owner else (),
        )
        if total is not None
        else None
    )


def _star(plan: Plan, parts: RoundSlot, me: PeerId, reducer: Reducer) -> list[Route]:
    """Everybody sends to the owners, and to their witnesses; owners send to everybody."""
    terms = [
        Term(c.member.peer, c.cid, c.weight)
        for c in plan.contributors
        if reducer.form != "own" or c.member.peer == me
    ]
    weights = tuple(term.weight for term in terms)
    factors = (
        reducer.factors(weights)
        if reducer.form == "streaming"
        else Factors((1.0,), 1.0)
        if reducer.form == "own"
        else None
    )
    job = Job(parts, me, terms, factors)
    own = job.own_cid if reducer.form != "own" else None
    seen = Job(parts, me, terms, factors, witness=True)
    return [
        Route(
            part.owner,
            part.owner,
            job if part.owner == me else seen if me in stating else None,
            tuple(Upload(own, False, to) for to in stating if to != me) if own else (),
            None,
        )
        for part, stating in zip(plan.parts, stated_by(plan, parts.witnesses), strict=True)
    ]
