"""What a run waits for, in words."""

from __future__ import annotations

from atoll.node.run.status import read_run_status
from atoll.node.session.events import Waiting
from atoll.node.views.documents import waiting_lines
from atoll.node.watching.waiting import document_of

WAITING = Waiting(
    "no quorum",
    "2 of 3 members; 1 can be counted on",
    (),
    "enough of them come back",
    since=40.0,
    round_open_s=12.4,
)


def test_a_wait_is_shown_once_it_is_longer_than_usual() -> None:
    document = document_of(WAITING, now=52.4)
    assert (
        waiting_lines(read_run_status({"waiting": None}))
        == waiting_lines(read_run_status({}))
        == []
    )
    assert waiting_lines(read_run_status({"waiting": {**document, "quiet": False}})) == []
    assert waiting_lines(read_run_status({"waiting": {**document, "quiet": True}})) == [
        "  waiting  no quorum, no round for 12 s: 2 of 3 members; 1 can be counted on",
        "           ends when enough of them come back",
    ]
    assert document["round_open_s"] == 12.4


def test_a_run_that_has_all_its_rounds_waits_for_nothing() -> None:
    done = Waiting("finished", "nothing", (), "all rounds are committed", 40.0, 12.4)
    run = {"waiting": {**document_of(done, now=52.4), "quiet": True}}
    assert waiting_lines(read_run_status({**run, "finished": True})) == []
