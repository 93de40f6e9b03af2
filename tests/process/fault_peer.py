"""One peer of a fault test: a script with its node. Commands and answers are JSON lines.

    {"do": "contribute", "seed": 7, "weight": 3, "wait_s": 20}  →  {"status", "round", "counted",
        "contributors", "digest", "elapsed_s"}
    {"do": "fate", "wait_s": 20} → of the last contribution, which outlives its node: {"status", "round",
        "counted", "contributors", "reason"}
    {"do": "anchor"} → {"round", "digest"}      {"do": "end"} → the process ends

A contribution is a deterministic function of (seed), so that anybody can compute what the mean must
be, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import torch
from blake3 import blake3

from atoll.collectives.errors import SwarmClosedError
from atoll.collectives.layout import make_layout
from atoll.node import join
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths

PERIOD = 262_144  # elements: no shorter than a chunk


def contribution(seed: int, numel: int, out: torch.Tensor) -> None:
    """Fill ``out`` (float32, (numel,)) with the contribution of a seed: cheap, the same everywhere,
    and noise, which no lane can pack.
    """
    noise = torch.rand(min(numel, PERIOD), generator=torch.Generator().manual_seed(seed)).sub_(0.5)
    whole = numel - numel % len(noise)
    out[:whole].view(-1, len(noise)).copy_(noise.expand(whole // len(noise), len(noise)))
    out[whole:] = noise[: numel - whole]


def say(**fields: Any) -> None:
    """One answer."""
    print(json.dumps(fields), flush=True)


def digest(swarm: Any, numel: int) -> tuple[int, str]:
    """Round and blake3 of the newest anchor."""
    view = swarm.anchor()
    try:
        copy = torch.empty(numel)
        view.copy_into(copy)
        return view.round, blake3(memoryview(copy.numpy()).cast("B")).hexdigest()
    finally:
        view.release()


def node_pid(home: str) -> int:
    """Of the node as it is now: one that was killed has a successor."""
    node = read_node_file(find_paths(home))
    return node.pid if node else 0


def _zero(initial: torch.Tensor) -> None:
    initial.zero_()


def offer(swarm: Any, earlier: Any, seed: int, weight: int, numel: int) -> Any:
    """Contribute; where the node was killed, as soon as the client has found or started another and
    the earlier one is settled.
    """
    while True:
        while not swarm.connected:
            time.sleep(0.05)
        try:
            if earlier is not None:
                earlier.wait(60)
            swarm.report({"loss": seed / 64})
            return swarm.contribute(
                samples=weight, write=lambda out: contribution(seed, numel, out)
            )
        except SwarmClosedError:
            continue


def fate(pending: Any, wait_s: float) -> dict[str, Any]:
    """What became of a contribution, as soon as any node can tell."""
    until = time.monotonic() + wait_s
    while (outcome := pending.wait(wait_s)).status == "open" and time.monotonic() < until:
        time.sleep(0.05)  # without a node it says "open" at once
    return {
        "status": outcome.status,
        "round": outcome.round,
        "counted": outcome.counted,
        "contributors": {share.peer: share.samples for share in outcome.contributors},
        "reason": outcome.reason,
    }


def main() -> None:
    home, run, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
    swarm = join(run, home=home, private=True)
    swarm.open(make_layout([("flat", (numel,))]), _zero).release()
    say(event="ready", peer=swarm.peer, node_pid=node_pid(home))
    pending = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        if command["do"] == "anchor":
            round_, hexdigest = digest(swarm, numel)
            say(event="anchor", round=round_, digest=hexdigest)
            continue
        if command["do"] == "fate":
            say(event="fate", **fate(pending, command["wait_s"]))
            continue
        since = time.monotonic()
        pending = offer(swarm, pending, command["seed"], command["weight"], numel)
        say(event="frozen")
        outcome = pending.wait(command["wait_s"])
        at, round_, hexdigest = time.monotonic(), -1, ""
        with contextlib.suppress(
            SwarmClosedError
        ):  # the node was killed between the decision and now
            round_, hexdigest = digest(swarm, numel) if outcome.status == "committed" else (-1, "")
        say(
            event="outcome",
            status=outcome.status,
            round=outcome.round,
            counted=outcome.counted,
            reason=outcome.reason,
            anchor_round=round_,
            contributors={share.peer: share.samples for share in outcome.contributors},
            digest=hexdigest,
            elapsed_s=at - since,
            at=at,
            node_pid=node_pid(home),
        )
    swarm.close()


if __name__ == "__main__":
    main()
