"""A peer that makes lanes, as a process on a host of the laboratory: the network part of a node,
without a node around it.

    fork(place, "netns.lane_peer", LISTEN, LANE_HOST)

LISTEN: a libp2p address; LANE_HOST: where its lane listener is. Commands come as JSON lines on
stdin: {"do": "connect", "peer": P, "addresses": [...]}, {"do": "lanes", "peer": P, "count": N},
{"do": "drop", "peer": P}, {"do": "guess", "on": B}, {"do": "send", "seconds": S, "congestion": C},
{"do": "receive", "warm_s": W, "seconds": S}. It says "ready", "connected", for each lane "lane"
once bytes have gone both ways, "dropped", "guesses", "sent", and "received" with the bytes that
came within S seconds, all and second by second, counted from W seconds after the first ones.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import sys
from typing import Any

import trio

from atoll.collectives.errors import NetworkError
from atoll.collectives.identifiers import PeerId
from atoll.node.net import lane_routes
from atoll.node.net.lane_talk import LaneTalk, Message, Sync
from atoll.node.net.lanes import Lanes
from atoll.node.net.through.relaying import Helpers, LaneRelay
from atoll.node.net.transport.faults import Faults
from atoll.node.net.transport.host import Host
from atoll.node.net.transport.lane_sockets import LaneListener
from atoll.security.identity import Identity

GREETING = b"over the lane"


def say(event: str, **values: Any) -> None:
    """One line."""
    print(json.dumps({"event": event, **values}), flush=True)


class LanePeer:
    """The peer."""

    def __init__(self, listen: str, lane_host: str) -> None:
        self.identity, self.rng = Identity.generate(), random.Random()
        self.host = Host(self.identity, [listen])
        self.listener = LaneListener([lane_host], 0)
        self.book: dict[PeerId, list[str]] = {}
        self.helpers = Helpers(self.host, lambda peer: self.book.get(peer, ()))
        self.relay = LaneRelay(self.host, self.listener, lambda run, peer: True)
        self.routes = lane_routes.LaneRoutes(
            self.listener, self.helpers, lambda peer: "a-run", lambda peer, address: True, self.rng
        )
        self.lanes = Lanes(
            self.host, self.routes, self.connect, lambda peer: True, Faults(), self.rng
        )
        self.lanes.on_lane = self.on_lane
        self.began: dict[PeerId, float] = {}
        self.synced: dict[PeerId, float] = {}
        self.open: list[trio.socket.SocketType] = []

    def note_sync(self) -> None:
        """From now on the moment is known at which this peer, as the driver, has said Sync last."""
        plainly = LaneTalk.say

        synced = self.synced

        async def say_and_note(self: LaneTalk, message: Message) -> None:
            if isinstance(message, Sync):
                synced[self.peer] = trio.current_time()
            await plainly(self, message)

        LaneTalk.say = say_and_note

    async def connect(self, peer: PeerId) -> None:
        """Make sure of a connection."""
        await self.host.connect(peer, self.book.get(peer, ()))

    def on_lane(
        self,
        peer: PeerId,
        sock: socket.socket,
        mine: bytes,
        theirs: bytes,
        drives: bool,
        path: str,
        index: int,
        _: bool,
    ) -> None:
        """See `lanes.OnLane`."""
        now = trio.current_time()
        seconds, from_sync = now - self.began.get(peer, now), now - self.synced.get(peer, now)
        self.nursery.start_soon(
            self.talk,
            peer,
            trio.socket.from_stdlib_socket(sock),
            mine + theirs,
            drives,
            path,
            index,
            seconds,
            from_sync,
        )

    async def talk(
        self,
        peer: PeerId,
        sock: trio.socket.SocketType,
        secrets: bytes,
        drives: bool,
        path: str,
        index: int,
        seconds: float,
        from_sync: float,
    ) -> None:
        """Bytes both ways, then word of it."""
        self.open.append(sock)
        await sock.send(GREETING + bytes([index]))
        got = b""
        while len(got) <= len(GREETING):
            piece = await sock.recv(64)
            if not piece:
                break
            got += piece
        say(
            "lane",
            peer=peer,
            path=path,
            index=index,
            seconds=seconds,
            from_sync=from_sync,
            drives=drives,
            right=got == GREETING + bytes([index]),
            why=self.routes.why.get(peer, ""),
            congestion=congestion(sock),
        )

    async def obey(self, command: dict[str, Any]) -> None:
        """One command."""
        peer = PeerId(command.get("peer", ""))
        if command["do"] == "connect":
            self.book[peer] = command["addresses"]
            await self.connect(peer)
            await self.helpers.met(peer)
            say("connected", peer=peer, observers=len(self.helpers.observers(self.host.peer)))
        elif command["do"] == "lanes":
            self.began[peer] = trio.current_time()
            self.lanes.ensure(peer, command["count"])
        elif command["do"] == "guess":
            self.routes.guesses = command["on"]
            say("guesses")
        elif command["do"] == "drop":
            self.lanes.release(peer)
            for sock in self.open:
                sock.close()
            self.open.clear()
            say("dropped")
        elif command["do"] == "send":
            self.nursery.start_soon(self.send, command["seconds"], command["congestion"])
        elif command["do"] == "receive":
            self.nursery.start_soon(self.receive, command["warm_s"], command["seconds"])

    async def send(self, seconds: float, cc: str) -> None:
        """Fill all lanes."""
        data = self.rng.randbytes(1 << 18)
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for sock in self.open:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, cc.encode())
                    nursery.start_soon(fill, sock, data)
        say("sent", congestion=[congestion(sock) for sock in self.open])

    async def receive(self, warm_s: float, seconds: float) -> None:
        """Count what comes on all lanes."""
        total = [0]
        first = trio.Event()
        async with trio.open_nursery() as nursery:
            for sock in self.open:
                nursery.start_soon(drain, sock, total, first)
            await first.wait()
            await trio.sleep(warm_s)
            before, began = total[0], trio.current_time()
            marks = [before]
            while (left := began + seconds - trio.current_time()) > 0:
                await trio.sleep(min(1.0, left))
                marks.append(total[0])
            rates = [after - mark for mark, after in itertools.pairwise(marks)]
            say(
                "received",
                nbytes=total[0] - before,
                seconds=trio.current_time() - began,
                by_second=rates,
            )
            nursery.cancel_scope.cancel()

    async def run(self) -> None:
        """Until stdin ends."""
        self.note_sync()
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            await nursery.start(self.host.run, lambda peer, up: None)
            await nursery.start(self.lanes.run)
            say("ready", peer=self.host.peer, addresses=self.host.addresses())
            while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
                try:
                    await self.obey(json.loads(line))
                except NetworkError as error:
                    say("failed", why=error.message)
            nursery.cancel_scope.cancel()
        self.relay.close()


async def fill(sock: trio.socket.SocketType, data: bytes) -> None:
    """Send for ever."""
    while True:
        await sock.send(data)


async def drain(sock: trio.socket.SocketType, total: list[int], first: trio.Event) -> None:
    """Receive until the end."""
    while data := await sock.recv(1 << 18):
        total[0] += len(data)
        first.set()


def congestion(sock: trio.socket.SocketType) -> str:
    """Congestion control in force."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def main(argv: list[str]) -> int:
    """Until stdin ends."""
    trio.run(LanePeer(*argv).run)
    return 0
