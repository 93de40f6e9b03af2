"""The law of liveness (docs/protocol.md): a quorum that lives goes on, whatever the dead took with them."""

from __future__ import annotations

import pytest
from session_table import Peer, Table

KEPT = 8  # rounds whose results are kept for laggards


def together(table: Table, peers: list[Peer], name: str) -> None:
    """One round in which these all contribute."""
    rounds = peers[0].session.completed
    for peer in peers:
        peer.contribute(f"{name} {peer.name}")
    table.until(lambda: all(peer.session.completed > rounds for peer in peers))


def three_left(table: Table) -> tuple[Peer, Peer, Peer]:
    """Four members; the founder is killed for good and evicted."""
    founder, one, two, three = table.all_in()
    together(table, table.peers, "all")
    founder.kill()
    while len(one.session.config_peers()) > 3:
        together(table, [one, two, three], f"evict {one.session.round}")
    return one, two, three


def goes_on(table: Table, peers: list[Peer]) -> None:
    """They commit three more rounds, and hold the same bits."""
    table.until(lambda: all(peer.inside and not peer.machine.frontier for peer in peers))
    for number in range(3):
        together(table, peers, f"again {number}")
    anchors = [peer.session.replica.anchor.tolist() for peer in peers if peer.session.replica]
    assert anchors == [anchors[0]] * len(peers)


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("more", range(4))
def test_who_holds_the_newest_state_alone_brings_one_that_lags_up_to_it(
    more: int, loss: float
) -> None:
    """The holder's newest state has no later entry that certifies it, and no quorum offers it alike; checkpoints come every 4 entries."""
    table = Table(4)
    dies, holder, lags = three_left(table)
    lags.kill()
    for number in range(2 * KEPT + 5 + more):
        together(table, [dies, holder], f"without {number}")
    dies.kill()
    table.network.weather.loss = loss
    lags.start().attach()
    goes_on(table, [holder, lags])
    table.end()


def test_a_holder_that_was_started_again_does_so_too() -> None:
    table = Table(4)
    dies, holder, lags = three_left(table)
    lags.kill()
    while (holder.session.round) % 4 or holder.session.round < 3 * KEPT:
        together(table, [dies, holder], f"without {holder.session.round}")
    dies.kill()
    holder.kill()
    lags.start().attach()
    holder.start().attach()
    goes_on(table, [holder, lags])
    table.end()
