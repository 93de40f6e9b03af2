"""The contracts of the seams: what every implementation keeps, clause by clause.

A clause is a function of one case: an implementation, and what a test needs beside it. `SWARM`,
`JOURNAL`, `STORAGE` and `DATA_PLANE` list the clauses of a seam; tests/unit/test_contracts.py plays
each on every implementation. To test another one, make its case and call the clauses. Codecs and
reducers have their own tests (test_codec.py, test_reduce.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import pytest
import torch
from blake3 import blake3
from exchange_kit import cid_of, make_plan, ref_digests, ref_result, vector
from torch import Tensor

from atoll.collectives import api
from atoll.collectives.digest import chunk_hash
from atoll.collectives.errors import (
    ConfigError,
    LocalProtocolError,
    ModelMismatchError,
    SwarmClosedError,
)
from atoll.collectives.exchange import (
    BlobComplete,
    BlobProgress,
    ExchangeEvent,
    NonFinite,
    PartReduced,
    ReductionReport,
    ResultComplete,
)
from atoll.collectives.group import Certified, Contributor, Entry, Member, Plan, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import AnchorView, Outcome, Share
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round import RECENT, SPAN, Journal, SealRecord, rounds_in
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.session.ports import ContentPlane, DataPlane, Storage

LAYOUT = make_layout([("w", (3, 5)), ("b", (4,))])
N = LAYOUT.numel
OTHER = make_layout([("w", (3, 6)), ("b", (4,))])
SETTINGS = RunSettings(sync_every=5, codec="fp32", outer=OuterSettings("sgd", 1.0, 0.0))
"""With these the outer step is anchor − mean, and nothing is rounded on the way: the bits are
known.
"""


def bits(flat: Tensor) -> list[int]:
    """The bits of a float32 tensor: equal values of other bits (0 and −0) are told apart."""
    return flat.view(torch.int32).tolist()


# ── Swarm ──


@dataclass(frozen=True)
class SwarmCase:
    """A fresh member of a fresh run with SETTINGS, not yet opened, in which nobody else
    contributes.

    ``hold(True)``: contributions stay undecided from now on, ``hold(False)``: they are decided
    again. None: the implementation decides before it returns. ``alone``: rounds of the run are
    rounds of this member.
    """

    swarm: Swarm
    hold: Callable[[bool], None] | None
    alone: bool = True


START = vector(N, 1)
DELTA = vector(N, 2)


def copy(source: Tensor) -> Callable[[Tensor], None]:
    """A writer that writes these values."""

    def write(out: Tensor) -> None:
        out.copy_(source)

    return write


def untouched(out: Tensor) -> None:
    """A writer that must not be called."""
    pytest.fail("nothing was to be written")


def read(view: AnchorView) -> Tensor:
    """All elements of a view."""
    out = torch.empty(view.numel)
    view.copy_into(out)
    return out


def newest(swarm: Swarm) -> tuple[int, list[int]]:
    """Round and bits of the newest anchor."""
    view = swarm.anchor()
    found = view.round, bits(read(view))
    view.release()
    return found


def opened(case: SwarmCase) -> tuple[Swarm, int]:
    """The swarm after `open`, and the round it is at."""
    view = case.swarm.open(LAYOUT, copy(START))
    view.release()
    return case.swarm, view.round


def contributed(swarm: Swarm, flat: Tensor, samples: int = 1, base: int | None = None) -> Outcome:
    """A contribution that is decided."""
    outcome = swarm.contribute(samples=samples, write=copy(flat), base=base).wait(60)
    assert outcome.status == "committed" or (outcome.status == "lost" and not outcome.counted)
    return outcome


def swarm_open_gives_the_initial_parameters(case: SwarmCase) -> None:
    swarm = case.swarm
    assert isinstance(swarm, Swarm)
    assert swarm.settings == SETTINGS
    for early in (swarm.anchor, lambda: swarm.contribute(samples=1, write=untouched)):
        with pytest.raises(LocalProtocolError, match="open"):
            early()
    view = swarm.open(LAYOUT, copy(START))
    assert view.numel == N
    assert view.round == 0 or not case.alone
    assert bits(read(view)) == bits(START)
    assert view.digest == blake3(START.numpy().tobytes()).hexdigest()
    view.release()


def swarm_open_again_gives_the_newest_anchor(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    outcome = contributed(swarm, DELTA)
    again = swarm.open(LAYOUT, untouched)
    assert again.round >= outcome.round
    assert bits(read(again)) == bits(START - DELTA)
    again.release()


def swarm_another_model_is_refused(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    with pytest.raises((ModelMismatchError, LocalProtocolError), match="model"):
        swarm.open(OTHER, untouched)
    assert contributed(swarm, DELTA).counted  # the run goes on
    assert newest(swarm)[1] == bits(START - DELTA)


def swarm_anchors_are_read_only_leases(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    held = swarm.anchor()
    out = torch.empty(N)
    held.copy_into(out)
    out.fill_(7.0)  # one's own copy
    assert bits(read(held)) == bits(START)
    contributed(swarm, DELTA)
    contributed(swarm, DELTA)
    contributed(swarm, DELTA)
    assert bits(read(held)) == bits(START)  # a lease is never overwritten
    later = swarm.anchor()
    assert bits(read(later)) == bits(START - DELTA - DELTA - DELTA)
    assert later.round >= held.round + 3
    held.release()
    held.release()
    with pytest.raises(LocalProtocolError, match="released"):
        held.copy_into(out)
    assert bits(read(later)) == bits(
        START - DELTA - DELTA - DELTA
    )  # giving one back leaves the other
    later.release()


def swarm_anchors_are_read_in_pieces_that_fit(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    view = swarm.anchor()
    for start, count in ((0, 1), (3, 5), (N - 2, 2), (N, 0)):
        part = torch.full((count,), 7.0)
        view.copy_into(part, start)
        assert bits(part) == bits(START[start : start + count])
    for start, count in ((N - 2, 3), (N - 1, 2), (N, 1), (-1, 1)):
        part = torch.full((count,), 7.0)
        with pytest.raises(LocalProtocolError):
            view.copy_into(part, start)
        assert part.tolist() == [7.0] * count
    for wrong in (torch.zeros(2, dtype=torch.float64), torch.zeros(4)[::2]):
        with pytest.raises(LocalProtocolError, match="float32, contiguous"):
            view.copy_into(wrong)
    view.release()


def swarm_a_contribution_is_committed_and_moves_the_anchor(case: SwarmCase) -> None:
    swarm, round_ = opened(case)
    expected = START
    for samples in (8, 3):
        outcome = contributed(swarm, DELTA, samples, base=newest(swarm)[0])
        expected = expected - DELTA
        assert outcome.counted
        assert outcome.contributors == (Share(swarm.peer, samples),)
        assert (outcome.lost, outcome.reason) == ((), "")
        assert outcome.round == round_ + 1 or (not case.alone and outcome.round > round_)
        assert min(outcome.bytes_sent, outcome.bytes_received, outcome.elapsed_s) >= 0
        round_, now = newest(swarm)
        assert round_ == outcome.round or (not case.alone and round_ > outcome.round)
        assert now == bits(expected)


def swarm_a_contribution_stays_as_it_was_written(case: SwarmCase) -> None:
    """Also once it is decided, until the next one: who carries what encoding loses reads it then."""
    swarm, _ = opened(case)
    kept: list[Tensor] = []

    def write(out: Tensor) -> None:
        out.copy_(DELTA)
        kept.append(out)

    assert swarm.contribute(samples=1, write=write).wait(60).counted
    assert bits(kept[0]) == bits(DELTA)


def swarm_an_outcome_may_be_asked_for_again(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    pending = swarm.contribute(samples=2, write=copy(DELTA))
    outcome = pending.wait()
    assert outcome.counted
    assert pending.done()
    assert pending.wait() == pending.wait(0.0) == pending.wait(60) == outcome
    contributed(swarm, DELTA)
    assert pending.wait() == outcome  # also when the next round is decided


def swarm_outcomes_tell_the_bytes_since_the_one_before(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    outcomes = [contributed(swarm, DELTA) for _ in range(12)]
    for key in ("bytes_sent", "bytes_received"):
        moved = [getattr(outcome, key) for outcome in outcomes]
        assert min(moved) >= 0
        assert max(moved[-3:]) <= 3 * max(
            moved[:3]
        )  # rounds alike; totals of the whole life would be four times as many


def swarm_one_contribution_at_a_time(case: SwarmCase) -> None:
    swarm, round_ = opened(case)
    if case.hold is None:
        assert swarm.contribute(samples=1, write=copy(DELTA)).done()
        return
    case.hold(True)
    pending = swarm.contribute(samples=1, write=copy(DELTA))
    assert not pending.done()
    early = pending.wait(0.0)
    assert (early.status, early.counted, early.contributors) == ("open", False, ())
    assert early.round > round_
    assert early.reason
    with pytest.raises(LocalProtocolError, match="undecided"):
        swarm.contribute(samples=1, write=untouched)
    case.hold(False)
    assert pending.wait(60).counted
    assert newest(swarm)[1] == bits(START - DELTA)  # once
    assert contributed(swarm, DELTA).counted


def swarm_what_cannot_be_contributed_freezes_nothing(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    for samples in (0, -1):
        with pytest.raises(LocalProtocolError, match="samples"):
            swarm.contribute(samples=samples, write=untouched)
    for nonsense in (2.5, "4", None):
        with pytest.raises(ConfigError, match="is not a number of samples"):
            swarm.contribute(samples=nonsense, write=untouched)  # type: ignore[arg-type]

    def interrupted(out: Tensor) -> None:
        out.fill_(9.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swarm.contribute(samples=1, write=interrupted)
    assert newest(swarm)[1] == bits(START)
    assert contributed(swarm, DELTA).counted
    assert newest(swarm)[1] == bits(START - DELTA)


def swarm_work_on_an_old_anchor_is_refused_visibly(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    old = newest(swarm)[0]
    assert contributed(swarm, DELTA, base=old).counted
    refused = contributed(swarm, DELTA, base=old)
    assert (refused.status, refused.counted, refused.contributors) == ("lost", False, ())
    assert f"round {old}" in refused.reason
    round_, now = newest(swarm)
    assert now == bits(START - DELTA)
    assert contributed(swarm, DELTA, base=round_).counted
    assert newest(swarm)[1] == bits(START - DELTA - DELTA)


def swarm_all_reduce_over_one_member_leaves_the_bits(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    contributed(swarm, DELTA)  # whoever was counted is a member
    flat = DELTA.clone().view(1, N)
    for weight in (3, 4):
        pending = swarm.all_reduce(flat, weight=weight, op_id=f"mean {weight}", deadline_s=60.0)
        outcome = pending.wait(60)
        assert (outcome.status, outcome.contributors, outcome.counted) == (
            "committed",
            (Share(swarm.peer, weight),),
            True,
        )
        assert pending.done()
        assert pending.wait(0.0) == outcome
        assert bits(flat.view(-1)) == bits(DELTA)
    for wrong in (torch.ones(2, dtype=torch.complex64), torch.ones(2, 3).t(), torch.empty(0)):
        with pytest.raises(LocalProtocolError, match="float32"):
            swarm.all_reduce(wrong, weight=1, op_id="wrong", deadline_s=1.0)
    with pytest.raises(LocalProtocolError, match="weight"):
        swarm.all_reduce(flat, weight=0, op_id="wrong", deadline_s=1.0)
    assert newest(swarm)[1] == bits(START - DELTA)  # the anchor has no part in it


def swarm_an_operation_is_called_once_and_others_beside_it(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    contributed(swarm, DELTA)
    one, two = START.clone(), DELTA.clone()
    first = swarm.all_reduce(one, weight=1, op_id="one", deadline_s=60.0)
    second = swarm.all_reduce(two, weight=2, op_id="two", deadline_s=60.0)
    if case.hold is not None:
        with pytest.raises(LocalProtocolError, match="one"):
            swarm.all_reduce(torch.ones(N), weight=1, op_id="one", deadline_s=60.0).wait(60)
    assert [pending.wait(60).status for pending in (second, first)] == ["committed"] * 2
    assert (bits(one), bits(two)) == (bits(START), bits(DELTA))


def swarm_collectives_over_one_member_give_back_what_was_given(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    contributed(swarm, DELTA)
    alone = (Share(swarm.peer, 1),)
    flat, whole = DELTA.clone(), torch.tensor([5, -1, 1 << 40])
    for op in ("mean", "sum", "max", "min", "product"):
        assert swarm.all_reduce(flat, op_id=op, op=op).wait(60).contributors == alone
    for wide in (
        torch.tensor([2.0**-1000], dtype=torch.float64),
        torch.tensor([1 + (1 << 60), -1]),
    ):
        given, name = wide.clone(), f"min of {wide.dtype}"
        assert swarm.all_reduce(wide, op_id=name, op="min").wait(60).contributors == alone
        assert torch.equal(wide, given)
    assert api.modular_sum(swarm, whole, op_id="modular", bits=4).wait(60).contributors == alone
    assert (bits(flat), whole.tolist()) == (bits(DELTA), [5, 15, 0])
    strange = torch.tensor([0x7F800001, -1, 3], dtype=torch.int32).to(
        torch.int32
    )  # as a float: a signalling NaN
    gathered = api.all_gather(swarm, strange, op_id="gather").wait(60)
    assert (gathered.outcome.contributors, list(gathered.tensors)) == (alone, [swarm.peer])
    assert gathered.tensors[swarm.peer].tolist() == strange.tolist()
    large = torch.arange(200_003, dtype=torch.float64).view(1, -1)
    assert torch.equal(
        api.all_gather(swarm, large, op_id="large").wait(60).tensors[swarm.peer], large
    )
    scattered = api.reduce_scatter(swarm, flat, op_id="scatter", op="sum").wait(60)
    assert scattered.values is not None
    assert (scattered.start, bits(scattered.values)) == (0, bits(DELTA))
    assert api.broadcast(swarm, strange, root=swarm.peer, op_id="broadcast").wait(60).counted
    assert strange.tolist() == [0x7F800001, -1, 3]
    if case.alone:  # else it waits for the others' scripts
        assert api.barrier(swarm, op_id="barrier").wait(60).contributors == alone
    check = api.check_state(swarm, {"x": flat, "y": large}, op_id="check").wait(60)
    assert (check.agreed, check.holders, check.differing) == (True, (swarm.peer,), {})
    with pytest.raises(LocalProtocolError, match="nothing to repair"):
        api.repair_state(swarm, {"x": flat}, check, op_id="repair")


def swarm_a_collective_that_cannot_be_is_refused_or_open_and_touches_nothing(
    case: SwarmCase,
) -> None:
    swarm, _ = opened(case)
    contributed(swarm, DELTA)
    flat = DELTA.clone()
    assert swarm.all_reduce(flat, op_id="once").wait(60).status == "committed"
    with pytest.raises(LocalProtocolError, match="called already"):
        swarm.all_reduce(flat, op_id="once").wait(60)
    for options in (
        {"op": "sum", "weight": 2},
        {"op": "mode"},
        {"op_id": ""},
        {"op_id": "x" * 65},
        {"deadline_s": -1.0},
    ):
        with pytest.raises(LocalProtocolError):
            swarm.all_reduce(flat, **{"op_id": "free", **options})  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="int64"):
        api.modular_sum(swarm, flat, op_id="free")
    poisoned = DELTA.clone()
    poisoned[3] = float("inf")
    outcome = swarm.all_reduce(poisoned, op_id="poison", op="max").wait(60)
    assert (outcome.status, outcome.contributors) == ("open", ())
    assert "NaN or infinity" in outcome.reason
    assert bits(poisoned)[:3] == bits(DELTA)[:3]
    assert poisoned[3] == float("inf")
    words = torch.tensor([1, 2])
    outcome = api.broadcast(
        swarm, words, root=PeerId("nobody"), op_id="rootless", deadline_s=0.2
    ).wait(60)
    assert (outcome.status, words.tolist()) == ("open", [1, 2])
    assert swarm.all_reduce(flat, op_id="free", op="sum").wait(60).status == "committed"
    assert bits(flat) == bits(DELTA)


def swarm_a_cancelled_collective_is_open_or_decided(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    contributed(swarm, DELTA)
    if case.hold is not None:
        case.hold(True)
    flat = DELTA.clone()
    pending = swarm.all_reduce(flat, op_id="cancelled", everyone=True)
    pending.cancel()
    pending.cancel()
    outcome = pending.wait(60)
    assert outcome.status == "committed" or outcome.reason.startswith("cancelled by its caller")
    assert (outcome.status == "committed") == outcome.counted
    assert pending.wait() == outcome
    if case.hold is not None:
        case.hold(False)
    assert bits(flat) == bits(DELTA)
    assert swarm.all_reduce(flat, op_id="after").wait(60).status == "committed"


def swarm_members_name_me(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    outcome = contributed(swarm, DELTA)
    mine = [view for view in swarm.members() if view.peer == swarm.peer]
    assert [(view.live, view.path) for view in mine] == [(True, "self")]
    assert mine[0].round >= outcome.round
    assert not case.alone or len(swarm.members()) == 1


def swarm_reports_never_raise(case: SwarmCase) -> None:
    swarm = case.swarm
    swarm.report({"step": 1})
    assert (type(swarm.closing), swarm.closing) == (int, 0)
    opened(case)
    for metrics in (
        {},
        {"loss": float("nan"), "step": 2},
        {"x" * 1000: 1.0},
        {f"m{n}": float(n) for n in range(500)},
    ):
        swarm.report(metrics)
    contributed(swarm, DELTA)
    assert (type(swarm.closing), swarm.closing) == (int, 0)  # nobody else has finished a round
    swarm.leave()
    swarm.report({"step": 3})
    swarm.close()
    swarm.report({"step": 4})


def swarm_leave_and_close_may_be_called_again(case: SwarmCase) -> None:
    swarm, _ = opened(case)
    assert contributed(swarm, DELTA).counted
    swarm.leave()
    swarm.leave()
    swarm.close()
    swarm.close()
    for late in (
        swarm.anchor,
        swarm.members,
        lambda: swarm.open(LAYOUT, untouched),
        lambda: swarm.contribute(samples=1, write=untouched),
        lambda: swarm.all_reduce(torch.ones(1), weight=1, op_id="late", deadline_s=1.0),
    ):
        with pytest.raises(SwarmClosedError, match="closed"):
            late()


SWARM = (
    swarm_open_gives_the_initial_parameters,
    swarm_open_again_gives_the_newest_anchor,
    swarm_another_model_is_refused,
    swarm_anchors_are_read_only_leases,
    swarm_anchors_are_read_in_pieces_that_fit,
    swarm_a_contribution_is_committed_and_moves_the_anchor,
    swarm_a_contribution_stays_as_it_was_written,
    swarm_an_outcome_may_be_asked_for_again,
    swarm_outcomes_tell_the_bytes_since_the_one_before,
    swarm_one_contribution_at_a_time,
    swarm_what_cannot_be_contributed_freezes_nothing,
    swarm_work_on_an_old_anchor_is_refused_visibly,
    swarm_all_reduce_over_one_member_leaves_the_bits,
    swarm_an_operation_is_called_once_and_others_beside_it,
    swarm_collectives_over_one_member_give_back_what_was_given,
    swarm_a_collective_that_cannot_be_is_refused_or_open_and_touches_nothing,
    swarm_a_cancelled_collective_is_open_or_decided,
    swarm_members_name_me,
    swarm_reports_never_raise,
    swarm_leave_and_close_may_be_called_again,
)

# ── Journal ──

ZERO = bytes(32)
ME = Member(PeerId("p0"), 0)


def log_of(count: int) -> list[Certified]:
    """Entries that continue each other."""
    entries, base = list[Certified](), ZERO
    for round_ in range(count):
        entry = Entry("main/x", round_, base, ZERO, (), (), (), 4, 4, "fp32", "mean", (ME,))
        entries.append(Certified(entry, (Vote(ME, 0, b"s"),)))
        base = entry.hash()
    return entries


@dataclass(frozen=True)
class JournalCase:
    """``again`` ends the life of the journal it made last, if any, and begins the next one of the
    same member.
    """

    again: Callable[[], Journal]


def journal_state(journal: Journal) -> tuple[int, list[Certified], int, tuple[int, Entry] | None]:
    """What a journal must not forget."""
    return journal.incarnation, list(journal.entries), journal.promised, journal.accepted


def journal_is_empty_at_first(case: JournalCase) -> None:
    journal = case.again()
    assert journal_state(journal) == (0, [], -1, None)
    assert journal.sealed is None
    assert not journal.restarted


def journal_keeps_promise_and_vote(case: JournalCase) -> None:
    entries = log_of(2)
    journal = case.again()
    journal.append(entries[0])
    journal.promise(1)
    assert journal_state(journal) == (0, entries[:1], 1, None)
    journal.accept(3, entries[1].entry)
    assert journal_state(journal) == (0, entries[:1], 3, (3, entries[1].entry))
    journal.promise(5)  # the vote stays known
    for _ in range(2):
        assert journal_state(journal) == (0, entries[:1], 5, (3, entries[1].entry))
        journal = case.again()
    journal.accept(5, entries[1].entry)
    assert journal_state(case.again()) == (0, entries[:1], 5, (5, entries[1].entry))


def journal_keeps_the_newest_seal_over_entries_and_lives(case: JournalCase) -> None:
    entries, gone = log_of(3), Member(PeerId("p9"), 4)
    journal = case.again()
    journal.append(entries[0])
    first = SealRecord(1, ZERO, (gone,), True)
    signed = SealRecord(
        1, ZERO, (gone, ME), True, Certified(entries[1].entry, entries[1].votes, (gone,))
    )
    for record in (first, signed):
        journal.seal(record)
        assert journal.sealed == record
        journal = case.again()
        assert journal.sealed == record
    journal.append(entries[1])
    assert case.again().sealed == signed


def journal_a_decided_entry_ends_promise_and_vote(case: JournalCase) -> None:
    entries = log_of(3)
    journal = case.again()
    journal.append(entries[0])
    journal.accept(4, entries[1].entry)
    journal.append(entries[1])
    for _ in range(2):
        assert journal_state(journal) == (0, entries[:2], -1, None)
        journal = case.again()  # and do not come back with the next life
    journal.append(entries[2])
    assert journal_state(journal) == (0, entries, -1, None)


def journal_a_later_life_knows_it_until_the_next_entry(case: JournalCase) -> None:
    entries = log_of(2)
    assert not case.again().restarted
    assert case.again().restarted
    journal = case.again()
    assert journal.restarted
    journal.append(entries[0])
    assert not journal.restarted
    journal = case.again()
    assert journal.restarted
    journal.promise(1)
    journal.accept(1, entries[1].entry)
    assert journal.restarted  # voting is not deciding


def journal_old_entries_are_read_where_they_are_kept(case: JournalCase) -> None:
    entries = [
        Certified(
            msgspec.structs.replace(
                certified.entry, contributors=(Contributor(ME, bytes(16), 1),) * (number % 3 == 1)
            ),
            certified.votes,
        )
        for number, certified in enumerate(log_of(3 * RECENT + 5))
    ]
    for number in range(1, len(entries)):
        entry = msgspec.structs.replace(
            entries[number].entry, base=entries[number - 1].entry.hash()
        )
        entries[number] = Certified(
            entry, entries[number].votes, (Member(PeerId("p9"), 0),) if number == 7 else ()
        )
    journal = case.again()
    for certified in entries:
        journal.append(certified)
    for _ in range(2):
        log = journal.entries
        assert len(log) == len(entries)
        assert log.held == RECENT + 1  # and the genesis
        assert list(log) == entries
        assert list(reversed(log)) == entries[::-1]
        assert list(log.since(SPAN + 1)) == entries[SPAN + 1 :]
        for at in (0, 1, 7, SPAN - 1, SPAN, 2 * RECENT + 4, 2 * RECENT + 5, -1, -len(entries)):
            assert log[at] == entries[at]
        for part in (
            slice(3, 9),
            slice(SPAN, 2 * SPAN),
            slice(2 * RECENT, 2 * RECENT + 9),
            slice(-4, None),
            slice(5, 3),
            slice(9, 3, -2),
        ):
            assert log[part] == entries[part]
        for at in (len(entries), -len(entries) - 1):
            with pytest.raises(IndexError):
                log[at]
        counted = list(accumulate(rounds_in(certified.entry) for certified in entries))
        assert [log.rounds(at) for at in range(len(entries))] == counted
        assert (log.rounds(-1), log.rounds(len(entries))) == (0, counted[-1])
        assert log.removed == {Member(PeerId("p9"), 0)}
        journal = case.again()


JOURNAL = (
    journal_old_entries_are_read_where_they_are_kept,
    journal_is_empty_at_first,
    journal_keeps_promise_and_vote,
    journal_keeps_the_newest_seal_over_entries_and_lives,
    journal_a_decided_entry_ends_promise_and_vote,
    journal_a_later_life_knows_it_until_the_next_entry,
)

# ── Storage ──


@dataclass(frozen=True)
class StorageCase:
    """``again`` ends the life of the storage it made last, if any, and begins the next one of the
    same run at the same member (who is not the only one that has the run's state)."""

    again: Callable[[], Storage]


def state_of(seed: int) -> bytes:
    """Anchor and momentum, with all that floats can be: −0, denormals, infinities, a NaN with a
    payload.
    """
    flat = vector(2 * N, seed)
    flat[:4] = torch.tensor([-0.0, 1e-42, float("inf"), -1e-38])
    flat.view(torch.int32)[N] = 0x7FC12345
    return flat.numpy().tobytes()


def checkpointed(storage: Storage, log: list[Certified], round_: int, state: bytes) -> None:
    """The state after entry ``round_`` is written; the journal holds ``log``."""
    for certified in log[len(storage.journal().entries) :]:
        storage.journal().append(certified)
    replica = storage.states.replica(LAYOUT, restore=False)
    replica.install(memoryview(state), round_)
    replica.publish(round_)
    storage.states.checkpoint(replica, log[round_], round_)


def keep(storage: Storage, certified: Certified, data: bytes) -> None:
    """Receive a result and keep it."""
    buffer = storage.results.allocate(len(data))
    assert (len(buffer), buffer.readonly, buffer.format) == (len(data), False, "B")
    buffer[:] = data
    storage.results.keep(certified.entry, buffer)


def kept(storage: Storage, log: list[Certified]) -> list[bytes | None]:
    """The result of each entry, as far as it is here."""
    found = [storage.results.kept(certified.entry) for certified in log]
    return [None if data is None else bytes(data) for data in found]


def storage_is_empty_at_first(case: StorageCase) -> None:
    storage = case.again()
    assert (storage.states.layout(), storage.results.first(), storage.spent.operations()) == (
        None,
        0,
        [],
    )
    assert not storage.was_founded
    assert kept(storage, log_of(2)) == [None, None]
    assert journal_state(storage.journal()) == (0, [], -1, None)
    replica = storage.states.replica(LAYOUT, restore=False)
    assert (replica.layout, replica.generation, replica.applied) == (LAYOUT, -1, -1)


def storage_keeps_journal_and_layout(case: StorageCase) -> None:
    entries = log_of(3)
    storage = case.again()
    storage.states.save_layout(LAYOUT)
    for certified in entries[:2]:
        storage.journal().append(certified)
    storage.journal().accept(1, entries[2].entry)
    later = case.again()
    assert later.was_founded
    assert later.states.layout() == LAYOUT
    assert journal_state(later.journal()) == (0, entries[:2], 1, (1, entries[2].entry))
    assert later.journal().restarted


def storage_keeps_results(case: StorageCase) -> None:
    log = log_of(6)
    data = [bytes([round_]) * (100 + round_) for round_ in range(6)]
    storage = case.again()
    for round_ in (1, 2, 3):
        keep(storage, log[round_], data[round_])
    storage.results.keep(log[4].entry, memoryview(bytearray(data[4])))  # bytes from elsewhere
    storage.results.allocate(100)[:] = b"x" * 100  # another buffer
    expected = [None, *data[1:5], None]
    assert kept(storage, log) == expected
    later = case.again()
    later.results.allocate(105)[:] = b"y" * 105
    assert kept(later, log) == expected
    keep(later, log[1], data[1])  # again, as after a vote in an earlier life
    keep(later, log[5], data[5])
    assert kept(later, log) == [None, *data[1:]]


def storage_forgets_nothing_newer_than_the_checkpoint(case: StorageCase) -> None:
    log = log_of(7)
    data = [bytes([round_]) * 64 for round_ in range(7)]
    storage = case.again()
    for certified, result in zip(log, data, strict=True):
        keep(storage, certified, result)
    storage.results.forget(5)  # there is no checkpoint
    assert (storage.results.first(), kept(storage, log)) == (0, data)
    checkpointed(storage, log, 3, state_of(1))
    storage.results.forget(2)
    assert (storage.results.first(), kept(storage, log)) == (2, [None, None, *data[2:]])
    storage.results.forget(99)
    assert (storage.results.first(), kept(storage, log)) == (4, [None] * 4 + data[4:])
    storage.results.forget(1)  # never back
    assert (storage.results.first(), kept(storage, log)) == (4, [None] * 4 + data[4:])
    later = case.again()
    assert later.states.replica(LAYOUT, restore=True).applied == 3
    assert (later.results.first(), kept(later, log)) == (4, [None] * 4 + data[4:])
    later.results.forget(99)
    assert kept(later, log) == [None] * 4 + data[4:]


def storage_keeps_a_certified_state_and_what_follows(case: StorageCase) -> None:
    """Until an entry follows the newest checkpoint, the one before it can be had, and all results
    since.
    """
    log = log_of(6)
    storage = case.again()
    for certified in log[:5]:
        keep(storage, certified, b"%d" % certified.entry.round)
    first, second = state_of(1), state_of(2)
    checkpointed(storage, log[:3], 2, first)
    assert storage.states.saved(2) is None
    checkpointed(storage, log[:5], 4, second)
    for _ in range(2):
        storage.results.forget(99)
        assert storage.results.first() == 3
        assert kept(storage, log) == [None, None, None, b"3", b"4", None]
        saved = storage.states.saved(4)
        assert saved is not None
        assert (saved[0], bytes(saved[1])) == (2, first)
        storage = case.again()
        assert storage.states.replica(LAYOUT, restore=True).applied == 4
    storage.journal().append(log[5])
    storage.results.forget(99)
    assert storage.results.first() <= 5
    saved = storage.states.saved(5)
    assert saved is not None
    assert (saved[0], bytes(saved[1])) == (4, second)
    older = storage.states.saved(4)  # gone with the results that followed it, or whole
    assert older is None or (older[0], bytes(older[1])) == (2, first)
    assert older is None or storage.results.first() <= 3


def storage_restores_what_the_journal_reaches(case: StorageCase) -> None:
    """The newest checkpoint is on the medium and the entry that it is of was lost: the one before
    it is taken, and results since are kept.
    """
    log = log_of(6)
    storage = case.again()
    for certified in log[:5]:
        keep(storage, certified, b"%d" % certified.entry.round)
    checkpointed(storage, log[:3], 2, state_of(1))
    storage.journal().append(log[3])
    replica = storage.states.replica(LAYOUT, restore=False)
    replica.install(memoryview(state_of(2)), 4)
    replica.publish(4)
    storage.states.checkpoint(replica, log[4], 4)
    storage.results.forget(99)
    for _ in range(2):
        storage = case.again()
        restored = storage.states.replica(LAYOUT, restore=True)
        assert (restored.applied, bytes(restored.snapshot())) == (2, state_of(1))
        assert kept(storage, log) == [None, None, None, b"3", b"4", None]
    checkpointed(storage, log[:5], 4, state_of(2))
    assert case.again().states.replica(LAYOUT, restore=True).applied == 4


def storage_forgets_what_an_earlier_life_kept(case: StorageCase) -> None:
    """Of lives of a few rounds each, none forgets by what came in itself."""
    log = log_of(7)
    data = [bytes([round_]) * 64 for round_ in range(7)]
    storage = case.again()
    for certified, result in zip(log, data, strict=True):
        keep(storage, certified, result)
    checkpointed(storage, log, 3, state_of(1))
    later = case.again()
    assert later.states.replica(LAYOUT, restore=True).applied == 3
    later.results.forget(2)
    assert kept(later, log) == [None, None, *data[2:]]


def storage_a_fetched_state_has_no_results_before_it(case: StorageCase) -> None:
    log = log_of(4)
    storage = case.again()
    storage.installed(2)
    assert storage.results.first() == 3
    storage.installed(1)
    assert storage.results.first() == 3
    keep(storage, log[3], b"three")
    assert kept(storage, log)[3] == b"three"


def storage_restores_the_checkpoint_bit_for_bit(case: StorageCase) -> None:
    log = log_of(4)
    storage = case.again()
    checkpointed(storage, log[:2], 1, state_of(1))
    state = state_of(2)
    checkpointed(storage, log, 3, state)  # takes the place of the first
    working = storage.states.replica(LAYOUT, restore=True)
    working.install(memoryview(state_of(3)), 3)  # not written
    for _ in range(2):
        storage = case.again()
        restored = storage.states.replica(LAYOUT, restore=True)
        assert (restored.applied, restored.generation) == (3, 3)
        assert bytes(restored.snapshot()) == state
        assert restored.hashes() == [chunk_hash(state)]
    assert storage.states.replica(LAYOUT, restore=False).generation == -1


def storage_founding_keeps_state_and_layout(case: StorageCase) -> None:
    log = log_of(1)
    storage = case.again()
    replica = storage.states.replica(LAYOUT, restore=False)
    replica.initialise(START)
    storage.found(replica, log[0])
    later = case.again()
    assert later.states.layout() == LAYOUT
    restored = later.states.replica(LAYOUT, restore=True)
    assert (restored.applied, restored.generation) == (0, 0)
    assert bytes(restored.snapshot()) == START.numpy().tobytes() + bytes(4 * N)


def storage_remembers_spent_operations(case: StorageCase) -> None:
    storage = case.again()
    for key in ("a", "b"):
        storage.spent.spend(key)
    assert storage.spent.operations() == ["a", "b"]
    later = case.again()
    later.spent.spend("c")
    assert later.spent.operations() == ["a", "b", "c"]


def storage_reset_begins_a_new_incarnation_with_an_empty_log(case: StorageCase) -> None:
    log = log_of(4)
    storage = case.again()
    storage.states.save_layout(LAYOUT)
    storage.spent.spend("a")
    checkpointed(storage, log[:2], 1, state_of(1))
    keep(storage, log[2], b"two")
    storage.results.forget(1)
    storage.journal().accept(1, log[2].entry)
    storage.reset()
    assert journal_state(storage.journal()) == (1, [], -1, None)
    assert not storage.journal().restarted  # nothing was ever said under this incarnation
    assert (storage.states.layout(), storage.results.first()) == (None, 0)
    assert kept(storage, log) == [None] * 4
    later = case.again()
    assert journal_state(later.journal()) == (1, [], -1, None)
    assert later.journal().restarted
    assert later.states.replica(LAYOUT, restore=True).generation == -1
    assert later.spent.operations() == [
        "a"
    ]  # votes in operations are of the peer, in all of its lives
    checkpointed(later, log, 3, state_of(2))
    newest = case.again()
    assert journal_state(newest.journal()) == (1, log, -1, None)
    assert bytes(newest.states.replica(LAYOUT, restore=True).snapshot()) == state_of(2)


STORAGE = (
    storage_is_empty_at_first,
    storage_keeps_journal_and_layout,
    storage_keeps_results,
    storage_forgets_nothing_newer_than_the_checkpoint,
    storage_keeps_a_certified_state_and_what_follows,
    storage_restores_what_the_journal_reaches,
    storage_forgets_what_an_earlier_life_kept,
    storage_a_fetched_state_has_no_results_before_it,
    storage_restores_the_checkpoint_bit_for_bit,
    storage_founding_keeps_state_and_layout,
    storage_remembers_spent_operations,
    storage_reset_begins_a_new_incarnation_with_an_empty_log,
)

# ── DataPlane ──


@dataclass(frozen=True)
class PlaneCase:
    """A data plane of peer ``me`` without lanes; ``content``: the same, of content. ``event`` gives its next event; ``refusal`` runs a
    command and gives the error with which it was refused, however the implementation tells that."""

    me: PeerId
    plane: DataPlane
    content: ContentPlane
    event: Callable[[], ExchangeEvent]
    refusal: Callable[[Callable[[], None]], Exception | None]


CID, OTHERS_CID = cid_of(0), cid_of(1)
STRANGER = PeerId("stranger")
PLANE_N, PLANE_CHUNK = (
    1500,
    512,
)  # three chunks, the last one shorter and not a multiple of a codec's block


def plan_of(me: PeerId, codec: str = "fp32", *, ballot: int = 0, other: bool = False) -> Plan:
    """I am the only owner, and the only contributor unless ``other``."""
    contributors = [(me, CID, 5), *([(STRANGER, OTHERS_CID, 1)] if other else [])]
    return make_plan(contributors, [me], PLANE_N, PLANE_CHUNK, codec, ballot=ballot)


def plane_opened(case: PlaneCase, codec: str = "fp32") -> tuple[DataPlane, Tensor]:
    """A plane with an open round, and a contribution to it."""
    case.plane.open_round("run", 1, [case.me, STRANGER], PLANE_N, PLANE_CHUNK, codec)
    return case.plane, vector(PLANE_N, 5)


def events(case: PlaneCase) -> list[ExchangeEvent]:
    """All that the commands so far lead to. Found by a small reduction behind them: reductions are
    done in order.
    """
    plan = make_plan([(case.me, cid_of(99), 1)], [case.me], 1, 1, "fp32", log="last")
    case.plane.open_round("last", 1, [case.me], 1, 1, "fp32")
    case.plane.freeze("last", 1, cid_of(99), torch.ones(1))
    case.plane.execute(plan, [case.me])
    found: list[ExchangeEvent] = []
    while not (isinstance(event := case.event(), ResultComplete) and event.plan_id == plan.plan_id):
        found.append(event)
    case.plane.close_round("last", 1)
    case.plane.release(cid_of(99))
    return [
        event
        for event in found
        if not (isinstance(event, PartReduced) and event.plan_id == plan.plan_id)
    ]


def assert_reduced(found: list[ExchangeEvent], plan: Plan, flat: Tensor) -> None:
    """These events are the complete result of a plan over this contribution: bytes and digests of
    an independent computation.
    """
    part, result = found
    data = ref_result(plan, {CID: flat})
    assert part == PartReduced(plan.plan_id, 0, ref_digests(plan, data)[0])
    assert isinstance(result, ResultComplete)
    assert (result.plan_id, result.digests, bytes(result.data)) == (
        plan.plan_id,
        ref_digests(plan, data),
        data,
    )
    assert (result.bytes_sent, result.bytes_received) == (0, 0)


def plane_has_the_commands(case: PlaneCase) -> None:
    commands = [
        (name, value)
        for each in (DataPlane, ContentPlane)
        for name, value in vars(each).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert len(commands) == 14
    for name, value in commands:
        seam = list(inspect.signature(value).parameters.values())[1:]
        mine = list(inspect.signature(getattr(case.plane, name)).parameters.values())
        assert [parameter.name for parameter in mine[: len(seam)]] == [
            parameter.name for parameter in seam
        ]
        assert all(parameter.default is not parameter.empty for parameter in mine[len(seam) :])


def plane_reduces_a_plan_of_one_member(case: PlaneCase) -> None:
    for codec in ("fp32", "bf16", "int8"):
        plane, flat = plane_opened(case, codec)
        plan = plan_of(case.me, codec)
        plane.freeze("run", 1, CID, flat)
        plane.execute(plan, [case.me])
        assert_reduced(events(case), plan, flat)
        plane.close_round("run", 1)
        plane.release(CID)


def plane_commands_are_idempotent(case: PlaneCase) -> None:
    plane, flat = plane_opened(case)
    plan = plan_of(case.me)
    plane_opened(case)
    plane.execute(plan, [case.me])  # before the contribution
    assert events(case) == []
    for _ in range(2):
        plane.freeze("run", 1, CID, flat)
    plane.execute(plan, [case.me])
    assert_reduced(events(case), plan, flat)
    plane.execute(plan, [case.me])
    plane.freeze("run", 1, CID, flat)
    for _ in range(2):
        plane.close_round("run", 1)
        plane.release(CID)
    assert events(case) == []


def plane_reports_what_is_lacking(case: PlaneCase) -> None:
    plane, flat = plane_opened(case)
    plan = plan_of(case.me, other=True)
    plane.execute(plan, [case.me, STRANGER])
    plane.report(plan.plan_id)
    plane.freeze("run", 1, CID, flat)
    plane.report(plan.plan_id)
    assert events(case) == [
        ReductionReport(plan.plan_id, {CID: ((0, 3),), OTHERS_CID: ((0, 3),)}, {}),
        ReductionReport(plan.plan_id, {OTHERS_CID: ((0, 3),)}, {}),
    ]
    plane.close_round("run", 1)
    plane.report(plan.plan_id)
    assert events(case) == []


def plane_a_larger_ballot_takes_over(case: PlaneCase) -> None:
    plane, flat = plane_opened(case)
    blocked, mine, late = (
        plan_of(case.me, other=True),
        plan_of(case.me, ballot=2),
        plan_of(case.me, ballot=1),
    )
    plane.freeze("run", 1, CID, flat)
    plane.execute(blocked, [case.me, STRANGER])
    assert events(case) == []
    plane.execute(mine, [case.me, STRANGER])
    plane.execute(late, [case.me, STRANGER])
    assert_reduced(events(case), mine, flat)
    plane.report(blocked.plan_id)
    plane.report(late.plan_id)
    plane.report(mine.plan_id)
    assert events(case) == [ReductionReport(mine.plan_id, {}, {})]


def plane_uses_nothing_that_was_released(case: PlaneCase) -> None:
    plane, flat = plane_opened(case)
    plane.freeze("run", 1, CID, flat)
    plane.release(CID)
    plane.execute(plan_of(case.me), [case.me])
    assert events(case) == []
    plane.freeze("run", 1, CID, 2 * flat)
    assert_reduced(events(case), plan_of(case.me), 2 * flat)


def plane_a_contribution_that_is_not_finite_is_told(case: PlaneCase) -> None:
    for codec, value in (
        ("fp32", float("nan")),
        ("int8", float("-inf")),
        ("bf16", 3.4e38),
    ):  # the last: more than bf16 can hold
        plane, flat = plane_opened(case, codec)
        flat[700] = value
        plane.freeze("run", 1, CID, flat)
        plane.execute(plan_of(case.me, codec), [case.me])
        assert events(case) == [NonFinite(CID)]
        plane.close_round("run", 1)
        plane.release(CID)


def plane_refuses_what_is_wrong(case: PlaneCase) -> None:
    plane, flat = plane_opened(case)
    plan = plan_of(case.me)
    for wrong in (
        lambda: plane.open_round("run", 1, [case.me], PLANE_N, PLANE_CHUNK + 1, "fp32"),
        lambda: plane.open_round("new", 1, [case.me], 0, PLANE_CHUNK, "fp32"),
        lambda: plane.freeze("run", 1, CID, flat.double()),
        lambda: plane.freeze("run", 1, CID, flat[:-1]),
        lambda: plane.freeze("run", 1, b"short", flat),
        lambda: plane.execute(
            make_plan([(case.me, CID, 1)], [case.me], PLANE_N, PLANE_CHUNK, "fp32", round_=2),
            [case.me],
        ),
        lambda: plane.execute(
            make_plan([(case.me, CID, 1)], [case.me], PLANE_N, PLANE_CHUNK, "bf16"), [case.me]
        ),
        lambda: case.content.provide(b"name", memoryview(b"data"), 0),
        lambda: case.content.want(b"name", memoryview(bytearray(8)), 4, [ZERO], []),
    ):
        assert isinstance(case.refusal(wrong), LocalProtocolError)
    assert events(case) == []
    plane.freeze("run", 1, CID, flat)  # and lives on
    plane.execute(plan, [case.me])
    assert_reduced(events(case), plan, flat)


def plane_what_is_unknown_does_nothing(case: PlaneCase) -> None:
    plane, unknown = case.plane, bytes(16)
    plane.release(unknown)
    plane.close_round("run", 9)
    plane.resend_parts(STRANGER, unknown, CID, ((0, 1),))
    plane.resend_results(STRANGER, unknown, ((0, 1),))
    plane.report(unknown)
    case.content.withdraw(unknown)
    case.content.send_blob(STRANGER, unknown, ((0, 1),))
    case.content.unwant(unknown)
    case.content.report_blob(unknown)
    assert events(case) == []


def plane_wishes_are_reported_until_withdrawn(case: PlaneCase) -> None:
    content, place = case.content, memoryview(bytearray(b"\7" * 10))
    content.want(b"name", place, 4, [chunk_hash(b"a")] * 3, [STRANGER])
    content.want(b"nothing", memoryview(bytearray()), 4, [], [STRANGER])
    content.report_blob(b"name")
    assert events(case) == [BlobComplete(b"nothing"), BlobProgress(b"name", 0, 3, ((0, 3),))]
    content.unwant(b"name")
    content.report_blob(b"name")
    assert events(case) == []
    assert bytes(place) == b"\7" * 10


DATA_PLANE = (
    plane_has_the_commands,
    plane_reduces_a_plan_of_one_member,
    plane_commands_are_idempotent,
    plane_reports_what_is_lacking,
    plane_a_larger_ballot_takes_over,
    plane_uses_nothing_that_was_released,
    plane_a_contribution_that_is_not_finite_is_told,
    plane_refuses_what_is_wrong,
    plane_what_is_unknown_does_nothing,
    plane_wishes_are_reported_until_withdrawn,
)
