"""A robust rule with real nodes: from the manifest to a committed round over all three, and to what
the nodes say of the run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_kit import MANIFEST, Peers

from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("before", ["", '["arc", "nnm"]'])
def test_three_peers_with_a_rule(tmp_path: Path, before: str) -> None:
    """No round is decided over fewer than three, so the first one counts all; the founder alone and
    two wait, and let the others in.
    """
    robust = (
        '[robust]\nrule = "median"\nf = 1\n'
        if not before
        else f'[robust]\nrule = "centred_clip"\nf = 1\nbefore = {before}\n'
    )
    with Peers(tmp_path, 3, 3_000, manifest=MANIFEST + robust) as swarm:
        swarm.settle()
        swarm.contribute(77)
        outcomes = [peer.expect("outcome") for peer in swarm.all]
        assert [(o["status"], len(o["contributors"])) for o in outcomes] == [("committed", 3)] * 3
        assert len({(o["anchor_round"], o["digest"]) for o in outcomes}) == 1
        with NodeClient.connect(find_paths(swarm.all[0].home)) as client:
            (run,) = client.status()["runs"]
        assert (run["rule"], run["quorum"]["needed"], run["quorum"]["held"]) == (
            "arc+nnm+centred_clip/running:1" if before else "median:1",
            3,
            True,
        )
        weights = run["last_round"].get("weights", {})
        assert set(weights) == (set(run["members"]) if before else set())
        assert not before or 0 < sum(weights.values()) <= 1.00001
