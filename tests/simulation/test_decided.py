"""What seeded swarms decide is what the record says they decide (`scripts/check_decided.py`)."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from seeds import RARE

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the record is of x86-64"
)


def check(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/check_decided.py", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("seeds", [1, pytest.param(30, marks=RARE)])
def test_what_is_decided_is_what_is_recorded(root: Path, seeds: int) -> None:
    done = check(root, "--seeds", str(seeds))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["equal"], result["seeds"], result["capability"]) == (True, 7 * seeds, "default")


def test_another_decision_is_named_with_its_entry_and_the_command_that_plays_it(
    root: Path, tmp_path: Path
) -> None:
    """As if entry 3 of a seed had had another configuration when it was recorded."""
    lines = (root / "tests/records/decided.txt").read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("ring 0 "))
    *front, logs = lines[at].split(" ")
    place = 3 * 12 + 6
    assert logs[place : place + 3] != "---"
    lines[at] = " ".join([*front, logs[:place] + "---" + logs[place + 3 :]])
    other = tmp_path / "decided.txt"
    other.write_text("\n".join(lines), encoding="utf-8")
    done = check(root, "--seeds", "1", "--kinds", "ring", "--jobs", "1", "--record", str(other))
    assert done.returncode == 1
    *told, last = done.stdout.splitlines()
    assert told[0] == "kind ring, seed 0: what is decided has changed"
    assert told[1] == "  entry 3 is the first that differs, in: next configuration"
    assert any(line.startswith("    next configuration: p") for line in told)
    played = next(line for line in told if "simulate_rounds.py" in line)
    assert played.startswith(
        "    ATEN_CPU_CAPABILITY=default scripts/simulate_rounds.py --first 0 "
    )
    assert played.endswith("--tree ring")
    result = json.loads(last)
    assert (result["different"], result["first"]["entry"]) == ({"ring": "0"}, 3)
    refused = check(
        root,
        *("--seeds", "1", "--kinds", "ring", "--jobs", "1", "--record", str(other)),
        *("--renew", "the configuration is another"),
    )
    assert refused.returncode == 1
    assert "recorded seeds were not played" in refused.stdout
    assert other.read_text(encoding="utf-8") == "\n".join(lines)
