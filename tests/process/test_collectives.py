"""Collectives among three real peers without a model: exact results, odd callers, callers that
cancel or die; their time is told and drawn.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from seeds import RARE
from swarm_kit import Peer, Peers

from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient

pytestmark = [*RARE]

LENGTH = 300_001
SCRIPT = Path(__file__).parent / "collective_peer.py"
PLOT = Path(__file__).parents[2] / "scripts" / "bench" / "plot_round.py"
numbers = itertools.count()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """Three peers that all see each other as members; nobody ever trains."""
    with Peers(tmp_path_factory.mktemp("collectives"), 3, LENGTH, script=SCRIPT) as peers:
        for peer in peers.all:
            await_members(peer, 3)
        yield peers


def await_members(peer: Peer, count: int) -> None:
    """Until this peer sees so many members."""
    for _ in range(600):
        peer.say(do="members")
        if peer.expect("members")["count"] == count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{peer.name} does not see {count} members")


def start(swarm: Peers, what: str, who: list[Peer] | None = None, **options: Any) -> None:
    """These peers call; all of them before any is waited for."""
    op = options.pop("op", None) or f"op {next(numbers)}"
    for peer in who or swarm.all:
        peer.say(do="call", what=what, op=op, index=swarm.all.index(peer), **options)


def results(swarm: Peers, who: list[Peer] | None = None) -> list[dict[str, Any]]:
    """What they say."""
    for peer in who or swarm.all:
        peer.expect("called")
    return [peer.expect("result") for peer in who or swarm.all]


def digest(tensor: torch.Tensor) -> str:
    """blake3 of a tensor's bytes."""
    return blake3(tensor.numpy().data.cast("B")).hexdigest()


def peers_of(swarm: Peers) -> list[str]:
    """Their ids in the order of a configuration."""
    return sorted(peer.peer for peer in swarm.all)


def test_gathers_sums_broadcasts_and_shares_are_exact(swarm: Peers) -> None:
    start(swarm, "gather")
    for found in results(swarm):
        assert found["contributors"] == peers_of(swarm)
        expected = {
            peer.peer: digest(torch.arange(LENGTH, dtype=torch.int16) * index)
            for index, peer in enumerate(swarm.all)
        }
        assert found["tensors"] == expected
    start(swarm, "modular")
    total = digest((6 * torch.arange(LENGTH) - 3 * (1 << 40)) % (1 << 20))
    assert [(found["digest"], found["contributors"]) for found in results(swarm)] == [
        (total, peers_of(swarm))
    ] * 3
    start(swarm, "broadcast", root=1)
    for found in results(swarm):
        root = next(index for index, peer in enumerate(swarm.all) if peer.peer == found["root"])
        assert (found["contributors"], found["values"]) == ([found["root"]], [root])
        assert found["root"] == peers_of(swarm)[1]
    start(swarm, "scatter")
    found = {peer.peer: result for peer, result in zip(swarm.all, results(swarm), strict=True)}
    pieces = [(found[peer]["start"], found[peer]["values"]) for peer in peers_of(swarm)]
    assert pieces == [(0, [0.0, 3.0, 6.0, 9.0]), (4, [12.0, 15.0, 18.0]), (7, [21.0, 24.0, 27.0])]


def test_states_are_compared_and_repaired(swarm: Peers) -> None:
    for peer in swarm.all:
        start(swarm, "check", [peer], op="check", odd=peer is swarm.all[1])
    for found in results(swarm):
        assert (found["differing"], found["repaired"], found["equal"]) == (
            {swarm.all[1].peer: ["b"]},
            "committed",
            True,
        )


def test_a_barrier_waits_for_the_last(swarm: Peers) -> None:
    start(swarm, "barrier", swarm.all[:2], op="barrier")
    for peer in swarm.all[:2]:
        peer.expect("called")
    time.sleep(6.5)  # longer than other operations wait for anybody
    last = time.time()
    start(swarm, "barrier", swarm.all[2:], op="barrier")
    swarm.all[2].expect("called")
    for peer in swarm.all:
        found = peer.expect("result")
        assert (found["status"], found["contributors"]) == ("committed", peers_of(swarm))
        assert found["at"] >= last


def test_an_odd_call_ends_the_operation_at_all_its_callers_in_words(swarm: Peers) -> None:
    """Two of three are enough for a sum: the third is to call before they have ended."""
    start(swarm, "sum", swarm.all[1:2], op="odd", numel=5)
    swarm.all[1].expect("called")
    start(swarm, "sum", [swarm.all[0], swarm.all[2]], op="odd")
    for peer in (swarm.all[0], swarm.all[2]):
        peer.expect("called")
    for peer in swarm.all:
        told = peer.expect_any(30)
        assert (told["event"], told["kind"]) == ("refused", "LocalProtocolError")
        assert "“float32[300001]”" in told["message"]
        assert "“float32[5]”" in told["message"]


def test_who_cancels_is_left_out(swarm: Peers) -> None:
    start(swarm, "sum", swarm.all[:1], op="cancel", cancel=True)
    (found,) = results(swarm, swarm.all[:1])
    assert (found["status"], found["values"]) == ("open", [1.0])
    assert found["reason"].startswith("cancelled by its caller: ")
    start(swarm, "sum", swarm.all[1:], op="cancel")
    for found in results(swarm, swarm.all[1:]):
        assert (found["contributors"], found["values"]) == (
            sorted(peer.peer for peer in swarm.all[1:]),
            [6.0],
        )


def test_time_is_told_by_phase_and_drawn(swarm: Peers, tmp_path: Path) -> None:
    events = list[dict[str, Any]]()
    subscribed, done = threading.Event(), threading.Event()

    def listen() -> None:
        with NodeClient.connect(find_paths(swarm.all[0].home)) as client:
            stream = client.events()
            subscribed.set()
            for event in stream:
                if event["event"] == "reduction.timed":
                    events.append(event)
                    if len(events) == 2:
                        break
        done.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert subscribed.wait(30)
    for what in ("sum", "gather"):
        start(swarm, what)
        assert {found["status"] for found in results(swarm)} == {"committed"}
    assert done.wait(30)
    me = swarm.all[0].peer
    for event, reducer in zip(events, ("sum", "gather"), strict=True):
        assert (event["peer"], event["reducer"], event["numel"] >= LENGTH // 2) == (
            me,
            reducer,
            True,
        )
        assert event["contributors"] == peers_of(swarm)
        assert (
            0
            <= event["planned_s"]
            <= event["reduced_s"]
            <= event["decided_s"]
            <= event["elapsed_s"]
            < 60
        )
        assert set(event["lanes"]) == set(peers_of(swarm)) - {me}
        moved = {
            way: [lane[way] for lane in event["lanes"].values()] for way in ("sent", "received")
        }
        assert all(min(bytes_) >= 0 for bytes_ in moved.values()), moved
        assert sum(moved["sent"]) > 0, moved  # what a peer that lags sends may come later
        assert set(event["phases"]["ready"]) == set(peers_of(swarm))
        assert set(event["phases"]["result"]) == set(peers_of(swarm)) - {me}
        assert event["slowest"]["peer"] in peers_of(swarm)
    pytest.importorskip("matplotlib")
    lines, picture = tmp_path / "events.jsonl", tmp_path / "round.png"
    lines.write_text("".join(json.dumps(event) + "\n" for event in [{"event": "other"}, *events]))
    spec = importlib.util.spec_from_file_location("plot_round", PLOT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(lines), "-o", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert "plot_round" not in sys.modules
    for wrong in ([str(tmp_path / "missing")], ["--record", "1", "--home", str(tmp_path)]):
        with pytest.raises(SystemExit, match=r"No such file|no node"):
            module.main(wrong)


@pytest.mark.parametrize("what", ["script", "both"])
def test_a_caller_that_dies_holds_nobody_up(swarm: Peers, what: str) -> None:
    """The last test: one peer after the other is gone for good."""
    victim = swarm.all[2] if what == "script" else swarm.all[1]
    gone = [swarm.all[2]] if what == "both" else []
    survivors = [peer for peer in swarm.all if peer is not victim and peer not in gone]
    if gone:
        await_members(swarm.all[0], 2)  # its node has left the run
    start(swarm, "barrier", survivors, op=f"death {what}")
    for peer in survivors:
        peer.expect("called")
    victim.signal(what, signal.SIGKILL)
    for peer in survivors:
        found = peer.expect("result", 60)
        assert (found["status"], found["contributors"]) == (
            "committed",
            sorted(survivor.peer for survivor in survivors),
        )
    start(swarm, "sum", survivors)
    for found in results(swarm, survivors):
        assert found["values"] == [sum(2.0 ** swarm.all.index(peer) for peer in survivors)]
