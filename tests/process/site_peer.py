"""One site of a federated run that trains a round at a time on a quadratic of its own. Commands and
answers are JSON lines.

{"do": "train"} → {"event": "outcome", "status", "counted", "contributors", "anchor_round",
"digest", "anchor", "own", "sum", "clients"}: the parameters in the anchor, its control variate, and
what the anchor has of all; "frozen" before it, once the contribution is offered. {"do": "finish",
"step_s"} → trains to the run's end, a step taking so long; {"event": "met", "round", "counted",
"contributors"} of each round that it hears of, then an outcome as above   {"do": "end"} → the
process ends
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

from atoll.collectives.outcomes import Outcome
from atoll.node import join
from atoll.optim import attach
from atoll.optim.federated.site import unpack

LR = 0.1


def loss_of(peer: str, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, b) of a site's loss, a/2 (w - b)², float32 (numel,)."""
    rng = torch.Generator().manual_seed(sum(peer.encode()))
    return torch.rand(numel, generator=rng) * 1.5 + 0.5, torch.randn(numel, generator=rng) * 3


def samples_of(outcome: Outcome) -> dict[str, int]:
    """Who is in a round, with what."""
    return {share.peer: share.samples for share in outcome.contributors}


def main() -> None:
    """Join, attach, obey."""
    from fault_peer import node_pid, say  # beside this script

    home, run, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
    swarm = join(run, home=home, private=True)
    a, b = loss_of(swarm.peer, numel)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(numel))})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    outcomes: list[Outcome] = []
    attachment = attach(model, optimizer, swarm, on_round=outcomes.append)

    def step() -> None:
        optimizer.zero_grad()
        (a / 2 * (model["w"] - b) ** 2).sum().backward()
        optimizer.step()

    def told() -> dict[str, Any]:
        with attachment.evaluate_anchor() as view:
            anchor = torch.zeros(view.numel)
            view.copy_into(anchor)
            saved = swarm.shelf().load()
            kept = unpack(saved, numel) if saved is not None else None
            own = (
                torch.zeros(numel)
                if kept is None
                else kept.next
                if kept.open and outcomes[-1].counted
                else kept.own
            )
            own = torch.zeros(numel) if own is None else own  # a method without
            sums = anchor[numel : 2 * numel] if len(anchor) > numel else torch.zeros(numel)
            clients = round(float(anchor[-1])) if len(anchor) > numel else 0
            return {
                "anchor_round": view.round,
                "digest": view.digest,
                "anchor": anchor[:numel].tolist(),
                "own": own.tolist(),
                "sum": sums.tolist(),
                "clients": clients,
            }

    say(event="ready", peer=swarm.peer, node_pid=node_pid(home))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        if command["do"] == "finish":
            while not attachment.done:
                before = len(outcomes)
                time.sleep(command["step_s"])
                step()
                for each in outcomes[before:]:
                    if each.status != "open":
                        say(
                            event="met",
                            round=each.round,
                            counted=each.counted,
                            contributors=samples_of(each),
                        )
        before = len(outcomes) if command["do"] == "train" else 0
        while len(outcomes) == before or outcomes[-1].status == "open":
            step()
        last = outcomes[-1]
        say(
            event="outcome",
            status=last.status,
            counted=last.counted,
            contributors=samples_of(last),
            **told(),
        )
    swarm.close()


if __name__ == "__main__":
    main()
