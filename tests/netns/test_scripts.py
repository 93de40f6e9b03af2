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


def printed(name: str, *arguments: str) -> dict[str, Any]:
    """The last line of a script's stdout. Fails unless it exits with 0."""
    run = subprocess.run([sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_link_is_measured() -> None:
    result = printed("bench_link.py", "--codec", "int8", "--elements", "200000")
    assert result["name"] == "bench_link"
    assert result["bit_equal"] is True


def test_a_soak_counts_faults_and_rounds() -> None:
    result = printed("soak.py", "--minutes", "0.4", "--peers", "4")
    assert result["rounds"] > 0
    assert result["digests_equal"] is True
    assert result["stuck"] == 0
