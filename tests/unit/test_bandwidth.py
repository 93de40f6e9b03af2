"""Limits of bandwidth: how they are written, and that a bucket lets no more through."""

from __future__ import annotations

from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.engine.bucket import BURST_S, LEAST_BURST, Bucket
from atoll.collectives.errors import ConfigError
from atoll.node.home.bandwidth import bytes_per_s


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("", 0),
        ("20Mbit/s", 2_500_000),
        ("20 mbit", 2_500_000),
        ("2.5MB/s", 2_500_000),
        ("300000", 300_000),
        ("800 kbit/s", 100_000),
        ("1GB", 10**9),
    ],
)
def test_units(text: str, rate: int) -> None:
    assert bytes_per_s(text, "node.max_up") == rate


@pytest.mark.parametrize(
    "text", ["fast", "20 Mbit/h", "-5", "1e6", "nan", "20 20", "100", "0", "1 Mbit/s/s"]
)
def test_what_is_no_bandwidth_is_refused_by_the_name_of_the_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.max_down"):
        bytes_per_s(text, "node.max_down")


@given(
    st.integers(50_000, 10**9),
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 10**6)), max_size=50),
)
def test_a_bucket_passes_its_rate_and_one_burst_at_most(
    rate: int, asked: list[tuple[float, int]]
) -> None:
    bucket, now, passed = Bucket(rate), 100.0, 0
    for pause, count in asked:
        now += pause
        room = bucket.room(now, count)
        assert 0 <= room <= count
        bucket.take(room)
        passed += room
        assert passed <= rate * (now - 100.0) + max(LEAST_BURST, BURST_S * rate) + 1
        if bucket.wait_s(now):
            assert copy(bucket).room(now + bucket.wait_s(now), 1) == 1


def test_without_a_limit_everything_passes() -> None:
    bucket = Bucket(0)
    assert bucket.room(5.0, 10**12) == 10**12
    bucket.take(10**12)
    assert bucket.wait_s(5.0) == 0.0
    assert bucket.room(5.0, 7) == 7


@pytest.mark.parametrize("most", [100, 20_000, 1_000_000])
def test_what_becomes_due_byte_by_byte_passes_in_pieces(most: int) -> None:
    """Somebody who asks every 20 µs, as a thread does that has nothing else to wait for, is given
    as much as who waits, and seldom.
    """
    rate = 1_000_000
    bucket, passed, given = Bucket(rate), 0, 0
    size = max(LEAST_BURST, rate * BURST_S)
    for turn in range(50_000):
        room = bucket.room(100.0 + turn / 50_000, most)
        bucket.take(room)
        passed += room
        given += room > 0
    assert size + 0.97 * rate < passed <= size + rate
    assert given <= 1 + passed / min(most, size / 2)
