"""Votes that come after the decision: they tell who has voted, and not who lags, until they are
repeated.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from session_table import Table

from atoll.collectives import messages as m
from atoll.collectives.identifiers import PeerId


def body_of(sender: PeerId, channel: str, payload: Any) -> m.Body | None:
    """A message of a round; None: something else."""
    if channel != "control" or payload[:1] != b"R":
        return None
    return m.decode(payload[1:], sender).body


@pytest.mark.parametrize("members", [3, 6])
def test_a_round_in_which_nothing_is_lost_hands_its_entry_to_nobody(members: int) -> None:
    table = Table(members)
    first, *_ = table.all_in()
    table.wait(5.0)
    sent = Counter[type[m.Body]]()

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        body = body_of(sender, channel, payload)
        if body is not None:
            sent[type(body)] += 1
        return False

    table.network.tap = tap
    for number in range(3):
        rounds = first.session.completed
        for peer in table.peers:
            peer.contribute(f"{number} {peer.name}")
        table.until(
            lambda rounds=rounds: all(peer.session.completed > rounds for peer in table.peers)
        )
    assert sent[m.Accepted] >= 3 * members * (members - 1)
    assert sent[m.Catch] == 0


def test_a_member_that_hears_no_vote_is_handed_the_entry_for_its_own_repeated_one() -> None:
    """It asks nobody: its votes alone tell that it lags."""
    table = Table(4)
    first, *_, odd = table.all_in()
    asked, caught = Counter[PeerId](), list[PeerId]()

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        body = body_of(sender, channel, payload)
        if isinstance(body, m.Accepted) and sender == odd.name:
            asked[receiver] += 1
        if isinstance(body, m.Catch) and receiver == odd.name:
            caught.append(sender)
        deaf = isinstance(body, m.Accepted) and receiver == odd.name
        return deaf or (isinstance(body, m.Fetch) and sender == odd.name)

    rounds = first.session.completed
    table.network.tap = tap
    for peer in table.peers:
        peer.contribute(f"1 {peer.name}")
    others = [peer for peer in table.peers if peer is not odd]
    table.until(lambda: all(peer.session.completed > rounds for peer in others))
    decided_at = table.world.now
    table.until(lambda: odd.session.completed > rounds)
    assert caught
    assert all(asked[peer] >= 2 for peer in caught)
    # its second vote after the decision, and the answer to that
    assert table.world.now - decided_at < 4 * table.place.timing.pull_s
