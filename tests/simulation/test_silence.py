"""Who is not heard for a while: what it had to say is had from others, and what it gave counts."""

from __future__ import annotations

from typing import Any

import pytest
from session_table import Peer, Table

from atoll.collectives.identifiers import PeerId
from atoll.collectives.pace import Pace


def offered(table: Table) -> tuple[Peer, list[Peer], list[bytes]]:
    """All are in and have contributed: who convenes, the others, and what was contributed."""
    peers = table.all_in()
    cids = [peer.contribute(f"of {peer.name}") for peer in peers]
    convener = next(peer for peer in peers if peer.machine.convener_of(0) == peer.machine.me)
    return convener, [peer for peer in peers if peer is not convener], cids


def counted(peer: Peer) -> list[bytes]:
    """What the newest entry with contributions is made of."""
    return [
        c.cid
        for c in next(
            c.entry for c in reversed(peer.machine.journal.entries) if c.entry.contributors
        ).contributors
    ]


def test_who_hears_votes_but_not_for_what_asks_a_voter() -> None:
    """The connection to the convener is lost as it proposes: others know soon what was decided."""
    table = Table(4)
    convener, (deaf, *others), cids = offered(table)
    table.until(lambda: convener.machine.convening.plan is not None)

    def lose(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        return (
            channel == "control"
            and (sender, receiver) == (convener.name, deaf.name)
            and deaf.machine.open.reduced is not None
        )

    table.network.tap = lose
    table.until(lambda: all(peer.rounds()[-1].contributors for peer in (convener, *others)))
    decided_at = table.world.now
    table.until(lambda: bool(deaf.rounds()[-1].contributors))
    assert (
        table.world.now - decided_at <= 3 * table.place.timing.pull_s
    )  # a take-over would come seven pulls later at the soonest
    assert counted(deaf) == cids
    table.end()


def test_who_is_silent_while_another_dies_is_counted_where_nothing_of_it_lacks() -> None:
    """An owner dies in the gather phase, and of another member no message is heard for a while:
    only the dead one's contribution is lost.
    """
    table = Table(4)
    convener, others, cids = offered(table)
    table.until(lambda: convener.machine.convening.plan is not None)
    plan = convener.machine.convening.plan
    assert plan is not None
    victim = next(peer for peer in others if peer.name in {part.owner for part in plan.parts})
    silent = next(peer for peer in others if peer.name not in {part.owner for part in plan.parts})
    victim.kill()

    def hush(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        revised = (
            convener.machine.convening.plan is not None
            and convener.machine.convening.plan.revision > plan.revision
        )
        return sender == silent.name and channel != "record" and not revised

    table.network.tap = hush
    live = [peer for peer in table.peers if peer is not victim]
    table.until(lambda: convener.session.actions.suspected(silent.name))
    assert convener.session.actions.suspected(victim.name)
    table.until(lambda: all(peer.rounds()[-1].contributors for peer in live))
    assert counted(convener) == [
        cid for cid, peer in zip(cids, table.peers, strict=True) if peer is not victim
    ]
    table.end()


def test_what_a_dead_owner_lacked_is_nobodys_fault() -> None:
    """An owner dies before a contribution has come to it that all others have: once the plan is
    late, its last word does not cost that contribution.
    """
    table = Table(4)
    convener, others, cids = offered(table)
    table.until(lambda: convener.machine.convening.plan is not None)
    plan = convener.machine.convening.plan
    assert plan is not None
    victim = next(peer for peer in others if peer.name in {part.owner for part in plan.parts})
    giver = next(peer for peer in others if peer is not victim)
    table.network.tap = lambda sender, receiver, channel, payload: (
        channel == "record" and (sender, receiver) == (giver.name, victim.name)
    )
    table.until(lambda: victim.name in convener.machine.convening.missing)
    given = cids[table.peers.index(giver)]
    assert given in convener.machine.convening.missing[victim.name]
    victim.kill()
    live = [peer for peer in table.peers if peer is not victim]
    table.until(lambda: all(peer.rounds()[-1].contributors for peer in live))
    assert counted(convener) == [
        cid for cid, peer in zip(cids, table.peers, strict=True) if peer is not victim
    ]
    table.end()


@pytest.mark.parametrize("lossy", [False, True])
def test_who_is_silent_on_a_way_that_loses_packets_is_waited_for(lossy: bool) -> None:
    """Nothing of a member is heard for two seconds as it contributes. Where packets to it are known
    to be lost, TCP may be repeating them: it is no more dead than before, and the plan waits for
    its word."""
    table = Table(4)
    peers = table.all_in()
    convener = next(peer for peer in peers if peer.machine.convener_of(0) == peer.machine.me)
    silent = next(peer for peer in peers if peer is not convener)
    if lossy:
        for peer in peers:
            table.place.paces[peer.name] = Pace(silences={silent.name: 3.0})
    began, suspected = table.world.now, set[PeerId]()

    def hush(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        if convener.session.actions.suspected(silent.name):
            suspected.add(silent.name)
        return sender == silent.name and table.world.now < began + 2.0

    table.network.tap = hush
    for peer in peers:
        peer.contribute(f"of {peer.name}")
    table.until(lambda: bool(convener.rounds()[-1].contributors))
    assert len(counted(convener)) == (4 if lossy else 3)
    assert suspected == (set() if lossy else {silent.name})
    table.network.tap = None
    table.end()
