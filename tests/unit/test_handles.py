"""Handles: one life, whichever threads and tasks look at it."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import trio
from handles_kit import Decided, Deciding
from torch import Tensor

from atoll.collectives.api import Handle, all_reduce
from atoll.collectives.averaging import Averaging, average
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.outcomes import Outcome


def reduced() -> tuple[Tensor, Handle[Outcome], Deciding]:
    swarm, tensor = Decided(), torch.zeros(4)
    handle = all_reduce(swarm, tensor, op_id="sum", op="sum")
    return tensor, handle, swarm.operations[0]


def averaged(rounds: int = 2) -> tuple[Tensor, Averaging, list[Deciding]]:
    swarm, tensor = Decided(), torch.zeros(4)
    return (
        tensor,
        average(swarm, tensor, op_id="mean", plan="gossip", rounds=rounds),
        swarm.operations,
    )


def in_threads(count: int, call: Callable[[], Any]) -> tuple[list[Any], Callable[[], None]]:
    """What each of ``count`` threads got of ``call``; to be joined."""
    got = list[Any]()

    def work() -> None:
        try:
            got.append(call())
        except BaseException as error:
            got.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()

    def join() -> None:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    return got, join


def test_done_means_that_the_tensor_holds_the_result() -> None:
    tensor, handle, operation = reduced()
    assert not handle.done()
    operation.decide()
    assert handle.done()
    assert (tensor.tolist(), operation.copied, operation.released) == ([1.0] * 4, 1, True)
    tensor.zero_()
    assert handle.done()
    assert handle.wait().status == "committed"
    assert tensor.tolist() == [0.0] * 4  # it is written once


def test_done_of_an_average_means_so_too() -> None:
    tensor, handle, operations = averaged()
    operations[0].decide()
    assert not handle.done()
    operations[1].decide()
    assert handle.done()
    assert tensor.tolist() == [2.0] * 4
    assert handle.wait().status == "committed"


def test_a_refused_call_is_done_and_raises() -> None:
    _, handle, operation = reduced()
    operation.error = LocalProtocolError("no")
    operation.settled.set()
    assert handle.done()
    with pytest.raises(LocalProtocolError, match="no"):
        handle.wait()


def test_threads_that_wait_for_one_average_all_get_its_result() -> None:
    tensor, handle, operations = averaged(rounds=6)
    got, join = in_threads(4, handle.wait)
    for step in range(6):
        while len(operations) <= step:  # another thread begins it
            threading.Event().wait(0.001)
        operations[step].decide()
    join()
    assert [(each.status, len(each.steps)) for each in got] == [("committed", 6)] * 4
    assert tensor.tolist() == [6.0] * 4
    assert len(operations) == 6


@pytest.mark.parametrize("make", [reduced, averaged])
def test_cancel_releases_who_waits_in_another_thread(make: Callable[[], Any]) -> None:
    tensor, handle, operation = make()
    first: Deciding = operation[0] if isinstance(operation, Sequence) else operation
    got, join = in_threads(3, handle.wait)
    assert first.waited_for.wait(60)
    handle.cancel()
    join()
    assert [each.status for each in got] == ["open"] * 3
    assert tensor.tolist() == [0.0] * 4
    assert handle.wait().status == "open"


@pytest.mark.parametrize("make", [reduced, averaged])
def test_a_handle_that_nobody_waited_for_warns(make: Callable[[], Any]) -> None:
    made = [make()]
    with pytest.warns(RuntimeWarning, match="was never waited for: your tensors keep"):
        made.clear()
    for look in (lambda handle: handle.cancel(), lambda handle: handle.wait(0.0)):
        made = make()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            look(made[1])
            del made


@pytest.mark.parametrize("make", [reduced, averaged])
@pytest.mark.parametrize("run", [asyncio.run, trio.run])
def test_awaited_while_other_tasks_run(make: Callable[[], Any], run: Callable[..., Any]) -> None:
    tensor, handle, operation = make()
    asynchronous = run is asyncio.run

    async def pause() -> None:
        await (asyncio.sleep(0.002) if asynchronous else trio.sleep(0.002))

    async def decide() -> None:
        for each in range(1 if isinstance(operation, Deciding) else 2):
            await pause()
            one = operation if isinstance(operation, Deciding) else operation[each]
            one.decide()
            await pause()
            while not isinstance(operation, Deciding) and len(operation) < 2:
                await pause()

    async def main() -> Any:
        if asynchronous:
            task = asyncio.create_task(decide())
            result = await handle
            await task
            return result
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decide)
            return await handle

    result = run(main()) if asynchronous else run(main)
    assert result.status == "committed"
    assert tensor.tolist() == [1.0 if isinstance(operation, Deciding) else 2.0] * 4
