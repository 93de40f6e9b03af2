"""The scripts that measure reductions run, small, and print what they promise. No figure is looked
at: the machine may be busy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from house import ROOT
from seeds import RARE

pytestmark = [*RARE]


def printed(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that a script prints as its last line."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "bench" / script),
        "--peers",
        "2",
        "--elements",
        "5000",
        "--reps",
        "1",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_all_reduce_beside_gloo() -> None:
    result = printed("bench_allreduce.py", "--outliers")
    assert result["bit_equal"]
    assert 0 < result["relative_error"] < 0.02
    assert (
        0 < result["relative_error_outliers"] < 0.2
    )  # few elements: a whole block stands beside the outlier
    keys = [
        "seconds",
        "cpu_seconds",
        "ratio_to_gloo",
        "cpu_ratio_to_gloo",
        "engine_memory_mib",
        "decision_ms",
        "bytes_sent",
    ]
    assert all(result[key] is not None for key in keys)
    assert result["incomplete"] == sum(not run["ok"] for run in result["runs"])


def test_python_work_beside_a_reduction() -> None:
    result = printed("bench_busy.py")
    assert {sample["where"] for sample in result["runs"] if sample["ok"]} == {"script", "other"}
    assert result["round_ratio"] > 0
    assert (
        result["loop_ratio"] >= 0
    )  # rounded: an operation as short as this may leave a loop no time at all


def test_what_a_reduction_costs_at_least() -> None:
    result = printed("bench_floor.py", "--codec", "fp32")
    assert set(result["passes"]) == {
        "encode",
        "seal",
        "socket",
        "open",
        "reduce",
        "hash",
        "deliver",
    }
    assert all(seconds > 0 for seconds in result["passes"].values())
    assert "seal" not in printed("bench_floor.py", "--plain")["passes"]


def federated(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON object of a script that knows nothing of peers."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_federated_methods_in_virtual_time() -> None:
    methods = ("fedavg", "scaffold", "fedcompass")
    result = federated(
        "bench_federated.py",
        "--methods",
        ",".join(methods),
        "--clients",
        "5",
        "--seeds",
        "1",
        "--rounds",
        "4",
        "--against",
        "nothing",
    )
    assert list(result["table"]) == list(methods)
    assert result["settings"]["clients"] == 5
    for row in result["table"].values():
        assert 0.05 < row["accuracy"] <= 1
        assert 0 <= row["idle_share"] < 1
        assert row["bytes"] > 0
        assert len(row["accuracy_at"]) == 4
    assert (
        result["table"]["scaffold"]["bytes"] == 2 * result["table"]["fedavg"]["bytes"]
    )  # as many turns, twice the vectors
    assert result["table"]["fedcompass"]["idle_share"] < result["table"]["fedavg"]["idle_share"]
    assert {run["method"] for run in result["runs"]} == set(methods)
    assert result["planted_groups"]


def test_secure_aggregation() -> None:
    result = federated(
        "bench_secagg.py", "--clients", "5", "--elements", "2000", "--dropouts", "1", "--reps", "1"
    )
    assert result["exact"] is True
    assert result["settings"]["threshold"] == 4
    (run,) = result["runs"]
    assert set(run["steps"]) == {"keys", "deal", "mask", "reveal", "unmask"}
    assert 0 < sum(run["steps"].values()) == pytest.approx(run["seconds"], rel=1e-6)
    assert result["seconds"] > 0


def test_coding() -> None:
    result = federated("bench_coding.py", "--seeds", "2", "--steps", "60", "--workers", "12")
    assert result["ratio"]["sequential"] < result["ratio"]["plain"] < 1
    assert set(result["seconds"]) == {"uncoded", "plain", "sequential"}
