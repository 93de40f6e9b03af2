"""Any graph of who sends to whom, as data: nodes with roles, and edges along which contributions
go. A scheme is checked, and compiled to a plan that atoll has, or refused with the reason. A run's
`[exchange] tree` is one of places only, which `collectives.schemes` compiles.

    >>> lab = places({"lab": {"box-1": 2, "box-2": 2}, "home": 1})
    >>> compiled = compile_scheme(lab)
    >>> compiled.plan
    'three-level'
    >>> compiled.labels["lab/box-1#2"]
    'lab/box-1'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...collectives.schemes import (
    Edge,
    ExchangeScheme,
    PlanName,
    Role,
    compile_places,
    places,
    refuse_scheme,
)

__all__ = [
    "CompiledScheme",
    "ExchangeScheme",
    "check_scheme",
    "compile_scheme",
    "full",
    "gossip",
    "master_worker",
    "places",
    "ring",
]


@dataclass(frozen=True)
class CompiledScheme:
    """What a scheme is in atoll. ``plan``: of `[exchange]`; None: there are no rounds, and
    ``average`` is what `average` is called with. ``labels``: what each machine says of its place
    (`atoll up --site`). ``master``: who adds up all (`[federated] topology = "coordinator"`: the
    organiser).
    """

    plan: PlanName | None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    master: str = ""
    average: str = ""


# ---- schemes that have names


def full(names: Sequence[str]) -> ExchangeScheme:
    """Everybody sends to everybody.

    >>> compile_scheme(full(["a", "b", "c"])).plan
    'butterfly'
    """
    return ExchangeScheme(dict.fromkeys(names, "peer"), frozenset(_pairs(names)))


def ring(names: Sequence[str]) -> ExchangeScheme:
    """Everybody sends to the next one, the last to the first.

    >>> compile_scheme(ring(["a", "b", "c", "d"])).plan
    'ring'
    """
    return ExchangeScheme(
        dict.fromkeys(names, "peer"),
        frozenset(
            (one, names[(index + 1) % len(names)])
            for index, one in enumerate(names)
            if len(names) > 1
        ),
    )


def master_worker(master: str, workers: Sequence[str]) -> ExchangeScheme:
    """All workers send to one master.

    >>> compile_scheme(master_worker("m", ["a", "b"])).master
    'm'
    """
    nodes: dict[str, Role] = {master: "master", **dict.fromkeys(workers, "worker")}
    return ExchangeScheme(nodes, frozenset((worker, master) for worker in workers))


def gossip(names: Sequence[str], edges: Iterable[Edge] | None = None) -> ExchangeScheme:
    """Averages in pairs, of any two or along these edges.

    >>> compile_scheme(gossip(["a", "b", "c"])).average
    'gossip'
    """
    both = set(_pairs(names)) if edges is None else set(edges)
    return ExchangeScheme(
        dict.fromkeys(names, "peer"), frozenset(both | {(b, a) for a, b in both}), mixing=True
    )


# ---- checks


def check_scheme(scheme: ExchangeScheme) -> None:
    """Raise ConfigError unless the scheme is connected, and each contribution reaches whoever adds
    up exactly once.

    >>> check_scheme(ExchangeScheme({"a": "peer", "b": "peer"}, frozenset()))
    Traceback (most recent call last):
    ...
    atoll.collectives.errors.ConfigError: b has no way to a
    """
    nodes = scheme.nodes
    if not scheme.machines:
        raise refuse_scheme("no machine", "A scheme is of peers, or of a master and workers.")
    for one, other in sorted(scheme.edges):
        if missing := {one, other} - set(nodes):
            raise refuse_scheme(f"an edge names {min(missing)}, which is no node", "")
        if one == other:
            raise refuse_scheme(f"{one} sends to itself", "")
    first, *_ = nodes
    reached = _reaching(first, {*scheme.edges, *((b, a) for a, b in scheme.edges)})
    if apart := [name for name in nodes if name not in reached]:
        raise refuse_scheme(f"{apart[0]} has no way to {first}", "A scheme is connected.")
    if scheme.mixing or _complete(scheme):
        return
    sinks = sorted(set(nodes) - {one for one, _ in scheme.edges})
    if len(sinks) > 1:
        raise refuse_scheme(
            f"contributions end at {sinks[0]} and at {sinks[1]}", "One of them adds up, or all do."
        )
    for owner in sinks or list(nodes):
        _check_once(scheme, owner)


def _check_once(scheme: ExchangeScheme, owner: str) -> None:
    """Every node but the owner sends to one that leads there, and to one only."""
    edges = {(one, other) for one, other in scheme.edges if one != owner}
    reaching = _reaching(owner, edges)
    ups: dict[str, list[str]] = {}
    for one, other in sorted(edges):
        if other in reaching:
            ups.setdefault(one, []).append(other)
    for name in scheme.nodes:
        if name != owner and name not in reaching:
            raise refuse_scheme(f"what {name} contributes does not reach {owner}", "")
        if len(several := ups.get(name, [])) > 1:
            raise refuse_scheme(
                f"what {name} contributes reaches {owner} more than once, by {several[0]} and "
                f"{several[1]}",
                "It would count twice.",
            )


# ---- compiling


def compile_scheme(scheme: ExchangeScheme) -> CompiledScheme:
    """What there is in atoll for a scheme. Raises ConfigError where it is none (`check_scheme`), or
    there is nothing for it, with the reason.
    """
    check_scheme(scheme)
    if scheme.mixing:
        return _mixing(scheme)
    roles = {*scheme.nodes.values()}
    if "place" in roles:
        found = compile_places(scheme)
        return CompiledScheme(found.plan, found.labels)
    masters = [name for name, role in scheme.nodes.items() if role == "master"]
    if masters or "worker" in roles:
        workers = {(name, masters[0]) for name in scheme.nodes if masters and name != masters[0]}
        if len(masters) == 1 and "peer" not in roles and scheme.edges == frozenset(workers):
            return CompiledScheme("butterfly", master=masters[0])
        raise refuse_scheme(
            "masters and workers in another shape",
            "One master adds up for all, and every other node is a worker that sends to it. "
            "Masters below a master are places.",
        )
    if _complete(scheme):
        return CompiledScheme("butterfly")
    ups = [one for one, _ in scheme.edges]
    if len(ups) == len({*ups}) == len(scheme.nodes):
        return CompiledScheme("ring")
    raise refuse_scheme(
        "a tree of fixed machines",
        "One machine at the top would send and receive for all, and its death would end the "
        "round. In atoll each part has an owner of its own, and members add up for their "
        "place in turn: draw places in place of inner nodes.",
    )


def _mixing(scheme: ExchangeScheme) -> CompiledScheme:
    """Pairs of all, or along a hypercube."""
    if {*scheme.nodes.values()} != {"peer"}:
        raise refuse_scheme("gossip of other nodes than peers", "All average alike.")
    if any((b, a) not in scheme.edges for a, b in scheme.edges):
        raise refuse_scheme("an edge of gossip in one direction", "Both of a pair take the mean.")
    if _complete(scheme):
        return CompiledScheme(None, average="gossip")
    names = list(scheme.nodes)
    bits = len(names).bit_length() - 1
    cube = (
        {(names[at], names[at ^ 1 << bit]) for at in range(len(names)) for bit in range(bits)}
        if len(names) == 1 << bits
        else set[Edge]()
    )
    if scheme.edges == frozenset(cube):
        return CompiledScheme(None, average="pairwise")
    raise refuse_scheme(
        "gossip along a given graph",
        "Pairs of a run are drawn among all members, or go along a hypercube. On a graph "
        "of one's own there are functions (optim.lab.gossip: dadao, gossip_rates), no run.",
    )


def _pairs(names: Sequence[str]) -> Iterable[Edge]:
    return ((one, other) for one in names for other in names if one != other)


def _complete(scheme: ExchangeScheme) -> bool:
    """Whether all nodes are peers, each of which sends to each."""
    count = len(scheme.nodes)
    peers = {*scheme.nodes.values()} <= {"peer"}
    return peers and len(scheme.edges) == count * (count - 1)


def _reaching(owner: str, edges: Iterable[Edge]) -> set[str]:
    """All nodes from which a way leads to the owner, itself included."""
    below: dict[str, list[str]] = {}
    for one, other in edges:
        below.setdefault(other, []).append(one)
    found, left = {owner}, [owner]
    while left:
        for one in below.get(left.pop(), ()):
            if one not in found:
                found.add(one)
                left.append(one)
    return found
