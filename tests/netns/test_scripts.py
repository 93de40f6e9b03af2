"""The measuring scripts that need real peers run from the command line to their one JSON object; what they measure is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.slow]  # slow: the longer limit; .ci/run takes each test once
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def printed(name: str, *arguments: str, right: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The last line of a script's stdout. Fails unless it exits as it should."""
    run = subprocess.run([sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode in right, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_link_is_measured() -> None:
    result = printed("bench_link.py", "--codec", "int8", "--elements", "200000")
    assert result["name"] == "bench_link"
    assert result["bit_equal"] is True


def test_lanes_are_measured() -> None:
    punched = printed("bench_lanes.py", "--seconds", "1")
    assert (punched["name"], punched["lanes"], punched["path"], punched["relay_cores"]) == ("bench_lanes", 1, "punched", None)
    assert 0 < punched["link_use"] < 1
    relayed = printed("bench_lanes.py", "--path", "relay", "--congestion", "cubic", "--lanes", "2", "--seconds", "1", "--mbit", "0")
    assert (relayed["lanes"], relayed["path"], relayed["link_use"]) == (2, "relay", None)
    assert relayed["mb_s"] > 0


def test_a_swarm_behind_routers_trains_on_without_its_public_peer() -> None:
    result = printed("nat_swarm.py")
    assert result["anchors_identical"] is True
    assert max(map(int, result["rounds"])) == 8
    assert all(result["rounds"][str(number)] >= 2 for number in range(4, 9))  # a busy machine may leave some out
    ways = [path for row in result["paths"]["after"].values() for name, path in row.items() if name != "public"]
    straight = {"direct / direct", "direct / punched", "punched / punched", "punched / direct"}
    # A pair's lane that a busy machine did not open in time is tried again a minute later; until then it goes over their connection.
    assert sum(path not in straight for path in ways) <= 2, ways
    assert {path for path in ways if path not in straight} <= {"punched / stream", "direct / stream"}


def test_a_soak_counts_faults_and_rounds() -> None:
    result = printed("soak.py", "--minutes", "0.4", "--peers", "4")
    assert result["rounds"] > 0
    assert result["digests_equal"] is True
    assert result["stuck"] == 0


def test_a_table_of_faults_is_made_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Whether cells pass, the machine's load decides, not what is right in them."""
    arguments = ["--all", "--fault", "reset", "--phase", "reduce", "--elements", "2000000", "--reps", "1"]
    journal = tmp_path / "journal"
    first = printed("bench_faults.py", *arguments, "--target", "owner", "--journal", str(journal), right=(0, 1))
    again = printed("bench_faults.py", *arguments, "--journal", str(journal), "--logs", str(tmp_path), right=(0, 1))
    assert (first["cells"], first["done"], first["right"], first["trials"]) == (1, 1, 1, 1)
    assert (again["cells"], again["done"], again["right"]) == (3, 3, 3)
    assert first["table"][0] in again["table"]
    assert sorted(row["cell"] for row in again["table"]) == ["reset reduce convener", "reset reduce member", "reset reduce owner"]
    assert set(again["failing"]) == {row["cell"] for row in again["table"] if not row["passed"]}


def test_a_plan_is_compared_with_what_comes_of_it() -> None:
    result = printed("bench_wan.py", "--rounds", "1", "--peers", "2", "--parameters", "200000", "--step-ms", "20")
    assert (result["name"], result["params"], result["choice"]["overlap"]) == ("bench_wan", 200_000, "late")
    assert 0 < result["training_share"] < 1
    assert 0.9 < result["predicted_share"] < 1
