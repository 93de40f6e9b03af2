"""Reductions of every number type: values against numpy, the same bits at all members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from atoll.collectives import api
from atoll.collectives.errors import ConfigError, LocalProtocolError
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import SoloSwarm

COUNT, NUMEL = 3, 70_001  # more than one chunk
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
OF_INTEGERS = ("sum", "max", "min", "product")


def play(body: Callable[[LocalMember], Any], topology: Any = "butterfly") -> list[Any]:
    ended = set[int]()

    def script(member: Any) -> Any:
        api.enter(member)
        while len(member.members()) < COUNT:
            member.sleep(0.1)
        member.sleep(1.0)
        try:
            return body(member)
        finally:
            ended.add(member.index)
            while len(ended) < COUNT:
                member.sleep(0.5)

    places = ["here", "here", "there"] if topology != "butterfly" else []
    swarm = LocalSwarm(COUNT, settings=RunSettings(plan=topology), latency_s=0.01, sites=places)
    return swarm.run(script, limit_s=600.0)


def given_by(index: int, dtype: torch.dtype) -> torch.Tensor:
    rng = torch.Generator().manual_seed(index)
    if dtype.is_floating_point:
        return torch.randn(NUMEL, generator=rng, dtype=torch.float64).to(dtype)
    # Products of three of int8 fit; int64 holds what no float32 does.
    values = torch.randint(0 if dtype == torch.uint8 else -5, 6, (NUMEL,), generator=rng)
    return (values * ((1 << 59) + 1) if dtype == torch.int64 else values).to(dtype)


def right(op: str, dtype: torch.dtype, weights: tuple[int, ...]) -> torch.Tensor:
    """In the order of the members, in the type that it is reduced in."""
    wide = (
        torch.int64
        if dtype in INTEGERS
        else torch.float64
        if dtype == torch.float64
        else torch.float32
    )
    rows = [given_by(index, dtype).to(wide).numpy() for index in range(COUNT)]
    if op == "mean":
        total = sum(
            (row * row.dtype.type(w) for row, w in zip(rows, weights, strict=True)), 0 * rows[0]
        )
        return torch.from_numpy(total / rows[0].dtype.type(sum(weights))).to(dtype)
    function = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}[op]
    total = rows[0]
    for row in rows[1:]:
        total = function(total, row)
    return torch.from_numpy(total).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_reduction_of_every_type_has_the_values_of_numpy(dtype: torch.dtype) -> None:
    ops = OF_INTEGERS if dtype in INTEGERS else ("mean", *OF_INTEGERS)
    weights = (1, 2, 3)

    def body(member: LocalMember) -> dict[str, torch.Tensor]:
        found = dict[str, torch.Tensor]()
        for op in ops:
            found[op] = given_by(member.index, dtype).reshape(1, NUMEL)
            weight = weights[member.index] if op == "mean" else 1
            handle = api.all_reduce(member, found[op], op_id=op, op=op, weight=weight)  # type: ignore[arg-type]
            outcome = handle.wait()
            assert (outcome.status, len(outcome.contributors)) == ("committed", COUNT)
        return found

    played = play(body)
    for op in ops:
        results = [found[op].flatten() for found in played]
        assert all(torch.equal(result, results[0]) for result in results)
        if dtype == torch.float32 and op == "mean":
            torch.testing.assert_close(results[0], right(op, dtype, weights))
        elif dtype in (torch.bfloat16, torch.float16) and op == "mean":
            torch.testing.assert_close(results[0], right(op, dtype, weights), rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(results[0], right(op, dtype, weights)), op


def test_named_tensors_of_one_width_and_types_that_differ() -> None:
    def body(member: LocalMember) -> tuple[list[Any], str]:
        tree = {"step": torch.full((1,), member.index), "count": torch.full((2,), 7).to(torch.int8)}
        assert api.all_reduce(member, tree, op_id="tree", op="sum").wait().status == "committed"
        half = {"a": torch.ones(2, dtype=torch.float16), "b": torch.full((1,), 2.0)}
        assert api.all_reduce(member, half, op_id="half", op="sum").wait().status == "committed"
        odd = torch.ones(4, dtype=torch.float32 if member.index else torch.bfloat16)
        with pytest.raises(LocalProtocolError) as told:
            api.all_reduce(member, odd, op_id="odd", op="sum").wait()
        values = [*tree.values(), *half.values()]
        return [value.tolist() for value in values], told.value.message

    for values, message in play(body):
        assert values == [[3], [21, 21], [3.0, 3.0], [6.0]]
        assert "“bfloat16[4]”" in message
        assert "“float32[4]”" in message


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        (torch.int8, 100, "the sum does not fit int8"),
        (torch.uint8, 100, "the sum does not fit uint8"),
        (torch.float16, 40000.0, "the sum does not fit float16"),
        (torch.float64, 1e308, "the sum does not fit float64"),
        (torch.float32, 3e38, "the sum of the values of p0, p1, p2 overflows fp32"),
        (torch.bfloat16, 3e38, "the sum of the values of p0, p1, p2 overflows fp32"),
    ],
)
def test_a_result_that_the_type_cannot_hold_is_an_error_at_all(
    dtype: torch.dtype, value: float, words: str
) -> None:
    def body(member: LocalMember) -> bool:
        tensor = torch.full((3,), value, dtype=dtype)
        before, began = tensor.clone(), member.clock()
        handle = api.all_reduce(member, tensor, op_id="sum", op="sum")
        for _ in range(2):
            with pytest.raises(LocalProtocolError, match=words):
                handle.wait()
        assert handle.done()
        assert member.clock() - began < 2.0  # not the deadline of a minute
        return torch.equal(tensor, before)

    assert play(body) == [True] * COUNT


@pytest.mark.parametrize("topology", ["butterfly", "two-level"])
def test_what_overflows_is_said_to_all_also_late_and_on_trees(topology: Any) -> None:
    """One element of many, in one chunk; a sum of a site, too; a caller that comes when the others
    have heard; and what comes out of the range on the way is told as well, back in it or not.
    """

    def body(member: LocalMember) -> list[str]:
        said = list[str]()
        values = {"sum": 3e38, "mean": 3e38, "product": 1e30}
        for op, value in values.items():
            tensor = torch.zeros(NUMEL)
            tensor[NUMEL - 1] = value
            before = tensor.clone()
            if op == "product" and member.index == 2:
                member.sleep(12.0)
            with pytest.raises(LocalProtocolError, match="overflows fp32") as told:
                api.all_reduce(member, tensor, op_id=op, op=op).wait()  # type: ignore[arg-type]
            assert torch.equal(tensor, before)
            said.append(told.value.message)
        with pytest.raises(LocalProtocolError, match="overflows fp32"):
            api.reduce_scatter(member, torch.full((9,), 3e38), op_id="part", op="sum").wait()
        fine = torch.ones(NUMEL)
        assert api.all_reduce(member, fine, op_id="fine", op="sum").wait().status == "committed"
        assert fine.sum() == COUNT * NUMEL
        return said

    played = play(body, topology)
    assert len({tuple(said) for said in played}) == 1


def test_what_a_type_cannot_do_is_refused_in_words() -> None:
    swarm = SoloSwarm()
    for tensor, options, words in (
        (torch.ones(2, dtype=torch.int32), {}, "mean of int32"),
        (torch.ones(2, dtype=torch.float64), {"op": "median"}, "median of float64"),
        (torch.ones(2, dtype=torch.complex64), {}, "a reduction takes float32.*, not complex64"),
        (torch.ones(2, dtype=torch.bool), {"op": "sum"}, "a reduction takes float32.*, not bool"),
        (torch.tensor([float("nan")]).double(), {}, "NaN or infinity"),
        (
            {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)},
            {"op": "sum"},
            "one reduction of",
        ),
        (torch.ones(2), {"op": "avg"}, "a mean, sum, max, min or product"),
    ):
        with pytest.raises(LocalProtocolError, match=words):
            api.all_reduce(swarm, tensor, op_id="x", **options)  # type: ignore[arg-type]
    for tensor, op in ((torch.ones(2).double(), "sum"), (torch.ones(2), "min")):
        with pytest.raises(ConfigError, match="codec"):
            api.all_reduce(swarm, tensor, op_id="x", op=op, codec="int8")  # type: ignore[arg-type]
    large = torch.tensor([2**53 + 1, -(2**60)])
    assert api.all_reduce(swarm, large, op_id="alone", op="min").wait().status == "committed"
    assert large.tolist() == [2**53 + 1, -(2**60)]
