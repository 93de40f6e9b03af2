"""`swarm.all_reduce` among four real peers: exact results, callers that are missing or late,
deadlines, NaN, and a peer killed in the middle.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from seeds import RARE
from swarm_kit import Peer, Peers

pytestmark = [*RARE]

NUMEL = 2_000_000
SCRIPT = Path(__file__).parent / "reduce_peer.py"
numbers = itertools.count()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """Four peers that all see each other as members."""
    with Peers(tmp_path_factory.mktemp("reduce"), 4, NUMEL, script=SCRIPT) as peers:
        peers.settle()
        await_members(peers)
        yield peers


def await_members(swarm: Peers) -> None:
    """Until every peer sees all of them in the configuration."""
    for peer in swarm.all:
        for _ in range(600):
            peer.say(do="members")
            if peer.expect("members")["count"] == len(swarm.all):
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{peer.name} does not see {len(swarm.all)} members")


def name() -> str:
    """A fresh operation id."""
    return f"op {next(numbers)}"


def start(swarm: Peers, who: list[Peer], *ops: dict[str, Any]) -> None:
    """These peers call these operations, all of them before any waits."""
    for peer in who:
        index = swarm.all.index(peer)
        own = [
            {
                "weight": index + 1,
                "numel": NUMEL,
                "deadline_s": 60.0,
                **op,
                "seed": op["seed"] + index,
            }
            for op in ops
        ]
        peer.say(do="reduce", ops=own)
    for peer in who:
        peer.expect("started")


def committed(
    swarm: Peers, outcomes: list[dict[str, Any]], seed: int, numel: int = NUMEL
) -> dict[str, int]:
    """All committed, with one another's bits, which are those of the mean over exactly whom they
    name. Returns the contributors.
    """
    first = outcomes[0]
    for outcome in outcomes:
        assert outcome["status"] == "committed", outcome
        assert (outcome["contributors"], outcome["digest"]) == (
            first["contributors"],
            first["digest"],
        ), outcomes
    for peer, weight in first["contributors"].items():
        assert weight == 1 + next(
            index for index, known in enumerate(swarm.all) if known.peer == peer
        )
    before, swarm.numel = swarm.numel, numel
    mean = swarm.mean(seed, first["contributors"], "fp32")
    swarm.numel = before
    assert first["digest"] == blake3(mean.numpy().data.cast("B")).hexdigest()
    return first["contributors"]


def weights(swarm: Peers, *indices: int) -> dict[str, int]:
    """The contributors these peers make."""
    return {swarm.all[index].peer: index + 1 for index in indices}


def test_two_at_once_count_everybody_and_their_bytes(swarm: Peers) -> None:
    ops = [{"op": name(), "seed": 100}, {"op": name(), "seed": 200, "numel": 70_001}]
    start(swarm, swarm.all, *ops)
    outcomes = [[peer.expect("reduced") for _ in ops] for peer in swarm.all]
    assert committed(swarm, [own[0] for own in outcomes], 100) == weights(swarm, 0, 1, 2, 3)
    assert committed(swarm, [own[1] for own in outcomes], 200, 70_001) == weights(swarm, 0, 1, 2, 3)
    # float32, the default of operations: what each sends of its own, and again of the result.
    part = NUMEL * 4 * 3 / 4
    for own in outcomes:
        assert part < own[0]["bytes_sent"] < 4 * part
        assert part < own[0]["bytes_received"] < 4 * part
    for peer, own in zip(swarm.all, outcomes, strict=True):
        peer.say(do="traffic")
        totals = peer.expect("traffic")
        assert totals["bytes_sent"] >= own[0]["bytes_sent"]
        assert totals["bytes_received"] >= own[0]["bytes_received"]


def test_an_operation_id_is_used_once(swarm: Peers) -> None:
    op = name()
    start(swarm, swarm.all, {"op": op, "seed": 300, "numel": 1000})
    for peer in swarm.all:
        assert peer.expect("reduced")["status"] == "committed"
    start(swarm, swarm.all[:1], {"op": op, "seed": 300, "numel": 1000})
    assert "was called already" in swarm.all[0].expect("refused")["message"]


def test_one_caller_is_missing_and_one_comes_late(swarm: Peers) -> None:
    op = {"op": name(), "seed": 400}
    callers = [swarm.all[0], swarm.all[1], swarm.all[3]]
    start(swarm, callers, op)
    outcomes = [peer.expect("reduced") for peer in callers]
    assert committed(swarm, outcomes, 400) == weights(swarm, 0, 1, 3)
    assert all(outcome["counted"] for outcome in outcomes)
    start(swarm, [swarm.all[2]], op)
    late = swarm.all[2].expect("reduced")
    assert committed(swarm, [outcomes[0], late], 400) == weights(swarm, 0, 1, 3)
    assert not late["counted"]


def test_a_deadline_leaves_the_tensor_alone(swarm: Peers) -> None:
    op = {"op": name(), "seed": 500, "deadline_s": 0.5}
    start(swarm, swarm.all[:2], op)
    for peer in swarm.all[:2]:
        outcome = peer.expect("reduced")
        assert (outcome["status"], outcome["untouched"], outcome["contributors"]) == (
            "open",
            True,
            {},
        ), outcome
        assert outcome["reason"].startswith("the deadline passed: ")
    start(swarm, swarm.all, {"op": name(), "seed": 510})
    assert committed(swarm, [peer.expect("reduced") for peer in swarm.all], 510) == weights(
        swarm, 0, 1, 2, 3
    )


def test_nan_is_refused_and_the_others_go_on(swarm: Peers) -> None:
    op = name()
    start(swarm, swarm.all[1:], {"op": op, "seed": 600})
    start(swarm, swarm.all[:1], {"op": op, "seed": 600, "poison": True})
    refused = swarm.all[0].expect("reduced")
    assert (refused["status"], refused["untouched"]) == ("open", True)
    assert "NaN" in refused["reason"]
    assert committed(swarm, [peer.expect("reduced") for peer in swarm.all[1:]], 600) == weights(
        swarm, 1, 2, 3
    )


def test_a_peer_is_killed_in_the_middle(swarm: Peers) -> None:
    seed, victim = 700, swarm.all[1]
    survivors = [peer for peer in swarm.all if peer is not victim]
    earlier = {"op": name(), "seed": seed + 5}
    start(swarm, swarm.all, earlier)
    decided = [peer.expect("reduced") for peer in swarm.all]
    committed(swarm, decided, seed + 5)
    start(swarm, swarm.all, {"op": name(), "seed": seed})
    time.sleep(
        random.Random(0).uniform(0, 0.2)
    )  # a moment inside the reduction, not a synchronisation
    victim.signal("node", signal.SIGKILL)
    contributors = committed(swarm, [peer.expect("reduced") for peer in survivors], seed)
    assert (
        contributors.items() >= {peer.peer: 1 + swarm.all.index(peer) for peer in survivors}.items()
    )
    outcome = victim.expect("reduced")
    assert outcome["status"] == "committed" or (
        outcome["status"] == "open" and outcome["untouched"]
    )
    victim.say(do="node", without=victim.node_pid)
    victim.expect("ready")
    await_members(swarm)
    start(
        swarm, [victim], earlier
    )  # its earlier life voted there (or, hardly ever, did not): it must not do so again
    answer = victim.expect_any(60)
    assert (
        "was called already" in answer.get("message", "")
        or answer["digest"] == decided[0]["digest"]
    ), answer
    for attempt in range(20):  # its lanes and the others' trust in it come back one by one
        start(swarm, swarm.all, {"op": name(), "seed": seed + 1000 * attempt})
        if len(
            committed(swarm, [peer.expect("reduced") for peer in swarm.all], seed + 1000 * attempt)
        ) == len(swarm.all):
            return
    raise AssertionError("no operation counted everybody")
