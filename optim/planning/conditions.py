"""What a plan is made from: the model's size, the peers' steps and links. Checked on
construction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...collectives.errors import ConfigError
from ...collectives.group import MAX_MEMBERS
from ..rounds.again import longest_round
from .waiting import Machines, Rounds, thin_of

MAX_PARAMETERS = 1 << 40


@dataclass(frozen=True, slots=True)
class PeerConditions:
    """One peer: bytes/s that its link carries to and from all others together, seconds that its
    inner step takes, and how many samples are in it.
    """

    name: str
    up: float
    down: float
    step_s: float
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Conditions:
    """What `plan` plans for: the model's size, the peers and their links.

    >>> from atoll.optim.planning import plan
    >>> peers = [PeerConditions(f"p{i}", up=6e6, down=6e6, step_s=1.0) for i in range(4)]
    >>> plan(Conditions(parameters=125_000_000, peers=tuple(peers))).group
    ('p0', 'p1', 'p2', 'p3')

    ``rtt_s``: the longest round trip between two peers. ``share``: of wall time that must be
    spent on training; None: as it comes. ``max_steps``: the longest round that the model's quality
    allows, in inner steps (None: by its size). ``links``: bytes/s of single links (from, to), where
    one carries less than its ends do, such as a relayed one. ``steps``: of the run, by the fastest
    peer (None: it has no end). ``cold``: the run is one that begins with short rounds and takes
    momentum later, if its settings are among those that were measured ("auto"). ``held``: codecs
    with overlaps for which every machine has the memory; None: all.

    Raises ConfigError with the argument's name in ``key``.
    """

    parameters: int
    peers: tuple[PeerConditions, ...]
    rtt_s: float = 0.0
    share: float | None = None
    max_steps: int | None = None
    links: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    steps: int | None = None
    cold: bool = False
    held: frozenset[tuple[str, str]] | None = None
    fastest_s: float = field(init=False, compare=False, repr=False)
    """The shortest step."""
    rounds: Rounds = field(init=False, compare=False, repr=False)
    """Whom they wait for."""
    thin: tuple[PeerConditions, ...] = field(init=False, compare=False, repr=False)
    """Whose links are so thin that they are in every n-th round only."""

    def __post_init__(self) -> None:
        # In whatever order they were named.
        object.__setattr__(self, "peers", tuple(sorted(self.peers, key=lambda peer: peer.name)))
        _check("parameters", self.parameters, 1, MAX_PARAMETERS)
        _check("rtt", self.rtt_s, 0, 3600)
        if self.share is not None and not 0 < self.share < 1:
            raise ConfigError(
                f"a training share of {self.share:g}",
                key="share",
                why="It is the part of the time spent on training, below 1.",
                hint="For example 0.95",
            )
        if self.max_steps is not None:
            _check("max_steps", self.max_steps, 1, 1_000_000)
        if self.steps is not None:
            _check("steps", self.steps, 1, 1 << 50)
        if not 1 <= len(self.peers) <= MAX_MEMBERS:
            raise ConfigError(
                f"{len(self.peers)} peers",
                key="peers",
                why=f"A run has 1 to {MAX_MEMBERS} members.",
            )
        names = {peer.name for peer in self.peers}
        if len(names) < len(self.peers):
            raise ConfigError("two peers have the same name", key="peers")
        for peer in self.peers:
            _check("step", peer.step_s, 1e-9, 86_400)
            _check("samples", peer.samples, 1, 1 << 40)
            _check("up", peer.up, 1, 1e15)
            _check("down", peer.down, 1, 1e15)
        for (one, other), rate in self.links.items():
            if one == other or not {one, other} <= names:
                raise ConfigError(
                    f"there is no link from {one!r} to {other!r}",
                    key="links",
                    hint=f"The peers: {', '.join(sorted(names))}",
                )
            _check("links", rate, 1, 1e15)
        object.__setattr__(self, "fastest_s", min(peer.step_s for peer in self.peers))
        kinds = Counter((peer.step_s, peer.samples) for peer in self.peers)
        rounds = Rounds([Machines(*kind, count) for kind, count in kinds.items()])
        object.__setattr__(self, "rounds", rounds)
        thin = thin_of([min(peer.up, peer.down) for peer in self.peers])
        object.__setattr__(self, "thin", tuple(self.peers[at] for at in thin))

    @property
    def thin_rate(self) -> float:
        """Samples a second of those on thin links, while they train."""
        return sum(peer.samples / peer.step_s for peer in self.thin)

    @property
    def longest(self) -> int:
        """The longest round, in inner steps."""
        return self.max_steps or longest_round(self.parameters)

    def only(self, names: set[str]) -> Conditions:
        """The same with these peers only."""
        links = {ends: rate for ends, rate in self.links.items() if set(ends) <= names}
        peers = tuple(peer for peer in self.peers if peer.name in names)
        return replace(self, peers=peers, links=links)


def _check(key: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(
            f"{key} is {value:g}",
            key=key,
            why=f"A plan needs a value from {low:g} to {high:g}.",
            hint=(
                "Measured values: atoll peers, atoll netcheck --bandwidth PEER; the step's "
                "time is your script's."
            ),
        )
