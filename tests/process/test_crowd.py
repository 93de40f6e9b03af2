"""Two hundred idle or slow connections, in every phase of a conversation and at every door of a
node, cost it little and no round.
"""

from __future__ import annotations

import json
import subprocess
import sys

from house import ROOT
from seeds import RARE

pytestmark = [*RARE]


def test_no_round_is_lost_to_a_crowd_and_a_fifth_of_a_core_at_most() -> None:
    """Some in each phase. Processor time is compared, which others' load does not change."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "bench" / "bench_crowd.py"),
        "--connections",
        "200",
        "--seconds",
        "10",
        "--phases",
        "all",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rounds"] > 0
    assert result["lost"] == 0, result
    assert result["cpu_share_max"] <= 0.2, result
