"""One peer of the tests of memory that goes back to the system: `fault_peer` with these commands
besides. It uses the home's running node, or else has one of its own.

    {"do": "strike", "step": "returning", "who": "node"} → at the next such step of a release SIGKILL
        for the node, or for this script      {"do": "look"} → what a training loop does after a
        step, until the strike has been
    {"do": "save", "path": "…"} → the newest anchor's bytes are there; {"round"}

Steps: "decided" (the outcome is known), "asked", "answered" (the node reads no more), "returning"
(the third piece is to go), "returned", "lent" (half of the next contribution is written).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_peer
import torch
from blake3 import blake3
from fault_peer import contribution, node_pid, offer, say

from atoll.collectives.layout import make_layout
from atoll.node import join
from atoll.node.client.link import Link
from atoll.node.client.reclaiming import Reclaiming
from atoll.node.control import shared_memory
from atoll.node.control.shared_memory import WritableFloats

HOME = sys.argv[1]
PIECES = 3


class Strike:
    """Who is to die at which step, and whether that has been."""

    step = who = ""
    done = False

    def at(self, step: str) -> None:
        """This step is now."""
        if step == self.step:
            self.step, self.done = "", True
            os.kill(node_pid(HOME) if self.who == "node" else os.getpid(), signal.SIGKILL)


strike = Strike()


def watch_steps() -> None:
    """Have the steps of releases call `strike`."""
    shared_memory.PIECE_BYTES = 1 << 18
    step, clear = Reclaiming.step, WritableFloats.clear

    def stepped(self: Reclaiming, now: float, link: Link, decided: Callable[[int], bool]) -> None:
        loan = self._loans.get(0)
        if loan is not None and loan.asked is None and loan.tensor() is None and decided(0):
            strike.at("decided")
        asked = loan is not None and loan.asked is not None
        if loan is not None and loan.asked is not None and loan.asked.done:
            strike.at("answered")
        step(self, now, link, decided)
        if loan is not None and loan.asked is not None and not asked:
            strike.at("asked")

    def cleared(
        self: WritableFloats, start: int, stop: int, go_on: Callable[[], bool] = lambda: True
    ) -> None:
        pieces = 0

        def counted() -> bool:
            nonlocal pieces
            pieces += 1
            if pieces == PIECES:
                strike.at("returning")
            return go_on()

        clear(self, start, stop, counted)
        strike.at("returned")

    Reclaiming.step, WritableFloats.clear = stepped, cleared  # type: ignore[method-assign]


def halfway(seed: int, numel: int, out: torch.Tensor) -> None:
    """Write a contribution, with a step in the middle."""
    contribution(seed, numel // 2, out[: numel // 2])
    strike.at("lent")
    contribution(seed, numel, out)


def held(view: Any, numel: int) -> str:
    """blake3 of what a leased view reads now."""
    copy = torch.empty(numel)
    view.copy_into(copy)
    return blake3(memoryview(copy.numpy()).cast("B")).hexdigest()


def main() -> None:
    run, numel = sys.argv[2], int(sys.argv[3])
    swarm = join(run, home=HOME, private=not node_pid(HOME))
    swarm.open(make_layout([("flat", (numel,))]), lambda initial: initial.zero_()).release()
    watch_steps()
    view = swarm.anchor()
    seen = held(view, numel)
    say(event="ready", peer=swarm.peer, node_pid=node_pid(HOME))
    pending = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        if command["do"] == "strike":
            strike.step, strike.who, strike.done = command["step"], command["who"], False
        elif command["do"] == "look":
            while not strike.done:
                assert swarm.closing >= 0
            say(event="look", same=held(view, numel) == seen)
        elif command["do"] == "save":
            while not swarm.connected:
                swarm.take_in()
                time.sleep(0.05)
            view.release()
            view = swarm.anchor()
            seen = held(view, numel)
            copy = torch.empty(numel)
            view.copy_into(copy)
            Path(command["path"]).write_bytes(copy.numpy().tobytes())
            say(event="save", round=view.round)
        else:
            fault_peer.contribution = halfway
            pending = offer(swarm, pending, command["seed"], command["weight"], numel)
            say(event="frozen")
            outcome = pending.wait(command["wait_s"])
            say(
                event="outcome",
                status=outcome.status,
                round=outcome.round,
                contributors={share.peer: share.samples for share in outcome.contributors},
            )
    swarm.close()


if __name__ == "__main__":
    main()
