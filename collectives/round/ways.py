"""The trees of a round's plans: which the convener chooses, and who holds one up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .. import messages as m
from ..group import BUTTERFLY, Contributor, Member, Plan, Topology
from ..identifiers import PeerId
from ..reduce import REDUCERS
from ..trees import Tree, trees_of

if TYPE_CHECKING:
    from .machine import RoundMachine


# for so many rounds nobody adds up for a member of whose sums, or doubts, one was not true, nor
# that member for others
APART_ROUNDS = 64


def topology_of(machine: RoundMachine, offers: Sequence[Contributor]) -> Topology:
    """The run's topology over these contributors, grouped by the sites that they name; who names
    none is alone, and who was in a dispute.
    """
    kind, ready = machine.shape.topology, machine.open.ready
    if kind == "butterfly":
        return BUTTERFLY
    apart = {
        peer for peer, (_, round_) in machine.apart.items() if machine.round < round_ + APART_ROUNDS
    }
    sites = [
        ready[offer.member].site if offer.member in ready and offer.member.peer not in apart else ""
        for offer in offers
    ]
    keys = [
        (site, "") if site else ("", offer.member.peer)
        for site, offer in zip(sites, offers, strict=True)
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return Topology(kind, tuple(numbers[key] for key in keys))


def plan_trees(plan: Plan) -> tuple[Tree, ...]:
    """The trees of a plan that has partial sums; none of a butterfly."""
    reducer = REDUCERS.get(plan.reducer) if plan.topology.kind != "butterfly" else None
    return trees_of(plan, reducer) if reducer is not None and reducer.form == "streaming" else ()


def held_up_by(
    plan: Plan, trees: Sequence[Tree], missing: Mapping[PeerId, set[bytes]]
) -> dict[PeerId, set[bytes]]:
    """By who waits: the contributions it waits for. For a partial sum, or an account of one, that
    of its maker, where that does not wait itself.
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


def disputes(machine: RoundMachine, who: Member, body: m.Disputed) -> bool:
    """Whether a member's word on a partial sum of the plan in force is for it to give: it owns the
    part. Head and witness are apart from now on, or who of them was wrong."""
    plan, pair = machine.open.plan, (body.head, body.witness)
    if body.wrong:
        for peer in pair:
            if machine.apart.get(peer, ("", 0))[0] == who.peer and peer not in body.wrong:
                del machine.apart[peer]
        return False
    if plan is None or plan.plan_id != body.plan_id:
        return False
    for part, tree in zip(plan.parts, plan_trees(plan), strict=False):
        if (
            part.owner == who.peer
            and part.first <= body.chunk < part.stop
            and pair in [(c.partial.peer, c.witness) for c in tree.checks()]
        ):
            machine.apart |= dict.fromkeys(pair, (who.peer, machine.round))
            return True
    return False


def broken(machine: RoundMachine, plan: Plan) -> set[PeerId]:
    """Who keeps results from coming here on the ways of a plan: owners that are gone and whose
    parts lack; of trees, whoever is gone.
    """
    opened, peers = machine.open, {part.owner for part in plan.parts}
    if plan.topology.kind == "butterfly":
        peers = set(filter(opened.lacking_of, peers))
    else:
        peers = (
            peers.union(c.member.peer for c in plan.contributors)
            if opened.lacking != 0
            else set[PeerId]()
        )
    return set(filter(machine.actions.suspected, peers))
