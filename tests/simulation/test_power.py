"""Power cuts, torn and reordered writes, full and failing disks: the node's own journal,
checkpoints and counts on a disk that forgets.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from contracts import log_of
from kits.rounds.medium import SimMedium

from atoll.collectives.digest import merkle_root
from atoll.collectives.errors import StorageError
from atoll.collectives.layout import make_layout
from atoll.collectives.outer_rules import OuterSettings
from atoll.node.session.barrier import Barrier
from atoll.node.session.replica import ModelReplica, PlainSlots
from atoll.node.storage import checkpoint as cp
from atoll.node.storage.journal import FileJournal
from atoll.node.storage.spent import SpentCounter

DISK = Path("disk")
NUMEL = 700  # several sectors
LAYOUT = make_layout([("w", (NUMEL,))])
LOG = log_of(40)
EVERY = 3


class Journal(FileJournal):
    """Leaves out votes of rounds that are over at almost every start."""

    WASTE = 300


class LostError(AssertionError):
    """Something that was told, or a whole checkpoint, is not there after a power cut."""


def replica_of(anchor: torch.Tensor, momentum: torch.Tensor) -> ModelReplica:
    replica = ModelReplica(LAYOUT, OuterSettings("nesterov", 0.7, 0.9), PlainSlots(NUMEL))
    replica.initialise(anchor)
    replica.momentum.copy_(momentum)
    return replica


class Life:
    """A member's files over many lives: it votes, applies, saves and spends, and power goes in
    between. What it tells, it must remember.
    """

    def __init__(self, seed: int, *, skip: str = "", late: bool = False, errors: float = 0) -> None:
        self.rng, self.late, self.errors = Random(seed), late, errors
        self.medium = SimMedium(Random(seed + 1), skip)
        self.told = (0, -1)  # entries, and the ballot in the round after them
        self.handed = self.cuts = self.left_out = 0
        self.refusals = list[StorageError]()
        self.saved = -1
        self.begin()

    def begin(self) -> None:
        """A life begins: it reads what the last one has left."""
        self.journal = Journal(DISK / "journal", medium=self.medium, boot=str(self.medium.boots))
        self.left_out += self.journal.left_out > 0
        self.spent = SpentCounter(DISK / "privacy", self.medium)
        if self.journal.damaged:
            raise LostError(self.journal.damaged)
        entries, ballot = self.told
        now = len(self.journal.entries)
        if now < entries or (now == entries and self.journal.promised < ballot):
            raise LostError(f"{self.told} was told; {now}, {self.journal.promised} is left")
        if list(self.journal.entries) != LOG[:now]:
            raise LostError("another log")
        try:
            count = self.spent.noisy()
        except StorageError as error:
            raise LostError(str(error)) from error
        if count < self.handed:
            raise LostError(f"{self.handed} were handed over, {count} are counted")
        if self.saved >= 0 and self.newest() < self.saved:
            raise LostError(f"no whole checkpoint of entry {self.saved}")

    def newest(self) -> int:
        """The entry of the newest whole checkpoint; -1 where there is none."""
        found = [-1]
        for name in (cp.NEWEST, cp.BEFORE):
            try:
                saved = cp.load(DISK / "checkpoint", NUMEL, medium=self.medium, name=name)
            except StorageError:
                continue
            if saved is not None:
                whole = merkle_root(replica_of(saved.anchor, saved.momentum).hashes())
                found.append(saved.entry if whole == saved.root else -1)
        return max(found)

    def step(self) -> None:
        """One thing that a member does; where the disk refuses, nothing is told."""
        if self.errors and self.rng.random() < self.errors:
            at = self.medium.calls + self.rng.randint(1, 6)
            self.medium.fail[at] = self.rng.choice((errno.ENOSPC, errno.EIO))
        rounds, what = len(self.journal.entries), self.rng.random()
        try:
            if what < 0.35:
                self.journal.promise(self.journal.promised + 1)
            elif what < 0.6 and rounds < len(LOG):
                self.journal.accept(max(0, self.journal.promised), LOG[rounds].entry)
            elif what < 0.8 and rounds < len(LOG):
                self.journal.append(LOG[rounds])
                if rounds % EVERY == 0:
                    self.save(rounds)
            elif what < 0.9:
                self.spend()
            else:
                self.tell()
        except StorageError as error:
            self.refusals.append(error)

    def tell(self) -> None:
        """Say what was written; after a sync that failed this life says nothing more."""
        try:
            self.journal.sync()
        except StorageError:
            self.end(power=self.rng.random() < 0.5)
            raise
        self.told = (len(self.journal.entries), self.journal.promised)

    def save(self, entry: int) -> None:
        """A checkpoint."""
        replica = replica_of(torch.full((NUMEL,), float(entry)), torch.zeros(NUMEL))
        self.tell()
        cp.save(
            DISK / "checkpoint",
            LAYOUT,
            cp.SavedCheckpoint(
                entry, entry, merkle_root(replica.hashes()), replica.anchor, replica.momentum
            ),
            run_id="r",
            entry_hash=LOG[entry].entry.hash(),
            medium=self.medium,
        )
        self.saved = entry

    def spend(self) -> None:
        """Hand something over that counts."""
        if self.late:  # a planted bug
            self.handed += 1
            if self.rng.random() < 0.3:
                return self.end(power=True)
        self.spent.spend_noisy(len(self.journal.entries))
        self.handed += not self.late
        return None

    def end(self, *, power: bool) -> None:
        """This life is over, and the next begins."""
        self.medium.fail.clear()
        if power:
            self.cuts += 1
            self.medium.cut()
        else:
            self.medium.kill()
        self.begin()


def play(seed: int, *, skip: str = "", late: bool = False, errors: float = 0) -> Life:
    """A dozen lives, each of some steps."""
    life = Life(seed, skip=skip, late=late, errors=errors)
    for _ in range(12):
        for _ in range(life.rng.randint(1, 14)):
            life.step()
        life.end(power=life.rng.random() < 0.8)
    return life


def test_two_hundred_power_cuts_take_nothing_that_was_told_and_leave_a_whole_checkpoint() -> None:
    cuts = left_out = seed = 0
    while cuts < 200:
        life = play(seed)
        cuts, left_out, seed = cuts + life.cuts, left_out + life.left_out, seed + 1
    assert left_out > 50  # starts that wrote the journal anew, and were cut at any time after


def test_a_disk_that_is_full_or_fails_at_any_call_costs_nothing_that_was_told() -> None:
    lives = [play(1000 + seed, errors=0.3) for seed in range(15)]
    refusals = [error for life in lives for error in life.refusals]
    assert len(refusals) > 30
    assert sum(life.medium.forgotten for life in lives) > 3
    for error in refusals:  # advice that fits
        assert error.code == "E501"
        assert ("free some space" in error.hint) == ("No space" in error.message)
        assert ("dmesg" in error.hint) == ("Input/output" in error.message)


@pytest.mark.parametrize(
    ("skip", "late"),
    [
        ("entries", False),  # journal and votes
        ("entries.new", False),  # the journal without votes of rounds that are over
        ("meta.json", False),
        ("safetensors", False),
        ("privacy", False),
        ("folder", False),
        ("", True),  # the budget after the hand-over
    ],
)
def test_each_planted_bug_of_storage_is_found(skip: str, late: bool) -> None:
    for seed in range(60):
        try:
            play(seed, skip=skip, late=late)
        except LostError:
            return
    pytest.fail("not found")


@pytest.mark.parametrize("failing", range(1, 9))
def test_a_start_that_is_cut_while_it_leaves_votes_out_leaves_one_whole_journal(
    failing: int,
) -> None:
    medium = SimMedium(Random(failing))
    journal = FileJournal(DISK / "journal", medium=medium, boot="0")
    for number, certified in enumerate(LOG[:9]):
        for ballot in range(3):
            journal.promise(ballot)
        journal.accept(3, LOG[number].entry)
        journal.append(certified)
    journal.promise(7)
    journal.accept(8, LOG[9].entry)
    journal.sync()
    before = medium.size(medium.open(DISK / "journal" / "entries"))
    medium.kill()
    medium.fail[medium.calls + failing] = errno.EIO
    try:
        Journal(DISK / "journal", medium=medium, boot="0")
    except StorageError:
        pass
    medium.cut()
    again = Journal(DISK / "journal", medium=medium, boot="1")
    assert again.damaged == ""
    assert list(again.entries) == LOG[:9]
    assert (again.promised, again.accepted) == (8, (8, LOG[9].entry))
    assert again.entries[3:5] == LOG[3:5]
    assert medium.size(medium.open(DISK / "journal" / "entries")) < before // 2
    again.append(LOG[9])
    assert list(Journal(DISK / "journal", medium=medium, boot="1").entries) == LOG[:10]


@pytest.mark.parametrize("more", [0, 1, 2, 20], ids=["no", "one", "two", "all"])
@pytest.mark.parametrize("seed", range(6))
def test_what_was_written_before_a_failed_sync_is_never_told_from_memory_alone(
    seed: int, more: int
) -> None:
    """The system forgets what a failed sync had to write, and the next one succeeds without it: in
    the same life, and in the next. ``more`` calls after the failed one are refused, too.
    """
    medium = SimMedium(Random(seed))
    journal = FileJournal(DISK / "journal", medium=medium, boot="0")
    for certified in LOG[:3]:
        journal.append(certified)
    journal.sync()
    journal.append(LOG[3])
    journal.accept(5, LOG[4].entry)
    medium.fail = {medium.calls + 1 + call: errno.EIO for call in range(more + 1)}
    with pytest.raises(StorageError, match="Input/output error"):
        journal.sync()
    medium.fail.clear()
    for act in (journal.sync, lambda: journal.promise(6), journal.close):
        with pytest.raises(StorageError, match="Input/output error"):
            act()
    medium.kill()
    journal = FileJournal(DISK / "journal", medium=medium, boot="0")
    if more > 1 and journal.damaged:
        return  # nothing could be cut or noted, and it was torn: another life begins
    assert journal.damaged == ""
    told = (list(journal.entries), journal.accepted)
    assert told[0] in (LOG[:3], LOG[:4])
    medium.cut()
    again = FileJournal(DISK / "journal", medium=medium, boot="1")
    assert (again.damaged, list(again.entries), again.accepted) == ("", *told)


class Slow:
    """Records that are on the medium when the test says so."""

    written = synced = 0

    def sync(self) -> None:
        """Everything written so far."""
        self.synced = self.written


def test_what_is_said_waits_for_what_was_written_before_it_and_for_nothing_later() -> None:
    storage, said = Slow(), list[str]()
    jobs = list[tuple[Callable[[], None], Callable[[float, None], None]]]()
    barrier = Barrier([storage], lambda work, done: jobs.append((work, done)))

    def say(what: str) -> None:
        if not barrier.hold(lambda _: said.append(what)):
            said.append(what)

    def force() -> None:
        work, done = jobs.pop(0)
        work()
        done(0.0, None)

    say("nothing is written")
    assert (said, jobs) == (["nothing is written"], [])
    storage.written = 1
    say("a vote")
    say("after it")
    storage.written = 3
    say("a later vote")
    assert len(said) == len(jobs) == 1  # one sync at a time
    force()
    assert said[1:] == ["a vote", "after it"]  # what was written since it began waits for the next
    storage.written = 4
    say("the last")
    force()
    assert said[3:] == ["a later vote"]
    force()
    assert said[4:] == ["the last"]
    say("at once")
    assert (said[5:], jobs) == (["at once"], [])
