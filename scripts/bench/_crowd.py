"""A crowd of connections that are idle or slow, for `bench_crowd.py`: each holds on to a door of a
node in one phase of a conversation.

First line of stdin: {"phase": one of `PHASES` or `ALL`, "count": n, "libp2p": [host, port], "peer":
id, "lanes": [host, port], "control": path}. It says {"there": n} once so many are in their phase,
or after PATIENCE_S where a door lets in fewer, and at the end of stdin {"made": how many
connections that took in all}. Who is shown out comes again.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from atoll.collectives.errors import NetworkError
from atoll.collectives.identifiers import PeerId
from atoll.node.control import protocol
from atoll.node.net import streams
from atoll.node.net.dht.node import PROTOCOL as KAD
from atoll.node.net.rendezvous import PROTOCOL as RENDEZVOUS
from atoll.node.net.through.observing import MAGIC as OBSERVE
from atoll.node.net.through.relaying import MAGIC as RELAY
from atoll.node.net.transport.addresses import make_address
from atoll.node.net.transport.host import Host
from atoll.node.net.transport.lane_sockets import MAGIC
from atoll.node.net.transport.peer_stream import PeerStream
from atoll.security.identity import Identity

DRIP_S = 2.0
PATIENCE_S = 40.0
AGAIN_S = 0.2
AT_ONCE = 8
"""Come through a door at a time: a flood of handshakes is another attack."""

MULTISTREAM = b"\x13/multistream/1.0.0\n"
NOISE = b"\x07/noise\n"
HALF = (5000).to_bytes(4, "big") + b"\x00"
"""Of a frame as we write them; `HALF_KAD`: of a message of the DHT."""
HALF_KAD = b"\x88\x27\x00"


@dataclass(frozen=True)
class Phase:
    """``door``: "libp2p", "lanes" or "control"; ``first``: what is said at once; ``drip``: a byte
    more every `DRIP_S`, for ever.
    """

    door: str
    first: bytes = b""
    drip: bool = False


RAW = {
    "open": Phase("libp2p"),
    "greeting": Phase("libp2p", MULTISTREAM[:1], drip=True),
    "handshake": Phase("libp2p", MULTISTREAM + NOISE + b"\x00\x20" + bytes(8), drip=True),
    "lane": Phase("lanes"),
    "lane-hello": Phase("lanes", MAGIC + bytes(8), drip=True),
    "voucher": Phase("lanes", RELAY + bytes(8), drip=True),
    "observed": Phase("lanes", OBSERVE),
    "control": Phase("control"),
    "control-hello": Phase("control", HALF, drip=True),
    "request": Phase(
        "control",
        protocol.frame(protocol.Hello(1, (protocol.VERSION,), os.getpid())) + HALF,
        drip=True,
    ),
}
"""Conversations that need no key."""
KEYED = ("peer", "stream", "frame")
"""A connection that is all made and says nothing; a stream on it whose protocol is never named;
half a frame of one of our protocols.
"""
PHASES = (
    "open",
    "greeting",
    "handshake",
    *KEYED,
    *[name for name, phase in RAW.items() if phase.door != "libp2p"],
)


ALL = "all"
"""As many of the crowd in each phase."""


def say(**what: Any) -> None:
    """One line."""
    print(json.dumps(what), flush=True)


class Crowd:
    """Counts who is there."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.made, self.there = order, 0, trio.Event()
        self.reached = set[int]()
        self._turns = trio.CapacityLimiter(AT_ONCE)

    def arrived(self, index: int) -> None:
        """This one is in its phase: what it took to get there is no cost of holding it."""
        self.reached.add(index)
        if len(self.reached) >= self.order["count"]:
            self.there.set()

    async def raw(self, phase: Phase, index: int) -> None:
        """One of them, without a key."""
        while True:
            try:
                async with self._turns:
                    stream = await self._open(phase.door)
                    await stream.send_all(phase.first)
                self.made += 1
                self.arrived(index)
                async with stream, trio.open_nursery() as nursery:
                    if phase.drip:
                        nursery.start_soon(drip, stream.send_all)
                    while await stream.receive_some():
                        pass
                    nursery.cancel_scope.cancel()
            except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            await trio.sleep(AGAIN_S * random.uniform(0.5, 1.5))

    async def _open(self, door: str) -> trio.SocketStream:
        if door == "control":
            return await trio.open_unix_socket(self.order["control"])
        host, port = self.order[door]
        return await trio.open_tcp_stream(host, port)

    async def keyed(self, phase: str, index: int) -> None:
        """One of them, with a key of its own."""
        host = Host(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"])
        peer = PeerId(self.order["peer"])
        gone = trio.Event()
        async with trio.open_nursery() as nursery:
            async with self._turns:
                await nursery.start(host.run, lambda _, up: None if up else gone.set())
            while True:
                gone = trio.Event()
                try:
                    async with self._turns:
                        await host.connect(peer, [make_address(*self.order["libp2p"])])
                    self.made += 1
                    if phase == "peer":
                        self.arrived(index)
                    await self._talk(host, peer, phase, index)
                    await gone.wait()
                except NetworkError:
                    pass
                await trio.sleep(AGAIN_S * random.uniform(0.5, 1.5))

    async def _talk(self, host: Host, peer: PeerId, phase: str, index: int) -> None:
        """What one says on its connection; a stream that is closed is opened again as long as the
        connection is there.
        """
        while phase != "peer" and host.connected(peer):
            async with self._turns:
                if phase == "stream":
                    stream = PeerStream(
                        peer, await host._open_connections(peer)[0].muxed_conn.open_stream()
                    )
                    await stream.send_all(MULTISTREAM[:1])
                else:
                    spoken = (streams.PROTOCOL, KAD, RENDEZVOUS)[index % 3]
                    stream = await host.open_stream(peer, spoken)
                    await stream.send_all(HALF_KAD if spoken == KAD else HALF)
            self.arrived(index)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(drip, stream.send_all)
                while await stream.receive_some():
                    pass
                nursery.cancel_scope.cancel()
            await stream.aclose()
            await trio.sleep(AGAIN_S)


async def drip(send: Callable[[bytes], Any]) -> None:
    """A byte now and then, until it fails."""
    while True:
        await trio.sleep(DRIP_S * random.uniform(0.8, 1.2))
        try:
            await send(b"\x00")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, NetworkError):
            return


async def main() -> None:
    """Until stdin ends."""
    order = json.loads(await trio.to_thread.run_sync(sys.stdin.readline))
    crowd = Crowd(order)
    async with trio.open_nursery() as nursery:
        for index in range(order["count"]):
            phase = PHASES[index % len(PHASES)] if order["phase"] == ALL else order["phase"]
            if phase in RAW:
                nursery.start_soon(crowd.raw, RAW[phase], index)
            else:
                nursery.start_soon(crowd.keyed, phase, index)
        with trio.move_on_after(PATIENCE_S):
            await crowd.there.wait()
        say(there=len(crowd.reached))
        await trio.to_thread.run_sync(sys.stdin.readline)
        say(made=crowd.made)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
