"""What a manifest says of lanes reaches real nodes: lanes that are not encrypted, two to a peer."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3
from swarm_kit import MANIFEST, Peer, Peers

from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "reduce_peer.py"
NUMEL = 500_000


def lanes_of(peer: Peer) -> list[str]:
    """The lanes of a node as its status tells them."""
    with NodeClient.connect(find_paths(peer.home)) as client:
        return list(client.status()["network"]["lanes"].values())


def test_lanes_that_are_not_encrypted(tmp_path: Path) -> None:
    with Peers(
        tmp_path,
        2,
        NUMEL,
        script=SCRIPT,
        manifest=MANIFEST + "[lanes]\nencrypt = false\nper_peer = 2\n",
    ) as swarm:
        swarm.settle()
        contributors = {peer.peer: 1 + index for index, peer in enumerate(swarm.all)}
        for index, peer in enumerate(swarm.all):
            peer.say(
                do="reduce",
                ops=[
                    {
                        "op": "one",
                        "weight": 1 + index,
                        "numel": NUMEL,
                        "deadline_s": 60.0,
                        "seed": index,
                    }
                ],
            )
        outcomes = [(peer.expect("started"), peer.expect("reduced"))[1] for peer in swarm.all]
        mean = swarm.mean(0, contributors, "fp32")
        digest = blake3(mean.numpy().data.cast("B")).hexdigest()
        for outcome in outcomes:
            assert (outcome["status"], outcome["contributors"], outcome["digest"]) == (
                "committed",
                contributors,
                digest,
            )
        assert [lanes_of(peer) for peer in swarm.all] == [["lan, not encrypted"]] * 2
