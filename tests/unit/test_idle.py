"""Scripts that give a run nothing are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.node.run.events import document, read_event
from atoll.node.run.status import read_run_status
from atoll.node.service.node import NobodysScript
from atoll.node.views.documents import run_state
from atoll.node.views.event_words import Words
from atoll.node.watching.idle import AFTER_S, STEPLESS_S, Idle, JoinedScript


def test_who_joins_and_never_attaches_is_named_once() -> None:
    told = list[Mapping[str, Any]]()
    idle = Idle("run", lambda event: told.append(document(event)))
    idle.joined(0.0, 41)
    idle.joined(10.0, 42)
    idle.joined(20.0, 43)
    idle.gone(43)  # it attaches
    idle.look(AFTER_S - 1)
    assert (told, idle.unattached(AFTER_S - 1)) == ([], {})
    idle.look(AFTER_S + 1)
    idle.look(AFTER_S + 2)
    assert [(event["event"], event["pid"], event["seconds"]) for event in told] == [
        ("script.unattached", 41, 61.0)
    ]
    idle.look(AFTER_S + 10)
    assert [event["pid"] for event in told] == [41, 42]
    assert idle.unattached(AFTER_S + 10) == {"41": 70.0, "42": 60.0}
    run = {"phase": "running", "script": False, "unattached": idle.unattached(AFTER_S + 10)}
    assert run_state(read_run_status(run)) == (
        "seeding; no script is training here; process 41 joined 1 min 10 s ago and has attached nothing"
        "; process 42 joined 1 min ago and has attached nothing"
    )
    assert list(Words().of(read_event(told[0]))) == [
        "process 41 joined 1 min 1 s ago and has attached nothing"
    ]
    idle.gone(41)
    idle.gone(42)
    assert idle.unattached(1000.0) == {}


def test_who_says_what_it_prepares_is_not_named_and_who_says_nothing_is() -> None:
    told = list[Mapping[str, Any]]()
    idle, woken = Idle("run", lambda event: told.append(document(event))), list[int]()
    idle.joined(0.0, 41)
    idle.joined(0.0, 42)
    script = JoinedScript(idle, 41, lambda: woken.append(41))
    script.prepares("loads the run's model")
    idle.prepares(43, "is not here")
    later = AFTER_S + 61
    idle.look(later)
    assert [event["pid"] for event in told] == [42]
    assert list(idle.unattached(later)) == ["42"]
    assert idle.preparing(later) == {"41": ("loads the run's model", later)}
    assert woken == [41]
    run = {"phase": "running", "preparing": {"41": ["loads the run's\x1b model", later]}}
    assert run_state(read_run_status(run)) == (
        "seeding; process 41 loads the run's\\x1b model, for 2 min 1 s"
    )
    idle.prepares(41, "")  # it says so itself
    idle.look(later)
    assert [event["pid"] for event in told] == [42, 41]
    script.prepares("reads its data")
    script.gone()
    assert (idle.preparing(later), idle.processes) == ({}, [42])
    NobodysScript().prepares("loads the model")
    NobodysScript().gone()


def test_who_attaches_and_never_steps_is_named_once() -> None:
    told = list[Mapping[str, Any]]()
    idle = Idle("run", lambda event: told.append(document(event)))
    idle.attached(0.0)
    idle.look(STEPLESS_S - 1)
    assert (told, idle.view(STEPLESS_S - 1)) == ([], None)
    idle.look(STEPLESS_S)
    idle.look(STEPLESS_S + 1)
    assert [(event["event"], event["seconds"]) for event in told] == [("script.idle", STEPLESS_S)]
    assert idle.view(STEPLESS_S + 1) == STEPLESS_S + 1
    idle.over()
    assert idle.view(1000.0) is None
