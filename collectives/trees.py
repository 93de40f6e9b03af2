"""The ways of a plan: over which members contributions reach the owner of a part, and its result
the members. Pure and deterministic.

Every part has a tree whose root is its owner. Who has members below adds up what they send and its
own, in the order of the plan, and sends one *partial sum* up: something like a contribution, named
by what it sums and with a weight of its own, so that it is kept, sent again and used under a later
plan like one. The division by the sum of all weights comes at the root. The result goes down the
same tree.

    butterfly   a star: everybody sends to the owner (no partial sums)
    ring        a chain: around the circle of contributors, sites one after another, to the owner
    two-level   contributors at another site than the owner's send to one of theirs, which sends
                their sum; every one of them in turn, part by part. So a site's sum crosses its
                uplink once
    three-level as two levels, and within a site as well: contributors on another host than the
                site's head (or the owner, at its site) send to one of their host, in turn, which
                sends their sum. So a host's sum leaves the host once, and a site's the site
    checked     two levels, and another member of the site adds up the same: its *witness*. Both
                give the owner an *account*: what they added up, and what came of it, by hashes.
                Where accounts and sum do not agree the sum is not used (`exchange/checking.py`)

In the butterfly the owner may be anybody; everywhere, who contributes nothing gets results from the
owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from . import terms
from .group import BUTTERFLY, Contributor, Entry, Plan, Topology, TopologyKind
from .identifiers import CID_BYTES, PeerId
from .terms import CheckedSum, PartialSum, Term

if TYPE_CHECKING:
    from .reduce import StreamingReducer

Parents = Mapping[PeerId, PeerId]
"""To whom each contributor sends what it has for a part. The owner is nobody's child."""


class Tree(terms.SumTree):
    """The tree of one part. ``parents`` must lead from every contributor to ``owner``;
    ``witnesses``: who checks each member that adds up for it; ``own``: `own_terms` of the
    contributors, which all trees of a plan share.
    """

    def __init__(
        self,
        contributors: Sequence[Contributor],
        owner: PeerId,
        parents: Parents,
        reducer: StreamingReducer,
        witnesses: Parents | None = None,
        own: Mapping[PeerId, Term] | None = None,
    ) -> None:
        self.owner = owner
        self.parents = parents
        self._witnesses = witnesses or {}
        self._checks: tuple[CheckedSum, ...] | None = None
        self._own = own if own is not None else own_terms(contributors)
        self._reducer = reducer
        self._sums: dict[PeerId, PartialSum] = {}
        self._members: dict[PeerId, list[PeerId]] = {}
        """Who sends something to each member that has others below, itself included where it
        contributes; in the plan's order.
        """
        self._inner = inner = frozenset((owner, *parents.values()))
        for contributor in contributors:
            peer = contributor.member.peer
            if peer in inner:
                self._members.setdefault(peer, []).append(peer)
            if peer != owner:
                self._members.setdefault(parents[peer], []).append(peer)

    def above(self, peer: PeerId) -> PeerId:
        """Who sends the result to a member other than the owner."""
        return self.parents.get(peer, self.owner)

    def below(self, peer: PeerId, audience: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Those of ``audience`` to whom a member sends the result."""
        if peer not in self._inner:
            return ()  # as most, of hundreds
        return tuple(
            other for other in audience if other != self.owner and self.above(other) == peer
        )

    def sum(self, peer: PeerId) -> PartialSum | None:
        """What a member adds up; None where nobody is below it."""
        if peer not in self._members:
            return None
        found = self._sums.get(peer)
        if found is None:
            found = self._sums[peer] = self._make(peer)
        return found

    def sent(self, peer: PeerId) -> Term | None:
        """What a member sends up; None for the root and for who contributes nothing."""
        if peer == self.owner:
            return None
        found = self.sum(peer)
        return found.sent if found is not None else self._own.get(peer)

    def checks(self) -> tuple[CheckedSum, ...]:
        """Which partial sums are checked, in the order of the plan."""
        if self._checks is None:
            found: list[CheckedSum] = []
            for head, witness in self._witnesses.items():
                of = self.sum(head)
                assert of is not None
                assert of.sent is not None
                found.append(
                    CheckedSum(of.sent, of, (_account(of.sent, head), _account(of.sent, witness)))
                )
            self._checks = tuple(found)
        return self._checks

    def check_by(self, peer: PeerId) -> CheckedSum | None:
        """The check in which a member is head or witness."""
        return next(
            (check for check in self.checks() if peer in (check.partial.peer, check.witness)), None
        )

    def wants(self, peer: PeerId) -> tuple[Term, ...]:
        """All that others send a member for this part, and its own if it adds that up."""
        total, check = self.sum(peer), self.check_by(peer)
        if peer == self.owner:
            accounts = chain.from_iterable(check.accounts for check in self.checks())
            return (*(total.terms if total is not None else ()), *accounts)
        if check is not None and peer == check.witness:
            return check.of.terms
        return total.terms if total is not None else ()

    def sends(self, peer: PeerId) -> tuple[tuple[Term, PeerId], ...]:
        """All that a member sends for this part, and to whom: what goes up; its contribution to a
        witness; its account.
        """
        if peer == self.owner:
            return ()
        above, sent, found = self.above(peer), self.sent(peer), list[tuple[Term, PeerId]]()
        if sent is not None:
            found.append((sent, above))
        for check in self.checks():
            head, witness = check.partial.peer, check.witness
            if peer != witness and peer in (head, *(term.peer for term in check.of.terms)):
                found.append((self._own[peer], witness))
            found += [(account, self.owner) for account in check.accounts if account.peer == peer]
        return tuple(found)

    def _make(self, peer: PeerId) -> PartialSum:
        terms: list[Term] = []
        total = 0
        for other in self._members[peer]:
            below = self.sum(other) if other != peer else None
            term = below.sent if below is not None else self._own[other]
            assert term is not None
            terms.append(term)
            total += below.total if below is not None else term.weight
        weights = [term.weight for term in terms]
        if peer == self.owner:
            return PartialSum(tuple(terms), self._reducer.factors(weights, total), None, total)
        factors, weight = self._reducer.partial(weights, total)
        return PartialSum(
            tuple(terms), factors, Term(peer, _name(self._reducer.name, terms), weight), total
        )


def own_terms(contributors: Sequence[Contributor]) -> dict[PeerId, Term]:
    """Each contributor's own contribution."""
    return {c.member.peer: Term(c.member.peer, c.cid, c.weight) for c in contributors}


def trees_of(plan: Plan | Entry, reducer: StreamingReducer) -> tuple[Tree, ...]:
    """The tree of each part of a plan, or of the entry made from it. Trees are made once for all
    who ask with the same object: the data plane and the round of a member, and in a simulation each
    of its members.
    """
    for known, by, trees in tuple(_made):
        if known is plan and by is reducer:
            return trees
    trees = _trees(plan, reducer)
    _made.append((plan, reducer, trees))
    return trees


_made: deque[tuple[Plan | Entry, StreamingReducer, tuple[Tree, ...]]] = deque(maxlen=2)
"""Those asked for last. A tree is filled as it is asked, always with the same: threads may share
it.
"""


def _trees(plan: Plan | Entry, reducer: StreamingReducer) -> tuple[Tree, ...]:
    peers = [c.member.peer for c in plan.contributors]
    every = parents_of(plan.topology, peers, [part.owner for part in plan.parts])
    own = own_terms(plan.contributors)
    return tuple(
        Tree(
            plan.contributors,
            part.owner,
            parents,
            reducer,
            witnesses_of(plan, part.owner, parents),
            own,
        )
        for part, parents in zip(plan.parts, every, strict=True)
    )


def parents_of(
    topology: Topology, peers: Sequence[PeerId], owners: Sequence[PeerId]
) -> list[Parents]:
    """For each part, given its owner: to whom each of the contributors ``peers`` sends."""
    if topology.kind == "butterfly":
        return [{peer: owner for peer in peers if peer != owner} for owner in owners]
    places = _nested(list(enumerate(peers)), topology.levels or (range(len(peers)),))
    if topology.kind == "ring":
        circle = [peer for place in places for peer in place.members]
        return [_ring(circle, owner) for owner in owners]
    found: list[Parents] = []
    for owner in owners:
        parents: dict[PeerId, PeerId] = {}
        _hang(places, owner, parents)
        found.append(parents)
    return found


def topology_at(kind: TopologyKind, labels: Mapping[PeerId, str]) -> Topology:
    """A topology of contributors, in order, with the label of each: ``SITE`` or ``SITE/HOST``, of
    which the host counts with three levels only; without a label one is a site of its own.

    >>> topology_at("three-level", {"a": "lab/1", "b": "lab/2", "c": "lab/1", "d": ""})
    Topology(kind='three-level', groups=(0, 0, 0, 1), hosts=(0, 1, 0, 2))
    """
    if kind == "butterfly":
        return BUTTERFLY
    sites, hosts = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for peer, label in labels.items():
        site, _, host = label.partition("/")
        sites.append((site,) if site else ("", peer))
        hosts.append((*sites[-1], host) if host else (*sites[-1], "", peer))
    return Topology(kind, _numbered(sites), _numbered(hosts) if kind == "three-level" else ())


def _numbered(keys: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """The same number for the same key, counted as they come."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)


def witnesses_of(plan: Plan | Entry, owner: PeerId, parents: Parents) -> Parents:
    """Who checks each member that adds up for the owner of a part: one of those that send to it,
    drawn by the entry before, which names all.
    """
    if plan.topology.kind != "checked":
        return {}
    mates: dict[PeerId, list[PeerId]] = {}
    for peer, head in parents.items():
        if head != owner:
            mates.setdefault(head, []).append(peer)
    draws = {
        head: blake3(b"atoll/witness/1" + msgspec.msgpack.encode((plan.base, owner, head))).digest(
            8
        )
        for head in mates
    }
    return {
        head: sorted(peers)[int.from_bytes(draws[head]) % len(peers)]
        for head, peers in mates.items()
    }


def _ring(circle: Sequence[PeerId], owner: PeerId) -> Parents:
    at = circle.index(owner) + 1 if owner in circle else 0
    chain = [peer for peer in (*circle[at:], *circle[:at]) if peer != owner] + [owner]
    return dict(pairwise(chain))


class _Place:
    """Contributors at one site, or on one host of it, in the plan's order; ``inner``: the places
    within, none on the last level. ``turns``: the parts for which it has had a head of its own, so
    that its members take turns.
    """

    def __init__(self, members: Sequence[PeerId], inner: Sequence[_Place]) -> None:
        self.members, self.inner, self.turns = members, inner, 0
        self._here = frozenset(members)

    def head(self, root: PeerId) -> PeerId:
        """Who adds up for this place, for the next part: ``root`` where it is here itself."""
        if root in self._here:
            return root
        self.turns += 1
        return self.members[(self.turns - 1) % len(self.members)]


def _nested(peers: Sequence[tuple[int, PeerId]], levels: Sequence[Sequence[int]]) -> list[_Place]:
    """The places of ``peers`` (with their numbers in the plan): those of the first level, in the
    plan's order, and within them those of the levels after it."""
    found: dict[int, list[tuple[int, PeerId]]] = {}
    for index, peer in peers:
        found.setdefault(levels[0][index], []).append((index, peer))
    return [
        _Place([peer for _, peer in here], _nested(here, levels[1:]) if levels[1:] else ())
        for here in found.values()
    ]


def _hang(places: Sequence[_Place], root: PeerId, parents: dict[PeerId, PeerId]) -> None:
    """Hang each place under ``root`` by one head, and what is in the place under that, level by
    level."""
    for place in places:
        head = place.head(root)
        if head != root:
            parents[head] = root
        if place.inner:
            _hang(place.inner, head, parents)
        else:
            parents.update((peer, head) for peer in place.members if peer not in (head, root))


def _account(partial: Term, by: PeerId) -> Term:
    """A member's account of a partial sum, by the name under which it is sent and asked for."""
    return Term(
        by,
        blake3(b"atoll/account/1" + msgspec.msgpack.encode((partial.cid, by))).digest(CID_BYTES),
        0,
    )


def _name(reducer: str, terms: Sequence[Term]) -> bytes:
    """The name of a partial sum: what is added up, in which order. Its chunks are the same whatever
    plan they were made under.
    """
    return blake3(
        b"atoll/partial/1"
        + msgspec.msgpack.encode((reducer, [(term.cid, term.weight) for term in terms]))
    ).digest(CID_BYTES)
