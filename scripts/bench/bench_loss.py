#!/usr/bin/env python3
"""Rounds over links that lose packets, beside one plain TCP connection of the same kernel over the
same links.

Peers on hosts of a network laboratory, ``--mbit`` up and down each and ``--rtt-ms`` between any
two; every packet, acknowledgements too, is lost with the probability ``--loss``. For ``--seconds``
the peers make rounds of a model of ``--elements`` (int8: as many bytes), then one TCP connection
with the kernel's congestion control sends without a pause between two of the hosts, and so on in
turn. With the default ``--elements`` a round is mostly bulk; with 1000 it is only control messages
(``--rival none``: there is nothing to compare these with).

goodput     bytes that a peer must send for its rounds (contributions and results, without records
            and repetitions) a second, median of the turns
tcp         bytes that arrived over the connection a second, the same
ratio       goodput / tcp of each turn, median: 0.5 is "within twice"
rounds      committed with everybody, of all; longest_s: the longest that one took
valid       pings without loss were on target before and after
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from _bench import emit, manifest, progress
from _kits import Lab, Peers, in_laboratory

from atoll.collectives.codecs.codec import Chunking, chunk_elements

PATIENCE_S = 120.0
PIECE = bytes(1 << 16)


def payload(options: argparse.Namespace) -> float:
    """Bytes that each peer sends in a round: contributions to the other owners, its own part's
    result to all others.
    """
    nbytes = Chunking("int8", options.elements, chunk_elements("int8", options.elements)).nbytes
    return 2 * nbytes * (options.peers - 1) / options.peers


def rounds(options: argparse.Namespace, swarm: Peers, seed: int) -> dict[str, Any]:
    """A turn of rounds."""
    began = time.monotonic()
    took: list[float] = []
    whole = 0
    while time.monotonic() - began < options.seconds:
        start = time.monotonic()
        swarm.contribute(seed + 100 * len(took), wait_s=PATIENCE_S)
        found = [peer.expect("outcome", PATIENCE_S + 10) for peer in swarm.all]
        took.append(time.monotonic() - start)
        whole += all(
            one["status"] == "committed" and len(one["contributors"]) == options.peers
            for one in found
        )
    elapsed = time.monotonic() - began
    return {
        "rounds": len(took),
        "whole": whole,
        "longest_s": round(max(took), 3),
        "median_s": round(statistics.median(took), 3),
        "goodput": round(whole * payload(options) / elapsed),
    }


class Connection:
    """One TCP connection between two hosts of the laboratory, with what the kernel does by default."""

    def __init__(self, lab: Lab) -> None:
        self.near, self.far = lab.connect(0, 1)
        self.near.setblocking(False)
        self.far.settimeout(0.2)

    def turn(self, seconds: float) -> int:
        """Bytes a second that arrive while it sends for so long."""
        ends = time.monotonic() + seconds
        sender = threading.Thread(target=self._send, args=(ends,))
        sender.start()
        arrived = 0
        while time.monotonic() < ends:
            with contextlib.suppress(TimeoutError):
                arrived += len(self.far.recv(1 << 18))
        sender.join()
        self._drain()
        return round(arrived / seconds)

    def _send(self, ends: float) -> None:
        while time.monotonic() < ends:
            if select.select([], [self.near], [], 0.1)[1]:
                with contextlib.suppress(BlockingIOError):
                    self.near.send(PIECE)

    def _drain(self) -> None:
        """Until nothing is under way that would disturb the next turn."""
        for _ in range(25):
            try:
                while self.far.recv(1 << 18):
                    pass
            except TimeoutError:
                unsent = socket_queue(self.near)
                if not unsent:
                    return

    def close(self) -> None:
        """End it at once."""
        for end in (self.near, self.far):
            end.close()


def socket_queue(sock: socket.socket) -> int:
    """Bytes that the other end has not acknowledged."""
    import fcntl
    import struct

    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), 0x5411, bytes(4)))[0])  # SIOCOUTQ


def lossy(options: argparse.Namespace, lab: Lab, swarm: Peers, loss: float) -> dict[str, Any]:
    """All turns at one share of loss."""
    connection = Connection(lab) if options.rival == "tcp" else None
    if loss:
        for host in lab.hosts:
            host.prepare("lose", share=loss)()
    try:
        swarm.contribute(7, wait_s=PATIENCE_S)
        for peer in swarm.all:
            peer.expect("outcome", PATIENCE_S + 10)
        turns: list[dict[str, Any]] = []
        for turn in range(options.turns):
            found = rounds(options, swarm, 100_000 * (turn + 1))
            if connection is not None:
                found["tcp"] = connection.turn(options.seconds)
                found["ratio"] = round(found["goodput"] / max(1, found["tcp"]), 4)
            turns.append(found)
            progress(f"{loss:.0%}: {found}")
    finally:
        if connection is not None:
            connection.close()
        for host in lab.hosts:
            host.heal()
    keys = ["goodput", *(["tcp", "ratio"] if connection is not None else [])]
    return {
        "loss": loss,
        "turns": turns,
        **{key: statistics.median(turn[key] for turn in turns) for key in keys},
        "rounds": [sum(turn["whole"] for turn in turns), sum(turn["rounds"] for turn in turns)],
        "rounds_a_s": round(
            sum(turn["whole"] for turn in turns) / (options.seconds * options.turns), 3
        ),
        "longest_s": max(turn["longest_s"] for turn in turns),
    }


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    with Lab(options.peers, mbit=options.mbit or None, rtt_ms=options.rtt_ms) as lab:
        before = lab.ping_ms()
        with Peers(
            folder,
            options.peers,
            options.elements,
            hosts=lab.hosts,
            manifest=manifest("loss", "int8"),
        ) as swarm:
            swarm.settle()
            found = [lossy(options, lab, swarm, loss / 100) for loss in options.loss]
        after = lab.ping_ms()
        valid = lab.on_target(before) and lab.on_target(after)
    emit(
        "bench_loss",
        vars(options),
        found,
        ratios={f"{row['loss']:.0%}": row.get("ratio") for row in found},
        rounds_a_s={f"{row['loss']:.0%}": row["rounds_a_s"] for row in found},
        longest_s={f"{row['loss']:.0%}": row["longest_s"] for row in found},
        valid=valid,
        ping_ms=[round(before, 3), round(after, 3)],
    )
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--loss",
        type=float,
        nargs="+",
        default=[0.0, 5.0, 10.0, 20.0, 30.0],
        help="per cent of the packets (default 0 5 10 20 30)",
    )
    parser.add_argument("--peers", type=int, default=2, help="default 2")
    parser.add_argument(
        "--mbit", type=float, default=50.0, help="rate of every host; 0: no limit (default 50)"
    )
    parser.add_argument(
        "--rtt-ms", type=float, default=40.0, help="between any two hosts (default 40)"
    )
    parser.add_argument(
        "--elements", type=int, default=4_000_000, help="of the model (default 4,000,000)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of a turn, at least (default 10)"
    )
    parser.add_argument("--turns", type=int, default=3, help="of each, at each loss (default 3)")
    parser.add_argument("--rival", choices=["tcp", "none"], default="tcp", help="default tcp")
    options = parser.parse_args()
    if (
        options.peers < 2
        or min(options.mbit, options.rtt_ms, *options.loss) < 0
        or max(options.loss) >= 100
        or min(options.seconds, options.turns, options.elements) <= 0
    ):
        parser.error("--peers is at least 2, --loss 0 to 100, the others positive")
    return options


if __name__ == "__main__":
    sys.exit(in_laboratory(parse(), run))
