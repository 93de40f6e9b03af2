"""Sessions of one run on a simulated network, played step by step: `Table` has them, each a `Peer`
with a disk and lives.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.layout import make_layout
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round import RoundMachine, Timing
from atoll.collectives.simulation import Network, World
from atoll.collectives.swarm import RunSettings
from atoll.node.session import events as ev
from atoll.node.session.memory_storage import MemoryStorage
from atoll.node.session.session import Session
from atoll.node.simulation.process import NodeProcess, Place
from atoll.security.identity import Identity

LAYOUT, OTHER = make_layout([("w", (8,))]), make_layout([("v", (9,))])
SETTINGS = RunSettings(
    sync_every=1, codec="fp32", outer=OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
)
LIMIT_S = 120.0


class Peer:
    """A disk, the node that lives on it, and what its session said in all its lives."""

    def __init__(self, table: Table, name: PeerId) -> None:
        self.table, self.name = table, name
        self.storage = table.storage(table.place.settings.outer)
        self.heard: list[object] = []
        self.lives = 0
        self.node: NodeProcess | None = None

    def start(self) -> Peer:
        """A process begins on this disk."""
        rng = Random(f"{self.name}/{self.lives}")
        self.lives += 1
        self.node = NodeProcess(
            self.table.place,
            self.name,
            self.storage,
            rng,
            emit=self.heard.append,
            died=lambda _: self.kill(),
        )
        self.node.start([peer for peer in self.table.place.peers if peer != self.name])
        return self

    def kill(self) -> None:
        """The process dies; the disk stays."""
        assert self.node is not None
        self.node.end()
        self.node = None
        self.storage.restart()

    @property
    def session(self) -> Session:
        """Of the present life."""
        assert self.node is not None
        return self.node.session

    @property
    def machine(self) -> RoundMachine:
        """Of the run's log."""
        assert self.session.machine is not None
        return self.session.machine

    @property
    def inside(self) -> bool:
        """Whether it is a member of the open entry's configuration."""
        return self.session.machine is not None and self.session.machine.is_member

    def do(self, act: Callable[[Session, float], object]) -> None:
        """An input of the session."""
        assert self.node is not None
        with self.node.alive():
            act(self.node.session, self.table.world.now)

    def attach(self) -> Peer:
        """A script of the run's model attaches."""
        self.do(lambda session, now: session.attach(now, LAYOUT))
        return self

    def contribute(self, name: str, value: float = 1.0) -> bytes:
        """Offer a contribution of ``value`` everywhere; its cid."""
        cid = name.encode().ljust(16, b".")
        self.do(
            lambda session, now: session.contribute(now, cid, 1, torch.full((LAYOUT.numel,), value))
        )
        return cid

    def rounds(self) -> list[ev.RoundCommitted]:
        """All rounds that a session here has told of."""
        return [event for event in self.heard if isinstance(event, ev.RoundCommitted)]


class Table:
    """Peers p0, p1, … of one run (of a secure one, or one with BTARD, by their keys); the first
    founds it.
    """

    def __init__(
        self,
        count: int,
        settings: RunSettings = SETTINGS,
        storage: Callable[[OuterSettings], MemoryStorage] = MemoryStorage,
    ) -> None:
        self.world, self.storage = World(0), storage
        self.network = Network(self.world, latency_s=0.001, jitter_s=0.001)
        people = (
            [Identity(bytes([index]) * 32) for index in range(count)]
            if settings.secure or settings.btard
            else []
        )
        names = [person.peer for person in people] or [
            PeerId(f"p{index}") for index in range(count)
        ]
        self.place = Place(
            self.world,
            self.network,
            names,
            RunId("run"),
            names[0],
            settings,
            Timing(pull_s=0.1, heartbeat_s=0.25),
            chunk_elements=4,
            identities={person.peer: person for person in people},
        )
        self.peers = [Peer(self, name) for name in names]

    def found(self) -> Peer:
        """p0 founds the run."""
        first = self.peers[0].start()
        first.do(lambda session, now: session.found(now, LAYOUT, torch.zeros(LAYOUT.numel)))
        return first.attach()

    def all_in(self) -> list[Peer]:
        """Everybody starts and is let in."""
        self.found()
        for peer in self.peers[1:]:
            peer.start().attach()
        self.until(
            lambda: all(
                len(peer.session.config_peers()) == len(self.peers) and peer.inside
                for peer in self.peers
            )
        )
        return self.peers

    def until(self, what: Callable[[], bool]) -> None:
        """Let time pass until something holds."""
        assert self.world.run(until=self.world.now + LIMIT_S, stop=what)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.world.run(until=self.world.now + seconds)

    def end(self) -> None:
        """All processes end."""
        for peer in self.peers:
            if peer.node is not None:
                peer.kill()
