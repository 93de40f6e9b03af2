"""Runs inside hivemind's environment: steps of a plain optimizer and of two that are wrapped, in
turns, between averagings.

``local``: hivemind.Optimizer with local updates, as in its quickstart; ``gradients``: as by
default, which gathers gradients until the target batch is there. Prints {"plain": [CPU seconds of
this process, …], "local": […], "gradients": […]} as its last line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # helpers of the measurements

from _attach_model import BATCH, Trainer, in_turns, steady_allocator
from _hivemind_peers import started_dht

FAR = 1 << 40  # samples until the first averaging


def wrapped(hivemind: Any, dht: Any, name: str, trainer: Trainer) -> Trainer:
    """The trainer with its optimizer inside hivemind's."""
    trainer.optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=name,
        optimizer=trainer.optimizer,
        batch_size_per_step=BATCH,
        target_batch_size=FAR,
        use_local_updates=name == "local",
    )
    return trainer


def main() -> None:
    """Measure."""
    import hivemind  # pyright: ignore[reportMissingImports]  # in its own environment
    import torch

    torch.set_num_threads(1)
    steady_allocator()
    settings: dict[str, Any] = json.loads(sys.argv[1])
    dht = started_dht(hivemind, [])
    trainers = {"plain": Trainer(settings["params"])}
    for name in ("local", "gradients"):
        trainers[name] = wrapped(hivemind, dht, name, Trainer(settings["params"]))
    for trainer in trainers.values():
        for _ in range(5):
            trainer.step()
    times = in_turns(trainers, settings["pairs"])
    print(json.dumps({name: [cpu for _, cpu in rows] for name, rows in times.items()}), flush=True)
    for name in ("local", "gradients"):
        trainers[name].optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
