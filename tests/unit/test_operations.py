"""What free-standing operations rest on: names, votes remembered over a restart, memory used again,
traffic counted over lanes that are gone.
"""

from __future__ import annotations

import gc
import socket
import threading
from pathlib import Path

import pytest

from atoll.collectives.api import call_of
from atoll.collectives.engine import EngineThread, LaneKeys
from atoll.collectives.errors import ConfigError
from atoll.collectives.exchange import ExchangeEvent, LaneDown, LaneUp
from atoll.collectives.group import MAX_LOG_NAME, Certified, Entry, Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.partition import slots_for
from atoll.collectives.script_swarm import MAX_TAG
from atoll.node.modes.operations.naming import MAX_NUMEL, Spec, config_key, operation_key, parse
from atoll.node.modes.operations.volatile import VolatileJournal
from atoll.node.service.buffers import BufferPool
from atoll.node.session.replica import PlainSlots
from atoll.node.storage import RunFiles

A, B = PeerId("a"), PeerId("b")
WAIT_S = 20.0


def test_a_call_that_names_a_removed_codec_is_told_another() -> None:
    with pytest.raises(ConfigError) as caught:
        call_of("sum of it", "sum", 5.0, True, codec="fp16")
    assert caught.value.message == (
        "operation 'sum of it': codec 'fp16' was removed: use bf16 or int8"
    )
    assert caught.value.key == "codec"


def test_a_log_name_fits_and_tells_operation_and_configuration_apart() -> None:
    small, large = (Member(A, 0),), (Member(A, 0), Member(B, 7))
    key = operation_key("r" * 26, "x" * 64)
    longest = Spec(
        MAX_NUMEL,
        "sparse64_both",
        "clipping999999.99999+bucketing16+arc+nnm+geometric_median:127",
        True,
        "x" * MAX_TAG,
        "x".join(["2"] * 8) + ".7",
    )
    assert len(longest.log_name(key, large, large)) <= MAX_LOG_NAME
    names = {
        Spec(numel, codec, reducer, everyone, tag, group).log_name(
            operation_key(run, op), config, config
        ): (run, op, numel, codec, reducer, everyone, tag, group)
        for run in "rs"
        for op in "xy"
        for numel in (1, 2)
        for codec, reducer in (("fp32", "mean"), ("int8", "mean"), ("fp32", "max"))
        for everyone in (False, True)
        for tag in ("", "all")
        for config in (small, large)
        for group in ("", "2x1.0", "d2.1")
    }
    assert len(names) == 2 * 2 * 2 * 3 * 2 * 2 * 2 * 3
    for name, (run, op, *spec) in names.items():
        found = parse(name)
        assert found is not None
        assert found[:2] == (Spec(*spec), operation_key(run, op))
        assert (found[2] in (config_key(small), config_key(large))) is not bool(found[0].group)


@pytest.mark.parametrize(
    "log",
    [
        "",
        "main/run",
        "op",
        "op/5/fp32/mean/any/key",
        "opd/5/fp32/mean/any/key/config",
        "op/5/fp32/mean/any/key/config/more",
        "op/-5/fp32/mean/any/key/config",
        "op/5/zip/mean/any/key/config",
        "op/5/fp32/median/any/key/config",
        "op/5/fp32/mean/some/key/config",
        "op/0/fp32/mean/any/key/config",
        "op/5/bits/mean/any/key/config",
        "op/5/fp32/copy/any/key/config",
        "op/5/bits/wrap64/any/key/config",
        "op/٥/fp32/mean/any/key/config",
        f"op/{MAX_NUMEL + 1}/fp32/mean/any/key/config",
        f"op/{MAX_NUMEL // 256 + 1}/bits/gather/any/key/config",
        f"op/5/fp32/mean/any{'x' * (MAX_TAG + 1)}/key/config",
        "op/5/fp32/mean/anyfloat32[5]\x1b[2J/key/config",
        "op/5/fp32/mean/anylänge/key/config",
        "op/5/fp32/mean/any@/key/config",
        "op/5/fp32/mean/any@d9.0/key/config",
        "op/5/fp32/mean/any@d2.2/key/config",
        "op/5/fp32/mean/any@p64/key/config",
        "op/5/fp32/mean/any@999x999.0/key/config",
        "op/5/fp32/mean/any@2x2/key/config",
        f"op/5/fp32/mean/any@{'2x' * 11}2.0/key/config",
    ],
)
def test_names_of_logs_that_nobody_can_take_part_in_are_refused(log: str) -> None:
    assert parse(log) is None


@pytest.mark.parametrize(
    ("numel", "members"), [(1, 1), (1, 3), (65_536, 2), (65_537, 2), (200_001, 5)]
)
def test_a_gather_has_a_slot_of_whole_chunks_for_each_member(numel: int, members: int) -> None:
    config = tuple(Member(PeerId(f"p{index}"), 0) for index in range(members))
    shape = Spec(numel, "bits", "gather", False, "").shape(config)
    slot = shape.numel // members
    assert shape.numel % members == slot % shape.chunk_elements == 0
    assert numel <= slot < numel + slot // shape.chunk_elements
    assert shape.chunk_elements <= 65_536
    peers = [member.peer for member in config]
    parts = slots_for(shape.numel // shape.chunk_elements, peers, peers[1:] or peers)
    assert [
        (part.first * shape.chunk_elements, part.stop * shape.chunk_elements) for part in parts
    ] == [(slot * index, slot * (index + 1)) for index in range(members)]
    assert all(part.owner == peer for part, peer in zip(parts[1:], peers[1:], strict=True))


def test_a_journal_tells_before_its_first_vote() -> None:
    told = list[int]()
    entry = Entry("op", 0, bytes(32), bytes(32), (), (), (), 1, 1, "fp32", "mean", (Member(A, 0),))
    journal = VolatileJournal(0, lambda: told.append(journal.promised))
    journal.append(Certified(entry, ()))
    assert not journal.spent
    journal.promise(3)
    journal.accept(4, entry)
    assert (told, journal.spent, journal.promised, journal.accepted) == ([-1], True, 4, (4, entry))


def test_votes_in_operations_are_remembered_over_a_restart(tmp_path: Path) -> None:
    def life() -> RunFiles:
        return RunFiles(
            tmp_path,
            run_id="r",
            outer=OuterSettings("nesterov", 0.7, 0.9),
            slots=PlainSlots,
            trouble=lambda error: None,
        )

    first = life()
    assert first.spent.operations() == []
    keys = [operation_key("r", str(number)) for number in range(4100)]
    for key in keys:
        first.spent.spend(key)
    second = life()  # as after kill -9: nothing was closed
    assert second.spent.operations() == keys[-4096:]
    second.spent.spend("more")
    third = life()
    assert third.spent.operations() == [*keys[-4095:], "more"]
    for opened in (first, second, third):
        opened.close()


def test_memory_comes_back_with_its_last_view() -> None:
    pool = BufferPool(max_free_bytes=8192)
    view = pool.take(5000)
    assert (len(view), view.readonly, view.format) == (5000, False, "B")
    view[:3] = b"abc"
    part = view[1:3]
    del view
    gc.collect()
    other = pool.take(5000)
    assert bytes(part) == b"bc"  # not given to anybody else while a slice of it lives
    other[:3] = b"xyz"
    assert bytes(part) == b"bc"
    del part
    gc.collect()
    again = pool.take(5000)
    assert bytes(again[:3]) == b"abc"  # the same memory
    del again, other
    gc.collect()
    assert bytes(pool.take(5000)[:1]) in (b"a", b"x")
    assert bytes(pool.take(6000)[:3]) == bytes(3)  # another length is other memory


def test_traffic_of_closed_lanes_counts_on() -> None:
    changed = {A: threading.Semaphore(0), B: threading.Semaphore(0)}

    def started(me: PeerId) -> EngineThread:
        def emit(event: ExchangeEvent) -> None:
            if isinstance(event, LaneUp | LaneDown):
                changed[me].release()

        engine = EngineThread(me, emit=emit)
        engine.start()
        return engine

    engines = {me: started(me) for me in (A, B)}
    totals = (0, 0)
    try:
        for _ in range(3):
            left, right = socket.socketpair()
            engines[A].add_lane(B, left, LaneKeys(bytes(16), bytes(16), "plain"), "direct")
            engines[B].add_lane(A, right, LaneKeys(bytes(16), bytes(16), "plain"), "direct")
            for me in (A, B):
                assert changed[me].acquire(timeout=WAIT_S)
            assert all(
                after > before for after, before in zip(engines[A].totals(), totals, strict=True)
            )  # a heartbeat each way
            engines[A].drop_lane(B)
            for me in (A, B):
                assert changed[me].acquire(timeout=WAIT_S)
            assert engines[A].stats() == {}
            totals = engines[A].totals()
            assert min(totals) > 0
    finally:
        for engine in engines.values():
            engine.stop()
    assert engines[A].totals() == totals
