"""The record of what seeded swarms decide: its file, how it is compared, and when it may be
renewed.
"""

from __future__ import annotations

import sys

import pytest
from house import ROOT

sys.path.append(str(ROOT / "scripts"))

from _decided import (
    DecidedRecord,
    Difference,
    PlayedSeed,
    RecordedSeed,
    RecordError,
    as_ranges,
    compare_logs,
    read_record,
    renew,
    write_record,
)

ONE, TWO, THREE = "aaabbbcccddd", "eeefffggghhh", "iiijjjkkklll"
WHEN = {"date": "2031-01-02", "tree": "0123456789ab"}


def played(
    seed: int, log: str, *counters: str, kind: str = "default", problem: str = ""
) -> PlayedSeed:
    return PlayedSeed(kind, seed, problem, (log,), counters)


def recorded() -> DecidedRecord:
    """Two default seeds, of which the first began a branch, and one on a ring."""
    record = renew(
        DecidedRecord(),
        [
            played(0, f"{ONE}{TWO}:zzz", "votes", "branch begun"),
            played(1, f"{ONE}:zzz", "votes"),
            played(0, f"{THREE}:zzz", "votes", "fault: crash", kind="ring"),
        ],
        why="the first record",
        entered=(),
        **WHEN,
    )
    assert record is not None
    return record


def test_a_record_is_read_as_it_was_written() -> None:
    record = recorded()
    assert record.seeds["default", 0].logs == (f"{ONE}{TWO}:zzz",)
    assert record.entered(("default", 0)) == {"votes", "branch begun"}
    assert record.entered(("ring", 0)) == {"votes", "fault: crash"}
    text = write_record(record)
    assert read_record(text) == record
    assert write_record(read_record(text)) == text
    assert text.splitlines()[-3:] == [
        f"default 0 3 {ONE}{TWO}:zzz",
        f"default 1 2 {ONE}:zzz",
        f"ring 0 6 {THREE}:zzz",
    ]


@pytest.mark.parametrize(
    "line", ["default 0 3", "default x 3 a:b", "default 0 y a:b", "odd 0 3 a:b", "counters [1]"]
)
def test_a_line_that_is_none_of_the_record_is_refused(line: str) -> None:
    with pytest.raises(RecordError, match="line 2 of the record"):
        read_record(f"# words\n{line}\n")


@pytest.mark.parametrize(
    ("was", "now", "difference"),
    [
        ((f"{ONE}:zzz",), (f"{ONE}:zzz",), None),
        (
            (f"{ONE}{TWO}{THREE}:zzz",),
            (f"{ONE}eeeFFFgggHHH{ONE}:yyy",),
            Difference(0, 1, ("results", "statuses"), TWO, "eeeFFFgggHHH"),
        ),
        ((f"{ONE}:zzz",), (f"{ONE}{TWO}:zzz",), Difference(0, 1, (), "", TWO)),
        ((f"{ONE}{TWO}:zzz",), (f"{ONE}:zzz",), Difference(0, 1, (), TWO, "")),
        ((f"{ONE}:zzz",), (f"{ONE}:yyy",), Difference(0, None, (), "zzz", "yyy")),
        (
            (f"{ONE}:zzz", f"{TWO}:zzz"),
            (f"{ONE}:zzz", f"EEE{TWO[3:]}:zzz"),
            Difference(1, 0, ("contributors and weights",), TWO, f"EEE{TWO[3:]}"),
        ),
        ((f"{ONE}:zzz", f"{TWO}:zzz"), (f"{ONE}:zzz",), Difference(1, 0, (), TWO, "")),
    ],
)
def test_the_first_entry_that_differs_is_found(
    was: tuple[str, ...], now: tuple[str, ...], difference: Difference | None
) -> None:
    assert compare_logs(was, now) == difference


def test_a_changed_seed_needs_a_counter_of_what_was_changed_when_it_was_recorded() -> None:
    record = recorded()
    same = [played(1, f"{ONE}:zzz", "votes"), played(0, f"{THREE}:zzz", "votes", kind="ring")]
    # what it enters now does not count: the code that entered a branch is gone
    now = [played(0, f"{ONE}{THREE}:zzz", "votes", "waited"), *same]
    with pytest.raises(RecordError, match=r"no counter \(--entered\) shows: default 0"):
        renew(record, now, why="no branches", entered=(), **WHEN)
    with pytest.raises(RecordError, match="'fault: crash' shows: default 0"):
        renew(record, now, why="no branches", entered=("fault: crash",), **WHEN)
    with pytest.raises(RecordError, match="no recorded seed has a counter 'waited'"):
        renew(record, now, why="no branches", entered=("waited",), **WHEN)
    with pytest.raises(RecordError, match="needs a reason"):
        renew(record, now, why=" ", entered=("branch begun",), **WHEN)
    renewed = renew(
        record, now, why="no branches", entered=("fault: crash", "branch begun"), **WHEN
    )
    assert renewed is not None
    assert renewed.renewals[1:] == [
        {
            "why": "no branches",
            "date": "2031-01-02",
            "on": "0123456789ab",
            "changed": {"branch begun": {"default": "0"}},
        }
    ]
    assert renewed.entered(("default", 0)) == {"votes", "waited"}
    assert renewed.seeds["ring", 0] == record.seeds["ring", 0]  # also its old counters
    assert record == recorded()


def test_what_did_not_change_is_not_renewed() -> None:
    record = recorded()
    same = [played(0, f"{ONE}{TWO}:zzz", "other counters"), played(1, f"{ONE}:zzz")]
    assert renew(record, same, why="a try", entered=("votes",), **WHEN) is None


def test_a_renewal_leaves_no_seed_behind_that_may_have_changed() -> None:
    with pytest.raises(RecordError, match="1 recorded seeds were not played"):
        renew(recorded(), [played(0, f"{THREE}:zzz")], why="x", entered=("votes",), **WHEN)


def test_those_that_enter_what_was_changed_are_renewed_by_themselves() -> None:
    now, only = [played(0, f"{THREE}:zzz", "branch begun")], [("default", 0)]
    renewed = renew(recorded(), now, why="x", entered=("branch begun",), only=only, **WHEN)
    assert renewed is not None
    assert renewed.seeds["default", 0].logs == (f"{THREE}:zzz",)
    assert renewed.seeds["default", 1] == recorded().seeds["default", 1]
    with pytest.raises(RecordError, match="1 recorded seeds were not played"):
        renew(recorded(), now, why="x", entered=("votes",), only=[*only, ("default", 1)], **WHEN)


def test_a_kind_is_renewed_by_itself_and_others_stay_as_recorded() -> None:
    now = [played(0, f"{THREE}:zzz", "votes"), played(1, f"{ONE}:zzz")]
    renewed = renew(recorded(), now, why="x", entered=("votes",), **WHEN)
    assert renewed is not None
    assert renewed.seeds["default", 0].logs == (f"{THREE}:zzz",)
    assert renewed.seeds["ring", 0] == recorded().seeds["ring", 0]


def test_seeds_that_fail_are_not_recorded() -> None:
    failing = played(2, f"{ONE}:zzz", problem="agreement: two entries")
    with pytest.raises(RecordError, match="seed 2 fails"):
        renew(recorded(), [failing], why="more seeds", entered=(), **WHEN)


def test_further_seeds_are_recorded_with_a_reason_alone() -> None:
    renewed = renew(recorded(), [played(2, f"{TWO}:zzz", "votes")], why="more", entered=(), **WHEN)
    assert renewed is not None
    assert renewed.seeds["default", 2] == RecordedSeed((f"{TWO}:zzz",), 2)
    assert renewed.renewals[-1]["new"] == {"default": "2"}


def test_seeds_are_written_as_ranges() -> None:
    assert as_ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3,7,9-10"
    assert as_ranges([]) == ""
