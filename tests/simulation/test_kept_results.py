"""Results of operations are let go of as soon as everybody has them: nobody holds two where the next operation begins."""

from __future__ import annotations

import pytest
import torch
from session_table import Peer, Table

from atoll.collectives.group import convener
from atoll.collectives.identifiers import PeerId
from atoll.collectives.swarm import Call
from atoll.node.session import events as ev
from atoll.node.session.naming import operation_key
from atoll.node.session.operation import Operation


def called(table: Table, op_id: str) -> dict[PeerId, Operation]:
    """Everybody calls."""
    key = operation_key("run", op_id)
    for peer in table.peers:
        cid = f"{op_id}/{peer.name}".encode().ljust(16, b".")
        peer.do(lambda session, now, cid=cid: session.operations.start(now, Call(op_id, codec="fp32"), 4, torch.ones(4), cid))
        peer.do(lambda session, now: session.settle(now))
    return {peer.name: peer.session.operations.by_key[key] for peer in table.peers}


def served(peer: Peer, op_id: str) -> bool:
    return any(isinstance(event, ev.OperationDone) and event.op_id == op_id for event in peer.heard)


@pytest.mark.parametrize("slow", [0.0, 0.3], ids=["even", "the proposal comes last"])
def test_a_result_is_kept_no_longer_than_until_the_last_has_it(slow: float) -> None:
    """Where the proposal comes later than the votes of a quorum, a member learns the decision without having voted; it has the bytes."""
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
        assert {name: len(operation.results) for name, operation in operations.items()} == dict.fromkeys(operations, 0)
        assert all(operation.holders == set(operations) for operation in operations.values())
        table.network.link(leader, last).latency_s = 0.001
    table.end()
