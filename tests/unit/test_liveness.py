"""When a connection is asked for a sign of life, and when it is given up, in virtual time."""

from __future__ import annotations

import itertools
import random

import pytest

from atoll.node.net.transport.liveness import ANSWER_S, FIRST_S, JITTER, LATE_S, SILENT_S, Liveness


def play(*arrivals: float, until: float) -> list[tuple[float, str]]:
    """What a connection that began at 0 does besides waiting, and when, if something arrives at
    these times.
    """
    alive, found, coming = Liveness(0.0, random.Random(1)), list[tuple[float, str]](), [*arrivals]
    while alive.at <= until:
        while coming and coming[0] <= alive.at:
            alive.heard(coming.pop(0))
        now = alive.at
        verdict = alive.due(now)
        if verdict != "wait":
            found.append((now, verdict))
        if verdict == "dead":
            break
    return found


def test_who_never_answers_is_given_up_after_the_first_question() -> None:
    assert play(until=100.0) == [(FIRST_S, "ask"), (FIRST_S + ANSWER_S, "dead")]


def test_an_idle_connection_is_asked_about_every_quarter_of_a_minute() -> None:
    alive, asked, now = Liveness(0.0, random.Random(1)), list[float](), 0.0
    while now < 600.0:
        now = alive.at
        verdict = alive.due(now)
        assert verdict != "dead"
        if verdict == "ask":
            asked.append(now)
            alive.heard(now + 0.1)
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert all(SILENT_S <= pause <= SILENT_S * (1 + JITTER) + 0.1 for pause in pauses)
    assert len({round(pause, 3) for pause in pauses}) > 20


def test_one_that_is_used_is_not_asked_again_and_its_end_is_noticed() -> None:
    used = [second / 2 for second in range(1, 121)]
    found = play(*used, until=200.0)
    assert found[0] == (FIRST_S, "ask")
    (asked, ask), (gone, dead) = found[1:]
    assert (ask, dead) == ("ask", "dead")
    assert 60.0 + SILENT_S <= asked <= 60.0 + SILENT_S * (1 + JITTER)
    assert gone == asked + ANSWER_S


@pytest.mark.parametrize("late_s", [LATE_S, 3600.0])
def test_who_was_stopped_itself_asks_again_before_it_gives_anybody_up(late_s: float) -> None:
    alive = Liveness(0.0, random.Random(1))
    assert alive.due(FIRST_S) == "ask"
    woken = alive.at + late_s
    assert alive.due(woken) == "ask"
    assert alive.at == woken + ANSWER_S
    assert alive.due(alive.at) == "dead"
