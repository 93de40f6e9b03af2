"""A script that trains a small model in a swarm, for laboratories: train_peer.py HOME RUN WIDTH.

It says "ready", and on {"do": "train"} trains until the run is over: each round "round" with who
contributed, at last "trained" with the digest of its anchor. {"do": "end"} ends it.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
from blake3 import blake3

from atoll.node import join
from atoll.optim import attach


def say(event: str, **fields: Any) -> None:
    """One line."""
    print(json.dumps({"event": event, **fields}), flush=True)


def digest(swarm: Any, numel: int) -> tuple[int, str]:
    """Round and blake3 of the newest anchor."""
    view = swarm.anchor()
    try:
        copy = torch.empty(numel)
        view.copy_into(copy)
        return view.round, blake3(copy.numpy().data.cast("B")).hexdigest()
    finally:
        view.release()


def main() -> None:
    home, run, width = sys.argv[1], sys.argv[2], int(sys.argv[3])
    swarm = join(run, home=home, private=True)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = attach(
        model,
        optimizer,
        swarm,
        on_round=lambda outcome: say(
            "round",
            round=outcome.round,
            status=outcome.status,
            contributors=[share.peer for share in outcome.contributors],
        ),
    )
    torch.manual_seed(int.from_bytes(swarm.peer.encode()[-4:], "big"))
    say("ready", peer=swarm.peer)
    go = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if json.loads(line)["do"] == "end":
                break
            go.set()
        ended.set()
        go.set()

    ended = threading.Event()
    threading.Thread(target=listen, daemon=True).start()
    go.wait()
    while not sync.done and not ended.is_set():
        x = torch.randn(32, 64)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not ended.is_set():
        round_, found = digest(swarm, sum(parameter.numel() for parameter in model.parameters()))
        say("trained", round=round_, digest=found)
        ended.wait()
    swarm.close()


if __name__ == "__main__":
    main()
