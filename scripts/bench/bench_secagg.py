"""Secure aggregation of all members in one process: seconds until a masked sum is unmasked, and
whether it is exact.

    scripts/bench/bench_secagg.py --clients 16 --elements 1000000 --dropouts 2

Members that drop out have dealt shares but send no masked vector: the expensive case, since their
masks with all others must be calculated anew. Members work one after another, on one core; messages
are encoded and decoded as for a network. The sum is over what `wrap32` sums.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any, TypeVar

import msgspec
import numpy as np
from _bench import emit, progress

from atoll.collectives.identifiers import PeerId, RunId
from atoll.security.identity import Identity
from atoll.security.masking import Binding, Client, Memory, Ring, Unmasking
from atoll.security.masking.keys import Words
from atoll.security.masking.messages import Message

M = TypeVar("M", bound=Message)


def crossed(message: M) -> M:
    """A message as it arrives."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


def once(clients: int, elements: int, dropouts: int, threshold: int, bits: Any) -> dict[str, Any]:
    """One aggregation: seconds of each step, of all members together."""
    people = {identity.peer: identity for identity in (Identity.generate() for _ in range(clients))}
    roster = tuple(sorted(people))
    ring = Ring(elements, clip=1.0, members=clients, bits=bits)
    rng = np.random.default_rng(0)
    rows: dict[PeerId, Words] = {}
    for peer in roster:
        values = rng.uniform(-1, 1, elements).astype(np.float32)
        rows[peer] = ring.encode(ring.quantise(values, random.Random(peer)), 1)
    survivors = roster[dropouts:]
    wanted: Words = np.zeros_like(rows[roster[0]])
    for peer in survivors:
        np.add(wanted, rows[peer], out=wanted)

    times, cpu = [time.perf_counter()], time.process_time()
    binding = Binding(RunId("bench"), 0, 0, roster, threshold, ring.length, bits)
    members = {peer: Client(binding, people[peer], Memory()) for peer in roster}
    keys = {peer: crossed(member.keys()) for peer, member in members.items()}
    times.append(time.perf_counter())
    deals = {peer: crossed(member.deal(keys)) for peer, member in members.items()}
    times.append(time.perf_counter())
    total: Words = np.zeros_like(wanted)
    for peer in roster:
        members[peer].mask(rows[peer], peer.encode(), deals)
        if peer in survivors:
            np.add(total, rows[peer], out=total)
    times.append(time.perf_counter())
    consents = {peer: crossed(members[peer].consent(survivors)) for peer in survivors}
    unmasking = Unmasking(binding, keys, deals, survivors)
    for peer in survivors:
        unmasking.add(peer, crossed(members[peer].reveal(consents)))
    times.append(time.perf_counter())
    unmasking.unmask(total)
    times.append(time.perf_counter())
    steps = dict(
        zip(("keys", "deal", "mask", "reveal", "unmask"), np.diff(times).tolist(), strict=True)
    )
    return {
        "seconds": times[-1] - times[0],
        "cpu_s": time.process_time() - cpu,
        "exact": bool((total == wanted).all()),
        "steps": steps,
    }


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--dropouts", type=int, default=2)
    parser.add_argument("--threshold", type=int, help="two thirds of the clients, rounded up")
    parser.add_argument("--bits", type=int, choices=(32, 64), default=32)
    parser.add_argument("--reps", type=int, default=3)
    given = parser.parse_args()
    threshold = given.threshold or -(-2 * given.clients // 3)
    if given.clients - given.dropouts < threshold:
        parser.error(
            f"{given.clients - given.dropouts} survivors are below the threshold of {threshold}"
        )
    runs: list[dict[str, Any]] = []
    for _ in range(given.reps):
        runs.append(once(given.clients, given.elements, given.dropouts, threshold, given.bits))
        progress(f"{runs[-1]}")
    settings = vars(given) | {"threshold": threshold}
    emit(
        "secagg",
        settings,
        runs,
        seconds=statistics.median(run["seconds"] for run in runs),
        exact=all(run["exact"] for run in runs),
        cpu_s=statistics.median(run["cpu_s"] for run in runs),
    )


if __name__ == "__main__":
    main()
