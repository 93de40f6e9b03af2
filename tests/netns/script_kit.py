"""The measuring scripts, run from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def printed(name: str, *arguments: str, right: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The last line of a script's stdout. Fails unless it exits as it should."""
    run = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode in right, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])
