"""A peer of two ranks: DDP and FSDP2 over gloo, each rank writing its slices; what such a job
cannot do is refused in all of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks_kit import play_two_ranks

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
    assert play_two_ranks(SCRIPT, tmp_path / "store", environment, 300) == [sorted(NAMES)] * 2
