"""How long until nodes that know one bootstrap address form one swarm.

Each node is a real process with a fresh identity, forked from one that has imported everything
("warm": the import, about half a CPU second a process, is not a cost of the protocol and is left
out). A start counts as joined when every node has learned every other member of the run: has its
signed record, and can dial it when it has something to say to it. Measured from the moment the last
node listens, by one clock (CLOCK_MONOTONIC is the same for all processes), to the moment the last
node knows all members (`p50_s`, `p99_s`). `cpu_s`: processor seconds of all nodes until then, which
say more than times do on a machine that has other work (median).

With `--greet` a start goes on: now that all know all, everybody dials everybody and says a word.
`greeted_p50_s`, `greeted_p99_s`: from there until the last node has heard all others.

`--simulate N` measures something else, in virtual time: how long a changed record takes until all
of N members hold it, and what membership costs each of them: bytes a second as they would go over
wires, and the processor time of the state machine with real signatures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import trio
from _bench import emit, percentile, progress
from _membership import simulate

from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.network import PeerNetwork
from atoll.security.identity import Identity

RUN = RunId("bench-start")


@dataclass
class Node:
    """A node process: its pid, the pipe on which it reports, and the one on which it is told to
    greet.
    """

    pid: int
    pipe: int
    orders: int


async def node_main(
    identity: Identity, port: int, bootstrap: list[str], others: int, report: int, orders: int
) -> None:
    """One node: listen, join the run, greet the others when told to; report when it listens, knows
    all and has heard all.
    """
    begin = resource.getrusage(resource.RUSAGE_SELF)

    def tell(event: str) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu = usage.ru_utime + usage.ru_stime - begin.ru_utime - begin.ru_stime
        os.write(
            report,
            (json.dumps({"event": event, "at": time.monotonic(), "cpu": cpu}) + "\n").encode(),
        )

    known: set[PeerId] = set()
    heard: set[PeerId] = set()
    network = PeerNetwork(identity, listen=[f"/ip4/127.0.0.1/tcp/{port}"], bootstrap=bootstrap)
    done = trio.Event()

    def on_member(run: RunId, peer: PeerId, addresses: Any) -> None:
        if peer not in known and addresses:
            known.add(peer)
            if len(known) == others:
                tell("known")

    def on_message(peer: PeerId, message: bytes) -> None:
        heard.add(peer)
        if len(heard) == others:
            done.set()

    network.on_member = on_member
    network.on_message(RUN, on_message)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        tell("listening")
        network.announce_run(RUN)
        async with trio.lowlevel.FdStream(orders) as told:
            await told.receive_some(1)
        for peer in known:
            network.send(RUN, peer, b"hello")
        await done.wait()
        tell("heard")
        await trio.sleep_forever()  # others may still need this node; the parent ends it


def start_node(identity: Identity, port: int, bootstrap: list[str], others: int) -> Node:
    """Fork a node process."""
    (read_end, write_end), (orders, order) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        os.close(orders)
        return Node(pid, read_end, order)
    try:
        os.close(read_end)
        os.close(order)
        random.seed(os.urandom(8))
        trio.run(
            node_main,
            identity,
            port,
            bootstrap,
            others,
            write_end,
            orders,
            strict_exception_groups=True,
        )
    except BaseException as error:
        print(f"node {os.getpid()} failed: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


class Reports:
    """What the nodes have said: times of "listening", "known" and "heard", and processor seconds
    until then.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self._buffers = {node.pipe: b"" for node in nodes}
        self._nodes = len(nodes)
        self.times: dict[str, list[float]] = {"listening": [], "known": [], "heard": []}
        self.cpu: dict[str, list[float]] = {"listening": [], "known": [], "heard": []}

    def wait(self, event: str, timeout_s: float) -> bool:
        """Until all nodes have said ``event``, or the time is up: whether they have."""
        deadline = time.monotonic() + timeout_s
        while (
            len(self.times[event]) < self._nodes
            and self._buffers
            and (left := deadline - time.monotonic()) > 0
        ):
            for pipe in select.select(list(self._buffers), [], [], left)[0]:
                data = os.read(pipe, 4096)
                if not data:
                    del self._buffers[pipe]
                    continue
                *lines, self._buffers[pipe] = (self._buffers[pipe] + data).split(b"\n")
                for line in lines:
                    told = json.loads(line)
                    self.times[told["event"]].append(told["at"])
                    self.cpu[told["event"]].append(told["cpu"])
        return len(self.times[event]) == self._nodes


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
    result: dict[str, Any] = {}
    try:
        if not arguments.bootstrap_last:
            nodes.append(start(0))
        nodes += [start(index) for index in range(1, arguments.nodes)]
        if arguments.bootstrap_last:
            time.sleep(arguments.bootstrap_delay_s)
            nodes.append(start(0))
        reports = Reports(nodes)
        if reports.wait("known", arguments.timeout_s):
            result["seconds"] = max(reports.times["known"]) - max(reports.times["listening"])
            result["cpu_s"] = sum(reports.cpu["known"])
            if arguments.greet:
                ordered = time.monotonic()
                for node in nodes:
                    os.write(node.orders, b"!")
                if reports.wait("heard", arguments.timeout_s):
                    result["greeted_seconds"] = max(reports.times["heard"]) - ordered
                    result["greeted_cpu_s"] = sum(reports.cpu["heard"]) - result["cpu_s"]
        return {"joined": "seconds" in result, "nodes_done": len(reports.times["known"]), **result}
    finally:
        for node in nodes:
            os.kill(node.pid, signal.SIGKILL)
            os.waitpid(node.pid, 0)
            os.close(node.pipe)
            os.close(node.orders)


def membership(arguments: argparse.Namespace) -> int:
    """`--simulate`."""
    spread, figures = simulate(arguments.simulate, arguments.changes, arguments.seed)
    emit(
        "bench_start",
        vars(arguments),
        [{"spread_s": value} for value in spread],
        spread_p50_s=percentile(spread, 0.5),
        spread_p99_s=percentile(spread, 0.99),
        **figures,
    )
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=4,
        help="nodes a start, the bootstrap node included (default 4)",
    )
    parser.add_argument("--starts", type=int, default=100, help="how many starts (default 100)")
    parser.add_argument(
        "--dead-bootstrap",
        action="store_true",
        help="put the address of a peer that does not exist first in everybody's list",
    )
    parser.add_argument(
        "--bootstrap-last", action="store_true", help="start the bootstrap node after all others"
    )
    parser.add_argument(
        "--bootstrap-delay-s",
        type=float,
        default=1.0,
        help="with --bootstrap-last: how much later (default 1)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=30.0,
        help="a start that takes longer has failed (default 30)",
    )
    parser.add_argument(
        "--greet", action="store_true", help="when all know all, everybody dials everybody"
    )
    parser.add_argument(
        "--simulate",
        type=int,
        default=0,
        metavar="N",
        help="in place of starts: membership of N in virtual time",
    )
    parser.add_argument(
        "--changes", type=int, default=40, help="with --simulate: records that change (default 40)"
    )
    parser.add_argument("--seed", type=int, default=1, help="with --simulate (default 1)")
    arguments = parser.parse_args()
    if arguments.simulate:
        return membership(arguments)
    runs: list[dict[str, Any]] = []
    for number in range(1, arguments.starts + 1):
        runs.append(one_start(arguments))
        last = runs[-1]
        shown = (
            f"{last['seconds']:.3f} s"
            if last["joined"]
            else f"FAILED, {last['nodes_done']} of {arguments.nodes} nodes done"
        )
        progress(f"start {number} of {arguments.starts}: {shown}")
    seconds, cpu, greeted = (
        [run[key] for run in runs if key in run] for key in ("seconds", "cpu_s", "greeted_seconds")
    )
    figures: dict[str, float] = {}
    if arguments.greet:
        figures = {
            "greeted": len(greeted),
            "greeted_p50_s": percentile(greeted, 0.5),
            "greeted_p99_s": percentile(greeted, 0.99),
        }
    emit(
        "bench_start",
        {**vars(arguments), "processes": "forked warm"},
        runs,
        joined=len(seconds),
        starts=arguments.starts,
        p50_s=percentile(seconds, 0.5),
        p99_s=percentile(seconds, 0.99),
        max_s=max(seconds, default=float("nan")),
        cpu_s=percentile(cpu, 0.5),
        **figures,
    )
    return 0 if seconds else 1


if __name__ == "__main__":
    sys.exit(main())
