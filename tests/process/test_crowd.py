"""Two hundred idle or slow connections, in every phase of a conversation and at every door of a node, cost it little and no round."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from house import ROOT

pytestmark = pytest.mark.slow


def test_no_round_is_lost_to_a_crowd_and_a_tenth_of_a_core_at_most() -> None:
    """The share is of processor time, which others' load does not change. Phases of which `scripts/bench_crowd.py` has shown most, briefly."""
    command = [sys.executable, str(ROOT / "scripts" / "bench_crowd.py"), "--connections", "200", "--seconds", "10", "--phases", PHASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["lost"] == 0, result
    assert result["rounds"] >= 20
    assert result["cpu_share_max"] <= 0.1, result


PHASES = "handshake,peer,frame,lane-hello,request"
