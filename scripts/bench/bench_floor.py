"""What an all-reduce costs this machine at least: the passes over memory that no implementation of
the protocol can leave out.

Each pass is measured alone, at its best: one core, no interpreter between chunks to speak of,
buffers that are used again lie in the cache, vectors do not. Its speed, times the bytes that all
peers together put through it, gives CPU seconds; divided by the cores, the time that the machine
needs if nothing ever waits. `bench_allreduce.py` on the same machine, with the same arguments, says
how far we are from that.

encode     every peer reads its own vector and checks (fp32) or quantises it
seal       what goes to others is encrypted, out of the cache into the cache (not with --plain)
socket     what goes to others passes a TCP connection over loopback: user and system time of both
           ends (with --plain: to where it stays)
open       it is decrypted into memory where it stays (not with --plain)
reduce     the owner of each chunk reads all contributions and writes the result
hash       every peer hashes the result, with blake3, out of the cache
deliver    every peer's script gets the result into its tensor
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from _bench import emit, machine, progress
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from atoll.collectives.codecs.codec import DEFAULT_CHUNK_ELEMENTS, Codec, EncodedChunk, get_codec
from atoll.collectives.engine import EngineSettings, tune

POOL_ELEMENTS = 16 << 20  # of a vector that is far larger than the caches near a core
HOT = 64  # repetitions over one chunk
TAG_BYTES, NONCE, HEADER = 16, bytes(12), bytes(48)


class Floor:
    """The passes of one codec, chunk by chunk. Each returns the bytes it has put through."""

    def __init__(self, codec: str, peers: int) -> None:
        self.codec: Codec = get_codec(codec)
        self.chunk = DEFAULT_CHUNK_ELEMENTS[codec]
        self.size = self.codec.wire_bytes(self.chunk)
        self.count = POOL_ELEMENTS // self.chunk // peers * peers
        self.peers = peers
        self.values = torch.randn(
            self.count * self.chunk, generator=torch.Generator().manual_seed(0)
        ).split(self.chunk)
        self.out = torch.zeros(self.count * self.chunk).split(self.chunk)
        self.wires = list(self._wires(self.count))
        for values, wire in zip(self.values, self.wires, strict=True):
            self.codec.encode(values, wire)
        self.hot = next(self._wires(1))
        self.sealed = memoryview(bytearray(self.size + TAG_BYTES))
        self.cipher = AESGCM(bytes(16))

    def _wires(self, count: int) -> Iterator[EncodedChunk]:
        memory = memoryview(mmap.mmap(-1, count * self.size))
        memory[:] = bytes(len(memory))
        for index in range(count):
            yield self.codec.wire(memory[index * self.size : (index + 1) * self.size], self.chunk)

    def encode(self) -> int:
        """float32 bytes."""
        for values, wire in zip(self.values, self.wires, strict=True):
            if self.codec.zero_copy:
                self.codec.finite(wire)
            else:
                self.codec.encode(values, self.hot)
        return 4 * self.count * self.chunk

    def seal(self) -> int:
        """Encoded bytes."""
        for _ in range(HOT):
            self.cipher.encrypt_into(NONCE, self.hot.data, HEADER, self.sealed)
        return HOT * self.size

    def open(self) -> int:
        """Encoded bytes."""
        self.cipher.encrypt_into(NONCE, self.hot.data, HEADER, self.sealed)
        for wire in self.wires:
            self.cipher.decrypt_into(NONCE, self.sealed, HEADER, wire.data)
        return self.count * self.size

    def reduce(self) -> int:
        """Encoded bytes of results."""
        rounds = self.count // self.peers - 1
        for index in range(rounds):
            given = self.wires[index * self.peers : (index + 1) * self.peers]
            self.codec.weighted_mean(
                given, [1.0] * self.peers, float(self.peers), self.wires[-1 - index % self.peers]
            )
        return rounds * self.size

    def hash(self) -> int:
        """Encoded bytes."""
        for _ in range(HOT):
            blake3(self.hot.data).digest()
        return HOT * self.size

    def deliver(self) -> int:
        """float32 bytes."""
        for wire, out in zip(self.wires, self.out, strict=True):
            self.codec.decode(wire, out, cold=True)
        return 4 * self.count * self.chunk


def seconds_per_byte(work: Callable[[], int], reps: int) -> float:
    """CPU seconds; the first repetition touches the memory."""
    samples = list[float]()
    for _ in range(reps + 1):
        started = time.thread_time()
        done = work()
        samples.append((time.thread_time() - started) / done)
    return statistics.median(samples[1:])


def socket_seconds_per_byte(places: Sequence[memoryview], total: int = 1 << 29) -> float:
    """CPU seconds of both ends of a lane's connection, with the engine's socket options, in turns,
    out of the cache into one place after another; all of one length."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        tune(end, EngineSettings())
    data, done = memoryview(bytearray(len(places[0]))), 0
    started = time.process_time()
    while done < total:
        with contextlib.suppress(BlockingIOError):
            one.send(data)
        with contextlib.suppress(BlockingIOError):
            index, at = divmod(done, len(data))
            done += other.recv_into(places[index % len(places)][at:])
    one.close()
    other.close()
    return (time.process_time() - started) / total


def floor(codec: str, options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of each pass, all peers together."""
    passes, peers = Floor(codec, options.peers), options.peers
    vector = 4 * options.elements
    encoded = vector / 4 / passes.chunk * passes.size
    moved = 2 * (peers - 1) * encoded  # contributions to owners, results to the others
    cost = {
        "encode": seconds_per_byte(passes.encode, options.reps) * peers * vector,
        "reduce": seconds_per_byte(passes.reduce, options.reps) * encoded,
        "deliver": seconds_per_byte(passes.deliver, options.reps) * peers * vector,
        "hash": seconds_per_byte(passes.hash, options.reps) * peers * encoded,
        "socket": socket_seconds_per_byte(
            [wire.data for wire in passes.wires] if options.plain else [passes.hot.data]
        )
        * moved,
    }
    if not options.plain:
        cost["seal"] = seconds_per_byte(passes.seal, options.reps) * moved
        cost["open"] = seconds_per_byte(passes.open, options.reps) * moved
    return cost


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument(
        "--elements", type=int, default=25_000_000, help="length of the vector (default 25,000,000)"
    )
    parser.add_argument("--codec", choices=("fp32", "int8"), default="int8")
    parser.add_argument("--plain", action="store_true", help="bulk bytes without encryption")
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cost = {name: round(seconds, 9) for name, seconds in floor(options.codec, options).items()}
    cores = machine()["cores"] or 1
    total = sum(cost.values())
    progress(f"{options.codec}: {total:.3f} CPU s, {total / cores:.3f} s on {cores} cores: {cost}")
    emit(
        "bench_floor",
        vars(options),
        [cost],
        cpu_seconds=round(total, 9),
        seconds=round(total / cores, 9),
        passes=cost,
    )


if __name__ == "__main__":
    main()
