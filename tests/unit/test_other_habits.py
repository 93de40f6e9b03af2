"""Habits of torch.distributed, mpi4py, asyncio and notebooks: right values, or an error in words."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from handles_kit import Decided

from atoll.collectives import (
    all_gather,
    all_reduce,
    average,
    barrier,
    broadcast,
    check_state,
    enter,
    numbered,
    repair_state,
)
from atoll.collectives.api import gather_objects
from atoll.collectives.errors import AtollError
from atoll.optim import SoloSwarm

ODD: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    # a rank without a swarm, and arguments in the order of torch.distributed and mpi4py
    "enter nothing": (lambda s, t: enter(None), "takes a swarm first"),  # type: ignore[arg-type]
    "number nothing": (lambda s, t: numbered(None, "x"), "takes a swarm first"),  # type: ignore[arg-type]
    "barrier of nothing": (lambda s, t: barrier(None, op_id="x"), "takes a swarm first"),  # type: ignore[arg-type]
    "gather into a list": (lambda s, t: all_gather([t], t, op_id="x"), "takes a swarm first"),  # type: ignore[arg-type]
    "a class": (lambda s, t: all_reduce(SoloSwarm, t, op_id="x"), "not the class SoloSwarm"),  # type: ignore[arg-type]
    "enter a class": (lambda s, t: enter(SoloSwarm), "not the class SoloSwarm"),  # type: ignore[arg-type]
    "root by rank": (lambda s, t: broadcast(s, t, root=0, op_id="x"), "the id of a peer"),  # type: ignore[arg-type]
    # names of operations and codecs
    "ReduceOp": (
        lambda s, t: all_reduce(s, t, op=torch.distributed.ReduceOp.SUM, op_id="x"),  # type: ignore[arg-type]
        "a mean, sum, max, min or product",
    ),
    "MPI.MAX": (lambda s, t: all_reduce(s, t, op="MAX", op_id="x"), "a mean, sum, max, min"),  # type: ignore[arg-type]
    "a codec of nobody": (lambda s, t: all_reduce(s, t, codec="int7", op_id="x"), "unknown codec"),
    "one step as text": (
        lambda s, t: all_reduce(s, t, op="median", before="nnm", op_id="x"),
        "not a sequence of steps",
    ),
    # what is given
    "flags": (lambda s, t: all_reduce(s, t > 0, op="max", op_id="x"), "give booleans as int8"),
    "a mean of counts": (lambda s, t: all_reduce(s, t.long(), op_id="x"), "mean of int64"),
    "a list": (lambda s, t: all_reduce(s, [t, t], op_id="x"), "by name, as a mapping"),  # type: ignore[arg-type]
    "a module": (lambda s, t: check_state(s, torch.nn.Linear(2, 2), op_id="x"), "a mapping of"),  # type: ignore[arg-type]
    "no check": (lambda s, t: repair_state(s, {"t": t}, None, op_id="x"), "check_state"),  # type: ignore[arg-type]
    "an average of half": (lambda s, t: average(s, t.half(), op_id="x"), "float32 tensor"),
    # objects that pickle would take
    "a tensor as object": (lambda s, t: gather_objects(s, t, op_id="x"), "cannot be sent"),
    "an instance": (lambda s, t: gather_objects(s, object(), op_id="x"), "cannot be sent"),
    "a long integer": (lambda s, t: gather_objects(s, 1 << 70, op_id="x"), "cannot be sent"),
    # memory
    "rows beyond memory": (lambda s, t: all_gather(s, t, op_id="x", most=10**13), "no memory for"),
    "rows beyond numbers": (lambda s, t: all_gather(s, t, op_id="x", most=10**19), "no memory for"),
    "a buffer of a shape": (lambda s, t: s.buffer((2, 3)), "numel is a whole number"),
    "a buffer of a float": (lambda s, t: s.buffer(1e3), "numel is a whole number"),
    "an empty buffer": (lambda s, t: s.buffer(0), "a buffer of 0 elements"),
}


@pytest.mark.parametrize("habit", ODD)
def test_what_cannot_be_is_said(habit: str) -> None:
    call, words = ODD[habit]
    tensor = torch.ones(4)
    with pytest.raises(AtollError) as caught:
        call(SoloSwarm(), tensor)
    told = f"{caught.value.message} {caught.value.hint}"
    assert words in told
    assert tensor.tolist() == [1.0] * 4


def test_a_handle_is_waited_for_again_and_by_several_tasks() -> None:
    """`Work.wait` may be called twice; a future is awaited by whoever has it."""
    swarm, tensor = Decided(), torch.zeros(4)

    async def tasks() -> list[Any]:
        handle = all_reduce(swarm, tensor, op_id="x", op="sum")

        async def waits() -> Any:
            return await handle

        waiting = [asyncio.create_task(waits()) for _ in range(3)]
        await asyncio.sleep(0)
        swarm.operations[0].decide()
        found = await asyncio.gather(*waiting, handle)
        return [*found, handle.wait(), handle.wait(0.0)]

    found = asyncio.run(tasks())
    assert [each.status for each in found] == ["committed"] * 6
    assert (tensor.tolist(), swarm.operations[0].copied) == ([1.0] * 4, 1)


def test_wait_for_gives_up_a_task_and_the_result_still_comes() -> None:
    swarm, tensor = Decided(), torch.zeros(4)

    async def tasks() -> Any:
        handle = all_reduce(swarm, tensor, op_id="x", op="sum")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.01)
        assert tensor.tolist() == [0.0] * 4
        swarm.operations[0].decide()
        return await handle

    assert asyncio.run(tasks()).status == "committed"
    assert tensor.tolist() == [1.0] * 4


def test_handles_that_a_loop_overwrites_warn_each_by_its_name() -> None:
    swarm, tensor = Decided(), torch.zeros(4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle = all_reduce(swarm, tensor, op_id="step 0")
        for step in (1, 2):
            handle = all_reduce(swarm, tensor, op_id=f"step {step}")
        handle.cancel()
    assert [str(each.message).partition(" was")[0] for each in told] == [
        "operation 'step 0'",
        "operation 'step 1'",
    ]
