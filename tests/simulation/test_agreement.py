"""What the callers of an operation must agree in is what they would notice: where two differ, all
of them hear at once, in words, who gave what, and nobody's tensor is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll.collectives import api
from atoll.collectives.averaging import average
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.plain import tag_of, tree_kind
from atoll.collectives.script_swarm import MAX_TAG
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember

A = torch.arange(6.0).reshape(2, 3)
SHAPES = [A, A.t().contiguous(), A.flatten()]


def play(count: int, body: Callable[[LocalMember], Any]) -> list[Any]:
    ended = set[int]()

    def script(member: Any) -> Any:
        api.enter(member)
        while len(member.members()) < count:
            member.sleep(0.1)
        member.sleep(1.0)
        try:
            return body(member)
        finally:
            ended.add(member.index)
            while len(ended) < count:
                member.sleep(0.5)

    return LocalSwarm(count, settings=RunSettings(), latency_s=0.01).run(script, limit_s=600.0)


Call = Callable[[LocalMember, torch.Tensor], Any]
SHAPED: dict[str, tuple[Call, str]] = {
    "all_reduce": (lambda m, t: api.all_reduce(m, t, op_id="x", op="sum"), "float32[3,2]"),
    "robust without f": (lambda m, t: api.all_reduce(m, t, op_id="x", op="median"), "float32[6]"),
    "reduce_scatter": (lambda m, t: api.reduce_scatter(m, t, op_id="x"), "scatter:float32[2,3]"),
    "average": (lambda m, t: average(m, t, op_id="x", dims=1), "mean:float32[3,2]"),
    "all_gather": (lambda m, t: api.all_gather(m, t, op_id="x"), "float32[6]"),
    "broadcast": (lambda m, t: api.broadcast(m, t, root="p1", op_id="x"), "float32[3,2]<p1"),
    "check_state": (lambda m, t: api.check_state(m, {"w": t}, op_id="x"), "state:w:float32[6]"),
}


@pytest.mark.parametrize("apart_s", [0.0, 0.5])
@pytest.mark.parametrize("what", SHAPED)
def test_who_gives_another_shape_is_named_to_all_callers_at_once(what: str, apart_s: float) -> None:
    """Three shapes of as many elements; the calls come together, or one after the other."""
    call, shown = SHAPED[what]

    def body(member: LocalMember) -> tuple[str, float, list[float]]:
        member.sleep(apart_s * member.index)
        given, since = SHAPES[member.index].clone(), member.clock()
        with pytest.raises(LocalProtocolError) as told:
            call(member, given).wait()
        return told.value.message, member.clock() - since, given.flatten().tolist()

    played = play(3, body)
    for index, (message, waited, given) in enumerate(played):
        assert given == SHAPES[index].flatten().tolist()
        assert waited < 0.1 + 2 * apart_s
        assert message.startswith("operation 'x")
        assert f"p{index} calls it with" not in message
        assert message.count("6 elements") + message.count("6 words") + message.count("8 words") > 1
    assert any(shown in message for message, _, _ in played)


DIFFERENT: dict[str, tuple[Call, str, str]] = {
    "codec": (
        lambda m, t: api.all_reduce(m, t, op_id="x", codec="int8" if m.index else ""),
        "fp32",
        "int8",
    ),
    "op": (
        lambda m, t: api.all_reduce(m, t, op_id="x", op="sum" if m.index else "max"),
        "max",
        "sum",
    ),
    "everyone": (
        lambda m, t: api.all_reduce(m, t, op_id="x", everyone=bool(m.index)),
        "fp32, of",
        "fp32, everyone, of",
    ),
    "kind of weights": (
        lambda m, t: average(m, t, op_id="x", dims=1, weight=3 if m.index else None),
        "mean:float32",
        "weighted:float32",
    ),
    "names": (
        lambda m, t: api.all_reduce(m, {"w": t, "b" if m.index else "c": t}, op_id="x"),
        "c:float32[2,3],w:float32[2,3]",
        "b:float32[2,3],w:float32[2,3]",
    ),
    "kind": (
        lambda m, t: (
            api.all_gather(m, t, op_id="x")
            if m.index
            else api.broadcast(m, t, root="p0", op_id="x")
        ),
        "6 words, copy",
        "6 words, gather",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_else_callers_must_agree_in_is_told_in_words(what: str) -> None:
    call, first, others = DIFFERENT[what]

    def body(member: LocalMember) -> str:
        with pytest.raises(LocalProtocolError) as told:
            call(member, A.clone()).wait()
        return told.value.message

    for message in play(2, body):
        assert first in message
        assert others in message


def test_named_tensors_are_reduced_by_name_whatever_their_order() -> None:
    def body(member: LocalMember) -> list[list[float]]:
        w, b = torch.full((3,), float(member.index)), torch.full((2, 1), 100.0)
        given = {"w": w, "b": b} if member.index else {"b": b, "w": w}
        outcome = api.all_reduce(member, given, op_id="tree", op="sum").wait()
        assert outcome.status == "committed"
        return [w.tolist(), b.flatten().tolist()]

    assert play(3, body) == [[[3.0] * 3, [300.0] * 2]] * 3


def test_a_robust_rule_goes_on_without_who_differs() -> None:
    """Members that may do anything must not be able to end what is made for them."""

    def body(member: LocalMember) -> str:
        flat = SHAPES[1 if member.index == 3 else 0].clone()
        handle = api.all_reduce(member, flat, op_id="x", op="median", f=1, deadline_s=20.0)
        if member.index < 3:
            return handle.wait().status
        with pytest.raises(LocalProtocolError, match=r"float32\[2,3\]"):
            handle.wait()
        return "told"

    assert play(4, body) == ["committed"] * 3 + ["told"]


def test_kinds_are_short_and_plain_whatever_the_names() -> None:
    tensors = {f"läyer/{number}@x\n": torch.ones(1) for number in range(300)}
    kind = tree_kind(tensors)
    assert len(kind) <= MAX_TAG
    assert tag_of(kind) == kind  # of allowed characters, and as it is
    assert kind != tree_kind({**tensors, "one more": torch.ones(1)})
    assert kind.startswith("300:l_yer_")
