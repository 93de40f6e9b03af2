"""One peer that only uses collectives: no model, no optimizer. Commands and answers are JSON lines.

{"do": "call", "what": …, "op": id, "index": i, …} → {"event": "called"}, then {"event": "result",
"status", "counted", "contributors", …} {"do": "members"} → {"count"}      {"do": "end"} → the
process ends
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from fault_peer import say
from reduce_peer import tensor_digest

from atoll.collectives import (
    all_gather,
    all_reduce,
    average,
    barrier,
    broadcast,
    check_state,
    enter,
    modular_sum,
    reduce_scatter,
    repair_state,
)
from atoll.collectives.averaging import Averaged
from atoll.collectives.errors import AtollError
from atoll.collectives.outcomes import Outcome
from atoll.node import join
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths

LENGTH = 300_001


def state(index: int, odd: bool) -> dict[str, torch.Tensor]:
    """Tensors that all hold, but for one of one peer."""
    return {
        "a": torch.arange(LENGTH),
        "b": torch.full((7, 3), float(index if odd else -1)),
        "c": torch.ones(3, dtype=torch.bfloat16),
    }


def begin(swarm: Any, command: dict[str, Any]) -> tuple[Any, Any]:
    """The handle of a call, and what makes an answer of its result."""
    op, index, deadline_s = command["op"], command["index"], command.get("deadline_s", 60.0)
    match command["what"]:
        case "gather":
            mine = torch.arange(LENGTH, dtype=torch.int16) * index
            return all_gather(swarm, mine, op_id=op, deadline_s=deadline_s), lambda found: {
                "tensors": {peer: tensor_digest(tensor) for peer, tensor in found.tensors.items()}
            }
        case "modular":
            mine = torch.arange(LENGTH) * (index + 1) - (1 << 40)
            return modular_sum(swarm, mine, op_id=op, bits=20, deadline_s=deadline_s), lambda _: {
                "digest": tensor_digest(mine)
            }
        case "broadcast":
            mine = torch.full((LENGTH,), index, dtype=torch.uint8)
            root = sorted(member.peer for member in swarm.members())[command["root"]]
            return broadcast(swarm, mine, root=root, op_id=op, deadline_s=deadline_s), lambda _: {
                "values": mine.unique().tolist(),
                "root": root,
            }
        case "scatter":
            mine = torch.arange(10.0)
            return reduce_scatter(
                swarm, mine, op_id=op, op="sum", codec="fp32", deadline_s=deadline_s
            ), lambda found: {
                "start": found.start,
                "values": found.values.tolist() if found.values is not None else None,
            }
        case "barrier":
            return barrier(swarm, op_id=op, deadline_s=deadline_s), lambda _: {"at": time.time()}
        case "average":
            mine = torch.randn(LENGTH, generator=torch.Generator().manual_seed(index))
            return average(
                swarm, mine, op_id=op, codec="fp32", deadline_s=deadline_s
            ), lambda found: {
                "steps": [
                    [share.peer for share in outcome.contributors] for outcome in found.steps
                ],
                "exact": found.exact,
                "weight": found.weight,
                "digest": tensor_digest(mine),
                "first": mine[0].item(),
            }
        case "sum":
            mine = torch.full((command.get("numel", LENGTH),), 2.0**index)
            handle = all_reduce(
                swarm, mine, op_id=op, op="sum", codec="fp32", deadline_s=deadline_s, everyone=True
            )
            if command.get("cancel"):
                handle.cancel()
            return handle, lambda _: {"values": mine.unique().tolist()}
        case _:
            held = state(index, command["odd"])
            check = check_state(swarm, held, op_id=op, deadline_s=deadline_s)
            return check, lambda found: {
                "differing": {peer: list(names) for peer, names in found.differing.items()},
                "repaired": repair_state(swarm, held, found, op_id=f"{op} repair").wait().status
                if found.differing
                else "",
                "equal": all(
                    torch.equal(held[key], tensor) for key, tensor in state(index, False).items()
                ),
            }


def call(swarm: Any, command: dict[str, Any]) -> None:
    """Call and answer."""
    try:
        handle, answer = begin(swarm, command)
        say(event="called")
        found = handle.wait()
        outcome = (
            found
            if isinstance(found, Outcome)
            else found.steps[-1]
            if isinstance(found, Averaged)
            else found.outcome
        )
        say(
            event="result",
            status=outcome.status,
            counted=outcome.counted,
            reason=outcome.reason,
            elapsed_s=outcome.elapsed_s,
            contributors=[share.peer for share in outcome.contributors],
            **answer(found),
        )
    except AtollError as error:
        say(event="refused", kind=type(error).__name__, message=error.message)


def main() -> None:
    """Join, enter, obey."""
    home, run = sys.argv[1], sys.argv[2]
    swarm = join(run, home=home, private=True)
    enter(swarm)
    node = read_node_file(find_paths(home))
    assert node is not None
    say(event="ready", peer=swarm.peer, node_pid=node.pid)
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "end":
                break
            case "members":
                say(event="members", count=len(swarm.members()))
            case _:
                call(swarm, command)
    swarm.close()


if __name__ == "__main__":
    main()
