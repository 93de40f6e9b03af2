"""Runs inside hivemind's environment: peers that average one flat vector. Prints {"seconds": [...]} as its last line.

The all-reduce alone is timed: peers find their group first, then wait for a trigger at a common moment.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
import time
from typing import Any


def peer(rank: int, settings: dict[str, Any], first: list[str] | None, address: Any, barrier: Any, times: Any) -> None:
    """One process: its DHT node and its averager."""
    import hivemind  # pyright: ignore[reportMissingImports]  # in its own environment
    import torch
    from hivemind import averaging, compression  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=first or [], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    if rank == 0:
        address.put([str(found) for found in dht.get_visible_maddrs()])
    flat = torch.randn(settings["elements"], generator=torch.Generator().manual_seed(rank))
    averager = averaging.DecentralizedAverager(
        averaged_tensors=[flat], dht=dht, prefix="bench", target_group_size=settings["peers"], min_group_size=settings["peers"],
        min_matchmaking_time=2.0, compression=getattr(compression, settings["compression"])(), start=True,
    )  # fmt: skip
    for _ in range(settings["reps"] + 1):
        control = averager.step(wait=False, require_trigger=True, timeout=120)
        while control.stage.name not in ("AWAITING_TRIGGER", "FINISHED"):
            time.sleep(0.01)
        barrier.wait(120)
        started = time.monotonic()
        control.allow_allreduce()
        control.result(120)
        times.put(time.monotonic() - started)
        barrier.wait(120)
    averager.shutdown()
    dht.shutdown()


def main() -> None:
    """Start the peers and gather their times."""
    settings = json.loads(sys.argv[1])
    context = mp.get_context("spawn")
    barrier, times, address = context.Barrier(settings["peers"]), context.Queue(), context.Queue()
    first: list[str] | None = None
    started = list[Any]()
    for rank in range(settings["peers"]):
        started.append(context.Process(target=peer, args=(rank, settings, first, address, barrier, times)))
        started[-1].start()
        if rank == 0:
            first = address.get(timeout=120)
    slowest = [max(times.get(timeout=300) for _ in range(settings["peers"])) for _ in range(settings["reps"] + 1)]
    for process in started:
        process.join(60)
    print(json.dumps({"seconds": slowest[1:]}), flush=True)  # the first warms up


if __name__ == "__main__":
    main()
