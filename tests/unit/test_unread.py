"""Whose connection ends where too much is unread over all of them."""

from __future__ import annotations

import pytest

from atoll.node.net.transport import unread
from atoll.node.net.transport.unread import UnreadShare


class Connection:
    """So much of what came is unread."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> UnreadShare:
    monkeypatch.setattr(unread, "MOST_BYTES", 1000)
    return UnreadShare(lambda connection: connection.nbytes)


def test_within_the_whole_nobody_is_cut_off(share: UnreadShare) -> None:
    connections = [Connection(100) for _ in range(10)]
    assert not any(share.exceeds(each, "11.0.0.1") for each in connections)


def test_a_machine_with_many_connections_pays_for_them_and_not_another(share: UnreadShare) -> None:
    crowd = [Connection(99) for _ in range(10)]
    assert not any(share.exceeds(each, "11.0.0.1") for each in crowd)
    honest = Connection(300)  # more than any one of the crowd
    assert not share.exceeds(honest, "11.0.0.2")
    assert share.exceeds(crowd[0], "11.0.0.1")


def test_of_one_machine_the_connection_with_more_than_its_share_is_cut_off(
    share: UnreadShare,
) -> None:
    small, large = Connection(1), Connection(1200)
    assert not share.exceeds(small, "11.0.0.1")
    assert share.exceeds(large, "11.0.0.1")
    assert not share.exceeds(small, "11.0.0.1")


def test_what_was_read_meanwhile_does_not_count(share: UnreadShare) -> None:
    connections = [Connection() for _ in range(4)]
    for _ in range(10):
        for each in connections:
            each.nbytes = 900
            assert not share.exceeds(each, "11.0.0.1")
            each.nbytes = 0


def test_ended_connections_are_forgotten(share: UnreadShare) -> None:
    for _ in range(20):
        assert not share.exceeds(Connection(600), "11.0.0.1")
