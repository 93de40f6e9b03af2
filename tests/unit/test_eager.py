"""The switch interval while somebody waits for the node."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from atoll.node.client.eager import EAGER_S, eager


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
