"""What a run keeps on disk survives a kill at any byte, and damage is told apart from an unfinished
write.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from contracts import log_of
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import StorageError
from atoll.collectives.group import Certified, Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round import RECENT, SealRecord
from atoll.node.session.replica import ModelReplica, PlainSlots
from atoll.node.storage import RunFiles, results
from atoll.node.storage.journal import FileJournal
from atoll.node.storage.medium import RealMedium
from atoll.node.storage.results import ResultFiles


def test_journal_comes_back(tmp_path: Path) -> None:
    entries = log_of(4)
    journal = FileJournal(tmp_path)
    assert not journal.restarted
    for certified in entries[:3]:
        journal.append(certified)
    journal.promise(2)
    journal.accept(5, entries[3].entry)
    again = FileJournal(tmp_path)  # as after kill -9: nothing was closed
    assert list(again.entries) == entries[:3]
    assert (again.promised, again.accepted) == (5, (5, entries[3].entry))
    assert again.restarted
    assert not again.rebooted
    again.append(entries[3])
    assert (again.promised, again.accepted, again.restarted) == (-1, None, False)
    last = FileJournal(tmp_path)
    assert list(last.entries) == entries
    assert last.accepted is None  # the vote on disk is of a round that is over
    for opened in (journal, again, last):
        opened.close(clean=False)


@given(cut=st.integers(min_value=0))
def test_a_write_cut_short_loses_only_itself(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    entries = log_of(3)
    journal = FileJournal(folder)
    sizes = [0]
    for certified in entries:
        journal.append(certified)
        sizes.append((folder / "entries").stat().st_size)
    journal.close(clean=False)
    length = cut % (sizes[-1] + 1)
    os.truncate(folder / "entries", length)
    again = FileJournal(folder)
    whole = max(index for index, size in enumerate(sizes) if size <= length)
    assert not again.damaged
    assert list(again.entries) == entries[:whole]
    if whole < 3:
        again.append(entries[whole])
        assert list(again.entries) == entries[: whole + 1]
    again.close()


def test_an_old_entry_that_the_disk_changes_later_is_never_another_one(tmp_path: Path) -> None:
    entries = log_of(2 * RECENT)
    journal = FileJournal(tmp_path)
    for certified in entries:
        journal.append(certified)
    data = bytearray((tmp_path / "entries").read_bytes())
    data[len(data) // 16] ^= 1  # in the eighth part of the entries that are no longer in memory
    (tmp_path / "entries").write_bytes(data)
    with pytest.raises(StorageError, match="is damaged: frame"):
        list(journal.entries)
    assert journal.entries[:9] == entries[:9]
    assert list(journal.entries.since(RECENT)) == entries[RECENT:]
    journal.append(log_of(2 * RECENT + 1)[-1])  # what is new is kept as ever
    journal.close(clean=False)
    again = FileJournal(tmp_path)
    assert again.damaged
    again.close()


@given(at=st.integers(min_value=0), flip=st.integers(1, 255))
def test_a_changed_byte_is_damage_never_another_entry(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    entries = log_of(3)
    journal = FileJournal(folder)
    for certified in entries:
        journal.append(certified)
    journal.close()
    data = bytearray((folder / "entries").read_bytes())
    data[at % len(data)] ^= flip
    (folder / "entries").write_bytes(data)
    again = FileJournal(folder)
    assert list(again.entries) == entries[: len(again.entries)]
    assert (
        again.damaged or len(again.entries) < 3
    )  # a changed length may look like a write cut short
    again.close()


@pytest.mark.parametrize("powered", [True, False])
@pytest.mark.parametrize("synced", [True, False])
def test_a_vote_at_the_end_that_was_never_forced_was_never_said_and_one_that_was_is_damage(
    tmp_path: Path, powered: bool, synced: bool
) -> None:
    """The vote before the broken one stands, also where an entry lies between."""
    entries = log_of(3)
    journal = FileJournal(tmp_path)
    journal.append(entries[0])
    journal.accept(2, entries[1].entry)
    journal.sync()
    at = (tmp_path / "entries").stat().st_size
    journal.append(entries[1])
    journal.promise(7)
    if synced:
        journal.sync()
        journal.promise(8)
    data = bytearray((tmp_path / "entries").read_bytes())
    data[at + 40] ^= 1  # of entry 1
    (tmp_path / "entries").write_bytes(data)
    again = FileJournal(tmp_path, boot="another" if powered else None)
    if powered and not synced:
        assert not again.damaged
        assert list(again.entries) == entries[:1]
        assert (again.promised, again.accepted) == (2, (2, entries[1].entry))
        assert again.lost_bytes == len(data) - at
        assert (tmp_path / "entries").stat().st_size == at
    else:  # a kill cuts the last write short and no other
        assert f"at byte {at}, fails its check" in again.damaged
        assert (tmp_path / "entries").read_bytes() == data
    for opened in (journal, again):
        opened.close(clean=False)


def test_broken_votes_of_a_round_that_is_over_are_told_and_the_rest_is_used(tmp_path: Path) -> None:
    entries = log_of(2 * RECENT)
    journal = FileJournal(tmp_path)
    journal.append(entries[0])
    at = (tmp_path / "entries").stat().st_size
    for certified in entries[1:]:
        journal.accept(0, certified.entry)
        journal.append(certified)
    journal.promise(3)
    journal.close()
    data = bytearray((tmp_path / "entries").read_bytes())
    data[at + 1] ^= 1  # the length of the vote before entry 1
    (tmp_path / "entries").write_bytes(data)
    again = FileJournal(tmp_path)
    assert (again.damaged, again.blemish) == ("", f"entries: broken votes at byte {at}")
    assert list(again.entries) == entries
    assert again.promised == 3
    again.close()


def test_results_are_kept_and_their_files_used_again(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path)
    for round_ in range(100):
        buffer = files.allocate(1000)
        buffer[:4] = round_.to_bytes(4, "big")
        files.keep(f"e{round_}", round_, buffer, forced=False)
        del buffer
        files.forget(round_ - 2)
    again = ResultFiles(tmp_path)
    kept = [again.kept(f"e{round_}") for round_ in range(100)]
    assert [index for index, data in enumerate(kept) if data is not None] == [97, 98, 99]
    assert bytes(kept[99] or b"")[:4] == (99).to_bytes(4, "big")
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) <= 5


class Refusing(RealMedium):
    """A disk that forces what it is told to, and says what; or refuses."""

    def __init__(self) -> None:
        self.forced, self.refuses = list[str](), False

    def sync(self, file: int) -> None:
        if self.refuses:
            raise OSError(errno.EIO, "Input/output error")
        super().sync(file)
        self.forced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)


def test_what_an_earlier_life_did_not_force_is_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between write and sync leaves bytes that look the same as those on the medium."""
    disk = Refusing()
    monkeypatch.setattr(results, "REAL", disk)
    killed = ResultFiles(tmp_path)
    for name in ("a", "b"):
        killed.keep(name, 1, memoryview(bytes(8)), forced=False)
    assert disk.forced == []
    again = ResultFiles(tmp_path)
    assert disk.forced == ["00", "01"]
    again.keep("a", 1, memoryview(bytes(8)), forced=True)
    assert disk.forced == ["00", "01"]
    ResultFiles(tmp_path)
    assert disk.forced == ["00", "01"]  # what is known to be forced is not forced again
    again.keep("c", 1, memoryview(bytes(8)), forced=False)
    disk.refuses = True
    refused = ResultFiles(tmp_path)
    with pytest.raises(StorageError, match="Input/output error"):
        refused.keep("c", 1, memoryview(bytes(8)), forced=True)
    disk.refuses = False
    refused.keep("c", 1, memoryview(bytes(8)), forced=True)
    assert disk.forced == ["00", "01", "02"]


class Forgetful(RealMedium):
    """A system that forgets at a failed sync what it could not write, and reads it all the same.
    Of each file: which bytes are on the medium. What is written by a mapping counts as dirty until
    the first sync.
    """

    def __init__(self) -> None:
        self.fails = False
        self.medium, self.dirty = dict[str, bytes](), dict[str, list[tuple[int, bytes]]]()

    @staticmethod
    def _name(file: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{file}")).name

    def write(self, file: int, data: bytes | memoryview, at: int) -> None:
        super().write(file, data, at)
        if (name := self._name(file)) in self.dirty:
            self.dirty[name].append((at, bytes(data)))

    def sync(self, file: int) -> None:
        name, now = self._name(file), os.pread(file, 1 << 20, 0)
        writes = self.dirty.setdefault(name, [(0, now)])
        self.dirty[name] = []
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        left = bytearray(self.medium.get(name, b"").ljust(len(now), b"\0"))
        for at, data in writes:
            left[at : at + len(data)] = data
        self.medium[name] = bytes(left)


@pytest.mark.parametrize("received", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_a_result_whose_sync_failed_is_written_again_before_it_counts_as_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, received: bool, killed: bool
) -> None:
    disk = Forgetful()
    monkeypatch.setattr(results, "REAL", disk)
    files = ResultFiles(tmp_path)
    data = files.allocate(5000) if received else memoryview(bytearray(5000))
    data[:] = bytes(range(250)) * 20
    disk.fails = True
    with pytest.raises(StorageError, match="Input/output error"):
        files.keep("a", 1, data, forced=True)
    disk.fails = False
    if killed:  # its name was given, and whoever opens the folder finds it
        files = ResultFiles(tmp_path)
        assert files.has("a")
    else:
        assert not files.has("a")
    files.keep("a", 1, data, forced=True)
    on_medium = tmp_path / "after the power cut"
    on_medium.mkdir()
    for name, left in disk.medium.items():
        (on_medium / name).write_bytes(left)
    kept = ResultFiles(on_medium).kept("a")
    assert kept is not None
    assert bytes(kept) == bytes(data)


class Ordered(RealMedium):
    """Says in which order it writes and forces."""

    def __init__(self) -> None:
        self.calls = list[tuple[str, str]]()

    def write(self, file: int, data: bytes | memoryview, at: int) -> None:
        super().write(file, data, at)
        self.calls.append(("write", Path(os.readlink(f"/proc/self/fd/{file}")).name))

    def sync(self, file: int) -> None:
        super().sync(file)
        self.calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{file}")).name))

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.calls.append(("folder", folder.name))


@pytest.mark.parametrize("received", [True, False])
def test_a_result_is_on_the_medium_with_its_name_before_anybody_votes_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, received: bool
) -> None:
    """Nothing is written to it afterwards but that it is forced; the name of a file that is known
    there is not forced again.
    """
    disk = Ordered()
    monkeypatch.setattr(results, "REAL", disk)
    files = ResultFiles(tmp_path / "results")
    for round_ in (1, 2):
        data = files.allocate(8) if received else memoryview(bytearray(8))
        data[:] = round_.to_bytes(8, "big")
        files.keep(f"r{round_}", round_, data, forced=True)
        name = f"{round_ - 1:02d}"
        of_it = [call for call, file in disk.calls if file == name]
        assert of_it[-2:] == ["sync", "write"]
        assert of_it.count("sync") == 1
        assert disk.calls[-2:] == [("folder", "results"), ("write", name)]
        disk.calls.clear()
    files.keep("r2", 2, data, forced=True)
    assert disk.calls == []


def test_operations_whose_sync_failed_are_never_told_from_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Refusing()
    monkeypatch.setattr("atoll.node.storage.spent.REAL", disk)
    files, path = run_files(tmp_path, []), tmp_path / "operations"
    files.spent.spend("a")
    files.sync()
    assert disk.forced == ["operations"]
    files.spent.spend("b")
    disk.refuses = True
    with pytest.raises(StorageError, match="Input/output error"):
        files.sync()
    disk.refuses = False
    with pytest.raises(StorageError, match="Input/output error"):
        files.sync()
    files.close()
    again, before = run_files(tmp_path, []), path.stat().st_ino
    assert again.spent.operations() == ["a", "b"]
    renewed = path.stat().st_ino
    assert renewed != before  # another file: what a sync has forgotten is written again
    assert again.spent.operations() == ["a", "b"]
    assert path.stat().st_ino == renewed
    again.close()


def test_a_buffer_in_use_is_not_given_away(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path)
    mine = files.allocate(8)
    mine[:] = b"in use!!"
    others = [files.allocate(8) for _ in range(3)]
    for other in others:
        other[:] = b"........"
    assert bytes(mine) == b"in use!!"


def run_files(folder: Path, troubles: list[StorageError]) -> RunFiles:
    return RunFiles(
        folder,
        run_id="r",
        outer=OuterSettings("nesterov", 0.7, 0.9),
        slots=PlainSlots,
        trouble=troubles.append,
    )


def test_checkpoint_comes_back_bit_for_bit_and_damage_is_told(tmp_path: Path) -> None:
    troubles: list[StorageError] = []
    layout = make_layout([("w", (3, 5)), ("b", (5,))])
    files = run_files(tmp_path, troubles)
    entries = log_of(2)
    for certified in entries:
        files.journal().append(certified)
    replica = files.states.replica(layout, restore=False)
    assert isinstance(replica, ModelReplica)
    replica.initialise(torch.arange(20, dtype=torch.float32))
    replica.momentum.copy_(torch.linspace(-1, 1, 20))
    replica.applied = 1
    files.states.checkpoint(replica, entries[1], 1)
    files.close()

    again = run_files(tmp_path, troubles)
    restored = again.states.replica(layout, restore=True)
    assert isinstance(restored, ModelReplica)
    assert (restored.applied, restored.generation) == (1, 1)
    assert torch.equal(restored.anchor, replica.anchor)
    assert torch.equal(restored.momentum, replica.momentum)
    assert restored.hashes() == replica.hashes()
    again.close()
    assert not troubles

    path = tmp_path / "checkpoint" / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    damaged = run_files(tmp_path, troubles)
    assert damaged.states.replica(layout, restore=True).generation == -1
    assert [error.code for error in troubles] == ["E303"]
    damaged.close()


def test_a_checkpoint_that_a_power_cut_left_ahead_of_the_journal_is_a_note_and_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an entry that the journal lost, or not there between two renames: the one before serves,
    and nothing is wrong with the disk.
    """
    caplog.set_level("INFO", "atoll")
    troubles: list[StorageError] = []
    layout, entries = make_layout([("w", (4,))]), log_of(3)
    files = run_files(tmp_path, troubles)
    replica = files.states.replica(layout, restore=False)
    assert isinstance(replica, ModelReplica)
    replica.initialise(torch.arange(4, dtype=torch.float32))
    for certified in entries[:2]:
        files.journal().append(certified)
    for applied in (1, 2):  # the second is of an entry that the journal never gets
        replica.applied = applied
        files.states.checkpoint(replica, entries[applied], applied)
    files.close()

    for missing in (False, True):
        if missing:
            (tmp_path / "checkpoint" / "state.safetensors").unlink()
        again = run_files(tmp_path, troubles)
        assert again.states.replica(layout, restore=True).applied == 1
        assert (again.damage, troubles) == (None, [])
        again.close()
        assert "entry 1 is taken" in caplog.records[-1].getMessage()

    both = run_files(tmp_path / "both", troubles)
    both.journal().append(entries[0])
    for applied in (1, 2):
        replica.applied = applied
        both.states.checkpoint(replica, entries[applied], applied)
    both.close()
    again = run_files(tmp_path / "both", troubles)  # nothing serves, and others may have the state
    assert again.states.replica(layout, restore=True).generation == -1
    assert not troubles
    assert again.damage is not None
    assert "does not reach" in again.damage.message
    again.close()


def test_what_no_step_changes_is_hashed_anew_only_after_another_state_was_installed() -> None:
    # three chunks of anchor, of which the last holds the first of the other vector, then two of
    # that alone
    numel = 600_000
    replica = ModelReplica(
        make_layout([("w", (numel,))]), OuterSettings("sgd", 1.0, 0.0), PlainSlots(numel)
    )
    replica.initialise(torch.randn(numel, generator=torch.Generator().manual_seed(1)))
    first = replica.hashes()
    assert replica.hashes() == first
    state = bytearray(replica.snapshot())
    state[-1] ^= 1
    replica.install(memoryview(state), 1)
    assert [
        index
        for index, (one, other) in enumerate(zip(first, replica.hashes(), strict=True))
        if one != other
    ] == [len(first) - 1]
    state[0] ^= 1
    replica.install(memoryview(state), 2)
    assert replica.hashes()[0] != first[0]


def test_who_founded_a_run_and_lost_its_folder_does_not_found_it_again_and_is_somebody_new(
    tmp_path: Path,
) -> None:
    def life(number: int, me: str = "p0") -> RunFiles:
        return RunFiles(
            tmp_path / me,
            run_id="r",
            outer=OuterSettings("nesterov", 0.7, 0.9),
            slots=PlainSlots,
            trouble=lambda _: None,
            me=me,
            organiser="p0",
            founded=tmp_path / "beside the key" / "r",
            first_life=number,
        )

    layout, genesis = make_layout([("w", (4, 5))]), log_of(1)[0]
    for me in ("p1", "p0"):  # another member's marker would mean nothing
        files = life(5, me)
        assert (files.was_founded, files.journal().incarnation) == (False, 5)
        files.found(files.states.replica(layout, restore=False), genesis)
        assert files.was_founded
        assert (tmp_path / "beside the key" / "r").exists() == (me == "p0")
        files.close()
    same = life(6)
    assert (same.was_founded, same.journal().incarnation) == (True, 5)
    same.close()
    shutil.rmtree(tmp_path / "p0")
    lost = life(7)
    assert (lost.was_founded, lost.journal().incarnation) == (
        True,
        7,
    )  # what the lost journal has voted for is not known any more
    with pytest.raises(StorageError, match="was founded here and its state is missing") as told:
        lost.check()
    assert told.value.code == "E303"
    lost.close()


def test_after_a_reboot_a_member_is_the_same_voter(tmp_path: Path) -> None:
    def files() -> RunFiles:
        return RunFiles(
            tmp_path,
            run_id="r",
            outer=OuterSettings("nesterov", 0.7, 0.9),
            slots=PlainSlots,
            trouble=lambda _: None,
            me="p1",
        )

    first, entries = files(), log_of(3)
    for certified in entries:
        first.journal().append(certified)
    first.journal().promise(4)
    first.journal().close(clean=False)
    path = tmp_path / "journal" / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "boot_id": "another"}))
    for rebooted in (True, False):  # and once more, as after kill -9
        again = files().journal()
        assert (again.rebooted, again.incarnation, again.promised) == (rebooted, 0, 4)
        assert list(again.entries) == entries
        assert json.loads(path.read_text()) == meta
        again.close(clean=False)


def test_a_journal_of_another_peer_is_refused_and_an_older_one_takes_its_owner(
    tmp_path: Path,
) -> None:
    """Nothing of exchanged folders is changed. A folder that names no owner, as earlier versions
    wrote it, is as good as it was.
    """
    homes = {"p1": tmp_path / "one", "p2": tmp_path / "two"}

    def files(owner: str, place: str) -> RunFiles:
        return RunFiles(
            homes[place],
            run_id="r",
            outer=OuterSettings("nesterov", 0.7, 0.9),
            slots=PlainSlots,
            trouble=lambda _: None,
            me=owner,
            first_life=7,
        )

    def bytes_of_all() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    for peer in homes:
        first = files(peer, peer)
        for certified in log_of(3):
            first.journal().append(certified)
        first.journal().promise(5)
        first.journal().close(clean=peer == "p1")
    before = bytes_of_all()
    for peer, place in (("p1", "p2"), ("p2", "p1")):
        with pytest.raises(StorageError) as told:
            files(peer, place)
        assert (told.value.code, told.value.exit_code) == ("E309", 74)
        assert peer in told.value.message
        assert place in told.value.message
    assert bytes_of_all() == before
    meta = homes["p1"] / "journal" / "meta.json"
    assert json.loads(meta.read_text()).pop("peer") == "p1"
    old = {key: value for key, value in json.loads(meta.read_text()).items() if key != "peer"}
    meta.write_text(json.dumps(old))
    journal = files("p2", "p1").journal()
    assert (journal.incarnation, journal.promised, len(journal.entries)) == (7, 5, 3)
    journal.close()
    assert json.loads(meta.read_text())["peer"] == "p2"
    with pytest.raises(StorageError, match="p2, and this node is p1"):
        files("p1", "p1")
    meta.write_text(json.dumps({**old, "peer": None}))  # damage names nobody: a new life begins
    journal = files("p1", "p1").journal()
    assert (journal.incarnation > 7, journal.promised, len(journal.entries)) == (True, -1, 0)


def test_a_damaged_journal_begins_a_new_incarnation(tmp_path: Path) -> None:
    troubles: list[StorageError] = []
    files = run_files(tmp_path, troubles)
    for certified in log_of(3):
        files.journal().append(certified)
    files.close()
    entries = tmp_path / "journal" / "entries"
    data = bytearray(entries.read_bytes())
    data[40] ^= 0xFF
    entries.write_bytes(data)
    again = run_files(tmp_path, troubles)
    assert again.journal().incarnation == 1
    assert list(again.journal().entries) == []
    assert [error.code for error in troubles] == ["E303"]
    again.close()


def test_a_seal_outlives_a_damaged_journal_and_a_damaged_seal_is_damage(tmp_path: Path) -> None:
    """What an organiser has signed must never be signed otherwise, whatever else of its disk is
    lost.
    """
    troubles: list[StorageError] = []
    entries, gone = log_of(2), Member(PeerId("p9"), 1)
    record = SealRecord(
        1,
        entries[0].entry.hash(),
        (gone,),
        True,
        Certified(entries[1].entry, entries[1].votes, (gone,)),
    )
    files = run_files(tmp_path, troubles)
    files.journal().append(entries[0])
    files.journal().seal(record)
    files.journal().close()
    data = bytearray((tmp_path / "journal" / "entries").read_bytes())
    data[30] ^= 1
    (tmp_path / "journal" / "entries").write_bytes(data)
    again = run_files(tmp_path, troubles)
    assert (again.journal().incarnation, list(again.journal().entries), again.journal().sealed) == (
        1,
        [],
        record,
    )
    again.close()

    whole = bytearray((tmp_path / "seal").read_bytes())
    whole[-1] ^= 1
    (tmp_path / "seal").write_bytes(whole)
    last = run_files(tmp_path, troubles)
    assert (last.journal().incarnation, last.journal().sealed, last.journal().damaged) == (
        2,
        None,
        "",
    )
    last.close()
    assert [trouble.code for trouble in troubles] == ["E303", "E303"]


def test_closed_files_hold_no_memory_but_what_is_still_read(tmp_path: Path) -> None:
    files, entries = run_files(tmp_path, []), log_of(3)
    for certified in entries[1:]:
        data = files.results.allocate(8)
        data[:] = bytes([certified.entry.round] * 8)
        files.results.keep(certified.entry, data)
    unread, read = files.results.kept(entries[1].entry), files.results.kept(entries[2].entry)
    assert unread is not None
    assert read is not None
    gone = weakref.ref(unread.obj)
    del data, unread
    files.close()
    assert gone() is None
    assert bytes(read) == b"\x02" * 8
    again = run_files(tmp_path, [])
    assert (
        bytes(again.results.kept(entries[1].entry) or b"") == b"\x01" * 8
    )  # what is on disk stays
    again.close()


def test_what_was_spent_of_privacy_outlives_lives_and_damage_of_the_state_and_is_never_guessed(
    tmp_path: Path,
) -> None:
    files, troubles = run_files(tmp_path, []), list[StorageError]()
    for steps in range(3):
        assert files.spent.noisy() == steps
        files.spent.spend_noisy(steps + 1)
    files.reset()  # the state is set aside, what it has told others is not
    assert files.spent.noisy() == 3
    files.close()
    again = run_files(tmp_path, troubles)
    assert again.spent.noisy() == 3
    for damaged in (b"", b"-5\n", b"3.5", b"\xff\xfe"):
        (tmp_path / "privacy").write_bytes(damaged)
        for use in (again.spent.noisy, lambda: again.spent.spend_noisy(1)):
            with pytest.raises(StorageError, match="privacy is damaged"):
                use()
    again.close()
