#!/usr/bin/env python3
"""How much of its link an all-reduce uses: real peers on hosts whose rate and delay are given,
against what the bytes alone would take.

Each peer has ``--mbit`` up and as much down by token buckets (whole Ethernet frames count, so that
no TCP payload can use more than 95.6 %), and ``--rtt-ms`` to every other. With ``--slow-one M`` the
last peer has M Mbit/s. ``seconds`` is the transfer: from the first plan's arrival anywhere to the
last byte of the result at the slowest peer, the median of the operations; ``end_to_end_s`` is what
a script waits. A run says how many ``plans`` it took: more than one means that the members changed
the plan on the way. ``incomplete`` counts operations that left somebody's contribution out: figures
come from the others, where there are any.

The vectors are Gaussian noise, which lanes cannot compress to speak of.

bound_s         payload over line rate, at the division among owners that makes it smallest
                (bisection): nothing can be faster
link_use        bound_s / seconds
ratio_to_bound  seconds / bound_s
plain_tcp_use   the same for one plain TCP connection that carries what a peer sends (with
                --slow-one: between two fast ones)
valid           pings before and after were on target; figures of a run that was not are void
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench import FailedError, emit, manifest, progress
from _kits import TESTS, Lab, Peers, Seen, Watch, in_laboratory

from atoll.collectives.codecs.codec import CODECS, DEFAULT_CHUNK_ELEMENTS, Chunking, chunk_elements

SETTLE_TRIES = 40
MEMBERS_S = 30.0
DEADLINE_S = 300.0


def bound_s(nbytes: int, mbit: Sequence[float]) -> float:
    """The shortest a butterfly of these peers can take, seconds, counting payload only.

    A peer that owns the share p of the vector sends and receives 1 + (n - 2) p vectors; all shares
    sum to 1.
    """
    n, rates = len(mbit), [rate * 1e6 / 8 for rate in mbit]
    low, high = nbytes / min(rates), nbytes * n / min(rates)
    if n == 2:
        return low
    for _ in range(100):
        middle = (low + high) / 2
        shares = sum(max(0.0, middle * rate / nbytes - 1) / (n - 2) for rate in rates)
        low, high = (low, middle) if shares >= 1 else (middle, high)
    return high


class Bench:
    """Peers, and what their nodes say of their operations."""

    def __init__(self, swarm: Peers, elements: int) -> None:
        self.swarm, self.elements = swarm, elements
        self._done: list[dict[str, Any]] = []
        self._phases: list[dict[str, Any]] = []
        self._more = threading.Condition()

    def heard(self, seen: Seen) -> None:
        """An event of a node."""
        with self._more:
            if seen.event["event"] == "operation.committed":
                self._done.append(seen.event)
                self._more.notify()
            elif seen.event["event"] == "round.phase" and seen.event["log"].startswith("op/"):
                self._phases.append(seen.event)

    def settle(self) -> None:
        """Until all are members, and see it. Raises FailedError."""
        try:
            self.swarm.settle(SETTLE_TRIES)
        except AssertionError as error:
            raise FailedError(str(error)) from None
        until = time.monotonic() + MEMBERS_S
        for peer in self.swarm.all:
            while peer.say(do="members") or peer.expect("members")["count"] < len(self.swarm.all):
                if time.monotonic() > until:
                    raise FailedError(f"{peer.name} does not see everybody")
                time.sleep(0.05)

    def reduce(self, name: str) -> dict[str, Any]:
        """One operation: the slowest peer's times."""
        self._done.clear()
        self._phases.clear()
        for index, peer in enumerate(self.swarm.all):
            op = {
                "op": name,
                "seed": index,
                "weight": 1,
                "numel": self.elements,
                "deadline_s": DEADLINE_S,
                "noise": True,
            }
            peer.say(do="reduce", ops=[op])
        for peer in self.swarm.all:
            peer.expect("started", DEADLINE_S)
        outcomes = [peer.expect("reduced", DEADLINE_S) for peer in self.swarm.all]
        with self._more:
            complete = self._more.wait_for(lambda: len(self._done) == len(outcomes), MEMBERS_S)
            mine, phases = list(self._done), list(self._phases)
        begun = min(
            (event["at"] for event in phases if event["phase"] == "reduce"), default=float("nan")
        )
        counted = all(len(outcome["contributors"]) == len(outcomes) for outcome in outcomes)
        return {
            "ok": complete
            and counted
            and all(
                outcome["status"] == "committed" for outcome in outcomes
            ),  # then nothing of it is NaN
            "bit_equal": len({outcome["digest"] for outcome in outcomes}) == 1,
            "seconds": max(
                (event["at"] for event in phases if event["phase"] == "decide"),
                default=float("nan"),
            )
            - begun,
            "plans": len({(event["ballot"], event["revision"]) for event in phases}),
            "end_to_end_s": max((event["elapsed_s"] for event in mine), default=None),
            "decision_s": max((event["decision_s"] for event in mine), default=None),
            "bytes_sent": [outcome["bytes_sent"] for outcome in outcomes],
        }


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    rates = [options.mbit] * options.peers
    if options.slow_one:
        rates[-1] = options.slow_one
    nbytes = Chunking(
        options.codec, options.elements, chunk_elements(options.codec, options.elements)
    ).nbytes
    bound = bound_s(nbytes, rates)
    with Lab(options.peers, mbit=rates, rtt_ms=options.rtt_ms, loss=options.loss) as lab:
        before = lab.ping_ms()
        plain = bytes(round(nbytes * 2 * (options.peers - 1) / options.peers))
        plain_use = len(plain) * 8e-6 / lab.transfer(plain)[1] / options.mbit
        progress(f"ping {before:.2f} ms; plain TCP uses {plain_use:.1%} of the link")
        script, text = TESTS / "process" / "reduce_peer.py", manifest("link", options.codec)
        with Peers(
            folder, options.peers, options.elements, script, hosts=lab.hosts, manifest=text
        ) as swarm:
            runs = measure(options, Bench(swarm, options.elements), bound)
        after = lab.ping_ms()
        valid = lab.on_target(before) and lab.on_target(after)
    whole_runs = [found for found in runs if found["ok"]]
    good = whole_runs or [
        found for found in runs if math.isfinite(found["seconds"]) and found["end_to_end_s"]
    ]
    if not good:
        raise FailedError("no operation was committed")
    seconds = statistics.median(found["seconds"] for found in good)
    whole = statistics.median(found["end_to_end_s"] for found in good)
    emit(
        "bench_link",
        {**vars(options), "rates": rates, "fifo": lab.fifo},
        runs,
        valid=valid,
        link_use=round(bound / seconds, 4),
        seconds=round(seconds, 4),
        bound_s=round(bound, 4),
        ratio_to_bound=round(seconds / bound, 4),
        end_to_end_s=round(whole, 4),
        link_use_end_to_end=round(bound / whole, 4),
        plain_tcp_use=round(plain_use, 4),
        bit_equal=all(found["bit_equal"] for found in good),
        plans_max=max(found["plans"] for found in good),
        incomplete=len(runs) - len(whole_runs),
        ping_ms=[round(before, 3), round(after, 3)],
    )
    return 0


def measure(options: argparse.Namespace, bench: Bench, bound: float) -> list[dict[str, Any]]:
    """All operations; the first is a warm-up and not among them."""
    bench.settle()
    runs: list[dict[str, Any]] = []
    with Watch(bench.swarm.all, bench.heard):
        for number in range(options.reps + 1):
            found = bench.reduce(f"link {number}")
            if number:
                runs.append(found)
            seconds = found["seconds"]
            progress(
                f"operation {number} of {options.reps}: {seconds:.3f} s, {bound / seconds:.1%} of the link{'' if found['ok'] else ' (incomplete)'}"
            )
    return runs


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mbit", type=float, default=100.0, help="rate of every peer, up and down (default 100)"
    )
    parser.add_argument(
        "--rtt-ms", type=float, default=0.0, help="round-trip time between any two (default 0)"
    )
    parser.add_argument(
        "--loss", type=float, default=0.0, help="share of packets lost between any two (default 0)"
    )
    parser.add_argument(
        "--slow-one",
        type=float,
        default=None,
        metavar="MBIT",
        help="rate of the last peer (default: as the others)",
    )
    parser.add_argument(
        "--codec",
        choices=[name for name in CODECS if name in DEFAULT_CHUNK_ELEMENTS],
        default="int8",
        help="default int8",
    )
    parser.add_argument(
        "--elements", type=int, default=4_000_000, help="length of the vector (default 4,000,000)"
    )
    parser.add_argument("--peers", type=int, default=4, help="default 4")
    parser.add_argument("--reps", type=int, default=5, help="operations that count (default 5)")
    options = parser.parse_args()
    if (
        min(options.elements, options.reps) < 1
        or options.peers < 2
        or min(options.mbit, options.slow_one or options.mbit) <= 0
    ):
        parser.error("--elements, --reps and rates are positive, --peers at least 2")
    return options


if __name__ == "__main__":
    sys.exit(in_laboratory(parse(), run))
