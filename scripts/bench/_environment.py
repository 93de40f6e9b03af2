"""What rivals need is set up once, in environments of their own below .ci/out. Standard library
only: this is imported inside them, too.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / ".ci" / "out"


class Unavailable(Exception):
    """What is measured beside us cannot be had here; the text says why."""


def set_up(what: str, command: list[str], limit_s: float) -> str:
    """Run a command to its end; what it printed. Raises Unavailable, with the line that tells most
    of what ``what`` lacks.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {command[0]}: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        lines = [
            line for line in lines if not line.startswith(("note:", "ERROR:", "error: subprocess"))
        ] or lines  # pip's own words say less
        telling = next(
            (line for line in reversed(lines) if "rror:" in line),
            lines[-1] if lines else f"exit status {done.returncode}",
        )
        raise Unavailable(f"{what} cannot be set up here: {telling[:300]}")
    return done.stdout
