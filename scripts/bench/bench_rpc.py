"""Requests and answers between two nodes: how many a second, and how long each takes.

The two nodes are processes. A request is a msgpack message of the given size in a topic of
`PeerNetwork`; the other node unpacks it and answers with as much. So many are under way at once;
then, for the time of one, one at a time.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time

import msgspec
import trio
from _bench import CANNOT, emit, percentile, progress

from atoll.collectives.identifiers import PeerId
from atoll.node.net.network import PeerNetwork
from atoll.security.identity import Identity

TOPIC = "bench-rpc"
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
PATIENCE_S = 30.0


class Call(msgspec.Struct, array_like=True):
    """A request, and its answer."""

    number: int
    method: str
    body: bytes


_decoder = msgspec.msgpack.Decoder(Call)
_encoder = msgspec.msgpack.Encoder()


def message(number: int, nbytes: int) -> bytes:
    """A call of ``nbytes`` bytes as a message."""
    return _encoder.encode(Call(number, "echo", bytes(max(0, nbytes - 16))))


async def serve(report: int) -> None:
    """The answering node, until it is killed; says where it listens."""
    network = PeerNetwork(Identity.generate(), listen=LISTEN)

    def on_message(peer: PeerId, data: bytes) -> None:
        call = _decoder.decode(data)
        network.send(TOPIC, peer, _encoder.encode(Call(call.number, "answer", call.body)))

    network.on_message(TOPIC, on_message)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        os.write(report, network.addresses()[0].encode() + b"\n")
        await trio.sleep_forever()


def start_server() -> tuple[int, str]:
    """Pid and address of an answering node."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            random.seed(os.urandom(8))
            trio.run(serve, write_end, strict_exception_groups=True)
        finally:
            os._exit(1)
    os.close(write_end)
    with open(read_end, encoding="ascii") as pipe:
        return pid, pipe.readline().strip()


class Caller:
    """The asking node's calls."""

    def __init__(self, network: PeerNetwork, peer: PeerId, nbytes: int) -> None:
        self._network, self._peer, self._nbytes = network, peer, nbytes
        self._waiting: dict[int, trio.Event] = {}
        self._number = 0

    def on_message(self, peer: PeerId, data: bytes) -> None:
        """An answer."""
        self._waiting.pop(_decoder.decode(data).number).set()

    async def call(self) -> float:
        """Seconds until the answer was there."""
        self._number += 1
        done = self._waiting[self._number] = trio.Event()
        started = time.perf_counter()
        self._network.send(TOPIC, self._peer, message(self._number, self._nbytes))
        await done.wait()
        return time.perf_counter() - started

    async def measure(self, in_flight: int, seconds: float) -> tuple[list[float], float]:
        """Seconds of each call, and of all of them together."""
        samples: list[float] = []
        started = time.perf_counter()

        async def one_after_the_other() -> None:
            while time.perf_counter() - started < seconds:
                samples.append(await self.call())

        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(one_after_the_other)
        return samples, time.perf_counter() - started


async def ask(arguments: argparse.Namespace, server: str) -> dict[str, list[float]]:
    """The asking node's life. Raises trio.TooSlowError when the other does not answer."""
    network = PeerNetwork(Identity.generate(), listen=LISTEN, bootstrap=[server])
    caller = Caller(network, PeerId(server.rpartition("/")[2]), arguments.bytes)
    network.on_message(TOPIC, caller.on_message)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        with trio.fail_after(PATIENCE_S):
            for _ in range(3):
                await caller.measure(16, 0.3)  # streams open, wires take over
        many = [
            await caller.measure(arguments.in_flight, arguments.seconds / arguments.reps)
            for _ in range(arguments.reps)
        ]
        single = (await caller.measure(1, arguments.seconds / 2))[0]
        nursery.cancel_scope.cancel()
    return {
        "per_s": [len(samples) / took for samples, took in many],
        "ms": [value * 1e3 for samples, _ in many for value in samples],
        "single_ms": [value * 1e3 for value in single],
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bytes", type=int, default=128, help="bytes a request and an answer (default 128)"
    )
    parser.add_argument(
        "--in-flight", type=int, default=64, help="requests under way at once (default 64)"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="how long (default 4)")
    parser.add_argument(
        "--reps", type=int, default=4, help="parts of that time, whose median counts (default 4)"
    )
    arguments = parser.parse_args()
    pid, server = start_server()
    found: dict[str, list[float]] | None = None
    try:
        progress(f"{arguments.bytes} bytes, {arguments.in_flight} under way, then one")
        found = trio.run(ask, arguments, server, strict_exception_groups=True)
    except* trio.TooSlowError:
        progress("cannot measure: the other node does not answer")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if found is None:
        return CANNOT
    emit(
        "bench_rpc",
        vars(arguments),
        [{"per_s": rate} for rate in found["per_s"]],
        per_s=statistics.median(found["per_s"]),
        p50_ms=percentile(found["ms"], 0.5),
        p99_ms=percentile(found["ms"], 0.99),
        single_per_s=len(found["single_ms"]) / (arguments.seconds / 2),
        single_p50_ms=percentile(found["single_ms"], 0.5),
        single_p99_ms=percentile(found["single_ms"], 0.99),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
