"""A robust rule with real nodes: from the manifest to a committed round over all three, and to what the nodes say of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_kit import MANIFEST, Peers

from atoll.node.client import NodeClient
from atoll.node.paths import find_paths

pytestmark = pytest.mark.slow


def test_three_peers_with_a_median(tmp_path: Path) -> None:
    """No round is decided over fewer than three, so the first one counts all; the founder alone and two wait, and let the others in."""
    with Peers(tmp_path, 3, 3_000, manifest=MANIFEST + '[robust]\nrule = "median"\nf = 1\n') as swarm:
        swarm.settle()
        swarm.contribute(77)
        outcomes = [peer.expect("outcome") for peer in swarm.all]
        assert [(o["status"], len(o["contributors"])) for o in outcomes] == [("committed", 3)] * 3
        assert len({(o["anchor_round"], o["digest"]) for o in outcomes}) == 1
        with NodeClient.connect(find_paths(swarm.all[0].home)) as client:
            (run,) = client.status()["runs"]
        assert (run["rule"], run["quorum"]["needed"], run["quorum"]["held"]) == ("median:1", 3, True)
