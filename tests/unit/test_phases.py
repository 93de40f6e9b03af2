"""What subscribers are told of a reduction's phases, and of plans that are not known."""

from __future__ import annotations

from typing import Any

from atoll.collectives import exchange as x
from atoll.collectives.group import Contributor, Member, Part, Plan
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.outcomes import Share
from atoll.collectives.partition import parts_for
from atoll.node.run.events import document
from atoll.node.session.documents import parts_of
from atoll.node.session.events import PlanTaken
from atoll.node.watching.phases import KEPT, Phases

A, B = PeerId("a"), PeerId("b")


def plan(round_: int) -> Plan:
    """Two members, a part each."""
    who = tuple(Contributor(Member(peer, 0), bytes(16), 1) for peer in (A, B))
    return Plan(
        "main/run", round_, 2, 1, bytes(32), who, (Part(B, 0, 1), Part(A, 1, 2)), 8, 4, "fp32"
    )


def phases() -> tuple[Phases, list[dict[str, Any]]]:
    """Phases, and what they publish."""
    told: list[dict[str, Any]] = []
    return Phases(RunId("run"), lambda event: told.append(document(event))), told


def test_a_reduction_is_told_from_plan_to_decision() -> None:
    subject, told = phases()
    name = plan(5).plan_id
    subject.planned(10.0, PlanTaken(plan(5), B))
    subject.on_exchange(10.5, x.PartReduced(name, 1, bytes(32)))
    subject.on_exchange(10.75, x.ResultComplete(name, (bytes(32),) * 2, memoryview(b"")))
    assert [(event["phase"], event["elapsed_s"]) for event in told] == [
        ("reduce", 0.0),
        ("gather", 0.5),
        ("decide", 0.75),
    ]
    same = {
        "event": "round.phase",
        "run": "run",
        "log": "main/run",
        "op_id": "",
        "round": 5,
        "ballot": 2,
        "revision": 1,
        "convener": B,
    }
    for event in told:
        assert event.items() >= same.items()
        assert (event["owners"], event["contributors"]) == ((B, A), (A, B))


def test_other_plans_and_events_are_none_of_its_business() -> None:
    subject, told = phases()
    subject.on_exchange(1.0, x.PartReduced(bytes(16), 0, bytes(32)))
    subject.on_exchange(1.0, x.NonFinite(bytes(16)))
    assert told == []


def test_old_plans_are_forgotten() -> None:
    subject, told = phases()
    for round_ in range(KEPT + 1):
        subject.planned(0.0, PlanTaken(plan(round_), A, "op"))
    del told[:]
    subject.on_exchange(1.0, x.PartReduced(plan(0).plan_id, 0, bytes(32)))
    assert told == []
    subject.on_exchange(1.0, x.PartReduced(plan(KEPT).plan_id, 0, bytes(32)))
    assert [(event["round"], event["op_id"]) for event in told] == [(KEPT, "op")]


def test_who_added_up_how_much() -> None:
    a, b, c, d = (Share(PeerId(name), 1) for name in "abcd")
    parts = parts_for(120, [(a.peer, 6e7), (b.peer, 6e7), (c.peer, 6e7), (d.peer, 6e6)])
    assert parts_of([a, b, c, d], parts) == {
        a.peer: 0.3333,
        b.peer: 0.3333,
        c.peer: 0.3333,
        d.peer: 0.0,
    }  # its link can carry none
    assert parts_of([a, b, d], parts_for(2, [(a.peer, 1.0), (b.peer, 1.0), (d.peer, 1.0)])) == {
        a.peer: 0.5,
        b.peer: 0.5,
    }  # a chunk for two only
    assert parts_of([a, b], [Part(A, 0, 3), Part(B, 3, 4), Part(A, 4, 8)]) == {A: 0.875, B: 0.125}
    assert parts_of([], []) == parts_of([a], []) == {}
