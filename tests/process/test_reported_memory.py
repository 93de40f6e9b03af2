"""What users have reported of memory that a fork shares, tried on a swarm's buffers: each names the
thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bad_input_kit import ended, new_run
from seeds import RARE
from torch.utils.data import DataLoader, Dataset

from atoll.collectives.api import all_reduce
from atoll.node.joining import RunSwarm

NUMEL = 4096
pytestmark = [
    *RARE,
    pytest.mark.skipif(sys.platform != "linux", reason="buffers are ordinary tensors elsewhere"),
]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RunSwarm]:
    with ended(member := new_run(tmp_path).organiser()):
        yield member.swarm


class Cached(Dataset[torch.Tensor]):
    """Rows in memory that the swarm gave; with ``change`` each row is changed in place."""

    def __init__(self, rows: torch.Tensor, *, change: bool) -> None:
        self.rows, self.change = rows, change

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        return row.mul_(-1) if self.change else row.clone()


@pytest.fixture
def rows(swarm: RunSwarm) -> torch.Tensor:
    """A buffer that was summed once: from then on its memory is the node's, too."""
    buffer = swarm.buffer(NUMEL)
    buffer.copy_(torch.arange(NUMEL))
    assert all_reduce(swarm, buffer, op_id="first", op="sum").wait(60).status == "committed"
    assert torch.equal(buffer, torch.arange(NUMEL).float())
    return buffer.view(16, -1)


@pytest.mark.parametrize("change", [False, True])
def test_workers_of_a_loader_read_a_buffer_and_change_their_own_copy_of_it(
    swarm: RunSwarm, rows: torch.Tensor, change: bool
) -> None:
    """ultralytics/ultralytics#26086: a cache in memory is read by forked workers;
    meta-pytorch/data#1061: who changes a sample in place changes it for others.
    """
    before = rows.clone()
    loader = DataLoader(
        Cached(rows, change=change), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    found = torch.cat(list(loader))
    assert torch.equal(found, -before if change else before)
    assert torch.equal(rows, before)
    flat = rows.view(-1)
    assert all_reduce(swarm, flat, op_id="again", op="sum").wait(60).status == "committed"
    assert torch.equal(rows, before)


def test_a_child_that_writes_while_a_call_is_under_way_changes_no_result(
    swarm: RunSwarm, rows: torch.Tensor
) -> None:
    """horovod/horovod#1824: memory of a transfer under way, and a fork."""
    flat = rows.view(-1)
    handle = all_reduce(swarm, flat, op_id="under way", op="sum", deadline_s=60)
    child = os.fork()
    if child == 0:
        flat.fill_(-7.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert handle.wait(60).status == "committed"
    assert torch.equal(flat, torch.arange(NUMEL).float())
