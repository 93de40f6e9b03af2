"""Tensors whose memory is changed, or is not to be written, while a collective has them."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from handles_kit import Decided
from torch import Tensor

from atoll.collectives import all_reduce, average, broadcast, modular_sum
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.identifiers import PeerId
from atoll.optim import SoloSwarm


def other_data(tensor: Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def other_storage(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.zeros_like(tensor))  # pyright: ignore[reportArgumentType]


def other_size(tensor: Tensor) -> None:
    tensor.resize_(2, 2)


def longer(tensor: Tensor) -> None:
    tensor.resize_(4, 4000)


def freed(tensor: Tensor) -> None:
    """As FSDP does with what it gathers."""
    tensor.untyped_storage().resize_(0)


def turned(tensor: Tensor) -> None:
    tensor.t_()


def other_type(tensor: Tensor) -> None:
    tensor.data = tensor.data.double().to(torch.int32)


CALLS: dict[str, tuple[torch.dtype, Callable[[Any, Tensor], Any]]] = {
    "reduce": (torch.float32, lambda s, t: all_reduce(s, t, op_id="x")),
    "rounded": (torch.bfloat16, lambda s, t: all_reduce(s, t, op_id="x")),
    "words": (torch.int64, lambda s, t: all_reduce(s, t, op_id="x", op="sum")),
    "tree": (torch.float32, lambda s, t: all_reduce(s, {"b": torch.ones(1), "w": t}, op_id="x")),
    "modular": (torch.int64, lambda s, t: modular_sum(s, t, op_id="x")),
    "broadcast": (torch.float32, lambda s, t: broadcast(s, t, root=PeerId("you"), op_id="x")),
    "average": (torch.float32, lambda s, t: average(s, t, op_id="x", dims=1)),
}


@pytest.mark.parametrize(
    "move", [other_data, other_storage, other_size, longer, freed, turned, other_type]
)
@pytest.mark.parametrize("call", CALLS)
def test_a_result_whose_tensor_has_moved_is_an_error_and_is_not_written(
    call: str, move: Callable[[Tensor], None]
) -> None:
    dtype, begin = CALLS[call]
    swarm, tensor = Decided(), torch.ones(4, 4, dtype=dtype)
    old = tensor.detach()
    handle = begin(swarm, tensor)
    move(tensor)
    held = tensor.contiguous().clone() if move is not freed else None
    swarm.operations[0].decide()
    assert handle.done()
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="was given other memory or another shape"):
            handle.wait()
    if held is not None:
        assert torch.equal(
            tensor.contiguous().view(torch.uint8), held.view(torch.uint8)
        )  # NaN may be there
        assert old.view(-1)[0] == 1


def test_views_and_values_of_a_tensor_may_change_meanwhile() -> None:
    swarm, tensor = Decided(), torch.nn.Parameter(torch.ones(4, 4))
    handle = all_reduce(swarm, tensor, op_id="x")
    tensor.data.t_()  # of a view of it
    tensor.data.mul_(7.0)
    tensor.grad = torch.zeros(4, 4)
    swarm.operations[0].decide()
    handle.wait()
    assert torch.equal(tensor.data, torch.full((4, 4), 2.0))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("call", CALLS)
def test_memory_that_cannot_be_written_is_refused_before_anything_is_given(call: str) -> None:
    dtype, begin = CALLS[call]
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
    tensor = torch.frombuffer(memory, dtype=dtype)
    swarm = Decided()
    with pytest.raises(LocalProtocolError, match="memory that cannot be written to"):
        begin(swarm, tensor)
    assert swarm.operations == []


def test_a_private_copy_of_a_mapped_file_is_written() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    assert all_reduce(SoloSwarm(), tensor, op_id="x").wait().status == "committed"


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_who_broadcasts_may_give_memory_that_is_only_read() -> None:
    swarm = SoloSwarm()
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ) as memory:
        given = torch.frombuffer(memory, dtype=torch.float32)
        assert broadcast(swarm, given, root=swarm.peer, op_id="x").wait(1).status == "committed"
        del given
