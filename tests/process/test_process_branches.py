"""Without a quorum, with real processes: two of three peers are killed, the founder among them; the
third goes on, uncertified, until they are back. Then its branch is adopted: the same bits at all
three, and every contribution in them once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input_kit import soon
from blake3 import blake3
from swarm_kit import MANIFEST, Peer, Peers

from atoll.collectives.swarm import OuterSettings
from atoll.node.client.commands import NodeClient
from atoll.node.home.paths import find_paths
from atoll.optim.outer import OuterStep

pytestmark = pytest.mark.slow

NUMEL = 20_000
POLICY = '\n[no_quorum]\npolicy = "branch"\nreconfigure_after_s = 2.0\n'
History = dict[int, tuple[int, dict[str, int]]]
"""Round -> seed and contributors."""


def turn(swarm: Peers, history: History, seed: int, who: list[Peer]) -> list[dict[str, Any]]:
    """These peers contribute once; what is decided goes into the history."""
    swarm.contribute(seed, 30.0, who)
    outcomes = [peer.expect("outcome") for peer in who]
    for outcome in outcomes:
        if outcome["counted"]:
            history.setdefault(outcome["round"], (seed, outcome["contributors"]))
    return outcomes


def together(swarm: Peers, history: History, first: int) -> None:
    """Contribute until one round counts everybody."""
    for seed in range(first, first + 1000, 20):
        outcomes = turn(swarm, history, seed, swarm.all)
        if all(o["status"] == "committed" and len(o["contributors"]) == 3 for o in outcomes):
            return
    raise AssertionError("no common round")


def anchor_after(swarm: Peers, history: History) -> str:
    """The digest of the anchor that these rounds make of zero."""
    step, anchor, momentum = (
        OuterStep(OuterSettings(kind="sgd", lr=1.0, momentum=0.0)),
        torch.zeros(NUMEL),
        torch.zeros(NUMEL),
    )
    assert sorted(history) == list(range(1, len(history) + 1))
    for round_ in sorted(history):
        target = torch.empty(NUMEL)
        step.apply_range(anchor, swarm.mean(*history[round_]), momentum, target, 0, NUMEL)
        anchor = target
    return blake3(memoryview(anchor.numpy()).cast("B")).hexdigest()


def anchor(peer: Peer) -> tuple[int, str]:
    """Round and digest of its newest anchor."""
    peer.say(do="anchor")
    said = peer.expect("anchor")
    return said["round"], said["digest"]


def alone(peer: Peer) -> bool:
    """Whether its node takes nobody else for alive."""
    with NodeClient.connect(find_paths(peer.home)) as client:
        return not any(row["live"] for row in client.peers() if not row["you"])


def test_a_lone_survivor_goes_on_uncertified_and_its_work_is_adopted(tmp_path: Path) -> None:
    with Peers(tmp_path, 3, NUMEL, manifest=MANIFEST + POLICY) as swarm:
        history: History = {}
        together(swarm, history, 1000)
        *lost, survivor = swarm.all
        for peer in lost:
            peer.signal("both", signal.SIGKILL)
            peer.process.wait(10)
        # A vote of the survivor's while it still takes them for alive would bind it: its first
        # contribution alone might be decided later.
        soon(lambda: alone(survivor), "the survivor knows that it is alone")
        for seed in (5000, 5020, 5040):
            [outcome] = turn(swarm, history, seed, [survivor])
            assert (outcome["status"], outcome["contributors"]) == (
                "uncertified",
                {survivor.peer: 3},
            )
        founder, third = lost
        founder.start()
        founder.expect("ready")
        # Before it offers anything: what it did alone would be a branch of its own, and of two
        # branches the one with more samples is taken.
        soon(
            lambda: anchor(founder)[0] == len(history),
            "the founder has adopted the work of the survivor",
        )
        while (
            turn(swarm, history, 7000, [founder])[0]["status"] != "committed"
        ):  # with the survivor: neither is a quorum alone
            pass
        third.start()
        third.expect("ready")
        together(swarm, history, 9000)
        assert {anchor(peer) for peer in swarm.all} == {
            (len(history), anchor_after(swarm, history))
        }
