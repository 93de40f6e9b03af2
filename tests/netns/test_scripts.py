"""The scripts that measure lanes, links and routers run from the command line to their one JSON
object; what they measure is not judged here.
"""

from __future__ import annotations

import pytest
from netns.script_kit import printed
from seeds import RARE

pytestmark = [
    pytest.mark.netns,
    *RARE,
]  # slow: the longer limit; .ci/run takes each test once


def test_a_link_is_measured() -> None:
    result = printed(
        "bench/bench_link.py",
        "--codec",
        "int8",
        "--elements",
        "200000",
        "--peers",
        "3",
        "--reps",
        "2",
    )
    assert result["name"] == "bench_link"
    assert result["bit_equal"] is True


def test_lanes_are_measured() -> None:
    punched = printed("bench/bench_lanes.py", "--seconds", "1")
    assert (punched["name"], punched["lanes"], punched["path"], punched["relay_cores"]) == (
        "bench_lanes",
        1,
        "punched",
        None,
    )
    assert 0 < punched["link_use"] < 1
    relayed = printed(
        "bench/bench_lanes.py",
        "--path",
        "relay",
        "--congestion",
        "cubic",
        "--lanes",
        "2",
        "--seconds",
        "1",
        "--mbit",
        "0",
    )
    assert (relayed["lanes"], relayed["path"], relayed["link_use"]) == (2, "relay", None)
    assert relayed["mb_s"] > 0


def test_a_swarm_behind_routers_trains_on_without_its_public_peer() -> None:
    result = printed("bench/nat_swarm.py")
    assert result["anchors_identical"] is True
    assert max(map(int, result["rounds"])) == 8
    assert all(
        result["rounds"][str(number)] >= 2 for number in range(4, 9)
    )  # a busy machine may leave some out
    ways = [
        path
        for row in result["paths"]["after"].values()
        for name, path in row.items()
        if name != "public"
    ]
    straight = {"direct / direct", "direct / punched", "punched / punched", "punched / direct"}
    # A pair's lane that a busy machine did not open in time is tried again a minute later; until
    # then it goes over their connection.
    assert sum(path not in straight for path in ways) <= 2, ways
    assert {path for path in ways if path not in straight} <= {
        "punched / stream",
        "direct / stream",
    }
