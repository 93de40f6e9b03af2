"""When a lane over a relay or a stream is tried again for a direct one, in virtual time."""

from __future__ import annotations

import math

import pytest

from atoll.node.net.retry import ASKED_S, Retry


def tries(retry: Retry, until: float) -> list[float]:
    """When it tries by itself."""
    found: list[float] = []
    while retry.at <= until:
        found.append(retry.at)
        assert retry.due(retry.at)
    return found


@pytest.mark.parametrize("path", ["relay", "stream"])
def test_after_one_five_and_fifteen_minutes_then_every_fifteen(path: str) -> None:
    retry = Retry(timed=True)
    retry.made(100.0, path)
    assert not retry.due(159.0)
    assert tries(retry, 3600.0) == [160.0, 460.0, 1360.0, 2260.0, 3160.0]


@pytest.mark.parametrize("path", ["lan", "direct", "punched"])
def test_a_direct_lane_is_left_alone(path: str) -> None:
    retry = Retry(timed=True)
    retry.made(0.0, path)
    retry.asked(1.0)
    assert retry.at == math.inf


def test_whatever_changes_is_a_reason_to_try_at_once_but_not_all_the_time() -> None:
    retry = Retry(timed=True)
    retry.made(0.0, "relay")
    retry.asked(5.0)
    assert retry.due(5.0)
    for second in range(6, 15):
        retry.asked(float(second))
        assert not retry.due(float(second))
    assert tries(retry, 100.0) == [5.0 + ASKED_S, 5.0 + ASKED_S + 60.0]


def test_a_lane_that_comes_up_roundabout_again_does_not_begin_anew() -> None:
    retry = Retry(timed=True)
    retry.made(0.0, "relay")
    assert tries(retry, 60.0) == [60.0]
    retry.made(70.0, "relay")
    assert retry.at == 360.0
    retry.made(80.0, "punched")
    assert retry.at == math.inf
    retry.made(90.0, "stream")
    assert retry.at == 150.0


def test_who_does_not_drive_tries_only_with_a_reason() -> None:
    retry = Retry(timed=False)
    retry.made(0.0, "stream")
    assert retry.at == math.inf
    retry.asked(7.0)
    assert retry.due(7.0)
    assert retry.at == math.inf
