"""Whether this machine does its part of a run: verdicts V11 to V13, each with its cause, withdrawn,
and none where there is no duty.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio

from atoll.node.client.farewell import cause_of
from atoll.node.run.duty import (
    ABSENT_S,
    BEFORE,
    IDLE_SHARE,
    NEWEST,
    READINGS,
    RETURN_S,
    SLOWER,
)
from atoll.node.run.events import RunEvent, read_event
from atoll.node.run.status import read_run_status
from atoll.node.run.verdicts import PAGES, VerdictChange, Verdicts, judge
from atoll.node.views.documents import run_state
from atoll.node.views.event_words import Words
from atoll.node.watching.judging import Notifier, RunVerdicts
from atoll.node.watching.obituary import ScriptProcess
from atoll.node.watching.standstill import (
    BUSY_S,
    IDLE_S,
    LONGER,
    SIGNS,
    STEPS,
    ProcessReading,
    Standstill,
    read_process,
)
from atoll.optim.script.step_times import MINUTE_S, StepTimes

Event = RunEvent
START = 1e9
OURS = ("V11", "V12", "V13", "V22")


def event(at: float, kind: str, **told: Any) -> Event:
    return read_event({"at": START + at, "event": kind, "run": "r", **told})


ATTACHED = event(0, "script.attached", pid=7)


def standing(events: Iterable[Event], now: float) -> dict[str, str]:
    """Verdicts of duty that stand at ``now``, by code."""
    verdicts, _ = judge(iter(events))
    verdicts.look(START + now)
    found = {code: verdict.said for (code, _), verdict in verdicts.standing.items()}
    return {code: said for code, said in found.items() if code in OURS}


def changed(events: Iterable[Event]) -> list[VerdictChange]:
    """What came and went of them, in order."""
    return [each for each in judge(iter(events))[1] if each.verdict.code in OURS]


def test_a_script_that_was_killed_is_named_at_once_with_its_signal() -> None:
    events = [
        ATTACHED,
        event(60, "script.ended", pid=7, farewell=False),
        event(61, "script.exited", pid=7, how="died of SIGKILL", failed=True),
    ]
    verdicts, changes = judge(iter(events))
    assert [(each.raised, each.verdict.code, each.verdict.since) for each in changes] == [
        (True, "V11", START + 60)
    ]
    assert standing(events, 61) == {"V11": "process 7 died of SIGKILL"}
    assert standing(events, 1e6) == {"V11": "process 7 died of SIGKILL"}
    again = verdicts.take(event(90, "script.attached", pid=8))
    assert [(each.raised, each.verdict.code) for each in again] == [(False, "V11")]
    assert verdicts.standing == {}


def test_a_script_whose_exception_ended_it_is_named() -> None:
    ended = event(60, "script.ended", pid=7, farewell=True, error="KeyError: 'mine'")
    assert standing([ATTACHED, ended], 60) == {"V11": "process 7 ended with KeyError: 'mine'"}


@pytest.mark.parametrize(
    ("how", "finished"),
    [
        # CharlesShang/FastMaskRCNN#172: the kernel ends what takes all memory, with one word
        ("died of SIGKILL", False),
        # facebookresearch/map-anything#89: no traceback, no message
        ("ended with exit status 1", False),
        # modelscope/ms-swift#7992: training has ended, and giving back what it held fails
        ("died of SIGABRT", True),
    ],
)
def test_ends_that_users_have_reported_are_named_where_training_was_not_over(
    how: str, finished: bool
) -> None:
    ended = event(60, "script.ended", pid=7, farewell=False, finished=finished)
    died = event(61, "script.exited", pid=7, how=how, failed=True)
    assert standing([ATTACHED, ended, died], 61) == (
        {} if finished else {"V11": f"process 7 {how}"}
    )


def test_a_loader_that_hangs_leaves_an_idle_gpu() -> None:
    """tensorpack/tensorpack#1134: workers of the loader are gone, and the script waits."""
    busy, at = reports([0.9] * 20, name="gpu_busy")
    idle, end = reports([0.0] * READINGS, at, "gpu_busy")
    assert list(standing([ATTACHED, *busy, *idle], end)) == ["V13"]


def test_a_script_that_only_lost_its_connection_has_time_to_come_back() -> None:
    lost = [ATTACHED, event(60, "script.ended", pid=7, farewell=False)]
    assert standing(lost, 60 + ABSENT_S - 1) == {}
    assert standing([*lost, event(90, "script.attached", pid=7)], 1e5) == {}
    assert standing(lost, 60 + ABSENT_S) == {"V11": "process 7 lives, and is not attached any more"}


def test_a_script_that_does_not_come_back_with_its_node_is_named() -> None:
    """As after a reboot; the connection ended because the node did."""
    events = [
        ATTACHED,
        event(60, "script.ended", pid=7),
        event(500, "script.missing", pid=7, since=START, how=""),
    ]
    assert standing(events, 500 + RETURN_S - 1) == {}
    assert standing([*events, event(600, "script.attached", pid=9)], 1e5) == {}
    assert list(standing(events, 500 + RETURN_S)) == ["V11"]
    dead = event(500, "script.missing", pid=7, since=START, how="died of SIGKILL")
    assert standing([dead], 500 + RETURN_S) == {"V11": "process 7 died of SIGKILL"}


DIED = [
    event(60, "script.ended", pid=7, farewell=False),
    event(61, "script.exited", pid=7, how="died of SIGKILL", failed=True),
]


@pytest.mark.parametrize(
    "events",
    [
        [event(60, "script.ended", pid=7, farewell=True)],
        [event(60, "script.ended", pid=7)],  # of an earlier node, or the node ends
        [event(60, "script.ended", pid=7, farewell=False, finished=True), DIED[1]],
        [
            event(60, "script.ended", pid=7, farewell=False),
            event(61, "script.exited", pid=7, how="ended with exit status 0", failed=False),
        ],
        [event(50, "run.waiting", state="finished", what="nothing"), *DIED],
        [*DIED, event(70, "run.waiting", state="finished", what="nothing")],
        [*DIED, event(70, "run.left")],
        [event(50, "run.paused", why="paused by its owner"), *DIED],
        [*DIED, event(70, "run.paused", why="paused by its owner")],
        [event(10, "script.attached", pid=8), *DIED],  # it came while the dead one's link stood
    ],
    ids=lambda events: "-".join(each.kind for each in events),
)
def test_nobody_is_missed_who_has_no_duty(events: list[Event]) -> None:
    assert standing([ATTACHED, *events], 1e6) == {}


def test_observers_and_seeds_have_no_duty() -> None:
    events = [event(at, "peer.path", peer="p", path="direct") for at in range(0, 5000, 10)]
    events += [event(5000, "run.waiting", state="training", what="contributions")]
    assert standing(events, 1e6) == {}


def test_a_pause_suspends_the_duty_and_its_end_gives_time_to_start() -> None:
    events = [
        ATTACHED,
        *DIED,
        event(70, "run.paused", why="paused by its owner"),
        event(5000, "run.resumed"),
    ]
    assert standing(events[:-1], 4999) == {}
    assert standing(events, 5000 + RETURN_S - 1) == {}
    assert standing(events, 5000 + RETURN_S) == {"V11": "process 7 died of SIGKILL"}


def reports(
    seconds: Iterable[float], start: float = 60.0, name: str = "step_s"
) -> tuple[list[Event], float]:
    at, found = start, list[Event]()
    for value in seconds:
        found.append(event(at, "script.report", metrics={name: value}))
        at += MINUTE_S
    return found, at


def test_steps_that_are_many_times_slower_are_named_and_withdrawn() -> None:
    usual, at = reports([0.2] * 60)
    slow, later = reports([4.0] * NEWEST, at)
    assert changed([ATTACHED, *usual, *slow[:2]]) == []
    assert standing([ATTACHED, *usual, *slow], later) == {
        "V12": "a step takes 4 s, 0.2 s before: 20 times"
    }
    # for as long as it is so: hours of it are not the new usual
    longer, end = reports([4.0] * 400, later)
    assert list(standing([ATTACHED, *usual, *slow, *longer], end)) == ["V12"]
    well, end = reports([0.25] * NEWEST, later)
    assert standing([ATTACHED, *usual, *slow, *well], end) == {}


def test_a_minute_of_reports_is_no_round_of_losses() -> None:
    """They say nothing of dropped samples, which V04 counts from round to round."""
    events, at = [ATTACHED], 60.0
    for number in range(9):
        more = {"step": number, "dropped": 64}  # once, before the first of them
        events.append(event(at, "script.report", metrics=more))
        events.append(event(at + 1, "script.report", metrics={"step_s": 0.1, "gpu_busy": 0.9}))
        at += 60
    assert judge(iter(events))[1] == []


@pytest.mark.parametrize("seed", range(20))
def test_honest_steps_have_no_verdict(seed: int) -> None:
    """Noise, a cold start, evaluations that fill a minute, a loader that stalls now and then, and
    steps that grow fourfold with the sequences; another script with a larger model.
    """
    rng = random.Random(seed)
    seconds = [30.0, 8.0] + [
        0.2
        * (1 + 3 * minute / 600)
        * rng.lognormvariate(0, 0.3)
        * (40 if rng.random() < 0.04 else 1)
        for minute in range(600)
    ]
    events, at = reports(seconds)
    larger, end = reports([6.0] * 30, at + 60)
    again = event(at + 1, "script.attached", pid=9)
    assert changed([ATTACHED, *events, again, *larger]) == []
    assert end > at


def test_a_first_round_may_take_hours() -> None:
    """A script that compiles, or makes many steps, before it contributes for the first time."""
    waiting = event(30, "run.waiting", state="training", what="contributions of members")
    verdicts, changes = judge(iter([ATTACHED, waiting]))
    assert (changes, verdicts.look(START + 4 * 3600)) == ([], [])
    verdicts.take(event(4 * 3600, "run.waiting", state="no quorum", what="2 of 3 members"))
    assert list(verdicts.standing) == [("V09", "")]  # it was no silence of the script


def test_a_few_reports_are_no_usual_time() -> None:
    events, at = reports([0.1] * (BEFORE - 1) + [0.1 * 3 * SLOWER] * NEWEST)
    assert standing([ATTACHED, *events], at) == {}


def test_a_gpu_that_idles_is_named_once_its_driver_has_said_so_for_long() -> None:
    busy, at = reports([0.9] * 20, name="gpu_busy")
    idle, end = reports([IDLE_SHARE / 2] * READINGS, at, "gpu_busy")
    assert standing([ATTACHED, *busy, *idle[:-1]], end) == {}
    assert list(standing([ATTACHED, *busy, *idle], end)) == ["V13"]
    again, end = reports([0.6], end, "gpu_busy")
    assert standing([ATTACHED, *busy, *idle, *again], end) == {}


def test_what_is_odd_in_an_event_is_passed_over() -> None:
    verdicts = Verdicts()
    for told in (
        event(0, "script.attached"),
        event(1, "script.attached", pid="x"),
        event(2, "script.exited", failed=True),
        event(3, "script.missing", pid=1, since=None),
        event(4, "script.report", metrics={"step_s": "fast", "gpu_busy": None}),
        event(5, "script.report", metrics={"step_s": float("nan"), "gpu_busy": 7}),
    ):
        assert verdicts.take(told) == []


def test_status_says_since_when_no_script_trains_here() -> None:
    run: dict[str, Any] = {"phase": "running", "script": False}
    verdict = {"code": "V11", "since": START, "said": "process 7 died of SIGKILL"}
    assert run_state(read_run_status(run)) == "seeding; no script is training here"
    assert run_state(read_run_status({**run, "verdicts": [verdict]})).startswith(
        "seeding; no script is training here since 2001-09-0"
    )
    for odd in ("soon", None, 1e300):
        told = read_run_status({**run, "verdicts": [{**verdict, "since": odd}]})
        assert run_state(told) == run_state(read_run_status(run))


def test_events_of_a_scripts_end_have_words() -> None:
    words = Words()
    told = [
        event(0, "script.ended", pid=7, farewell=True, error="KeyError: 'mine'"),
        event(0, "script.exited", pid=7, how="died of SIGKILL", failed=True),
        event(0, "script.missing", pid=7, since=0.0, how=""),
        event(0, "run.left"),
    ]
    assert [line for each in told for line in words.of(each)] == [
        "the script has let go, process 7: KeyError: 'mine'",
        "process 7 died of SIGKILL",
        "a script trained here until the node ended, and none is attached now",
        "this machine has left the run",
    ]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, ""),
        (KeyboardInterrupt(), ""),
        (SystemExit(), ""),
        (SystemExit(0), ""),
        (SystemExit(130), ""),
        (SystemExit(3), "exit status 3"),
        (SystemExit("no data"), "exit status 1"),
        (RuntimeError("CUDA error\nmore"), "RuntimeError: CUDA error"),
        (ValueError(), "ValueError"),
        (ValueError("\ud800" + "x" * 500), "ValueError: ?" + "x" * 187),
    ],
)
def test_what_ended_a_script_is_told_in_a_line(error: BaseException | None, cause: str) -> None:
    assert cause_of(error) == cause


@pytest.mark.parametrize(
    ("code", "end", "how", "status"),
    [
        ("import time; time.sleep(60)", signal.SIGKILL, "died of SIGKILL", -9),
        ("import os; os._exit(3)", None, "ended with exit status 3", 3),
        ("pass", None, "ended with exit status 0", 0),
    ],
)
def test_how_a_process_ended_is_known_to_who_is_not_its_parent(
    code: str, end: signal.Signals | None, how: str, status: int
) -> None:
    async def main() -> tuple[bool, tuple[str, int | None]]:
        child = subprocess.Popen([sys.executable, "-c", "input();" + code], stdin=subprocess.PIPE)
        process = ScriptProcess(child.pid)
        assert not await process.ended(0.01)
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        if end is not None:
            child.send_signal(end)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, child.wait)
            gone = await process.ended(60)
            found = await process.how()
        process.close()
        return gone, found

    gone, found = trio.run(main)
    assert gone
    assert found in ((how, status), ("is gone", None))  # the latter before Linux 6.15
    assert trio.run(ScriptProcess(0).ended, 0.01) is False
    assert trio.run(ScriptProcess(os.getpid()).ended, 0.01) is False


def test_step_times_are_the_median_of_a_minute_without_what_is_between_rounds() -> None:
    now = [0.0]
    times = StepTimes(lambda: now[0], lambda: torch.device("cpu"))
    told = list[dict[str, float]]()
    for step in range(1, 1300):
        now[0] += 0.1
        if report := times.step():
            told.append({**report, "at": step})
        if step % 50 == 0:  # a round is waited for
            times.pause()
            now[0] += 30
        if step % 70 == 0:  # an evaluation within a round
            now[0] += 20
    assert len(told) > 10
    assert {round(report["step_s"], 6) for report in told} == {0.1}


class Watched:
    """A standstill's owner: time, and a process of which the test says what it does."""

    def __init__(self) -> None:
        self.now = self.used_s = 0.0
        self.state = "S"
        self.told = list[Event]()
        self.still = Standstill("r", self.publish, self.read)
        self.still.begin(0.0, 7)

    def publish(self, told: Event) -> None:
        self.told.append(msgspec.structs.replace(told, at=START + self.now))

    def read(self, pid: int) -> ProcessReading:
        assert pid == 7
        return ProcessReading(self.used_s, self.state)

    def goes_on(self, seconds: float, *, busy: float = 0.0) -> list[Event]:
        """Nothing is heard of it for so long. What was published."""
        for _ in range(int(seconds)):
            self.now += 1
            self.used_s += busy
            self.still.look(self.now)
        told, self.told[:] = list(self.told), []
        return told

    def steps(self, minutes: int, step_s: float = 0.2) -> None:
        for _ in range(minutes):
            assert self.goes_on(60, busy=1.0) == []
            self.still.stepped(self.now, step_s)


def test_a_script_that_hangs_is_named_once_and_withdrawn_with_its_next_steps() -> None:
    watched = Watched()
    watched.steps(SIGNS)
    assert watched.goes_on(IDLE_S - 1) == []
    sign = watched.now - (IDLE_S - 1)
    (told,) = watched.goes_on(100)
    (name,) = Words().of(told)
    assert name == "process 7 has made no step for 10 min; " + told.doing
    assert standing([ATTACHED, told], 1e4) == {
        "V22": (
            "process 7 has made no step for 10 min, and one took 0.2 s; its process takes no "
            "processor time: it waits for something"
        )
    }
    (change,) = changed([ATTACHED, told])
    assert change.verdict.since == START + sign
    watched.steps(1)
    for event_ in (
        event(2e4, "script.report", metrics={"step_s": 0.2}),
        event(2e4, "script.ended", pid=7, farewell=True),
        event(2e4, "script.attached", pid=8),
        event(2e4, "run.paused", why="paused by its owner"),
        event(2e4, "run.waiting", state="finished", what="nothing"),
    ):
        assert "V22" not in standing([ATTACHED, told, event_], 2e4)
    run = {"phase": "running", "script": True, "verdicts": [{"code": "V22", "since": START}]}
    assert run_state(read_run_status(run)).startswith(
        "a script is attached, and has made no step since 2001-09-0"
    )


def test_a_script_that_stands_still_is_told_to_the_owners_command(tmp_path: Path) -> None:
    """From the silence to the owner's file, and back with its next steps."""
    out, tell = tmp_path / "told", tmp_path / "tell.sh"
    tell.write_text(f'#!/bin/sh\necho "$ATOLL_CODE $ATOLL_RAISED $ATOLL_TEXT" >> {out}\n')
    tell.chmod(0o700)
    watched, verdicts = Watched(), RunVerdicts("r", lambda _: None)
    watched.steps(SIGNS)
    watched.state = "T"
    (still,) = watched.goes_on(IDLE_S + 1)
    again = event(watched.now + 60, "script.report", metrics={"step_s": 0.2})

    async def main() -> None:
        notifier = Notifier([str(tell)])
        for each in (ATTACHED, still, again):
            changes = verdicts.take(each)
            notifier.tell("r", "tiny", [each for each in changes if each.verdict.code == "V22"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.run)
            await notifier.settled(60)
            nursery.cancel_scope.cancel()

    trio.run(main)
    title = "the script here lives and makes no step"
    said = (
        "process 7 has made no step for 10 min, and one took 0.2 s; it is stopped, as by Ctrl-Z: "
        "kill -CONT 7 lets it go on"
    )
    assert out.read_text().splitlines() == [
        f"V22 1 {title}: {said}",
        f"V22 0 holds no more: {title}: {said}",
    ]


@pytest.mark.parametrize(
    ("state", "words"), [("T", "kill -CONT 7"), ("D", "a file system that does not answer")]
)
def test_what_the_system_says_of_a_process_that_stands_still_is_said(
    state: str, words: str
) -> None:
    watched = Watched()
    watched.steps(SIGNS)
    watched.state = state
    (said,) = watched.goes_on(IDLE_S + 1)
    assert words in said.doing


def test_a_script_that_spins_is_named_later() -> None:
    watched = Watched()
    watched.steps(SIGNS)
    assert watched.goes_on(BUSY_S - 2, busy=1.0) == []
    (said,) = watched.goes_on(10, busy=1.0)
    assert said.doing == "though its process is busy"


def test_silence_of_honest_scripts_is_no_standstill() -> None:
    """A first compile, waiting for rounds and pauses, slow steps, evaluations, and a loader that
    stalls for half as long as it did before.
    """
    starts = Watched()
    assert starts.goes_on(3 * BUSY_S) == []
    starts.steps(SIGNS - 1)
    assert starts.goes_on(2 * BUSY_S) == []
    waits = Watched()
    waits.steps(60)
    waits.still.wait()
    assert waits.goes_on(3 * BUSY_S) == []
    waits.still.sign(waits.now)  # the round is decided
    waits.steps(60)
    assert waits.goes_on(BUSY_S - 1, busy=0.5) == []  # an evaluation
    slow = Watched()
    for _ in range(SIGNS):
        slow.goes_on(400)
        slow.still.stepped(slow.now, 400.0)
    assert slow.goes_on(STEPS * 400 - 1) == []
    assert len(slow.goes_on(2)) == 1
    stalled = Watched()
    stalled.steps(SIGNS)
    assert len(stalled.goes_on(1000)) == 1
    stalled.steps(1)
    assert stalled.goes_on(LONGER * 1060 - 1) == []
    assert len(stalled.goes_on(2)) == 1


def test_a_process_is_read_from_the_system() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        found = read_process(child.pid)
        assert found.state == "T"
        assert found.used_s is not None
        assert read_process(child.pid).used_s == found.used_s
        child.kill()
    assert read_process(child.pid) == ProcessReading()
    used = read_process(os.getpid()).used_s
    assert used is not None
    assert used > 0


def test_each_verdict_of_duty_has_a_page() -> None:
    assert {code: PAGES[code].slug for code in OURS} == {
        "V11": "no-script",
        "V12": "steps-slower",
        "V13": "gpu-idle",
        "V22": "script-stands-still",
    }
