"""The journal of one log on disk.

`entries`: append-only frames (length, blake3 check, msgpack of Certified), all of them checked at the start; in memory are the newest, and
where every 64th frame begins. `vote`: two slots written in turn, each with a sequence
number and a check, so that a write cut short leaves the one before. `../seal`: one frame, replaced at once and forced to the medium; it
outlives the journal, since what an organiser has signed stands whatever else is lost. `meta.json`: incarnation, boot id, whether the last life ended
cleanly. The page cache survives kill -9; after a reboot without a clean stop the votes may be gone, so the peer takes a new
incarnation and may never vote under the old one.

A write that fails (a full disk) leaves the file as it was, so that the same write can be tried again. What does not fit its check is
``damaged``, in words; nothing on the disk is changed then.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from array import array
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Literal

import msgspec

from ...collectives.errors import StorageError
from ...collectives.group import Certified, Entry, Vote
from ...collectives.round import SPAN, Log, SealRecord
from .frames import FRAME, MAX_ENTRY_BYTES, check_of, framed, read_frames

_SLOT_BYTES = 1 << 20
_seal = msgspec.msgpack.Decoder(SealRecord)
_certified = msgspec.msgpack.Decoder(Certified)


def _decoded(data: bytes) -> Certified | None:
    try:
        return _certified.decode(data)
    except msgspec.MsgspecError:
        return None


class _Vote(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    round: int
    promised: int
    accepted: tuple[int, Entry] | None
    proof: tuple[Vote, ...] = ()
    echoed: tuple[int, Entry] | None = None


_vote = msgspec.msgpack.Decoder(_Vote)


def boot_id() -> str:
    """Identifies this boot of the machine; "" where the platform does not tell (then every restart counts as the same boot)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def write_atomically(path: Path, data: bytes, *, forced: bool = False) -> None:
    """Replace a file's content at once; ``forced``: also a power cut leaves it. Raises StorageError."""
    temporary = path.with_name(path.name + ".new")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if forced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if forced:
            force_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error


def force_folder(folder: Path) -> None:
    """Force the names in a folder to the medium. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it. Raises OSError: ENOSPC, too, where the disk took a part."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def stored_entries(folder: Path) -> Iterator[Certified]:
    """The entries in the journal of ``folder``, read without opening it: a node may be writing there. Raises StorageError."""
    path = folder / "entries"
    try:
        with open(path, "rb") as file:
            for number, body in enumerate(read_frames(file, path, growing=True)):
                certified = _decoded(body)
                if certified is None:
                    raise StorageError(
                        f"{path} is damaged: frame {number} is no entry", code="E303", exit_code=74
                    )
                yield certified
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """A coded error for a failed file operation."""
    return StorageError(
        f"cannot use {path}: {error.strerror or error}",
        code="E501",
        why="the disk is full, or the folder cannot be written",
        hint="free some space, or move the state: ATOLL_HOME=/another/disk",
        exit_code=73,
    )


class FileJournal:
    """Implements `collectives.round.Journal`. Raises StorageError when it cannot write; nothing is answered then."""

    def __init__(self, folder: Path, *, incarnation: int = 0) -> None:
        self._folder, self.incarnation = folder, incarnation
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise storage_error(folder, error) from error
        self.entries = Log(self._read)
        self._marks = array("Q")  # where every SPANth frame begins
        self.newest: Certified | None = (
            None  # the newest entry that can be read, also behind damage
        )
        self.promised = -1
        self.accepted: tuple[int, Entry] | None = None
        self.proof: tuple[Vote, ...] = ()
        self.echoed: tuple[int, Entry] | None = None
        self.sealed: SealRecord | None = None
        self.damaged = ""
        self._sequence = 0
        self._end = 0  # of the whole frames in `entries`
        self._load_meta()
        self._log = self._open("entries")
        self._votes = self._open("vote")
        try:
            self._load_entries()
            self._load_vote()
            self._load_seal()
        except OSError as error:
            raise storage_error(folder, error) from error
        if not self.damaged and not self.rebooted:
            self._save_meta(clean=False)
        self.restarted = self._existed

    # ---- Journal
    def promise(self, ballot: int) -> None:
        """Record a promise."""
        self._write_vote(ballot, self.accepted, self.proof, self.echoed)

    def accept(self, ballot: int, entry: Entry, proof: tuple[Vote, ...] = ()) -> None:
        """Record a vote."""
        self._write_vote(ballot, (ballot, entry), proof, self.echoed)

    def echo(self, ballot: int, entry: Entry) -> None:
        """Record an echo."""
        self._write_vote(ballot, self.accepted, self.proof, (ballot, entry))

    def append(self, certified: Certified) -> None:
        """Record an applied entry."""
        data = framed(msgspec.msgpack.encode(certified))
        try:
            write_at(self._log.fileno(), data, self._end)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._log.truncate(self._end)
            raise storage_error(self._folder / "entries", error) from error
        self._take(certified, self._end)
        self._end += len(data)
        self.newest, self.promised, self.accepted, self.restarted = certified, -1, None, False
        self.proof, self.echoed = (), None

    def seal(self, record: SealRecord) -> None:
        """Record a seal."""
        write_atomically(
            self._folder.with_name("seal"), framed(msgspec.msgpack.encode(record)), forced=True
        )
        self.sealed = record

    # ---- life
    def go_on(self, *, anew: bool) -> None:
        """To be called after a reboot without a clean stop. ``anew``: in a new incarnation, since votes may have been lost with the page cache;
        the entries that are here are as good as before. Raises StorageError."""
        self.incarnation += anew
        self._save_meta(clean=False)

    def close(self, *, clean: bool = True) -> None:
        """End of this life; ``clean``: nothing was lost on the way to the disk."""
        if self._log.closed:
            return
        try:
            if clean:
                for file in (self._log, self._votes):
                    os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(self._folder, error) from error
        finally:
            self._log.close()
            self._votes.close()
        if not self.damaged:
            self._save_meta(clean=clean)

    def _open(self, name: str) -> FileIO:
        path = self._folder / name
        try:
            path.touch(mode=0o600)
            return open(
                path, "r+b", buffering=0
            )  # a buffer would keep what could not be written, and write it later
        except OSError as error:
            raise storage_error(path, error) from error

    def _load_meta(self) -> None:
        path, entries = self._folder / "meta.json", self._folder / "entries"
        self._existed = path.exists()
        self.rebooted = self._was_clean = False
        if self._existed:
            try:
                meta = json.loads(path.read_text())
                self.incarnation, self._was_clean = int(meta["incarnation"]), bool(meta["clean"])
                self.rebooted = not self._was_clean and meta["boot_id"] != boot_id()
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._unknown_life(f"meta.json: {error}")
        elif entries.exists() and entries.stat().st_size:
            self._unknown_life("meta.json is missing")

    def _unknown_life(self, why: str) -> None:
        """Which incarnations were used cannot be told: the next one must be larger than any that counted from 0, or from a clock."""
        self.damaged, self.incarnation = why, int(time.time())

    def _save_meta(self, *, clean: bool) -> None:
        meta = {"incarnation": self.incarnation, "boot_id": boot_id(), "clean": clean}
        write_atomically(self._folder / "meta.json", json.dumps(meta).encode())

    def _load_entries(self) -> None:
        """Check all whole frames, one at a time; a last frame cut short by a kill is dropped, anything else that does not fit is damage."""
        at, total = 0, os.fstat(self._log.fileno()).st_size
        with open(self._folder / "entries", "rb") as file:
            while at + FRAME.size <= total:
                size, check = FRAME.unpack(file.read(FRAME.size))
                whole = at + FRAME.size + size <= total
                if size <= MAX_ENTRY_BYTES and not whole and not self.damaged:
                    break
                if size > MAX_ENTRY_BYTES or not whole:
                    return self._damage(f"entries: frame at {at} has a wrong length")
                body = file.read(size)
                self._load_entry(body, at, check_of(body) == check)
                at += FRAME.size + size
        if self._was_clean and at < total:
            self._damage(f"entries: {total - at} bytes too many")
        if not self.damaged:
            self._end = at
            self._log.truncate(at)
        return None

    def _load_entry(self, body: bytes, at: int, intact: bool) -> None:
        """The next frame; behind damage it only tells who was a member last."""
        certified = _decoded(body) if intact else None
        if certified is None:
            return self._damage(f"entries: frame {len(self.entries)} fails its check")
        before, self.newest = self.newest, certified
        if self.damaged:
            return None
        if certified.entry.round != len(self.entries) or (
            before is not None and certified.entry.base != before.entry.hash()
        ):
            return self._damage(f"entries: frame {len(self.entries)} does not continue the log")
        return self._take(certified, at)

    def _take(self, certified: Certified, at: int) -> None:
        if len(self.entries) % SPAN == 0:
            self._marks.append(at)
        self.entries.append(certified)

    def _read(self, first: int, stop: int) -> list[Certified]:
        """Entries that are no longer in memory. Raises StorageError."""
        try:
            return list(self._frames(first, stop))
        except OSError as error:
            raise storage_error(self._folder / "entries", error) from error

    def _frames(self, first: int, stop: int) -> Iterator[Certified]:
        fd, at = self._log.fileno(), self._marks[first // SPAN]
        for number in range(first - first % SPAN, stop):
            size, check = FRAME.unpack(os.pread(fd, FRAME.size, at).ljust(FRAME.size, b"\0"))
            if number >= first:
                body = os.pread(fd, min(size, MAX_ENTRY_BYTES), at + FRAME.size)
                certified = _decoded(body) if (size, check) == (len(body), check_of(body)) else None
                if certified is None or certified.entry.round != number:
                    raise StorageError(
                        f"{self._folder / 'entries'} is damaged: frame {number} is not what was written",
                        code="E303",
                        exit_code=74,
                        why="the file was changed, or the disk returned other bytes",
                        hint="check the disk, then start the node again",
                    )
                yield certified
            at += FRAME.size + size

    def _damage(self, why: str) -> None:
        self.damaged = self.damaged or why

    def _load_seal(self) -> None:
        path = self._folder.with_name("seal")
        data = path.read_bytes() if path.exists() else b""
        if data:
            size, check = FRAME.unpack(data[: FRAME.size].ljust(FRAME.size, b"\0"))
            body = data[FRAME.size :]
            try:
                self.sealed = (
                    _seal.decode(body) if (size, check) == (len(body), check_of(body)) else None
                )
            except msgspec.MsgspecError:
                self.sealed = None
            if self.sealed is None:
                self._damage("seal: it fails its check")

    def _load_vote(self) -> None:
        votes = [self._read_vote(slot) for slot in range(2)]
        unreadable = votes.count("unreadable")
        if unreadable == 2 or (
            unreadable and self._was_clean
        ):  # more than the one write that a kill may cut short
            self._damage("vote: a record fails its check")
        newest = max(
            (vote for vote in votes if isinstance(vote, _Vote)),
            key=lambda vote: vote.sequence,
            default=None,
        )
        if newest is not None:
            self._sequence = newest.sequence
            if newest.round == len(self.entries):
                self.promised, self.accepted = newest.promised, newest.accepted
                self.proof, self.echoed = newest.proof, newest.echoed

    def _read_vote(self, slot: int) -> _Vote | Literal["", "unreadable"]:
        head = os.pread(self._votes.fileno(), FRAME.size, slot * _SLOT_BYTES)
        if not any(head):
            return ""
        size, check = FRAME.unpack(head.ljust(FRAME.size, b"\0"))
        body = (
            os.pread(self._votes.fileno(), size, slot * _SLOT_BYTES + FRAME.size)
            if size < _SLOT_BYTES
            else b""
        )
        if len(body) != size or check_of(body) != check:
            return "unreadable"
        try:
            return _vote.decode(body)
        except msgspec.MsgspecError:
            return "unreadable"

    def _write_vote(
        self,
        promised: int,
        accepted: tuple[int, Entry] | None,
        proof: tuple[Vote, ...],
        echoed: tuple[int, Entry] | None,
    ) -> None:
        vote = _Vote(self._sequence + 1, len(self.entries), promised, accepted, proof, echoed)
        try:
            write_at(
                self._votes.fileno(),
                framed(msgspec.msgpack.encode(vote)),
                (vote.sequence % 2) * _SLOT_BYTES,
            )
        except OSError as error:
            raise storage_error(self._folder / "vote", error) from error
        self._sequence, self.promised, self.accepted = vote.sequence, promised, accepted
        self.proof, self.echoed = proof, echoed
