"""What a node says of a disk that is full, and of a script that does nothing: once, and not for
ever.
"""

from __future__ import annotations

import errno
import logging
from typing import Any

import pytest
import trio

from atoll.collectives.errors import AtollError, LocalProtocolError, StorageError
from atoll.collectives.identifiers import PeerId
from atoll.node.run.events import document, read_event
from atoll.node.run.status import read_run_status
from atoll.node.run.verdicts import Verdicts
from atoll.node.service.troubles import Troubles, coded
from atoll.node.session.events import Waiting
from atoll.node.session.waiting import A_SCRIPT_BEGINS, A_SCRIPT_TRAINS
from atoll.node.views.documents import run_state
from atoll.node.views.event_words import Words
from atoll.node.watching.idle import STEPLESS_S, Idle
from atoll.node.watching.waiting import explained


def test_a_full_disk_is_told_once_though_small_writes_succeed_in_between() -> None:
    told = list[dict[str, Any]]()

    async def main() -> Troubles:
        troubles = Troubles("r", lambda event: told.append(document(event)))
        for number in range(100):
            troubles.tell(StorageError(f"cannot write file {number}: no space", code="E501"))
            troubles.clear()
        troubles.tell(StorageError("file 7 is damaged", code="E303"))
        troubles.tell(StorageError("the last one", code="E501"))
        return troubles

    troubles = trio.run(main)
    assert [(event["event"], event["code"]) for event in told] == [
        ("storage.trouble", "E501"),
        ("storage.trouble", "E303"),
    ]
    assert troubles.current is not None
    assert troubles.current.message == "the last one"  # status has the newest all the same


def test_storage_that_fails_through_no_whole_round_is_mended_and_its_verdict_goes() -> None:
    told = list[dict[str, Any]]()

    async def main() -> None:
        troubles = Troubles("r", lambda event: told.append(document(event)))
        for fails in (1, 0, 2, 1, 0, 0, 1):  # how often in each round
            for number in range(fails):
                troubles.tell(StorageError(f"cannot write file {number}: no space", code="E501"))
            troubles.clear()

    trio.run(main)
    assert [event["event"] for event in told] == [
        *("storage.trouble", "storage.mended"),
        *("storage.trouble", "storage.mended"),
        "storage.trouble",
    ]
    verdicts = Verdicts()
    raised = [verdicts.take(read_event({**event, "at": 1e9 + at})) for at, event in enumerate(told)]
    assert [[(change.raised, change.verdict.code) for change in each] for each in raised] == [
        [(True, "V06")],
        [(False, "V06")],
        [(True, "V06")],
        [(False, "V06")],
        [(True, "V06")],
    ]
    assert list(Words().of(read_event(told[1]))) == ["what must be written is written again"]


def test_who_cannot_write_what_came_waits_for_its_disk_and_for_nobody_else() -> None:
    lacks = Waiting(
        "lacking state", "the result of entry 7", (PeerId("p1"),), "one of them is reached", 0.0
    )
    full = StorageError("no space", code="E501")
    found = explained(lacks, full)
    assert (found.state, found.of) == ("lacking state", ())
    assert (found.what, found.ends) == (
        "room for what this node must write before it votes",
        "its disk takes that",
    )
    assert explained(lacks, None) == explained(lacks, StorageError("old", code="E303")) == lacks
    trains = Waiting("training", "contributions", (), "one of them contributes", 0.0)
    assert explained(trains, full) == trains


def test_a_script_that_loads_its_model_is_what_is_waited_for() -> None:
    preparing = {"41": ("loads the run's model", 12.3)}
    for state, what in (("waiting for peers", A_SCRIPT_BEGINS), ("training", A_SCRIPT_TRAINS)):
        found = explained(Waiting(state, what, (), "one attaches", 0.0), None, preparing)
        said = "this machine's script: process 41 loads the run's model, for 12 s"
        assert (found.state, found.what, found.ends) == (state, said, "it attaches")
    other = Waiting("training", "contributions", (), "one of them contributes", 0.0)
    assert explained(other, None, preparing) == other


@pytest.mark.parametrize(
    ("error", "code", "traced"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "E502", False),
        (OSError(errno.EROFS, "Read-only file system", "/home/x"), "E501", False),
        (MemoryError(), "E502", False),
        (ExceptionGroup("", [OSError(errno.EIO, "Input/output error")]), "E501", False),
        (ValueError("a defect"), "E142", True),
        (LocalProtocolError("a defect"), "E142", True),
    ],
)
def test_a_refusal_of_the_system_is_logged_without_a_traceback_and_a_defect_with_one(
    error: Exception, code: str, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = coded(error, "run r")
    (record,) = caplog.records
    assert found.code == code
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, traced)
    assert traced or (found.code in record.getMessage() and found.message in record.getMessage())


def test_a_coded_error_is_passed_on_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    error: AtollError = StorageError("no space")
    assert coded(ExceptionGroup("", [KeyError(), error]), "run r") is error
    assert caplog.records == []


def test_a_script_that_never_contributes_is_named_once() -> None:
    told = list[dict[str, Any]]()
    idle = Idle("r", lambda event: told.append(document(event)))
    idle.look(1000.0)  # nobody is attached
    idle.attached(1000.0)
    idle.look(1000.0 + STEPLESS_S - 1)
    assert (told, idle.view(1000.0 + STEPLESS_S - 1)) == ([], None)
    for later in (0.0, 1.0, 500.0):
        idle.look(1000.0 + STEPLESS_S + later)
    assert told == [{"event": "script.idle", "run": "r", "at": 0.0, "seconds": STEPLESS_S}]
    assert idle.view(1190.0) == 190.0
    said = run_state(read_run_status({"phase": "running", "script": True, "idle_s": 90.0}))
    assert said == "training; its script has made no step in the 1 min 30 s since it attached"
    (line,) = Words().of(read_event(told[0]))
    assert line == "the script has made no step in the 2 min 10 s since it attached"
    idle.over()
    assert idle.view(2000.0) is None
    idle.attached(2000.0)
    idle.look(3000.0)
    assert len(told) == 2
