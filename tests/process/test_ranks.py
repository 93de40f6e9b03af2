"""A peer of two ranks: DDP and FSDP2 over gloo, each rank writing its slices; what such a job
cannot do is refused in all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "rank_cases.py"
NAMES = [
    line[4:].split("(")[0]
    for line in SCRIPT.read_text(encoding="utf-8").splitlines()
    if line.startswith("def case_")
]


@pytest.mark.slow
def test_a_job_of_two_ranks(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(SCRIPT.parent.parent),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / "store"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(
        f"{out}\n{error}" for out, error in said
    )
    assert [out.splitlines() for out, _ in said] == [sorted(NAMES)] * 2
