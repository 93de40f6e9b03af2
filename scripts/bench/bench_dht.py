"""How fast the DHT stores and finds, with all nodes well, some killed, some frozen or some lying;
beside hivemind's.

Each node is a process forked from one that has imported everything. One node stores, another looks
up (it has no copy of its own), over and over. hivemind runs in between, in an environment of its
own (made on first use): as many processes, the same pattern.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import trio
from _bench import CANNOT, emit, percentile, progress
from rivals import _hivemind

from atoll.node.net.dht.wire import ADD_PROVIDER, PUT_VALUE, Rpc
from atoll.node.net.network import PeerNetwork
from atoll.security.identity import Identity

ANSWER_S = 30.0
REFRESHES = 3
NAMES = 50
"""An owner has room for 64 values: later ones replace the earlier."""


class Lost(Exception):
    """A node process has ended or is silent."""


class Node:
    """One node process: commands go down a pipe, answers come back, a JSON object a line."""

    def __init__(self, bootstrap: list[str], hostile: bool) -> None:
        here, theirs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(here[0])
            os.close(theirs[1])
            _live(theirs[0], here[1], bootstrap, hostile)
        os.close(here[1])
        os.close(theirs[0])
        self._in, self._out, self._buffer = here[0], theirs[1], b""
        self.hello = self.heard()

    def heard(self, patience_s: float = ANSWER_S) -> dict[str, Any]:
        """The next answer. Raises Lost."""
        until = time.monotonic() + patience_s
        while b"\n" not in self._buffer:
            ready = select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]
            data = os.read(self._in, 65536) if ready else b""
            if not data:
                raise Lost(f"node {self.pid} ended or said nothing for {patience_s:g} s")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        """A command's answer. Raises Lost."""
        os.write(self._out, json.dumps(command).encode() + b"\n")
        return self.heard()

    def cpu_s(self) -> float:
        """Processor seconds used so far, read from outside."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Kill the process and forget it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _live(commands: int, answers: int, bootstrap: list[str], hostile: bool) -> None:
    """The life of a node process; never returns."""
    try:
        random.seed(os.urandom(8))
        trio.run(_serve, commands, answers, bootstrap, hostile, strict_exception_groups=True)
    except BaseException as error:
        print(f"node {os.getpid()}: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


async def _serve(commands: int, answers: int, bootstrap: list[str], hostile: bool) -> None:
    network = PeerNetwork(Identity.generate(), listen=["/ip4/127.0.0.1/tcp/0"], bootstrap=bootstrap)
    if hostile:
        network.dht.engine.server.answer = _lying(network.dht.engine.server.answer)

    async def carry_out(command: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        if command["do"] == "put":
            got: Any = await network.dht.put(command["name"], command["value"].encode())
        elif command["do"] == "get":
            found = await network.dht.get(command["owner"], command["name"])
            got = found.decode() if found is not None else None
        elif command["do"] == "refresh":
            await network.dht.refresh()
            got = len(network.dht.table)
        else:
            raise ValueError(command["do"])
        return {"ms": (time.perf_counter() - started) * 1e3, "got": got}

    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        os.write(
            answers,
            json.dumps({"peer": network.peer, "address": network.addresses()[0]}).encode() + b"\n",
        )
        stream, buffer = trio.lowlevel.FdStream(commands), b""
        while data := await stream.receive_some(65536):
            buffer += data
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                os.write(answers, json.dumps(await carry_out(json.loads(line))).encode() + b"\n")
        nursery.cancel_scope.cancel()


def _lying(honest: Callable[..., Rpc]) -> Callable[..., Rpc]:
    """Acknowledges everything, keeps nothing, finds nothing, knows nobody."""

    def answer(peer: Any, request: Rpc, now: float, unix_s: float) -> Rpc:
        honest(peer, Rpc(5), now, unix_s)
        return Rpc(
            request.kind,
            request.key,
            request.value if request.kind in (PUT_VALUE, ADD_PROVIDER) else None,
        )

    return answer


def start(arguments: argparse.Namespace) -> list[Node]:
    """All nodes, acquainted; the first two are honest and stay."""
    hostile = round(arguments.peers * arguments.hostile)
    nodes: list[Node] = []
    tables: list[int] = []
    for number in range(arguments.peers):
        nodes.append(Node([nodes[0].hello["address"]] if nodes else [], 2 <= number < 2 + hostile))
    for _ in range(REFRESHES):
        tables = [node.ask(do="refresh")["got"] for node in nodes]
    progress(f"{len(nodes)} nodes, at least {min(tables)} in each table")
    return nodes


def operate(nodes: list[Node], arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Stores and gets among the living, and the processor milliseconds of all of them for one
    store.
    """
    writer, reader = nodes[:2]
    runs: list[dict[str, Any]] = []
    cpu = 0.0
    warmup = (
        0 if arguments.dead or arguments.frozen else arguments.warmup
    )  # what follows a fault counts from the first operation
    for number in range(warmup + arguments.reps):
        name, value = f"key {number % NAMES}", f"value {number}"
        before = sum(node.cpu_s() for node in nodes)
        put = writer.ask(do="put", name=name, value=value)
        time.sleep(arguments.pause_s)  # what goes on in the background is part of a store's cost
        after = sum(node.cpu_s() for node in nodes)
        got = reader.ask(do="get", owner=writer.hello["peer"], name=name)
        if number >= warmup:
            cpu += after - before
            runs.append(
                {
                    "store_ms": put["ms"],
                    "get_ms": got["ms"],
                    "right": put["got"] > 0 and got["got"] == value,
                }
            )
    return runs, cpu * 1e3 / arguments.reps


def ours(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Our runs and CPU. Kills and freezes before it measures, as far as asked for. Raises Lost."""
    nodes = start(arguments)
    gone: list[Node] = []
    try:
        for number in range(arguments.warmup):  # so that the dead were well known
            nodes[0].ask(do="put", name=f"key {number % NAMES}", value="x")
        for node in nodes[len(nodes) - round(arguments.peers * arguments.dead) :]:
            gone.append(node)
            os.kill(node.pid, signal.SIGKILL)
        for node in nodes[len(nodes) - len(gone) - arguments.frozen : len(nodes) - len(gone)]:
            os.kill(node.pid, signal.SIGSTOP)
        return operate([node for node in nodes if node not in gone], arguments)
    finally:
        for node in nodes:
            node.end()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=16, help="nodes (default 16)")
    parser.add_argument("--reps", type=int, default=100, help="stores and gets (default 100)")
    parser.add_argument(
        "--dead",
        type=float,
        default=0.0,
        help="share of the nodes that is killed before (default 0)",
    )
    parser.add_argument(
        "--frozen", type=int, default=0, help="nodes that are stopped before (default 0)"
    )
    parser.add_argument(
        "--hostile", type=float, default=0.0, help="share of the nodes that lies (default 0)"
    )
    parser.add_argument("--against", default="", help="hivemind, or nothing (default)")
    parser.add_argument(
        "--warmup", type=int, default=20, help="stores and gets that do not count (default 20)"
    )
    parser.add_argument(
        "--pause-s", type=float, default=0.05, help="between a store and its get (default 0.05)"
    )
    arguments = parser.parse_args()
    if arguments.against not in ("", "hivemind"):
        parser.error("--against hivemind, or nothing")
    try:
        theirs: dict[str, list[float]] = {}
        if arguments.against:
            theirs = _hivemind.dht_times(arguments.peers, arguments.reps // 2, arguments.pause_s)
        progress(f"{arguments.peers} nodes: {arguments.reps} stores and gets")
        runs, cpu_ms = ours(arguments)
        if arguments.against:
            for key, values in _hivemind.dht_times(
                arguments.peers, arguments.reps - arguments.reps // 2, arguments.pause_s
            ).items():
                theirs[key] += values
    except (Lost, _hivemind.Unavailable) as error:
        progress(f"cannot measure: {error}")
        return CANNOT
    stores, gets = ([run[key] for run in runs] for key in ("store_ms", "get_ms"))
    figures: dict[str, Any] = {}
    if theirs:
        figures = {f"hivemind_{key}": statistics.median(values) for key, values in theirs.items()}
        figures |= {
            f"hivemind_{key.removesuffix('_ms')}_mean_ms": statistics.mean(values)
            for key, values in theirs.items()
        }
        figures["ratio_store"] = statistics.median(stores) / figures["hivemind_store_ms"]
        figures["ratio_get"] = statistics.median(gets) / figures["hivemind_get_ms"]
    emit(
        "bench_dht",
        vars(arguments),
        [*runs, {"hivemind": theirs}] if theirs else runs,
        store_ms=statistics.median(stores),
        get_ms=statistics.median(gets),
        store_p99_ms=percentile(stores, 0.99),
        get_p99_ms=percentile(gets, 0.99),
        cpu_ms_per_store=cpu_ms,
        success=sum(run["right"] for run in runs),
        of=len(runs),
        **figures,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
