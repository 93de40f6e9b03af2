"""`bench_plan.py`, small: one fleet, one other setting; what it kept is not played again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from house import ROOT
from seeds import RARE

pytestmark = [*RARE]


def printed(out: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "bench_plan.py")]
    command += ["--fleets", "1", "--settings", "1", "--seed", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_one_fleet_is_played_once(tmp_path: Path) -> None:
    out = tmp_path / "plan.jsonl"
    found = printed(out)
    assert found["above"] == []
    assert found["above_alone"] <= 1.0
    [play] = found["runs"][0]["plays"]  # of the one other setting: the plan is to train alone
    assert json.loads(out.read_text())["key"] == [2, play["group"], play["choice"]]
    assert printed(out)["runs"] == found["runs"]
    assert len(out.read_text().splitlines()) == 1
