"""The tree over which a part is added up, drawn for people and as nodes and edges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...collectives.bounds import most_members, why_so_many
from ...collectives.errors import ConfigError
from ...collectives.group import TopologyKind
from ...collectives.identifiers import PeerId
from ...collectives.schemes import compile_places, places
from ...collectives.trees import parents_of, topology_at

if TYPE_CHECKING:
    from ..manifest import Manifest

ALIKE = 3  # as many that do nothing but send are drawn as one line, and more


@dataclass(frozen=True)
class DrawnTree:
    """The tree of one part. ``parents``: to whom each peer sends; ``labels``: where it is."""

    plan: TopologyKind
    owner: PeerId
    parents: Mapping[PeerId, PeerId]
    labels: Mapping[PeerId, str]

    @property
    def document(self) -> dict[str, Any]:
        """As nodes and edges, for programs."""
        heads = {*self.parents.values()} - {self.owner}
        return {
            "plan": self.plan,
            "nodes": [
                {
                    "name": peer,
                    "label": label,
                    "role": "owner" if peer == self.owner else "head" if peer in heads else "peer",
                }
                for peer, label in self.labels.items()
            ],
            "edges": [[peer, above] for peer, above in self.parents.items()],
        }

    def lines(self, width: int) -> list[str]:
        """As text, no line wider than ``width``."""
        below = dict[PeerId, list[PeerId]]()
        for peer in self.labels:
            if peer in self.parents:
                below.setdefault(self.parents[peer], []).append(peer)
        count, hops = len(self.labels), max((self._hops(peer) for peer in self.labels), default=0)
        head = f"{self.plan}: one part of {count:,} peers', {hops} hop{'s' * (hops != 1)} up"
        note = "Each part has another owner; heads of a place take turns."
        drawn = [head, note, f"{self.owner}  (owner)", *_drawn(below, self.labels, self.owner)]
        return [line if len(line) <= width else f"{line[: width - 3]}..." for line in drawn]

    def _hops(self, peer: PeerId) -> int:
        hops = 0
        while peer in self.parents:
            peer, hops = self.parents[peer], hops + 1
        return hops


def tree_of(manifest: Manifest, peers: int) -> DrawnTree:
    """The tree of a run's first part, over the places of its `[exchange] tree`, or among so many
    peers that are each a site of its own. Raises ConfigError for more than its plan bears.
    """
    exchange, plan = manifest.exchange, manifest.topology
    if isinstance(exchange.tree, dict):
        labels = compile_places(places(exchange.tree)).labels
    else:
        if peers > most_members(plan):
            raise ConfigError(
                f"{peers:,} peers: a run with this plan has at most {most_members(plan):,} members",
                key="peers",
                why=why_so_many(plan),
            )
        labels = {f"peer#{number}": "" for number in range(1, peers + 1)}
    ids = {PeerId(name): label for name, label in labels.items()}
    owner = next(iter(ids))
    (parents,) = parents_of(topology_at(plan, ids), list(ids), [owner])
    return DrawnTree(plan, owner, parents, ids)


def _drawn(
    below: Mapping[PeerId, Sequence[PeerId]],
    labels: Mapping[PeerId, str],
    peer: PeerId,
    indent: str = "",
) -> Iterator[str]:
    """What hangs under a peer: those that others send to first, then the rest, those of one place
    in one line where they are many."""
    children = below.get(peer, ())
    heads = [child for child in children if child in below]
    rows: list[tuple[str, PeerId | None]] = [(f"{head}  (adds up)", head) for head in heads]
    leaves = dict[str, list[PeerId]]()
    for child in children:
        if child not in below:
            leaves.setdefault(labels[child], []).append(child)
    for alike in leaves.values():
        if len(alike) > ALIKE:
            rows.append((f"{alike[0]} ... {alike[-1]}  ({len(alike)} peers)", None))
        else:
            rows += [(leaf, None) for leaf in alike]
    for number, (text, head) in enumerate(rows):
        last = number == len(rows) - 1
        yield f"{indent}{'`-- ' if last else '|-- '}{text}"
        if head is not None:
            yield from _drawn(below, labels, head, indent + ("    " if last else "|   "))
