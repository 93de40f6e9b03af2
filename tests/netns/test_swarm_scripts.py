"""The scripts that measure swarms of real peers run from the command line to their one JSON object;
what they measure is not judged here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from netns.script_kit import printed
from seeds import RARE

pytestmark = [
    pytest.mark.netns,
    *RARE,
]  # slow: the longer limit; .ci/run takes each test once


def test_a_soak_counts_faults_and_rounds() -> None:
    result = printed("soak.py", "--minutes", "0.25", "--peers", "4")
    assert result["rounds"] > 0
    assert result["digests_equal"] is True
    assert result["stuck"] == 0


def test_a_table_of_faults_is_made_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Whether cells pass, the machine's load decides, not what is right in them."""
    arguments = [
        "--all",
        "--fault",
        "reset",
        "--phase",
        "reduce",
        "--elements",
        "4000000",
        "--reps",
        "1",
        "--peers",
        "3",
    ]
    journal = tmp_path / "journal"
    first = printed(
        "bench/bench_faults.py",
        *arguments,
        "--target",
        "owner",
        "--journal",
        str(journal),
        right=(0, 1),
    )
    again = printed(
        "bench/bench_faults.py",
        *arguments,
        "--journal",
        str(journal),
        "--logs",
        str(tmp_path),
        right=(0, 1),
    )
    assert (first["cells"], first["done"], first["right"], first["trials"]) == (1, 1, 1, 1), first
    assert (again["cells"], again["done"], again["right"]) == (3, 3, 3), again
    assert first["table"][0] in again["table"]
    assert sorted(row["cell"] for row in again["table"]) == [
        "reset reduce convener",
        "reset reduce member",
        "reset reduce owner",
    ]
    assert set(again["failing"]) == {row["cell"] for row in again["table"] if not row["passed"]}


def test_a_plan_is_compared_with_what_comes_of_it() -> None:
    result = printed(
        "bench/bench_wan.py",
        "--rounds",
        "1",
        "--peers",
        "2",
        "--parameters",
        "200000",
        "--step-ms",
        "20",
    )
    assert (result["name"], result["params"], result["choice"]["overlap"]) == (
        "bench_wan",
        200_000,
        "late",
    )
    assert 0 < result["training_share"] < 1
    assert 0.9 < result["predicted_share"] < 1
