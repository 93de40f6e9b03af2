"""How a fleet adds up, as data: nodes with roles, and edges along which contributions go. A
hierarchy of places, a run's `[exchange] tree`, is compiled to a plan, or refused with the reason.
Pure functions; `optim.lab.schemes` has those for any graph.

    >>> lab = places({"lab": {"box-1": 2, "box-2": 2}, "home": 1})
    >>> compiled = compile_places(lab)
    >>> compiled.plan
    'three-level'
    >>> compiled.labels["lab/box-1#2"]
    'lab/box-1'

Roles: a ``peer`` contributes and adds up its part, a ``worker`` contributes only, a ``master`` adds
up for all, and a ``place`` is no machine but a site, or a host within one, whose peers add up for
it in turn. An edge (a, b) says that what a has goes to b. So do results, the other way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError
from .group import MAX_MEMBERS

Role = Literal["peer", "worker", "master", "place"]
PlanName = Literal["butterfly", "ring", "two-level", "three-level"]
"""What `[exchange] plan` may be."""
Edge = tuple[str, str]
Places = Mapping[str, "int | Places"]
"""Places by name, and how many peers each has, or what places are within it."""
LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
WORLD = "world"
KEY = "$.exchange.tree"


@dataclass(frozen=True)
class ExchangeScheme:
    """``nodes``: by name, what each is. ``mixing``: edges say who averages with whom, in pairs, and
    nobody has the mean of all (gossip).
    """

    nodes: Mapping[str, Role]
    edges: frozenset[Edge]
    mixing: bool = False

    @property
    def machines(self) -> tuple[str, ...]:
        """All nodes but places."""
        return tuple(name for name, role in self.nodes.items() if role != "place")


@dataclass(frozen=True)
class CompiledPlaces:
    """What a hierarchy is in atoll: ``plan`` of `[exchange]`; ``labels``: what each machine says of
    its place (`atoll up --site`).
    """

    plan: PlanName
    labels: Mapping[str, str]


def places(sizes: Places) -> ExchangeScheme:
    """A hierarchy: places in places, and how many peers each has, which are called by their place
    and a number.

    >>> sorted(places({"a": 2, "b": 1}).machines)
    ['a#1', 'a#2', 'b#1']
    """
    nodes: dict[str, Role] = {WORLD: "place"}
    edges = set[Edge]()

    def add(within: Places, above: str, path: str) -> None:
        for name, inside in within.items():
            here = f"{path}{name}"
            if here in nodes:
                raise refuse_scheme(f"two places called {here}", f"{WORLD} is all of them.")
            nodes[here] = "place"
            edges.add((here, above))
            if isinstance(inside, int):
                for number in range(1, inside + 1):
                    nodes[peer := f"{here}#{number}"] = "peer"
                    edges.add((peer, here))
            else:
                add(inside, here, f"{here}/")

    if (count := peers_in(sizes)) > MAX_MEMBERS:
        raise refuse_scheme(f"{count:,} peers", f"A run has at most {MAX_MEMBERS:,} members.")
    add(sizes, WORLD, "")
    return ExchangeScheme(nodes, frozenset(edges))


def peers_in(sizes: Places) -> int:
    """How many peers are in these places.

    >>> peers_in({"a": 2, "b": {"x": 3, "y": 4}})
    9
    """
    return sum(each if isinstance(each, int) else peers_in(each) for each in sizes.values())


def compile_places(scheme: ExchangeScheme) -> CompiledPlaces:
    """The plan of sites, and of hosts within them; every machine's label.

    Raises ConfigError for a scheme without machines, names that are no labels, more than three
    levels, and machines that are no peers of a place.
    """
    if not scheme.machines:
        raise refuse_scheme("no machine", "A scheme is of peers, or of a master and workers.")
    above = dict(scheme.edges)
    labels: dict[str, str] = {}
    for name in scheme.nodes:
        path = list[str]()
        at = above.get(name)
        while at is not None:
            path.append(at)
            at = above.get(at)
        if scheme.nodes[name] == "place":
            if name in above and not LABEL.fullmatch(_own(name)):
                raise refuse_scheme(
                    f"a place called {_own(name)!r}", "Letters, digits, dots, dashes, underscores."
                )
            if len(path) > 2:
                raise refuse_scheme(
                    f"{name} is a place within a host", "Three levels are what there is."
                )
            continue
        if scheme.nodes[name] != "peer" or not path or scheme.nodes[path[0]] != "place":
            raise refuse_scheme(
                f"{name} is a {scheme.nodes[name]} that sends to {path[0] if path else 'nobody'}",
                "Where there are places, every machine is a peer that sends to its place.",
            )
        label = "/".join(_own(place) for place in reversed(path[:-1]))
        if len(label) > 64:
            raise refuse_scheme(f"the label {label!r}", "A label has at most 64 characters.")
        labels[name] = label
    deepest = max((label.count("/") + bool(label) for label in labels.values()), default=0)
    plans: tuple[PlanName, ...] = ("butterfly", "two-level", "three-level")
    return CompiledPlaces(plans[deepest], labels)


def _own(name: str) -> str:
    """A place's name without those that it is in."""
    return name.rpartition("/")[2]


def refuse_scheme(what: str, why: str) -> ConfigError:
    """The error for a scheme that is none, or that atoll has nothing for."""
    return ConfigError(what, key=KEY, why=why)
