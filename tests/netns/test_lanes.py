"""Lanes between peers behind routers of every kind: which way they take, and that bytes go through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from netns.lane_kit import Pair
from netns.nat import Kind

pytestmark = pytest.mark.netns


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two peers, 80 ms from each other, whose routers become what a test wants."""
    with Pair(
        tmp_path_factory.mktemp("pair"), "port-restricted", "port-restricted", rtt_ms=80
    ) as found:
        yield found


def paths(pair: Pair, count: int, times: int = 1) -> list[str]:
    """Of lanes that were made and dropped so many times."""
    return [lane["path"] for _ in range(times) for lane in pair.lanes(count)]


@pytest.mark.parametrize(
    ("a", "b"), [("port-restricted", "port-restricted"), ("port-shifting", "port-shifting")]
)
def test_a_pair_of_routers_is_punched_through(pair: Pair, a: Kind, b: Kind) -> None:
    pair.become(a, b)
    assert paths(pair, 1, 5) == ["punched"] * 5
    assert paths(pair, 8) == ["punched"] * 8


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("full-cone", "symmetric"),
        ("symmetric", "full-cone"),
        ("rst", "rst"),
        ("no-udp", "port-shifting"),
    ],
)
def test_so_are_others(pair: Pair, a: Kind, b: Kind) -> None:
    pair.become(a, b)
    assert paths(pair, 2, 2) == ["punched"] * 4


@pytest.mark.parametrize("lans", [("11.1.1", "11.1.2"), ("11.1.1", ""), ("", "11.1.2")])
def test_public_addresses_behind_firewalls_are_punched_through(
    tmp_path: Path, lans: tuple[str, str]
) -> None:
    """They look as if they could be dialled."""
    with Pair(tmp_path, "port-restricted", "port-restricted", rtt_ms=20, lans=lans) as pair:
        assert paths(pair, 1, 2) == ["punched"] * 2


@pytest.mark.parametrize("b", ["symmetric", "port-restricted"])
def test_where_no_punch_can_work_a_relay_does(pair: Pair, b: Kind) -> None:
    pair.become("symmetric", b)
    lane = pair.lanes()[0]
    assert lane["path"] == "relay"
    assert "every destination another port" in lane["why"]


@pytest.mark.parametrize(
    ("a", "b"), [("symmetric", "port-restricted"), ("port-restricted", "symmetric")]
)
def test_ports_are_guessed_where_both_were_told_to(pair: Pair, a: Kind, b: Kind) -> None:
    """One of 50 lanes finds none; the second lane of a pair is not worth hundreds of sockets."""
    pair.become(a, b)
    pair.guess(True)
    try:
        assert paths(pair, 1, 3).count("punched") >= 2
        assert sorted(paths(pair, 2))[-1] == "relay"
    finally:
        pair.guess(False)
