"""One contestant's worker on one host of bench_race.py. Runs inside the rivals' environments:
torch, the rival and the standard library only. Argument: a JSON object. It says {"event": "ready"},
waits for {"zero": SECONDS}, trains, and says {"event": "trained"}; it ends when its stdin does.

Worker 0 saves weights: for rivals that average after each average, else every ``look`` steps.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _race_task import BATCH, Pace, Task

PORT, TIMEOUT_S = 29600, 20
SAID = threading.Lock()
KEPT = list[Any]()


Stepping = Callable[[int], bool]
"""What the step of this number is to a contestant: gradients, then everything else. True: there are
new common weights.
"""


def say(event: str, **fields: Any) -> None:
    """One line to the bench."""
    with SAID:
        print(json.dumps({"event": event, **fields}), flush=True)


def joined(given: dict[str, Any]) -> None:
    """A gloo group of all workers."""
    os.environ |= {"MASTER_ADDR": given["first"], "MASTER_PORT": str(PORT)}
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", rank=given["worker"], world_size=given["workers"])
    dist.barrier()


def ddp(task: Task, given: dict[str, Any]) -> Stepping:
    """Gradients averaged in every step, by buckets of 1 MB while backward goes on."""
    joined(given)
    model = torch.nn.parallel.DistributedDataParallel(task.model, bucket_cap_mb=1)

    def step(number: int) -> bool:
        task.backward(model, number)
        task.optimizer.step()
        return (number + 1) % given["look"] == 0

    return step


def local(task: Task, given: dict[str, Any]) -> Stepping:
    """torch's post-local SGD without synchronous steps: the mean of weights every H steps."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    joined(given)
    every = given["every"]
    averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)

    def step(number: int) -> bool:
        task.backward(task.model, number)
        task.optimizer.step()
        averager.average_parameters(task.model.parameters())
        return (number + 1) % every == 0

    return step


def torchft(task: Task, given: dict[str, Any]) -> Stepping:
    """torchft's DiLoCo with its published outer values."""
    # in an environment of its own
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    own, every = given["address"], given["every"]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        own, PORT, is_master=True, wait_for_workers=False
    )
    wait = timedelta(seconds=TIMEOUT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait),
        load_state_dict=task.model.load_state_dict,
        state_dict=task.model.state_dict,
        min_replica_size=given["workers"],
        use_async_quorum=False,
        timeout=wait,
        quorum_timeout=wait,
        connect_timeout=wait,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=PORT,
        lighthouse_addr=given["lighthouse"],
        replica_id=f"worker{given['worker']}",
        hostname=own,
        init_sync=False,
    )
    outer = torch.optim.SGD(
        task.model.parameters(), lr=given["outer_lr"], momentum=given["momentum"], nesterov=True
    )
    diloco = DiLoCo(
        manager, [task.model], task.optimizer, outer, every,
        use_bucketization=True, fragment_sync_delay=1, pin_memory=False,
    )  # fmt: skip
    diloco.__enter__()
    KEPT.append(store)  # the manager asks it as long as it lives

    def step(number: int) -> bool:
        task.backward(task.model, number)
        task.optimizer.step()
        return (number + 1) % every == 0

    return step


def hivemind(task: Task, given: dict[str, Any]) -> Stepping:
    """hivemind's Optimizer with local updates. The averaged state is adopted a step after the epoch
    has changed.
    """
    import hivemind as library  # pyright: ignore[reportMissingImports]  # in its own environment

    dht = library.DHT(
        initial_peers=given["found"], start=True, host_maddrs=[f"/ip4/{given['address']}/tcp/0"]
    )
    optimizer = library.Optimizer(
        dht=dht,
        run_id="race",
        batch_size_per_step=BATCH,
        target_batch_size=BATCH * given["workers"] * given["every"],
        optimizer=partial(torch.optim.AdamW, lr=task.lr, betas=(0.9, 0.99)),
        params=list(task.model.parameters()),
        use_local_updates=True,
        matchmaking_time=3.0,
        averaging_timeout=30.0,
        averager_opts={"request_timeout": 1.0},  # as it advises, below matchmaking_time
        state_averaging_compression=library.compression.Float16Compression(),
        tracker_opts={"min_refresh_period": 0.2, "max_refresh_period": 1.0},
    )
    task.optimizer = optimizer
    epoch = [0, 0]  # now, and after the step before
    given["found"] = [str(each) for each in dht.get_visible_maddrs()]

    def step(number: int) -> bool:
        task.backward(task.model, number)
        optimizer.step()
        adopted, epoch[:] = epoch[0] > epoch[1], [optimizer.local_epoch, epoch[0]]
        return adopted

    return step


ARMS: dict[str, Callable[[Task, dict[str, Any]], Stepping]] = {
    "ddp": ddp,
    "local": local,
    "torchft": torchft,
    "hivemind": hivemind,
}


def sent() -> int:
    """Bytes that this host has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main() -> None:
    """Train as told."""
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    pace = Pace(given["step_s"])
    task = Task(given["seed"], given["worker"], given["lr"], pace)
    step = ARMS[given["arm"]](task, given)
    say("ready", found=given.get("found", []))
    zero, folder = json.loads(sys.stdin.readline())["zero"], Path(given["folder"])
    time.sleep(max(0.0, zero - time.monotonic()))
    before, points = sent(), [(0, 0.0)]
    for number in range(given["steps"]):
        if step(number) and not given["worker"]:
            task.save(folder, number + 1)
            points.append((number + 1, time.monotonic() - zero))
    seconds = time.monotonic() - zero
    say("trained", seconds=seconds, late_s=pace.late_s, points=points, sent=sent() - before)
    sys.stdin.readline()
    os._exit(0)  # rivals' threads would wait for peers that are gone


if __name__ == "__main__":
    main()
