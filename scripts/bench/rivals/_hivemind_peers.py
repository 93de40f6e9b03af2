"""Runs inside hivemind's environment: peers that average one flat vector. Prints {"seconds": [...],
"cpu_seconds": [...]} as its last line.

The all-reduce alone is timed: peers find their group first, then wait for a trigger at a common
moment. CPU seconds are those of all its processes, the daemons included, until all have their mean.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path
from queue import Empty
from typing import Any


def peer(
    rank: int,
    settings: dict[str, Any],
    first: list[str] | None,
    address: Any,
    barrier: Any,
    times: Any,
) -> None:
    """One process: its DHT node and its averager."""
    import hivemind  # pyright: ignore[reportMissingImports]  # in its own environment
    import torch
    from hivemind import averaging, compression  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    dht = started_dht(hivemind, first or [])
    if rank == 0:
        address.put([str(found) for found in dht.get_visible_maddrs()])
    flat = torch.randn(settings["elements"], generator=torch.Generator().manual_seed(rank))
    averager = averaging.DecentralizedAverager(
        averaged_tensors=[flat],
        dht=dht,
        prefix="bench",
        target_group_size=settings["peers"],
        min_group_size=settings["peers"],
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        compression=getattr(compression, settings["compression"])(),
        start=True,
    )
    for _ in range(settings["reps"] + 1):
        control = averager.step(wait=False, require_trigger=True, timeout=120)
        while control.stage.name not in ("AWAITING_TRIGGER", "FINISHED"):
            time.sleep(0.01)
        barrier.wait(120)
        used_s = cpu_s(os.getppid()) if rank == 0 else 0.0
        barrier.wait(120)
        started = time.monotonic()
        control.allow_allreduce()
        control.result(120)
        elapsed_s = time.monotonic() - started
        barrier.wait(120)
        times.put((elapsed_s, cpu_s(os.getppid()) - used_s if rank == 0 else 0.0))
        barrier.wait(120)
        with averager.get_tensors() as (
            mean,
        ):  # it reports success also where it has averaged nothing
            spread = float(mean.std()) * settings["peers"] ** 0.5
        if not 0.95 < spread < 1.05:
            raise RuntimeError(
                f"not the mean of {settings['peers']} vectors: spread {spread:.3f} of what it should be"
            )
        barrier.wait(120)
    averager.shutdown()
    dht.shutdown()


def cpu_s(root: int) -> float:
    """User and system time of a process and all that come from it."""
    parents, used = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents[int(folder.name)], used[int(folder.name)] = (
            int(fields[1]),
            int(fields[11]) + int(fields[12]),
        )
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def started_dht(hivemind: Any, first: list[str]) -> Any:
    """A DHT node. Its daemon gives the bootstrap peer one short moment to answer, which a busy
    machine may miss.
    """
    for left in reversed(range(4)):
        try:
            return hivemind.DHT(
                initial_peers=first, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]
            )
        except Exception:
            if not left:
                raise
    raise AssertionError


def heard(queue: Any, peers: list[Any], timeout_s: float) -> Any:
    """What a peer says. Ends this process when one of them has died, or nobody says anything."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and all(process.exitcode in (None, 0) for process in peers):
        try:
            return queue.get(timeout=0.5)
        except Empty:
            pass
    for process in peers:
        process.kill()
    sys.exit("a peer of hivemind ended, or said nothing for too long")


def main() -> None:
    """Start the peers and gather their times."""
    settings = json.loads(sys.argv[1])
    context = mp.get_context(
        "fork"
    )  # hivemind's own processes cannot be pickled, and inherit the way
    barrier, times, address = context.Barrier(settings["peers"]), context.Queue(), context.Queue()
    first: list[str] | None = None
    started = list[Any]()
    for rank in range(settings["peers"]):
        started.append(
            context.Process(target=peer, args=(rank, settings, first, address, barrier, times))
        )
        started[-1].start()
        if rank == 0:
            first = heard(address, started, 120)
    told = [
        [heard(times, started, 300) for _ in range(settings["peers"])]
        for _ in range(settings["reps"] + 1)
    ][1:]  # the first warms up
    for process in started:
        process.join(60)
    found = {
        "seconds": [max(seconds for seconds, _ in each) for each in told],
        "cpu_seconds": [max(used for _, used in each) for each in told],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
