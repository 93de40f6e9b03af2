"""Secure rounds with real nodes: from the manifest to a sum that nobody could look into; a site is killed, the others go on bit-equal."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from swarm_kit import MANIFEST, Peers

from atoll.node.client import NodeClient
from atoll.node.paths import find_paths

pytestmark = pytest.mark.slow

NUMEL = 3_000
SECURE = 'mode = "federated"\n' + MANIFEST.replace('method = "local_sgd"\n', "").replace(
    '[exchange]\ncodec = "int8"\n', '[secure]\nmetrics = ["loss"]\n'
)


def test_five_sites_of_which_one_is_killed(tmp_path: Path) -> None:
    with Peers(tmp_path, 5, NUMEL, manifest=SECURE) as swarm:
        swarm.settle()
        swarm.contribute(70)
        outcomes = [peer.expect("outcome") for peer in swarm.all]
        assert [o["status"] for o in outcomes] == ["committed"] * 5
        assert {count for o in outcomes for count in o["contributors"].values()} == {
            1
        }  # nobody says how much it trained
        assert sum(o["counted"] for o in outcomes) >= 4
        assert len({(o["anchor_round"], o["digest"]) for o in outcomes}) == 1
        victim, rest = swarm.all[2], [peer for peer in swarm.all if peer is not swarm.all[2]]
        swarm.contribute(80, who=rest)
        victim.signal("both", signal.SIGKILL)
        for seed in (80, 90):
            if seed > 80:
                swarm.contribute(seed, who=rest)
            outcomes = [peer.expect("outcome") for peer in rest]
            assert [o["status"] for o in outcomes] == ["committed"] * 4
            assert sum(o["counted"] for o in outcomes) >= 3
            assert len({(o["anchor_round"], o["digest"]) for o in outcomes}) == 1
        with NodeClient.connect(find_paths(swarm.all[0].home)) as client:
            (run,) = client.status()["runs"]
        assert run["secure"]["threshold"] in (3, 4)
        assert {peer.peer for peer in rest} >= set(run["secure"]["last"]["members"])
        assert run["secure"]["last"]["metrics"] == {
            "loss": pytest.approx(90 / 64, abs=0.1)
        }  # of seeds 90 to 94
