"""A tensor at one address, behind which memory changes."""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch

from atoll.collectives.errors import LocalProtocolError, StorageError
from atoll.collectives.script_swarm import Call
from atoll.node.client.shared import Buffers
from atoll.node.control.shared_memory import SharedBuffer

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="buffers are ordinary tensors elsewhere"
)

NUMEL = 5001  # not a whole number of pages
MEAN = Call("op", "mean", weight=1)


def test_values_stay_where_they_are_while_memory_changes() -> None:
    buffers, home, node = Buffers(), object(), SharedBuffer(4 * NUMEL)
    tensor = buffers.make(NUMEL)
    assert (tensor.dtype, tensor.shape, tensor.count_nonzero().item()) == (
        torch.float32,
        (NUMEL,),
        0,
    )
    address = tensor.data_ptr()
    shared = buffers.of(MEAN, tensor)
    assert shared is not None
    tensor.copy_(torch.arange(NUMEL))
    shared.move_to(home, 7, os.dup(node.fd))
    assert torch.equal(tensor, torch.arange(NUMEL).float())
    tensor.add_(1)
    assert torch.equal(node.tensor(), tensor)  # it is the node's memory
    shared.detach()
    assert (shared.home, shared.number, tensor.data_ptr()) == (None, 0, address)
    assert torch.equal(tensor, torch.arange(1, NUMEL + 1).float())
    tensor.zero_()
    assert torch.equal(
        node.tensor(), torch.arange(1, NUMEL + 1).float()
    )  # what is frozen there stays
    again = SharedBuffer(4 * NUMEL)
    tensor.fill_(3)
    shared.move_to(home, 8, os.dup(again.fd))
    tensor[0] = 4
    assert (again.tensor()[0].item(), again.tensor()[1:].unique().tolist()) == (4, [3])


@pytest.mark.slow
@pytest.mark.rota(7)
def test_a_buffer_ends_with_its_tensor() -> None:
    buffers, home, node = Buffers(), object(), SharedBuffer(4 * NUMEL)
    tensor, unused = buffers.make(NUMEL), buffers.make(NUMEL)
    shared = buffers.of(MEAN, tensor)
    assert shared is not None
    shared.move_to(home, 9, os.dup(node.fd))
    part = tensor[10:20]
    del tensor, unused
    gc.collect()
    assert list(buffers.ended()) == []
    part.fill_(5)
    assert node.tensor()[10:20].unique().tolist() == [5]
    del part
    gc.collect()
    assert list(buffers.ended()) == [(home, 9)]
    shared.detach()  # of a ticket that outlived it
    assert list(buffers.ended()) == []


def test_what_is_not_a_whole_buffer_is_an_ordinary_tensor() -> None:
    buffers = Buffers()
    tensor = buffers.make(NUMEL)
    assert buffers.of(MEAN, tensor) is not None
    for call, values in (
        (MEAN, tensor[:100]),
        (MEAN, tensor[1:]),
        (MEAN, torch.zeros(NUMEL)),
        (Call("op", "copy", weight=1), tensor),
        (Call("op", "mean", weight=0), tensor),
        (Call("op", "wrap64", weight=1), tensor),
    ):
        assert buffers.of(call, values) is None
    with pytest.raises(LocalProtocolError, match="a buffer of 0 elements"):
        buffers.make(0)
    with pytest.raises(LocalProtocolError, match="whole number"):
        buffers.make(1.5)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="no memory"):
        buffers.make(1 << 55)


def test_a_forked_child_has_a_copy_of_its_own() -> None:
    buffers, home, node = Buffers(), object(), SharedBuffer(4 * NUMEL)
    tensor = buffers.make(NUMEL).fill_(3)
    shared = buffers.of(MEAN, tensor)
    assert shared is not None
    shared.move_to(home, 7, os.dup(node.fd))
    pid = os.fork()
    if pid == 0:
        right = False
        try:
            right = tensor.unique().tolist() == [3] and shared.home is None
            tensor.fill_(9)
            right = right and tensor.unique().tolist() == [9]
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tensor.unique().tolist() == node.tensor().unique().tolist() == [3]
    assert (shared.home, shared.number) == (home, 7)
    tensor.fill_(4)
    assert node.tensor().unique().tolist() == [4]  # the parent's is the node's still
