"""One peer that trains on a shard, a step at a time, and saves after each. Commands and answers are
JSON lines.

{"do": "step"} → {"event": "stepped", "round", "digest", "samples"}     {"do": "live"} → how many
members are reachable {"do": "end"} → the process ends
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from atoll.node import join
from atoll.optim import attach

SIZE, BATCH = 200, 8


class Points(Dataset[tuple[Tensor, int]]):
    """Random points, each with its number."""

    def __init__(self) -> None:
        self.values = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.values[index], index


def endless(data: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pass after pass."""
    while True:
        yield from data


def main() -> None:
    """Join, attach, go on from the checkpoint if there is one, obey."""
    from fault_peer import node_pid, say  # beside this script

    home, run = sys.argv[1], sys.argv[2]
    checkpoint = Path(home) / "checkpoint.pt"
    swarm = join(run, home=home, private=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attachment = attach(model, optimizer, swarm)
    if checkpoint.exists():
        # As users keep their own checkpoints: this script's file, tensors only. Nothing of the
        # network comes near torch.load.
        saved = torch.load(checkpoint, weights_only=True)
        for part, state in zip((model, optimizer, attachment), saved, strict=True):
            part.load_state_dict(state)
    batches = endless(swarm.shard(DataLoader(Points(), batch_size=BATCH, shuffle=True)))
    say(event="ready", peer=swarm.peer, node_pid=node_pid(home))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        if command["do"] == "live":
            say(event="live", members=sum(member.live for member in swarm.members()))
            continue
        values, numbers = next(batches)
        (model(values) - values.sin().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = attachment.state_dict()
        torch.save(
            (model.state_dict(), optimizer.state_dict(), state), checkpoint.with_suffix(".new")
        )
        os.replace(checkpoint.with_suffix(".new"), checkpoint)
        say(
            event="stepped",
            round=attachment.round,
            digest=state["strands"]["0"]["digest"],
            samples=numbers.tolist(),
        )
    swarm.close()


if __name__ == "__main__":
    main()
