"""A job of two ranks, a process each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def play_two_ranks(
    script: Path, folder: Path, environment: Mapping[str, str], patience_s: float
) -> list[list[str]]:
    """Run ``script FOLDER RANK`` for both ranks to their end; the lines that each has printed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=patience_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(
        f"{out}\n{error}" for out, error in said
    )
    return [out.splitlines() for out, _ in said]
