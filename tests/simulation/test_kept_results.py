"""Results of operations are let go of as soon as everybody has them: nobody holds two where the
next operation begins."""

from __future__ import annotations

import pytest
import torch
from session_table import Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.group import convener
from atoll.collectives.identifiers import PeerId
from atoll.collectives.script_swarm import Call
from atoll.node.modes.operations.naming import operation_key
from atoll.node.modes.operations.operation import Operation
from atoll.node.session import events as ev
from atoll.node.session.actions import ROUND_PREFIX


def called(table: Table, op_id: str) -> dict[PeerId, Operation]:
    """Everybody calls."""
    call = Call(op_id, codec="fp32")
    key = operation_key("run", op_id)
    for peer in table.peers:
        cid = f"{op_id}/{peer.name}".encode().ljust(16, b".")
        peer.do(
            lambda session, now, cid=cid: session.operations.start(now, call, 4, torch.ones(4), cid)
        )
        peer.do(lambda session, now: session.settle(now))
    return {peer.name: peer.session.operations.by_key[key] for peer in table.peers}


def served(peer: Peer, op_id: str) -> bool:
    return any(isinstance(event, ev.OperationDone) and event.op_id == op_id for event in peer.heard)


@pytest.mark.parametrize("slow", [0.0, 0.3], ids=["even", "the proposal comes last"])
def test_a_result_is_kept_no_longer_than_until_the_last_has_it(slow: float) -> None:
    """Where the proposal comes later than the votes of a quorum, a member learns the decision
    without having voted; it has the bytes.
    """
    table = Table(4)
    table.all_in()
    for number in range(6):
        operations = called(table, f"op{number}")
        first = next(iter(operations.values())).machine
        leader = convener("run", first.log, 1, 0, first.config).peer
        last = table.peers[-1].name if leader != table.peers[-1].name else table.peers[-2].name
        table.network.link(leader, last).latency_s = slow
        table.until(lambda number=number: all(served(peer, f"op{number}") for peer in table.peers))
        table.wait(2.0)
        assert {
            name: len(operation.results) for name, operation in operations.items()
        } == dict.fromkeys(operations, 0)
        assert all(operation.holders == set(operations) for operation in operations.values())
        table.network.link(leader, last).latency_s = 0.001
    table.end()


@pytest.mark.parametrize("survivor", [0, 1, 2])
def test_a_majority_killed_after_it_has_voted_votes_no_more_and_the_caller_that_is_left_hears_of_no_result(
    survivor: int,
) -> None:
    """Votes of operations are volatile: who comes back takes no part in what it has voted in."""
    table = Table(3)
    table.all_in()
    left, killed = (
        table.peers[survivor],
        [peer for peer in table.peers if peer is not table.peers[survivor]],
    )

    def lost(sender: PeerId, receiver: PeerId, channel: str, payload: object) -> bool:
        """No vote of the others' reaches the one that is left."""
        if (
            not isinstance(payload, bytes)
            or payload[:1] != ROUND_PREFIX
            or receiver != left.name
            or sender == receiver
        ):
            return False
        return isinstance(m.decode(payload[1:], sender).body, m.Accepted | m.Catch)

    table.network.tap = lost
    operations = called(table, "op")
    mine = operations[left.name]
    table.until(
        lambda: (
            all(
                operations[peer.name].journal.accepted or operations[peer.name].done
                for peer in killed
            )
            and bool(mine.results)
        )
    )
    assert not mine.done
    for peer in killed:
        peer.kill()
    table.network.tap = None
    table.wait(5.0)
    assert not served(left, "op")
    for peer in killed:
        peer.start().attach()
    table.wait(30.0)
    assert not served(left, "op")
    table.end()
