"""A DHT of many nodes in virtual time: real engines, real messages, and nodes that lie.

A hostile node has one way for all it does: it says nothing; it is empty; it names only its friends,
with invented peers nearest to whatever is asked for; or it keeps an owner's first value for ever.
All but the silent acknowledge what they do not keep, and some add forged values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TypeVar

from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.simulation import World
from atoll.node.net.dht.engine import QUORUM, REPLICAS, Engine, Operation
from atoll.node.net.dht.routing import closest, position
from atoll.node.net.dht.wire import ADD_PROVIDER, GET_VALUE, PUT_VALUE, Rpc
from atoll.node.net.dht.work import DhtWork
from atoll.node.net.transport.peerbook import PeerBook
from atoll.security.identity import Identity, encode_base58

DIAL_S = 1.0  # until a peer that does not exist is given up
SILENT_S = 2.0
UNIX_S = 1_800_000_000.0
WAYS = ("silent", "empty", "friends", "replay")
T = TypeVar("T")


class Node:
    """One node; ``way``: "" for an honest one."""

    def __init__(self, swarm: Swarm, number: int, way: str) -> None:
        self.identity = Identity(hashlib.sha256(f"{swarm.world.seed}/{number}".encode()).digest())
        self.peer, self.way, self.up = self.identity.peer, way, True
        self._swarm, self._first = swarm, dict[bytes, bytes]()
        self.engine = Engine(
            self.identity,
            lambda peer: (),
            PeerBook(self.peer),
            lambda peer: swarm.linked(self.peer, peer),
            swarm.world.stream(f"node {number}"),
        )

    def answer(self, sender: PeerId, request: Rpc) -> Rpc | None:
        """What it says; None for nothing."""
        if not self.up or self.way == "silent":
            return None
        try:
            honest = self.engine.server.answer(
                sender, request, self._swarm.world.now, self._swarm.unix_s
            )
        except RemoteProtocolError:
            return None
        return self._lie(request, honest) if self.way else honest

    def _lie(self, request: Rpc, honest: Rpc) -> Rpc:
        if request.kind == PUT_VALUE and request.value is not None:
            self._first.setdefault(request.key, request.value)
        if request.kind in (PUT_VALUE, ADD_PROVIDER):
            return Rpc(request.kind, request.key, request.value)
        value = self._first.get(request.key) if self.way == "replay" else None
        if request.kind == GET_VALUE and value is None and self.way == "empty":
            value = b"forged" + request.key
        friends = self._swarm.friends(request.key) if self.way == "friends" else ()
        closer = (
            tuple((peer, ()) for peer in friends)
            if self.way == "friends"
            else ()
            if self.way == "empty"
            else honest.closer
        )
        return Rpc(request.kind, request.key, value if request.kind == GET_VALUE else None, closer)


class Swarm:
    """``count`` nodes, a ``hostile`` share of them liars, each knowing ``known`` others at the
    start; then all refresh.

    ``slow_s``: what every way takes longer.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: int = 0,
        hostile: float = 0.0,
        dead: float = 0.0,
        known: int = 5,
        slow_s: float = 0.0,
    ) -> None:
        self.world, self._slow_s = World(seed), slow_s
        self._chance = self.world.stream("swarm")
        liars = round(count * hostile)
        ways = [WAYS[number % len(WAYS)] for number in range(liars)] + [""] * (count - liars)
        self.nodes = {
            node.peer: node for node in (Node(self, number, way) for number, way in enumerate(ways))
        }
        self.honest = [node for node in self.nodes.values() if not node.way]
        self._liars = [node.peer for node in self.nodes.values() if node.way]
        self._invented = [
            PeerId(encode_base58(b"\x00\x24\x08\x01\x12\x20" + self._chance.randbytes(32)))
            for _ in range(1000 if liars else 0)
        ]
        self._links: set[frozenset[PeerId]] = set()
        self.requests = 0
        for node in self.nodes.values():
            for other in self._chance.sample(list(self.nodes), min(known, count)):
                self.link(node.peer, other)
        for _ in range(2):
            for node in self.honest:
                self.carry_out(node, node.engine.refresh())
        for node in self._chance.sample(self.honest, round(count * dead)):
            self.end(node)
        self.living = [node for node in self.honest if node.up]

    @property
    def unix_s(self) -> float:
        """The wall clock of all nodes."""
        return UNIX_S + self.world.now

    def linked(self, one: PeerId, other: PeerId) -> bool:
        """Whether two nodes are connected."""
        return frozenset((one, other)) in self._links

    def link(self, one: PeerId, other: PeerId) -> None:
        """Connect two nodes."""
        if one != other and not self.linked(one, other):
            self._links.add(frozenset((one, other)))
            self.nodes[one].engine.link_changed(other, True)
            self.nodes[other].engine.link_changed(one, True)

    def end(self, node: Node) -> None:
        """The node's process ends."""
        node.up = False
        for link in [link for link in self._links if node.peer in link]:
            self._links.discard(link)
            (other,) = link - {node.peer}
            self.nodes[other].engine.link_changed(node.peer, False)

    def friends(self, key: bytes) -> list[PeerId]:
        """What the liars agreed to say about a key: ten invented peers nearer than anybody real,
        then the nearest ones of themselves.
        """
        return closest(self._invented, position(key), 10) + closest(self._liars, position(key), 10)

    def nearest(self, key: bytes, count: int) -> list[PeerId]:
        """The living nodes nearest to a key, liars among them."""
        return closest((peer for peer, node in self.nodes.items() if node.up), position(key), count)

    def put(self, node: Node, name: str, payload: bytes, life_s: float = 3600.0) -> int:
        """How many nodes say that they hold it."""
        return self.carry_out(node, node.engine.put(name, payload, life_s, REPLICAS, self.unix_s))

    def get(self, node: Node, owner: PeerId, name: str) -> bytes | None:
        """What ``node`` finds."""
        return self.carry_out(node, node.engine.get(owner, name, QUORUM, self.unix_s))

    def carry_out(self, node: Node, operation: Operation[T]) -> T:
        """Run the world until an operation of ``node`` has its result."""
        while True:
            try:
                work = next(operation)
            except StopIteration as end:
                return end.value
            driver = _Driver(self, node, work)
            driver.poll()
            assert work.done or self.world.run(stop=lambda work=work: work.done), (
                "the operation stands still"
            )

    def ask(
        self,
        sender: Node,
        peer: PeerId,
        request: Rpc,
        answered: Callable[[Rpc], None],
        failed: Callable[[], None],
    ) -> None:
        """Carry a request and its answer; the latency of a way is 5 to 40 ms, and ``slow_s`` more."""
        self.requests += 1
        there, back = (self._slow_s + self._chance.uniform(0.005, 0.04) for _ in range(2))
        if peer not in self.nodes:
            self.world.after(DIAL_S, failed)
        elif not self.nodes[peer].up:
            self.world.after(there, failed)
        else:
            self.world.after(
                there, lambda: self._arrive(sender, peer, request, back, answered, failed)
            )

    def _arrive(
        self,
        sender: Node,
        peer: PeerId,
        request: Rpc,
        back: float,
        answered: Callable[[Rpc], None],
        failed: Callable[[], None],
    ) -> None:
        self.link(sender.peer, peer)
        answer = self.nodes[peer].answer(sender.peer, request)
        if answer is None:
            self.world.after(SILENT_S, failed)
        else:
            self.world.after(back, lambda: answered(answer))


class _Driver:
    """Carries out one `DhtWork` of a node."""

    def __init__(self, swarm: Swarm, node: Node, work: DhtWork) -> None:
        self._swarm, self._node, self._work = swarm, node, work

    def poll(self) -> None:
        """Send what is due."""
        if self._work.over:
            return
        now = self._swarm.world.now
        for peer, request in self._work.poll(now):
            self._swarm.ask(
                self._node,
                peer,
                request,
                lambda answer, peer=peer: self._answered(peer, answer, now),
                lambda peer=peer: self._failed(peer),
            )
        if not math.isinf(self._work.wake()):
            self._swarm.world.at(max(self._work.wake(), now + 1e-4), self.poll)

    def _answered(self, peer: PeerId, answer: Rpc, asked: float) -> None:
        now = self._swarm.world.now
        self._node.engine.answered(peer, answer, now - asked)
        try:
            self._work.answered(peer, answer, now)
        except ValueError:
            pass
        self.poll()

    def _failed(self, peer: PeerId) -> None:
        self._node.engine.failed(peer, self._swarm.world.now)
        self._work.failed(peer, self._swarm.world.now)
        self.poll()
