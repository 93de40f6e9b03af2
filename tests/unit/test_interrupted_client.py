"""An exception between any two lines of the client: what is called afterwards gets the right values
or an error, and no descriptor is left open.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_ulong, py_object, pythonapi
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from reference_node import INVITE, Node, ReferenceService
from seeds import one_in

from atoll.collectives.api import all_gather, all_reduce, enter
from atoll.collectives.errors import AtollError, LocalProtocolError, SwarmClosedError
from atoll.node.client import eager, link, pending, reattach
from atoll.node.client import memory as client_memory
from atoll.node.client import swarm as client_swarm
from atoll.node.control import beside, descriptors, frames
from atoll.node.joining import RunSwarm, join
from atoll.node.joining import swarm as joined_swarm

FILES = {
    module.__file__
    for module in (
        beside,
        link,
        pending,
        client_memory,
        client_swarm,
        joined_swarm,
        descriptors,
        eager,
        frames,
    )
}


# Calls that are interrupted drop their handles, which warn; an exception that comes in that warning
# goes no further: the interpreter's own way.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:operation .* was never waited for:RuntimeWarning"),
]


class Stop(BaseException):
    """What interrupts; nothing in the product catches it by name."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    yield started
    started.stop()
    assert started.defects == []


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection is made anew at once."""
    monkeypatch.setattr(reattach, "FIRST_DELAY_S", 0.002)


@pytest.fixture(autouse=True)
def unraised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An exception that comes in a finaliser, of the standard library say, goes no further than
    that. Nothing keeps it: pytest's own hook does until the test is over, and with it the frames
    below it and all that they hold, descriptors too.
    """
    others = list[str]()

    def forget(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not Stop:
            others.append(f"{unraisable.exc_type.__name__} in {unraisable.object!r}")

    monkeypatch.setattr(sys, "unraisablehook", forget)
    yield
    assert others == []


def none_left(node: Node, home: Path, play: Callable[[RunSwarm], None]) -> None:
    """``play`` leaves no descriptor open that the same connections do not leave without it, and a
    switch interval that is soon as it was.
    """
    interval = sys.getswitchinterval()

    def after(script: Callable[[RunSwarm], None]) -> int:
        with contextlib.closing(
            join(INVITE, home=home, private=False, progress=lambda *_: None)
        ) as swarm:
            enter(swarm)
            script(swarm)
        node.until(lambda: node.service.run.session is None)
        return open_fds()

    before = after(lambda swarm: settled(swarm, "first", 1.0))
    found, until = after(play), time.monotonic() + 60
    while found > before and time.monotonic() < until:
        time.sleep(0.05)  # threads of this process, the node's among them, still end
        found = open_fds()
    assert found <= before
    with eager.eager():
        pass  # whoever leaves mends what an interrupted one has left
    assert sys.getswitchinterval() == interval


def reduced(swarm: RunSwarm, name: str, value: float, numel: int = 5) -> str:
    """One operation. Its status; the values of a committed one are right."""
    flat = torch.full((numel,), value)
    outcome = all_reduce(swarm, flat, op_id=name, op="sum", deadline_s=20).wait(20)
    assert flat.tolist() == [value] * numel, (name, outcome)
    return outcome.status


def settled(swarm: RunSwarm, name: str, value: float) -> None:
    """An operation after an interrupt: right once there is a connection again. Errors until then
    say that the connection is lost.
    """
    until = time.monotonic() + 60
    for attempt in range(1000):
        try:
            if reduced(swarm, f"{name}/{attempt}", value) == "committed":
                return
        except SwarmClosedError:
            assert time.monotonic() < until
            time.sleep(0.02)
    raise AssertionError("there is no connection any more")


def open_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def interrupted_at(call: Callable[[], Any], line: int) -> bool:
    """Run ``call`` with an exception before the ``line``-th line of the client that it runs.
    Whether it got so far.
    """
    seen, entered = 0, set[tuple[FrameType, int]]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in FILES:
            return None
        place = frame, frame.f_lineno
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # Between the end of a block and the release of its lock, and at the line of a ``try``, the
        # interpreter raises nothing: only a trace function can.
        leaves = place in entered or source == "try:"
        if source.startswith("with "):
            entered.add(place)
        if event in ("line", "return") and not leaves:
            seen += 1
            if seen == line:
                raise Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Stop:
        pass
    except (RuntimeError, AtollError):
        assert seen >= line, "an error without an interrupt"
    finally:
        sys.settrace(before)
    return seen >= line


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_an_exception_before_each_line_of_the_client(node: Node, tmp_path: Path) -> None:

    def play(swarm: RunSwarm) -> None:
        """In a thread of its own: an exception that a trace function raises at the end of a handler
        leaves the handled one behind, and what that holds, as long as its thread lives.
        """
        with ThreadPoolExecutor(1) as pool:
            pool.submit(every_line, swarm).result()

    none_left(node, tmp_path, play)


def every_line(swarm: RunSwarm) -> None:
    """An operation with an exception before its first line, one before its second, and so on."""
    line = 0
    while True:
        line += 1
        value = float(2 + line % 89)
        ended = not interrupted_at(lambda: reduced(swarm, f"cut {line}", value), line)  # noqa: B023
        for number in range(2):
            settled(swarm, f"after {line}/{number}", value + 100 + number)
        if ended:
            break
    assert line > 300


def _polled(swarm: RunSwarm, name: str) -> None:
    handle = all_reduce(swarm, torch.ones(3), op_id=name, deadline_s=20)
    while not handle.done():
        pass


def _cancelled(swarm: RunSwarm, name: str) -> None:
    handle = all_reduce(swarm, torch.ones(3), op_id=name, deadline_s=20)
    handle.cancel()
    handle.wait(20)


def _dropped(swarm: RunSwarm, name: str) -> None:
    all_reduce(swarm, torch.ones(3), op_id=name, deadline_s=20)


def _at_once(swarm: RunSwarm, name: str) -> None:
    handle = all_reduce(swarm, torch.ones(3), op_id=name, deadline_s=20)
    handle.wait(0.0)
    handle.wait(20)


def _gathered(swarm: RunSwarm, name: str) -> None:
    mine = torch.arange(40_000, dtype=torch.float64)
    found = all_gather(swarm, mine, op_id=name, deadline_s=20).wait(20)
    assert all(torch.equal(tensor, mine) for tensor in found.tensors.values())


def _refused(swarm: RunSwarm, name: str) -> None:
    reduced(swarm, name, 2.0)
    with pytest.raises((AtollError, Stop)):
        all_reduce(swarm, torch.ones(3), op_id=name, deadline_s=20)


def zeros(vector: torch.Tensor) -> None:
    vector.zero_()


def _anchored(swarm: RunSwarm, name: str) -> None:
    swarm.anchor().release()


def _contributed(swarm: RunSwarm, name: str) -> None:
    swarm.contribute(samples=1, write=zeros).wait(20)


def _asked(swarm: RunSwarm, name: str) -> None:
    swarm.report({"loss": 1.0})
    swarm.tallies(0)
    assert swarm.next_number(name) >= 0
    assert len(swarm.members()) == 1


CALLS: dict[str, Callable[[RunSwarm, str], None]] = {
    call.__name__[1:]: call
    for call in (
        *(_polled, _cancelled, _dropped, _at_once, _gathered, _refused),
        *(_anchored, _contributed, _asked),
    )
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_before_each_line_of_other_calls(
    node: Node, tmp_path: Path, call: str
) -> None:
    def play(swarm: RunSwarm) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(each_line, swarm, CALLS[call]).result()

    none_left(node, tmp_path, play)


@pytest.mark.slow
def test_an_exception_before_each_line_while_another_thread_waits(tmp_path: Path) -> None:
    """Which reads for all, or is read for: neither waits for the other for ever."""
    node = Node(tmp_path, lambda: ReferenceService(tmp_path))
    (tmp_path / "hold").touch()  # what is contributed stays undecided
    over, roles = threading.Event(), Counter[str]()
    with contextlib.closing(
        join(INVITE, home=tmp_path, private=False, progress=lambda *_: None)
    ) as swarm:
        enter(swarm)
        ticket = swarm.contribute(samples=1, write=zeros)

        def wait() -> None:
            while not over.is_set():
                ticket.wait(0.05)

        def call(swarm: RunSwarm, name: str) -> None:
            reduced(swarm, name, 3.0)
            at = swarm._at  # pyright: ignore[reportPrivateUsage]
            reader = at.link._reader if at else 0  # pyright: ignore[reportPrivateUsage]
            roles["waits" if reader not in (0, threading.get_ident()) else "reads"] += 1

        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(wait)
            try:
                pool.submit(each_line, swarm, call).result()
            finally:
                over.set()
            waiting.result()
    node.stop()
    assert node.defects == []
    assert roles["waits"] > 0


def again(swarm: RunSwarm, call: Callable[[RunSwarm, str], None], name: str) -> None:
    """The same call, until it works: errors until then say that the connection is lost."""
    until = time.monotonic() + 60
    for attempt in itertools.count():
        try:
            call(swarm, f"{name}/{attempt}")
            return
        except SwarmClosedError:
            assert time.monotonic() < until
            time.sleep(0.01)
        except LocalProtocolError as error:
            if "still undecided" not in error.message or time.monotonic() > until:
                raise  # else it was sent, and is decided soon
            time.sleep(0.01)


def each_line(swarm: RunSwarm, call: Callable[[RunSwarm, str], None]) -> None:
    """A call with an exception before its first line, one before its second, and so on."""
    for line in one_in(9):
        ended = not interrupted_at(lambda: call(swarm, f"cut {line}"), line)  # noqa: B023
        gc.collect()  # the trace function holds the frames that it has seen, and they their values
        again(swarm, call, f"again {line}")
        settled(swarm, f"after {line}", float(100 + line % 89))
        if ended:
            assert line > 20
            return


def test_a_close_that_an_exception_ended_is_finished_by_the_next(
    node: Node, tmp_path: Path
) -> None:
    """Else the node holds the run for a script that is gone, and nobody can attach."""
    line = 0
    while True:
        line += 1
        swarm = join(INVITE, home=tmp_path, private=False, progress=lambda *_: None)
        enter(swarm)
        ended = not interrupted_at(swarm.close, line)
        swarm.close()
        node.until(lambda: node.service.run.session is None)
        with pytest.raises(SwarmClosedError):
            reduced(swarm, f"closed {line}", 1.0)
        if ended:
            break
    assert line > 40


@contextlib.contextmanager
def alarms(seed: int) -> Generator[None]:
    """SIGALRM at random instants, whose handler raises."""
    rng = random.Random(seed)

    def ring(*_: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 4e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_alarms_at_random_instants(node: Node, tmp_path: Path) -> None:
    none_left(node, tmp_path, alarming)


def alarming(swarm: RunSwarm) -> None:
    """Operations until the alarm rings, again and again."""
    rang = 0
    for turn in range(300):
        try:
            with alarms(turn):
                for number in range(20):
                    reduced(swarm, f"alarm {turn}/{number}", float(turn % 50 + number))
        except Stop:
            rang += 1
        except (AtollError, RuntimeError):
            pass
        settled(swarm, f"after alarm {turn}", float(1000 + turn))
    assert rang > 100


@pytest.mark.slow
def test_exceptions_set_by_another_thread(node: Node, tmp_path: Path) -> None:
    """As debuggers and time-outs of notebooks do: into a thread that is not the main one."""
    none_left(node, tmp_path, hitting)


def hitting(swarm: RunSwarm) -> None:
    """Operations in a thread until an exception hits it, again and again."""
    hit = 0
    for turn in range(150):
        wrong: list[BaseException] = []

        def work() -> None:
            nonlocal hit
            try:
                try:
                    for number in range(1000):
                        reduced(swarm, f"set {turn}/{number}", float(turn % 50 + number))  # noqa: B023
                except Stop:
                    hit += 1
            except AssertionError as error:
                wrong.append(error)  # noqa: B023
            except (Stop, AtollError, RuntimeError):
                pass

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(random.Random(turn).uniform(0, 4e-3))
        while thread.is_alive():
            pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread.ident or 0), py_object(Stop))
            thread.join(0.2)
        assert not wrong
        settled(swarm, f"after set {turn}", float(1000 + turn))
    assert hit > 50


def test_an_exception_set_in_a_thread_that_begins_another() -> None:
    """CPython 3.11 sets it in the one that is being begun, too: with `threading.Thread` 4 in 10 of
    these wait for that one for ever.
    """
    for turn in range(100):
        ended = threading.Event()

        def work() -> None:
            with contextlib.suppress(Stop):
                try:
                    while True:
                        beside.Beside(threading.Event().set).start()
                finally:
                    ended.set()  # noqa: B023

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        time.sleep(random.Random(turn).uniform(0, 2e-3))
        until = time.monotonic() + 60
        while not ended.is_set() and time.monotonic() < until:
            pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread.ident or 0), py_object(Stop))
            ended.wait(0.01)
        assert ended.is_set(), turn


def test_work_beside_has_ended_though_somebody_keeps_an_error_of_it() -> None:
    """A script's `close` waited for ever for a thread whose last failed attempt was remembered."""
    kept = list[BaseException]()

    def fails() -> None:
        raise OSError("no")

    def work() -> None:
        try:
            fails()
        except OSError as error:
            kept.append(error)

    thread = beside.Beside(work)
    thread.start()
    until = time.monotonic() + 30.0
    while thread.running:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert len(kept) == 1
    thread.join()
