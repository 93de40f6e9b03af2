"""How long until nodes that know one bootstrap address form one swarm.

Each node is a real process with a fresh identity, forked from one that has imported everything ("warm": the import, about half a CPU
second a process, is not a cost of the protocol and is left out). A start counts as joined when every node has learned every
other member of the run and has had a message from it. Measured from the moment the last node listens, by one clock
(CLOCK_MONOTONIC is the same for all processes), to the moment the last node knows all members (`p50_s`, `p99_s`), and to the moment
the last has had a message from each of them as well (`greeted_p50_s`, `greeted_p99_s`: everybody dials everybody).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import trio
from _bench import emit, percentile, progress

from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.network import PeerNetwork
from atoll.security.identity import Identity

RUN = RunId("bench-start")


@dataclass
class Node:
    """A node process: its pid and the pipe on which it reports."""

    pid: int
    pipe: int


async def node_main(identity: Identity, port: int, bootstrap: list[str], others: int, report: int) -> None:
    """One node: listen, join the run, greet whoever becomes known; report when it listens and when everybody has answered."""

    def tell(event: str) -> None:
        os.write(report, (json.dumps({"event": event, "at": time.monotonic()}) + "\n").encode())

    known: set[PeerId] = set()
    heard: set[PeerId] = set()
    network = PeerNetwork(identity, listen=[f"/ip4/127.0.0.1/tcp/{port}"], bootstrap=bootstrap)
    done = trio.Event()

    def check() -> None:
        if len(known) == others and heard >= known:
            done.set()

    def on_member(run: RunId, peer: PeerId, addresses: Any) -> None:
        if peer not in known and addresses:
            known.add(peer)
            network.send(run, peer, b"hello")
            if len(known) == others:
                tell("known")
            check()

    def on_message(peer: PeerId, message: bytes) -> None:
        heard.add(peer)
        check()

    network.on_member = on_member
    network.on_message(RUN, on_message)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        tell("listening")
        network.announce_run(RUN)
        await done.wait()
        tell("done")
        await trio.sleep_forever()  # others may still need this node; the parent ends it


def start_node(identity: Identity, port: int, bootstrap: list[str], others: int) -> Node:
    """Fork a node process."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return Node(pid, read_end)
    try:
        os.close(read_end)
        random.seed(os.urandom(8))
        trio.run(node_main, identity, port, bootstrap, others, write_end, strict_exception_groups=True)
    except BaseException as error:
        print(f"node {os.getpid()} failed: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def collect(nodes: list[Node], timeout_s: float) -> dict[str, list[float]]:
    """The times of "listening", "known" and "done" that nodes reported, until all are done or the time is up."""
    times: dict[str, list[float]] = {"listening": [], "known": [], "done": []}
    buffers = {node.pipe: b"" for node in nodes}
    deadline = time.monotonic() + timeout_s
    while len(times["done"]) < len(nodes) and buffers and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(buffers), [], [], left)[0]:
            data = os.read(pipe, 4096)
            if not data:
                del buffers[pipe]
                continue
            *lines, buffers[pipe] = (buffers[pipe] + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                times[event["event"]].append(event["at"])
    return times


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def one_start(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start all nodes, wait until they have found each other, end them."""
    identities = [Identity.generate() for _ in range(arguments.nodes)]
    port, dead_port = free_ports(2)
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identities[0].peer}"
    bootstrap = [address]
    if arguments.dead_bootstrap:
        bootstrap.insert(0, f"/ip4/127.0.0.1/tcp/{dead_port}/p2p/{Identity.generate().peer}")
    others = arguments.nodes - 1

    def start(index: int) -> Node:
        mine = [entry for entry in bootstrap if entry != address] if index == 0 else bootstrap
        return start_node(identities[index], port if index == 0 else 0, mine, others)

    nodes: list[Node] = []
    try:
        if not arguments.bootstrap_last:
            nodes.append(start(0))
        nodes += [start(index) for index in range(1, arguments.nodes)]
        if arguments.bootstrap_last:
            time.sleep(arguments.bootstrap_delay_s)
            nodes.append(start(0))
        times = collect(nodes, arguments.timeout_s)
    finally:
        for node in nodes:
            os.kill(node.pid, signal.SIGKILL)
            os.waitpid(node.pid, 0)
            os.close(node.pipe)
    joined = len(times["done"]) == arguments.nodes
    seconds, greeted = ((max(times[event]) - max(times["listening"]) if joined else None) for event in ("known", "done"))
    return {"joined": joined, "nodes_done": len(times["done"]), "seconds": seconds, "greeted_seconds": greeted}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="nodes a start, the bootstrap node included (default 4)")
    parser.add_argument("--starts", type=int, default=100, help="how many starts (default 100)")
    parser.add_argument(
        "--dead-bootstrap", action="store_true", help="put the address of a peer that does not exist first in everybody's list"
    )
    parser.add_argument("--bootstrap-last", action="store_true", help="start the bootstrap node after all others")
    parser.add_argument("--bootstrap-delay-s", type=float, default=1.0, help="with --bootstrap-last: how much later (default 1)")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="a start that takes longer has failed (default 30)")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for number in range(1, arguments.starts + 1):
        runs.append(one_start(arguments))
        last = runs[-1]
        shown = f"{last['seconds']:.3f} s" if last["joined"] else f"FAILED, {last['nodes_done']} of {arguments.nodes} nodes done"
        progress(f"start {number} of {arguments.starts}: {shown}")
    seconds, greeted = ([run[key] for run in runs if run["joined"]] for key in ("seconds", "greeted_seconds"))
    emit(
        "bench_start",
        {**vars(arguments), "processes": "forked warm"},
        runs,
        joined=len(seconds),
        starts=arguments.starts,
        p50_s=percentile(seconds, 0.5),
        p99_s=percentile(seconds, 0.99),
        max_s=max(seconds, default=float("nan")),
        greeted_p50_s=percentile(greeted, 0.5),
        greeted_p99_s=percentile(greeted, 0.99),
        within_2_s=sum(value <= 2.0 for value in seconds),
    )
    return 0 if seconds else 1


if __name__ == "__main__":
    sys.exit(main())
