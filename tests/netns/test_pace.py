"""Real peers on links of different rates: what they measure decides who reduces, and everybody
stays counted.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from netns.lab import Lab
from real_faults import Seen, Watch
from swarm_kit import Peers

pytestmark = [pytest.mark.netns, pytest.mark.rota(7)]

NUMEL = 3_000_000  # a shorter operation says too little of links as fast as these
TRIES = 6
TESTS = Path(__file__).resolve().parents[1]


def test_a_host_with_a_slow_link_comes_to_own_nothing_and_is_counted(tmp_path: Path) -> None:
    owners: list[set[str]] = []
    told = threading.Lock()

    def heard(seen: Seen) -> None:
        if (
            seen.event["event"] == "round.phase"
            and seen.event["phase"] == "reduce"
            and seen.event["log"].startswith("op/")
        ):
            with told:
                owners.append(set(seen.event["owners"]))

    with (
        Lab(4, mbit=[60.0, 60.0, 60.0, 6.0]) as lab,
        Peers(tmp_path, 4, NUMEL, TESTS / "process" / "reduce_peer.py", hosts=lab.hosts) as swarm,
        Watch(swarm.all, heard),
    ):
        swarm.settle()
        everybody = {peer.peer for peer in swarm.all}
        for number in range(TRIES):
            owners.clear()
            digests, counted = reduced(swarm, f"op {number}")
            assert len(digests) == 1
            # How parts are divided among the fast ones is their measurement's affair: what they saw
            # of a link shared with other work may differ.
            if (
                counted == everybody
                and owners
                and all(found and swarm.all[3].peer not in found for found in owners)
            ):
                return
    raise AssertionError(f"the slow host was given a part {TRIES} times: {owners}")


def reduced(swarm: Peers, name: str) -> tuple[set[str], set[str]]:
    """One operation of all: the digests of the results, and who is counted."""
    for index, peer in enumerate(swarm.all):
        op: dict[str, Any] = {
            "op": name,
            "seed": index,
            "weight": 1,
            "numel": NUMEL,
            "deadline_s": 120.0,
            "noise": True,
        }
        peer.say(do="reduce", ops=[op])
    for peer in swarm.all:
        peer.expect("started", 120.0)
    outcomes = [peer.expect("reduced", 150.0) for peer in swarm.all]
    assert {outcome["status"] for outcome in outcomes} == {"committed"}
    return {outcome["digest"] for outcome in outcomes}, set(outcomes[0]["contributors"])
