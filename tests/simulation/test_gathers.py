"""Gathers of unequal lengths and of objects, names that survive a restart, and a founder that waits
for others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from atoll.collectives import (
    all_gather,
    all_reduce,
    average,
    enter,
    gather_objects,
    numbered,
    plain,
)
from atoll.collectives.errors import LocalProtocolError, NotEnoughPeersError, RemoteProtocolError
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import SoloSwarm


def play(count: int, body: Callable[[LocalMember], Any]) -> list[Any]:
    ended = set[int]()

    def script(member: Any) -> Any:
        enter(member, start_with=count)
        try:
            return body(member)
        finally:
            ended.add(member.index)
            while len(ended) < count:
                member.sleep(0.5)

    return LocalSwarm(count, latency_s=0.01).run(script, limit_s=900.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool, torch.complex64], ids=str)
def test_rows_of_unequal_number_come_bit_for_bit(dtype: torch.dtype) -> None:
    def rows(index: int) -> torch.Tensor:
        return torch.arange(3 * (2 * index)).reshape(2 * index, 3).to(dtype)

    def body(member: LocalMember) -> dict[Any, torch.Tensor]:
        return all_gather(member, rows(member.index), op_id="g", most=7).wait().tensors

    for found in play(3, body):
        assert list(found) == ["p0", "p1", "p2"]
        for index, tensor in enumerate(found.values()):
            assert tensor.dtype == dtype
            assert tensor.shape == (2 * index, 3)
            assert torch.equal(tensor, rows(index))


def test_callers_that_differ_in_most_or_in_a_row_hear_it() -> None:
    def body(member: LocalMember) -> list[str]:
        said = list[str]()
        for name, width, most in (("most", 2, 5 + member.index), ("row", 2 + member.index, 5)):
            with pytest.raises(LocalProtocolError) as told:
                all_gather(member, torch.ones(1, width), op_id=name, most=most).wait()
            said.append(told.value.message)
        return said

    for said in play(2, body):
        assert "rows<=5" in said[0]
        assert "rows<=6" in said[0]
        assert "float32[1,2]" in said[1]
        assert "float32[1,3]" in said[1]


OBJECTS: list[Any] = [
    {"loss": 0.5, "steps": [1, 2, None], "who": "é"},
    b"\x00\xff",
    [],
]


def test_objects_come_as_they_were_given() -> None:
    def body(member: LocalMember) -> dict[Any, Any]:
        return gather_objects(member, OBJECTS[member.index], op_id="o", most=100).wait().values

    assert play(3, body) == [{f"p{index}": value for index, value in enumerate(OBJECTS)}] * 3


def test_what_cannot_be_gathered_is_refused_in_words() -> None:
    swarm = SoloSwarm()
    for value, most, words in (
        ("x" * 100, 50, "an object of 102 bytes, where 50 are the most"),
        (object(), 50, "cannot be sent"),
        (1, 0, "objects of at most 0 bytes"),
        (1, 1 << 30, "objects of at most"),
    ):
        with pytest.raises(LocalProtocolError, match=words):
            gather_objects(swarm, value, op_id="x", most=most)
    for tensor, most in ((torch.ones(3), 2), (torch.tensor(1.0), 2)):
        with pytest.raises(LocalProtocolError, match="a gather of at most 2 rows"):
            all_gather(swarm, tensor, op_id="x", most=most)
    with pytest.raises(LocalProtocolError, match="contiguous"):
        all_gather(swarm, torch.ones(4, 4)[:, 0], op_id="x", most=9)
    nothing = all_gather(swarm, torch.ones(0, 2), op_id="none", most=3).wait().tensors
    assert [tensor.shape for tensor in nothing.values()] == [(0, 2)]


@pytest.mark.parametrize("length", [-1, 6, 1 << 62])
def test_a_hostile_number_of_rows_is_named(length: int) -> None:
    def body(member: LocalMember) -> str:
        if member.index:  # what an honest gather of 5 rows of 4 bytes sends, but for its number
            slot = torch.zeros(8 + 20, dtype=torch.uint8)
            slot[:8].view(torch.int64)[0] = length
            call = msgspec.structs.replace(honest(), weight=1)
            member.operate(call, slot.view(torch.float32)).wait()
            return ""
        handle = all_gather(member, torch.ones(2), op_id="g", most=5, everyone=True)
        with pytest.raises(RemoteProtocolError, match=f"{length} rows, of at most 5") as told:
            handle.wait()
        return str(told.value.peer)

    def honest() -> Any:
        from atoll.collectives.api import call_of

        return call_of("g", "gather", 60.0, True, tag="rows<=5:float32[1]")

    assert play(2, body) == ["p1", ""]


def test_a_numbered_name_goes_on_after_a_restart_and_meets_those_who_wait() -> None:
    """Each life counts from what the nodes know: no name is used twice, and nobody stays alone."""
    seen: dict[tuple[int, int], list[tuple[str, int]]] = {}

    def script(member: Any) -> None:
        enter(member, start_with=3)
        life = sum(index == member.index for index, _ in seen)
        mine = seen.setdefault((member.index, life), [])
        while member.clock() < 30.0:
            tensor = torch.ones(1)
            name = numbered(member, "loss")
            outcome = all_reduce(member, tensor, op_id=name, op="sum", deadline_s=30).wait()
            assert outcome.status == "committed"
            assert tensor.item() == len(outcome.contributors)
            mine.append((name, len(outcome.contributors)))
            member.sleep(1.0)
        member.sleep(30.0)

    LocalSwarm(3).crash_at(2, 9.0, back_after_s=4.0).run(script, limit_s=900.0)
    names = [name for name, _ in seen[2, 0] + seen[2, 1]]
    assert len(set(names)) == len(names)
    assert seen[2, 1][-1][0] == "loss/" + str(max(int(name[5:]) for name in names))
    assert sum(count > 1 for _, count in seen[2, 1]) >= 3
    with pytest.raises(LocalProtocolError, match="a series is named by"):
        numbered(SoloSwarm(), "")
    swarm = SoloSwarm()
    for number in range(3):
        name = numbered(swarm, "x")
        assert name == f"x/{number}"
        all_reduce(swarm, torch.ones(1), op_id=name).wait()
    with pytest.raises(LocalProtocolError, match=r"no numbered\(\) name"):
        average(swarm, torch.ones(1), op_id=numbered(swarm, "x"))


def test_a_founder_waits_for_others_or_hears_that_it_was_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decided(start_with: int) -> list[int]:
        def script(member: Any) -> int:
            enter(member, start_with=start_with)
            name = f"first of {1 if start_with > 1 else member.index}"
            outcome = all_reduce(member, torch.ones(1), op_id=name, everyone=True).wait()
            member.sleep(60.0)
            return len(outcome.contributors)

        return LocalSwarm(2).join_at(1, 20.0).run(script)

    monkeypatch.setattr(plain, "_told_alone", False)
    with caplog.at_level(logging.WARNING):
        assert decided(2) == [2, 2]
        assert not [line for line in caplog.messages if "alone" in line]
        assert decided(1)[0] == 1
    assert "decided by this member alone" in "\n".join(caplog.messages)
    with pytest.raises(NotEnoughPeersError, match="1 of 2 members are there"):
        enter(SoloSwarm(), start_with=2)

    def impatient(member: Any) -> str:
        with pytest.raises(NotEnoughPeersError, match="1 of 2 members are there") as told:
            enter(member, start_with=2, timeout_s=5.0)
        return f"{told.value.retryable} {member.clock():.0f}"

    assert LocalSwarm(1).run(impatient) == ["True 5"]
