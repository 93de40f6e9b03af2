"""An average among four real peers on a grid of 2 x 2, against numpy; then one of them is gone."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from process.test_collectives import LENGTH, SCRIPT, await_members, digest, peers_of, results, start
from swarm_kit import Peers

pytestmark = pytest.mark.slow


def test_four_peers_average_on_a_grid_and_three_know_what_they_lack(tmp_path: Path) -> None:
    with Peers(tmp_path, 4, LENGTH, script=SCRIPT) as swarm:
        for peer in swarm.all:
            await_members(peer, 4)
        order = sorted(swarm.all, key=lambda peer: peer.peer)
        given = {
            peer.peer: torch.randn(LENGTH, generator=torch.Generator().manual_seed(index)).numpy()
            for index, peer in enumerate(swarm.all)
        }
        names, half = peers_of(swarm), np.float32(0.5)
        rows = [(given[names[at]] + given[names[at + 1]]) * half for at in (0, 2)]
        mean = (rows[0] + rows[1]) * half

        start(swarm, "average")
        found = dict(zip([peer.peer for peer in swarm.all], results(swarm), strict=True))
        for at, name in enumerate(names):
            row = names[at // 2 * 2 : at // 2 * 2 + 2]
            assert found[name]["steps"] == [row, names[at % 2 :: 2]]
            assert (found[name]["status"], found[name]["exact"], found[name]["weight"]) == (
                "committed",
                True,
                4,
            )
            assert found[name]["digest"] == digest(torch.from_numpy(mean))

        lost = order[-1]
        lost.signal("both", signal.SIGKILL)
        rest = order[:-1]
        start(swarm, "average", rest)
        found = dict(zip([peer.peer for peer in rest], results(swarm, rest), strict=True))
        for name in names[:-1]:
            line, column = found[name]["steps"]
            reached = {giver for carrier in column for giver in found[carrier]["steps"][0]}
            assert name in line
            assert name in column
            assert lost.peer not in reached
            assert (found[name]["status"], found[name]["exact"], found[name]["weight"]) == (
                "committed",
                False,
                len(reached),
            )
            expected = np.mean([given[giver][0] for giver in reached])
            assert found[name]["first"] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
