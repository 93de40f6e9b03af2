"""What a member holds does not grow with the age of its run: all that is reachable from its session
is counted.
"""

from __future__ import annotations

import gc
from collections import Counter
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from seeds import RARE
from session_table import Peer, Table

from atoll.collectives.round import RECENT, MemoryJournal
from atoll.collectives.script_swarm import Call
from atoll.collectives.simulation import Network, World
from atoll.node.session.record import MAX_SPENT
from atoll.node.simulation.process import Place

OPERATION_EVERY = 3  # rounds


def held(peer: Peer) -> Counter[str]:
    """By type, the objects that live as long as the session does; not its disk, the network, or the
    operations it may not vote in again.
    """
    session, journal = peer.session, peer.storage.journal()
    assert isinstance(journal, MemoryJournal)
    elsewhere = (journal.kept, session.operations.spent, peer.storage, peer.heard, peer)
    seen, todo, found = (
        {id(thing) for thing in elsewhere},
        list[Any]([session, journal.entries]),
        Counter[str](),
    )
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(
            thing, ModuleType | type | World | Network | Table | Place
        ):
            continue
        seen.add(id(thing))
        found[type(thing).__name__] += 1
        cells = isinstance(thing, FunctionType)
        todo.extend(
            (cell.cell_contents for cell in thing.__closure__ or ())
            if cells
            else gc.get_referents(thing)
        )
    return found


def live(table: Table, count: int) -> None:
    """So many rounds, and operations between them."""
    for _ in range(count):
        number = table.peers[0].machine.round
        for peer in table.peers:
            peer.contribute(f"{number}/{peer.name}")
        if number % OPERATION_EVERY == 0:
            for peer in table.peers:
                cid, call = (
                    f"op{number}/{peer.name}".encode().ljust(16, b"."),
                    Call(f"op{number}", codec="fp32"),
                )
                peer.do(
                    lambda session, now, cid=cid, call=call: session.operations.start(
                        now, call, 4, torch.ones(4), cid
                    )
                )
                peer.do(lambda session, now: session.settle(now))
        table.until(lambda number=number: all(peer.machine.round > number for peer in table.peers))
        for peer in table.peers:
            peer.heard.clear()


@pytest.mark.parametrize("rounds", [1000, pytest.param(6000, marks=RARE)])
def test_what_a_member_holds_does_not_grow_with_its_log(rounds: int) -> None:
    table = Table(2)
    peers = table.all_in()
    live(table, 220)  # until every window is full
    young = [held(peer) for peer in peers]
    live(table, rounds)
    for peer, before in zip(peers, young, strict=True):
        after = held(peer)
        assert {
            "Exchange",
            "Membership",
            "RoundMachine",
            "Operation",
        } <= after.keys()  # it was looked for where it could be
        assert before["Operation"] == after["Operation"]
        for counted in (before, after):  # one is less where an entry was not learnt by its votes
            assert counted["Certified"] - RECENT - 2 * counted["Operation"] in (0, 1)
        assert after.total() <= 1.05 * before.total(), (after - before).most_common(8)
        assert len(peer.machine.journal.entries) > rounds
        assert len(peer.session.operations.spent) <= MAX_SPENT
    table.end()
