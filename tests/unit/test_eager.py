"""The switch interval while somebody waits for the node."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from atoll.node.client.eager import EAGER_S, eager


class Stop(BaseException):
    """What interrupts."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test does, the interval is afterwards as it was."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_it_is_short_inside_and_as_before_outside() -> None:
    sys.setswitchinterval(0.005)
    with eager():
        with eager():
            assert sys.getswitchinterval() == pytest.approx(EAGER_S, rel=0.05)
        assert sys.getswitchinterval() == pytest.approx(EAGER_S, rel=0.05)
    assert sys.getswitchinterval() == pytest.approx(0.005, rel=0.05)
    with pytest.raises(ZeroDivisionError), eager():
        raise ZeroDivisionError
    assert sys.getswitchinterval() == pytest.approx(0.005, rel=0.05)


def test_what_others_have_set_stays() -> None:
    sys.setswitchinterval(EAGER_S / 2)
    with eager():
        assert sys.getswitchinterval() == pytest.approx(EAGER_S / 2, rel=0.05)
    assert sys.getswitchinterval() == pytest.approx(EAGER_S / 2, rel=0.05)
    sys.setswitchinterval(0.005)
    with eager():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == pytest.approx(0.02, rel=0.05)


def interrupted_at(line: int) -> bool:
    """Enter and leave with an exception before the ``line``-th line of `eager`. Whether it came."""
    seen: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not CODE:
            return None
        # A line comes again where a block gives its lock back: the interpreter raises nothing
        # there, only a trace function can.
        if event == "line" and frame.f_lineno not in seen:
            seen.append(frame.f_lineno)
            if len(seen) == line:
                raise Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with eager():
            pass
    except Stop:
        pass
    finally:
        sys.settrace(before)
    return len(seen) >= line


CODE = eager.__wrapped__.__code__  # type: ignore[attr-defined]


def test_an_exception_between_any_two_lines_leaves_nobody_inside() -> None:
    line = 0
    while True:
        line += 1
        sys.setswitchinterval(0.005)
        came: list[bool] = []
        # In a thread of its own: a trace function's exception may outlive its handler there.
        thread = threading.Thread(target=lambda: came.append(interrupted_at(line)))  # noqa: B023
        thread.start()
        thread.join()
        with eager():
            assert sys.getswitchinterval() == pytest.approx(EAGER_S, rel=0.05), line
        assert sys.getswitchinterval() == pytest.approx(0.005, rel=0.05), line
        if came == [False]:
            break
    assert line > 10


def test_who_is_inside_while_another_sets_the_interval_does_not_keep_it_long() -> None:
    sys.setswitchinterval(0.005)
    with eager():
        sys.setswitchinterval(0.02)
        with eager():
            assert sys.getswitchinterval() == pytest.approx(EAGER_S, rel=0.05)
    assert sys.getswitchinterval() == pytest.approx(0.02, rel=0.05)
