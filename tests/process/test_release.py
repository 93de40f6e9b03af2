"""kill -9 of a script, or of its node, between any two steps in which the memory of a contribution
goes back to the system: nobody reads zeros or stale bytes, and the run goes on.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_kit import LISTEN, nothing_stays, start
from seeds import RARE
from swarm_kit import MANIFEST, Peer, Peers

from atoll.node.control.shared_memory import memfd_works
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths

pytestmark = [
    *RARE,
    pytest.mark.skipif(not memfd_works(), reason="no memory here that can be given back"),
]

SCRIPT = Path(__file__).with_name("release_peer.py")
NUMEL = 600_000  # more than is worth a request, in ten pieces
STEPS = ("decided", "asked", "answered", "returning", "returned", "lent")
PATIENCE_S = 120.0


def up(home: Path) -> None:
    """A node of this home's own, ready to be asked."""
    before = read_node_file(find_paths(home))
    start(home, "up", *LISTEN)
    patience = time.monotonic() + PATIENCE_S
    while (found := read_node_file(find_paths(home))) is None or found == before:
        assert time.monotonic() < patience
        time.sleep(0.05)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Peers]:
    """p0 with a private node, and p1, which the test strikes, with a lasting one."""
    with (
        nothing_stays(),
        Peers(tmp_path, 1, NUMEL, SCRIPT, manifest=MANIFEST, ready_s=PATIENCE_S) as peers,
    ):
        home = tmp_path / "p1"
        up(home)
        peers.all.append(Peer("p1", home, peers.invite, NUMEL, script=SCRIPT))
        peers.all[1].expect("ready", PATIENCE_S)
        yield peers


def anchor(peer: Peer, folder: Path) -> tuple[int, torch.Tensor]:
    """The newest anchor, by value."""
    path = folder / f"{peer.name}.anchor"
    peer.say(do="save", path=str(path))
    round_ = peer.expect("save", PATIENCE_S)["round"]
    return round_, torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)


def after(swarm: Peers, seed: int, folder: Path, before: tuple[int, torch.Tensor]) -> int:
    """The outcome of p0's contribution; if it is the very next round, the anchor is what exactly
    its contributors wrote, bit for bit. How many they were.
    """
    outcome = swarm.all[0].expect("outcome", PATIENCE_S)
    assert outcome["status"] == "committed"
    now = anchor(swarm.all[0], folder)
    if now[0] == before[0] + 1:
        assert torch.equal(now[1], before[1] - swarm.mean(seed, outcome["contributors"]))
    return len(outcome["contributors"])


@pytest.mark.parametrize("who", ["script", "node"])
@pytest.mark.parametrize("steps", [STEPS[:3], STEPS[3:]], ids=["asking", "returning"])
def test_killed_at_each_step_of_a_release(
    swarm: Peers, steps: tuple[str, ...], who: str, tmp_path: Path
) -> None:
    for number, step in enumerate(steps):
        killed_at(swarm, step, who, 10_000 * (number + 1), tmp_path)


def killed_at(swarm: Peers, step: str, who: str, seed: int, folder: Path) -> None:
    """The struck peer's script or node dies at this step, and comes back. Seeds from ``seed`` on."""
    steady, struck = swarm.all
    before = anchor(steady, folder)
    struck.say(do="strike", step=step, who=who)
    swarm.contribute(seed, wait_s=PATIENCE_S, frozen=False)
    if step == "lent" and who == "node":
        up(struck.home)  # its script waits for it
    counted = after(swarm, seed, folder, before)
    if step != "lent":
        with contextlib.suppress(BrokenPipeError):  # it may be struck where it waits
            struck.say(do="look")
    if who == "script":
        assert counted == 1 or step != "lent"
        while struck.expect_any(PATIENCE_S)["event"] != "end":
            pass
        assert struck.process.wait(PATIENCE_S) == -signal.SIGKILL
        struck.start()
        struck.expect("ready", PATIENCE_S)
    else:
        struck.expect("outcome", PATIENCE_S)
        if step != "lent":
            # what it had leased of the node that is gone reads as before
            assert struck.expect("look", PATIENCE_S)["same"]
            up(struck.home)
    for later in range(
        seed + 100, seed + 2100, 100
    ):  # until a round counts both, with the values of both
        before = anchor(steady, folder)
        swarm.contribute(later, wait_s=PATIENCE_S)
        both = after(swarm, later, folder, before) == 2
        struck.expect("outcome", PATIENCE_S)
        if both:
            break
    else:
        raise AssertionError("no round counts both")
    (first, mine), (second, theirs) = (anchor(peer, folder) for peer in swarm.all)
    assert first == second
    assert torch.equal(mine, theirs)
