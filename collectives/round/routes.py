"""The routes that contributions and results take under a plan: which trees the convener chooses,
who holds one up, who disputes a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from .. import messages as m
from ..group import BUTTERFLY, Contributor, Member, Plan, Topology, TopologyKind
from ..identifiers import PeerId
from ..reduce import find_reducer
from ..rows import ROWS
from ..terms import SumTree, trees_of
from .state import OpenRound

# for so many rounds after a dispute nobody adds up for either of its two peers, nor they for others
APART_ROUNDS = 64


class Disputes:
    """Which peers disagreed on a partial sum. Until one is found to be wrong, or for
    `APART_ROUNDS`, the two are put at no common node of a tree.
    """

    def __init__(self) -> None:
        self.pairs: dict[PeerId, tuple[PeerId, int]] = {}
        """By peer: the owner of the part that reported the dispute, and the round of it."""

    def peers(self, round_: int) -> Set[PeerId]:
        """Peers with a dispute that still counts in this round."""
        return {peer for peer, (_, at) in self.pairs.items() if round_ < at + APART_ROUNDS}

    def note(self, owner: PeerId, body: m.Disputed, plan: Plan | None, round_: int) -> bool:
        """A member reports a dispute of a head and its witness, or who of them was wrong. Whether
        it makes the plan in force useless: then the reporter owns the part in question.
        """
        pair = (body.head, body.witness)
        if body.wrong:
            for peer in pair:
                if self.pairs.get(peer, ("", 0))[0] == owner and peer not in body.wrong:
                    del self.pairs[peer]
            return False
        if plan is None or plan.plan_id != body.plan_id:
            return False
        for part, tree in zip(plan.parts, plan_trees(plan), strict=False):
            if (
                part.owner == owner
                and part.first <= body.chunk < part.stop
                and pair in [(c.partial.peer, c.witness) for c in tree.checks()]
            ):
                self.pairs |= dict.fromkeys(pair, (owner, round_))
                return True
        return False


def topology_of(
    kind: TopologyKind,
    offers: Sequence[Contributor],
    ready: Mapping[Member, m.Ready],
    disputed: Set[PeerId],
) -> Topology:
    """The run's topology over these contributors, grouped by the places that they name in
    ``ready``: ``SITE``, or ``SITE/HOST``, of which the host counts with three levels only. A
    contributor without a site is a group of its own, and one without a host a host of its own; so
    is one that is ``disputed``.
    """
    if kind == "butterfly":
        return BUTTERFLY
    labels = dict[PeerId, str]()
    for offer in offers:
        said = ready.get(offer.member)
        peer = offer.member.peer
        labels[peer] = said.site if said is not None and peer not in disputed else ""
    return ROWS.load("trees", "topology_at", key="[exchange] plan")(kind, labels)


def plan_trees(plan: Plan) -> tuple[SumTree, ...]:
    """The trees of a plan that has partial sums; none of a butterfly."""
    reducer = find_reducer(plan.reducer) if plan.topology.kind != "butterfly" else None
    return trees_of(plan, reducer) if reducer is not None and reducer.form == "streaming" else ()


def held_up_by(
    plan: Plan, trees: Sequence[SumTree], missing: Mapping[PeerId, set[bytes]]
) -> dict[PeerId, set[bytes]]:
    """By waiting peer: the contributions that it waits for. In place of a partial sum, or of an
    account of one, stands the contribution of its maker, unless the maker waits itself.
    """
    if not trees:
        return dict(missing)
    own = {c.member.peer: c.cid for c in plan.contributors}
    found: dict[PeerId, set[bytes]] = {peer: set() for peer in missing}
    for tree in trees:
        for peer, names in missing.items():
            for term in tree.wants(peer):
                leaf = term.cid == own.get(term.peer)
                if term.cid in names and (leaf or not missing.get(term.peer)):
                    found[peer].add(own[term.peer])
    return found


def broken_by(plan: Plan, opened: OpenRound, suspected: Callable[[PeerId], bool]) -> set[PeerId]:
    """Peers that block this plan's results here: suspected owners whose parts are incomplete; in a
    tree, any suspected contributor or owner while results are incomplete.
    """
    peers = {part.owner for part in plan.parts}
    if plan.topology.kind == "butterfly":
        peers = set(filter(opened.lacking_of, peers))
    else:
        peers = (
            peers.union(c.member.peer for c in plan.contributors)
            if opened.lacking != 0
            else set[PeerId]()
        )
    return set(filter(suspected, peers))
