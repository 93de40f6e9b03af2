"""One peer of an all-reduce test: a script with its node. Commands and answers are JSON lines.

{"do": "reduce", "ops": [{"op", "seed", "weight", "numel", "deadline_s", "poison", "noise"}]}
    → {"event": "started"}, then one {"event": "reduced", "op", "status", "counted", "contributors",
        "digest", "untouched", …} an operation
{"do": "contribute", "weight", "wait_s"} → "frozen", then "outcome": a training round of zeros, with
which newcomers become members {"do": "node", "without": PID} → {"event": "ready", "peer",
"node_pid"} once the node is another process {"do": "members"} → {"count"}      {"do": "traffic"} →
the node's own figures      {"do": "end"} → the process ends
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from blake3 import blake3
from fault_peer import contribution, say

from atoll.collectives.errors import AtollError
from atoll.collectives.layout import make_layout
from atoll.node import join
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient

MODEL_ELEMENTS = 1000  # of the run; what is reduced has a length of its own


def tensor_digest(flat: torch.Tensor) -> str:
    """blake3 of its bytes."""
    return blake3(flat.numpy().data.cast("B")).hexdigest()


def zero(out: torch.Tensor) -> None:
    """A contribution of nothing."""
    out.zero_()


def reduce(swarm: Any, ops: list[dict[str, Any]]) -> None:
    """Call all operations, then wait for each."""
    begun = list[tuple[dict[str, Any], torch.Tensor, str, Any]]()
    for op in ops:
        flat = torch.empty(op["numel"])
        if op.get("noise"):
            flat.normal_(generator=torch.Generator().manual_seed(op["seed"]))
        else:
            contribution(op["seed"], op["numel"], flat)
        if op.get("poison"):
            flat[7] = float("nan")
        before = tensor_digest(flat)
        try:
            pending = swarm.all_reduce(
                flat,
                weight=op["weight"],
                op_id=op["op"],
                deadline_s=op["deadline_s"],
            )
        except AtollError as error:
            pending = error
        begun.append((op, flat, before, pending))
    say(event="started")
    for op, flat, before, pending in begun:
        if isinstance(pending, AtollError):
            say(event="refused", op=op["op"], message=pending.message)
            continue
        outcome = pending.wait()
        digest = tensor_digest(flat)
        say(
            event="reduced",
            op=op["op"],
            status=outcome.status,
            counted=outcome.counted,
            reason=outcome.reason,
            digest=digest,
            contributors={share.peer: share.samples for share in outcome.contributors},
            untouched=digest == before,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
        )


def ready(swarm: Any, home: str, without: int) -> None:
    """Say who we are once there is a node with another pid: after a kill the client finds or starts
    one.
    """
    while True:
        swarm.members()  # notices that a node is gone
        node = read_node_file(find_paths(home)) if swarm.connected else None
        if node is not None and node.pid != without:
            return say(event="ready", peer=swarm.peer, node_pid=node.pid)
        time.sleep(0.05)


def main() -> None:
    home, run = sys.argv[1], sys.argv[2]
    swarm = join(run, home=home, private=True)
    swarm.open(make_layout([("flat", (MODEL_ELEMENTS,))]), lambda initial: None).release()
    ready(swarm, home, 0)
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "end":
                break
            case "node":
                ready(swarm, home, command["without"])
            case "members":
                say(event="members", count=len(swarm.members()))
            case "contribute":
                pending = swarm.contribute(samples=command["weight"], write=zero)
                say(event="frozen")
                outcome = pending.wait(command["wait_s"])
                say(
                    event="outcome",
                    status=outcome.status,
                    contributors={share.peer: share.samples for share in outcome.contributors},
                )
            case "traffic":
                with NodeClient.connect(find_paths(home)) as client:
                    say(
                        event="traffic",
                        **{
                            key: client.status()["runs"][0][key]
                            for key in ("bytes_sent", "bytes_received")
                        },
                    )
            case _:
                reduce(swarm, command["ops"])
    swarm.close()


if __name__ == "__main__":
    main()
