"""`atoll plan --node`: rates and round trips are measured between real nodes, and the plan is the
one for what was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_kit import MANIFEST, Peers

from atoll.node.manifest import load_manifest
from atoll.node.manifest.presets import begins_short, steps_of
from atoll.optim.planning import Conditions, PeerConditions, plan

pytestmark = pytest.mark.slow


def test_three_nodes_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(MANIFEST)
    with Peers(tmp_path, 3, 4096) as swarm:
        swarm.settle()
        command = [
            "plan",
            str(tmp_path / "run.toml"),
            "--node",
            "faults",
            "--step-ms",
            "50",
            "--parameters",
            "2000000",
            "--json",
        ]
        environment = {**os.environ, "ATOLL_HOME": str(swarm.all[0].home), "CI": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "atoll.node.cli", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    peers = tuple(PeerConditions(**row) for row in found["peers"])
    assert "this machine" in {peer.name for peer in peers}
    assert len(peers) == 3
    assert all(min(peer.up, peer.down) > 1e5 for peer in peers)
    assert 0 < found["rtt_s"] < 5
    run = load_manifest(tmp_path / "run.toml")
    expected = plan(
        Conditions(
            *(2_000_000, peers, found["rtt_s"], found["share"]),
            steps=steps_of(run),
            cold=begins_short(run),
        )
    )
    assert {**found["settings"], **expected.settings()} == found["settings"]
    assert found["why"] == list(expected.why)
    assert found["group"] == list(expected.group)
