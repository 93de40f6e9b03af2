"""Power is cut on two members at once: real nodes, a real file system in an image, nothing flushed
(scripts/bench/power_cuts.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "power_cuts.py"
CANNOT = 64


@pytest.mark.slow
def test_two_members_go_on_after_a_power_cut() -> None:
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--cuts", "1", "--members", "2", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if found.returncode == CANNOT:
        pytest.skip(found.stderr.strip())
    result = json.loads(found.stdout.splitlines()[-1])
    assert found.returncode == 0, found.stderr
    assert (result["cuts"], result["went_on"], result["rounds_lost"]) == (1, 1, 0)
    assert result["trials"][0]["troubles"] == []
