"""A home is copied and started beside the original: both find out and stop, the others name them.
One that follows a dead one is no double.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from swarm_kit import Peer, Peers
from twins import copy_home, double_votes, find, is_named, trouble, votes

pytestmark = pytest.mark.slow
FOUND_S = 30.0  # ten at rest (`scripts/bench/trial_twins.py`); the machine of a test may be loaded


def test_a_backup_of_a_dead_home_is_no_double_and_of_a_live_one_is(tmp_path: Path) -> None:
    with Peers(tmp_path, 3, 20_000) as swarm:
        swarm.settle()
        first, second, original = swarm.all
        copy_home(original, tmp_path / "copy")
        swarm.settle()  # the copy is older than what the original has voted for

        original.signal("both", signal.SIGKILL)
        original.process.wait(10)
        swarm.all[2] = copy = Peer("copy", tmp_path / "copy", original.run, original.numel)
        copy.expect("ready")
        swarm.settle()
        assert copy.peer == original.peer
        assert not any(is_named(peer, copy) for peer in (first, second))
        assert trouble(copy) == ""

        began = time.monotonic()
        original.start()
        swarm.all.append(original)
        told = find(began, copy, original, [first, second], FOUND_S)
        assert told.keys() == {"p0", "p1", "p2", "copy"}, (told, original.log())
        assert votes(copy.home)
        assert double_votes(copy.home, original.home) == []

        swarm.contribute(77, who=[first, second])
        for peer in (first, second):  # two of three members are left, and decide
            outcome = peer.expect("outcome")
            assert outcome["status"] == "committed"
            assert original.peer not in outcome["contributors"]
