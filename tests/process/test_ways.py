"""A ring, two levels over two sites whose heads are checked, and three levels, with four real
peers: the bits are those of the trees, in numpy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from exchange_kit import cid_of, make_plan, ref_result, ref_tree_result, ways
from process.test_all_reduce import SCRIPT, await_members, start
from seeds import RARE
from swarm_kit import MANIFEST, Peers

from atoll.collectives.codecs.codec import chunk_elements
from atoll.collectives.group import Topology, TopologyKind
from atoll.collectives.identifiers import PeerId

pytestmark = [*RARE]

NUMEL = 16_000  # one chunk, so that the plan has one part, whoever owns it
assert chunk_elements("fp32", NUMEL) >= NUMEL
SITES = ("lab-1", "lab-2", "lab-1", "lab-2")
HOSTED = ("lab/1", "lab/2", "lab/1", "lab/2")  # and with three levels


@pytest.mark.parametrize("kind", ["ring", "checked", "three-level"])
def test_four_peers_at_two_sites(tmp_path: Path, kind: TopologyKind) -> None:
    sites = HOSTED if kind == "three-level" else SITES
    plan = 'plan = "two-level"\ncheck = true' if kind == "checked" else f'plan = "{kind}"'
    manifest = MANIFEST.replace('codec = "int8"', f'codec = "fp32"\n{plan}')
    with Peers(tmp_path, 4, NUMEL, script=SCRIPT, manifest=manifest, sites=sites) as swarm:
        swarm.settle()  # rounds of the run go the same ways
        await_members(swarm)
        start(
            swarm, swarm.all, {"op": "mean over trees", "seed": 40, "numel": NUMEL, "noise": True}
        )
        found = [peer.expect("reduced") for peer in swarm.all]
        assert [(one["status"], len(one["contributors"])) for one in found] == [
            ("committed", 4)
        ] * 4

        order = sorted(range(4), key=lambda index: swarm.all[index].peer)
        vectors = {
            cid_of(index): torch.empty(NUMEL).normal_(
                generator=torch.Generator().manual_seed(40 + index)
            )
            for index in order
        }
        givers = [(PeerId(swarm.all[index].peer), cid_of(index), index + 1) for index in order]
        groups = tuple(("lab-1", "lab-2").index(SITES[index]) for index in order)
        at = ways(kind, (0,) * 4 if kind == "three-level" else groups, groups)

        def digest(owner: PeerId, topology: Topology) -> str:
            plan = make_plan(givers, [owner], NUMEL, NUMEL, "fp32", topology=topology)
            data = (
                ref_result(plan, vectors)
                if topology.kind == "butterfly"
                else ref_tree_result(plan, vectors)
            )
            return blake3(np.frombuffer(data, np.float32).data.cast("B")).hexdigest()

        assert len({one["digest"] for one in found}) == 1
        trees, star = (
            {digest(peer, at) for peer, _, _ in givers},
            digest(givers[0][0], Topology()),
        )
        assert found[0]["digest"] in trees
        # Names are drawn: where the first two by name are of one site, and the owner of the other,
        # the tree adds up in the star's order.
        assert found[0]["digest"] != star or (
            groups in ((0, 0, 1, 1), (1, 1, 0, 0)) and star in trees
        )
