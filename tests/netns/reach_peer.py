"""A PeerNetwork in a process of its own, for the NAT laboratory: it says what happens as JSON
lines, and does what stdin tells it.

First line of stdin: {"listen": [...], "bootstrap": [...], "seed": n, "announce": [...], "open":
bool, "run": "name" or "", "only_upnp": bool, "relay_only": bool, "limits": {}, "lan": bool, "lies":
[addresses that it gives its lane listener, before the true ones], "silent_s": after how many
seconds a silent connection is asked for a sign of life; it has as long for it}. Then {"send":
peer}, {"add": [peer, addresses]}, {"status": null}, {"connect": peer}, {"lane": peer}, {"forget":
null}. Out: {"up": addresses}, {"told": addresses}, {"path": [peer, path]}, {"member": [peer,
addresses]}, {"got": [peer, text]}, {"status": ...}, {"connected": [peer, error]}, {"lane": [peer,
path]}, {"log": a line of the log of the network}. Each has {"at": its clock in seconds}.
"""

from __future__ import annotations

import json
import logging
import random
import socket
from typing import Any

import trio

from atoll.collectives.errors import NetworkError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.network import PeerNetwork
from atoll.node.net.reach import natpmp
from atoll.node.net.reach.ledger import RelayLimits
from atoll.node.net.reach.reach import ReachSettings
from atoll.node.net.transport import liveness
from atoll.security.identity import Identity


def say(**what: Any) -> None:
    print(json.dumps({**what, "at": round(trio.current_time(), 3)}), flush=True)


class Log(logging.Handler):
    """The network's log as events."""

    def emit(self, record: logging.LogRecord) -> None:
        say(log=record.getMessage()[:300])


async def live() -> None:
    lines = trio.lowlevel.FdStream(0)
    buffer = b""

    async def line() -> Any:
        nonlocal buffer
        while b"\n" not in buffer:
            more = await lines.receive_some()
            if not more:
                return None
            buffer += more
        first, _, buffer = buffer.partition(b"\n")
        return json.loads(first)

    start = await line()
    if start.get("only_upnp"):
        natpmp.TRIES_S = ()  # not a datagram is sent
    liveness.SILENT_S = liveness.ANSWER_S = start.get("silent_s", liveness.SILENT_S)
    network = PeerNetwork(
        Identity.generate(),
        listen=start.get("listen", ["/ip4/0.0.0.0/tcp/4001"]),
        bootstrap=start.get("bootstrap", []),
        announce=start.get("announce", []),
        rng=random.Random(start.get("seed", 1)),
        reach=ReachSettings(
            relay=RelayLimits(open_to_all=start.get("open", False), **start.get("limits", {})),
            relay_only=bool(start.get("relay_only")),
        ),
        lan_discovery=start.get("lan", False),
    )
    run = RunId(start.get("run") or "run")
    network.on_message(run, lambda peer, data: say(got=[peer, data.decode()]))
    network.on_path = lambda peer, path: say(path=[peer, path])
    network.on_member = lambda _, peer, addresses: say(member=[peer, list(addresses)])
    network.on_addresses = lambda: say(told=network.addresses())

    def on_lane(peer: PeerId, sock: socket.socket, *rest: Any) -> None:
        sock.close()
        say(lane=[peer, rest[3]])

    network.on_lane = on_lane
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        if start.get("lies"):
            network._routes.listener.outside = lambda: start["lies"]
        if start.get("run"):
            network.announce_run(run)
        say(up=network.addresses(), peer=network.peer)

        async def connect(peer: PeerId) -> None:
            try:
                await network.connect(peer)
                say(connected=[peer, ""])
            except NetworkError as error:
                say(connected=[peer, error.message])

        while (command := await line()) is not None:
            for verb, what in command.items():
                if verb == "send":
                    network.send(run, PeerId(what), b"hello")
                elif verb == "add":
                    network.add_addresses(PeerId(what[0]), what[1])
                elif verb == "lane":
                    network.ensure_lane(PeerId(what))
                elif verb == "connect":
                    nursery.start_soon(connect, PeerId(what))
                elif verb == "status":
                    say(status=network.status())
        nursery.cancel_scope.cancel()


def main(_: list[str]) -> int:
    """Until stdin ends."""
    log = logging.getLogger("atoll.net")
    log.addHandler(Log())
    log.setLevel(logging.DEBUG)
    trio.run(live)
    return 0
