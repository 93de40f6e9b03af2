"""What users of other clients have reported of interrupted calls, tried on ours: each names the
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reference_node import INVITE, Node, ReferenceService

from atoll.collectives.api import all_reduce, enter
from atoll.node.joining import RunSwarm, join


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RunSwarm]:
    node = Node(tmp_path, lambda: ReferenceService(tmp_path))
    with contextlib.closing(
        join(INVITE, home=tmp_path, private=False, progress=lambda *_: None)
    ) as found:
        enter(found)
        yield found
    node.stop()
    assert node.defects == []


async def total(swarm: RunSwarm, name: str, value: float) -> None:
    """One sum of this member alone: what it gave."""
    flat = torch.full((5,), value)
    outcome = await all_reduce(swarm, flat, op_id=name, op="sum", deadline_s=60)
    assert (outcome.status, flat.tolist()) == ("committed", [value] * 5), name


def test_tasks_that_are_cancelled_give_their_answers_to_no_other_task(swarm: RunSwarm) -> None:
    """socketry/async-http#77, encode/httpcore#830: of tasks with calls under way some are stopped,
    and others read what was meant for them.
    """
    draw = random.Random(1)

    async def calls(task: int) -> None:
        for number in range(8):
            await total(swarm, f"{task}/{number}", float(100 * task + number))

    async def main() -> None:
        tasks = [asyncio.create_task(calls(number)) for number in range(20)]
        stopped = tasks[::2]
        for task in stopped:
            await asyncio.sleep(draw.uniform(0.0, 0.01))
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in found[1::2] if each is not None] == []
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in found)
        for number in range(8):
            await total(swarm, f"after/{number}", float(number))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a handle that a stopped task dropped
        asyncio.run(main())
        gc.collect()


def test_an_answer_that_nobody_took_is_not_the_next_ones(swarm: RunSwarm) -> None:
    """Shopify/async-memcached#88: a call is dropped before its answer is read, and the next one
    takes that for its own.
    """
    for number in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            all_reduce(swarm, torch.full((5,), -1.0), op_id=f"dropped/{number}", op="sum")
            gc.collect()
        asyncio.run(total(swarm, f"kept/{number}", float(number)))


@pytest.mark.parametrize("cell", range(3))
def test_a_cell_that_was_interrupted_shows_its_own_result_when_it_is_run_again(
    swarm: RunSwarm, cell: int
) -> None:
    """twosigma/beakerx#7354: the next cell shows the last one's result."""
    flat = torch.full((5,), 1.0)
    handle = all_reduce(swarm, flat, op_id="cell/first", op="sum", deadline_s=60)
    with pytest.raises(KeyboardInterrupt):
        raise KeyboardInterrupt  # between the call and its wait
    for number in range(cell + 1):
        asyncio.run(total(swarm, f"cell/{number}", 2.0 + number))
    assert handle.wait(60).status == "committed"
    assert flat.tolist() == [1.0] * 5
