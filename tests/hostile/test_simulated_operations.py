"""What a member says of free-standing operations that nobody called: it reserves nothing, and is
forgotten.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from exchange_kit import cid_of, make_plan
from hostile.invented import invented
from session_table import SETTINGS, Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.errors import ConfigError
from atoll.collectives.exchange import Exchange, ResultComplete
from atoll.collectives.exchange.header import PART, RESULT, pack, slot_id
from atoll.collectives.group import Plan
from atoll.collectives.identifiers import PeerId
from atoll.collectives.script_swarm import Call
from atoll.collectives.swarm import LimitSettings
from atoll.node.modes.operations.operations import ACCOUNTS, LIFETIME_S, UNCALLED_S
from atoll.node.session import events as ev
from atoll.node.session.actions import ROUND_PREFIX
from atoll.node.session.budgets import REQUESTS

A, B, ME = PeerId("a"), PeerId("b"), PeerId("me")
GIB = 1 << 30


def test_a_plan_of_others_takes_no_memory_before_something_comes_that_belongs_there() -> None:
    taken = list[int]()

    def buffer(plan: Plan) -> memoryview:
        taken.append(plan.numel)
        return memoryview(bytearray(4 * plan.numel))

    exchange = Exchange(ME, emit=lambda event: None, result_buffer=buffer)
    exchange.open_round("op", 1, [A, ME], 8, 4, "fp32", 64)
    plan = make_plan([(A, cid_of(0), 1)], [A], 8, 4, "fp32", log="op")
    exchange.execute(plan, [A, ME])
    exchange.report(plan.plan_id)
    assert not taken
    header = pack(RESULT, 16, 0, plan.plan_id, slot_id("op", 1))
    view = exchange.destination(A, header)
    assert view is not None
    assert taken == [8]


def test_what_the_own_script_contributes_to_has_its_memory_at_once() -> None:
    taken = list[int]()

    def buffer(plan: Plan) -> memoryview:
        taken.append(plan.numel)
        return memoryview(bytearray(4 * plan.numel))

    exchange = Exchange(ME, emit=lambda event: None, result_buffer=buffer)
    exchange.open_round("op", 1, [A, ME], 8, 4, "fp32", 64)
    exchange.freeze("op", 1, cid_of(0), torch.ones(8))
    exchange.execute(make_plan([(ME, cid_of(0), 1)], [A], 8, 4, "fp32", log="op"), [A, ME])
    assert taken == [8]


def test_parts_of_what_nobody_here_called_are_kept_as_far_as_is_said() -> None:
    """A vector of 100 chunks of 16 bytes, of which 64 bytes may come before a plan, and nothing
    that a plan does not want.
    """
    emitted = list[object]()
    exchange = Exchange(ME, emit=emitted.append)
    exchange.open_round("op", 1, [A, B, ME], 400, 4, "fp32", 64)

    def sends(peer: PeerId, chunk: int, cid: bytes) -> bool:
        header = pack(PART, 16, chunk, slot_id("op", 1), cid)
        view = exchange.destination(peer, header)
        if view is not None:
            view[:] = bytes(16)
            exchange.received(peer, header)
        return view is not None

    assert [sends(A, chunk, cid_of(0)) for chunk in range(100)] == [True] * 4 + [False] * 96
    assert not sends(B, 0, cid_of(1)), "all senders share it"
    exchange.execute(make_plan([(A, cid_of(0), 1)], [ME], 400, 4, "fp32", log="op"), [A, B, ME])
    assert not sends(B, 5, cid_of(1))
    assert all(sends(A, chunk, cid_of(0)) for chunk in range(4, 100))
    assert any(isinstance(event, ResultComplete) for event in emitted)


def say(victim: Peer, sender: PeerId, log: str, body: m.Body) -> None:
    data = ROUND_PREFIX + m.encode(m.Envelope(log, 1, 0, body))
    victim.do(lambda session, now: session.on_message(now, sender, data))


def settled(count: int = 3, limits: LimitSettings | None = None) -> Table:
    """Everybody is in, and has a budget to speak of operations again."""
    settings = SETTINGS if limits is None else msgspec.structs.replace(SETTINGS, limits=limits)
    table = Table(count, settings)
    table.all_in()
    table.wait(1.0)
    return table


def test_plans_of_invented_operations_are_not_carried_out_beyond_a_members_account() -> None:
    table = settled()
    victim, liar = table.peers[0], table.peers[1].name
    config = victim.machine.config
    for number in range(8):  # a GiB each
        plan = invented("run", config, liar, f"x{number}")
        say(victim, liar, plan.log, m.PlanMessage(plan))
    operations = victim.session.operations
    assert [
        operation.machine.open.plan is not None for operation in operations.by_key.values()
    ] == [True] * 8, "they are understood"
    assert not any(operation.charged for operation in operations.by_key.values())
    assert victim.node is not None
    assert not victim.node.plane._plans
    assert victim.session.budgets.refused(liar)["operation_bytes"] == 8
    table.end()


def test_small_ones_are_carried_out_up_to_a_members_account_and_to_all_members() -> None:
    limits = LimitSettings(member_bytes=10_000)
    table = settled(6, limits)
    victim = table.peers[0]
    for liar in table.peers[1:]:
        for number in range(4):
            plan = invented("run", victim.machine.config, liar.name, f"y{number}", numel=1000)
            say(victim, liar.name, plan.log, m.PlanMessage(plan))
    taken = [op.charged for op in victim.session.operations.by_key.values() if op.charged]
    assert {nbytes for _, nbytes in taken} == {4000}
    assert max(sum(who == liar.name for who, _ in taken) for liar in table.peers) == 2
    assert sum(nbytes for _, nbytes in taken) == ACCOUNTS * limits.member_bytes
    assert victim.node is not None
    assert len(victim.node.plane._plans) == len(taken)
    table.end()


def test_invented_operations_are_few_at_once_and_soon_forgotten() -> None:
    table = settled()
    victim, liar = table.peers[0], table.peers[1].name
    operations, most = victim.session.operations, table.place.settings.limits.operations
    for number in range(300):
        plan = invented("run", victim.machine.config, liar, f"z{number}", numel=100)
        say(victim, liar, plan.log, m.Prepare(1))
    known = [operation for operation in operations.by_key.values() if operation.by == liar]
    assert len(known) <= most * 3 // 4
    refused = victim.session.budgets.refused(liar)["operation"]
    assert refused >= 300 - REQUESTS["operation"].burst
    table.wait(UNCALLED_S + 15.0)
    assert not [operation for operation in operations.by_key.values() if operation.by == liar]
    assert victim.node is not None
    assert not victim.node.plane._plans
    assert not victim.session.transfer.fetching
    table.end()


def test_who_is_no_member_makes_no_operation_known_and_keeps_none_alive() -> None:
    table = settled()
    victim, liar, observer = table.peers[0], table.peers[1].name, PeerId("observer")
    call, plan = (
        Call("done", codec="fp32"),
        invented("run", victim.machine.config, liar, "known", numel=100),
    )
    for peer in table.peers:
        cid = f"done/{peer.name}".encode().ljust(16, b".")
        peer.do(
            lambda session, now, cid=cid: session.operations.start(now, call, 4, torch.ones(4), cid)
        )
        peer.do(lambda session, now: session.settle(now))
    table.until(lambda: any(isinstance(event, ev.OperationDone) for event in victim.heard))
    operations = victim.session.operations
    (done,) = operations.by_key.values()
    unheard = invented("run", victim.machine.config, liar, "unheard", numel=100)
    say(victim, observer, unheard.log, m.PlanMessage(unheard))
    assert set(operations.by_key) == {done.key}
    say(victim, liar, plan.log, m.PlanMessage(plan))
    assert len(operations.by_key) == 2
    for _ in range(int(LIFETIME_S / 10.0) + 3):
        for log, base in ((done.log, done.machine.base), (plan.log, plan.base)):
            say(victim, observer, log, m.Ready(base, b"c" * 16, 1, False))
        say(victim, observer, plan.log, m.PlanMessage(plan))
        table.wait(10.0)
    assert not operations.by_key
    table.end()


def test_an_invented_result_is_not_fetched_beyond_the_account_and_fetching_ends_with_it() -> None:
    table = settled(limits=LimitSettings(member_bytes=10_000))
    victim, liar = table.peers[0], table.peers[1].name
    for numel in (1 << 28, 1000):
        plan = invented("run", victim.machine.config, liar, f"f{numel}", numel=numel)
        digests = tuple(bytes([7]) * 32 for _ in plan.parts)
        entry = msgspec.structs.replace(
            victim.machine.journal.entries[0].entry,
            log=plan.log,
            round=1,
            base=plan.base,
            base_state=bytes(32),
            contributors=plan.contributors,
            parts=plan.parts,
            part_digests=digests,
            numel=plan.numel,
            chunk_elements=plan.chunk_elements,
            codec=plan.codec,
            reducer=plan.reducer,
            next_config=victim.machine.config,
        )
        say(victim, liar, plan.log, m.Accept(0, entry))
        wanted = [
            item.entry.numel for item in victim.session.transfer.fetching.values() if item.entry
        ]
        assert wanted == ([] if numel > 1000 else [1000])
    table.wait(UNCALLED_S + 15.0)
    assert not victim.session.transfer.fetching
    table.end()


def test_an_operation_that_did_not_fit_is_carried_out_once_the_own_script_calls() -> None:
    """All are called, one late; none fits into what others may take."""
    table = settled(limits=LimitSettings(member_bytes=0))
    call = Call("late", codec="fp32")
    for peer in table.peers:
        if peer is table.peers[-1]:
            table.wait(5.0)
        cid = f"late/{peer.name}".encode().ljust(16, b".")
        peer.do(
            lambda session, now, cid=cid: session.operations.start(now, call, 4, torch.ones(4), cid)
        )
        peer.do(lambda session, now: session.settle(now))
    table.until(
        lambda: all(
            any(isinstance(event, ev.OperationDone) for event in peer.heard) for peer in table.peers
        )
    )
    table.end()


def test_a_call_longer_than_the_runs_limit_is_refused_by_name_and_others_are_not_heard() -> None:
    table = settled(limits=LimitSettings(operation_elements=100))
    caller, other = table.peers[0], table.peers[1].name
    with pytest.raises(ConfigError, match="101 elements, this run's are of 100 at most") as told:
        caller.do(
            lambda session, now: session.operations.prepare(now, Call("x", codec="fp32"), 101)
        )
    assert told.value.key == "$.limits.operation_elements"
    plan = invented("run", caller.machine.config, other, "x", numel=101)
    say(caller, other, plan.log, m.PlanMessage(plan))
    assert not caller.session.operations.by_key
    table.end()
