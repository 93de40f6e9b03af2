"""A short run of the interrupter, and that a second start of it goes on where the first ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "interrupt_calls.py"

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_a_short_run_in_two_parts(tmp_path: Path) -> None:
    earlier, turns = 0, 0
    for interrupts in (150, 300):
        found = subprocess.run(
            [sys.executable, str(SCRIPT), "--interrupts", str(interrupts), "--keep", "kept"],
            cwd=tmp_path,
            env={**os.environ, "CI": "1"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert found.returncode == 0, found.stderr[-3000:]
        told: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
        before, after = told["descriptors"]
        assert (told["wrong"], told["came"], told["earlier"]) == (0, interrupts, earlier)
        assert after <= before
        earlier, ended = told["came"], sum(told["ended"].values())
        assert ended > turns
        turns = ended
