"""The journal of one log on disk: a write-ahead log of everything that a member must not forget.

`entries`: append-only frames (length, blake3 check, body), of two kinds: a decided entry, and what
was promised and voted in the open round. What is said by a message is written here first, and the
message waits until `sync` has forced it to the medium (`session.barrier`). So whatever a power cut
takes from the end of the file was never said to anybody: the tail is cut off, and the member goes
on as the same life. Each frame tells up to which byte the file was on the medium when it was
written: what is broken before that byte is damage, not a tail. `../seal`: one frame, replaced at
once; it outlives the journal, since what an organiser has signed stands whatever else is lost.
`meta.json`: whose votes these are (``peer``), incarnation, boot id, and whether the last life ended
cleanly.

Votes of rounds that are over are left out at a start where they take more than a quarter of what
the entries take: the file is written anew beside, forced, and renamed, so that a cut leaves the one
or the other. Entries are all kept: whoever joins verifies the chain from the genesis on.

All frames are checked at the start; in memory are the newest entries, and where every 64th begins.
A write that fails (a full disk) leaves the file as it was, so that the same write can be tried
again. After a sync that fails, the system forgets what it could not write, and a later sync would
succeed without it: what was not forced is cut off, and this life writes and says nothing more. A
life counts as forced what is marked so, and writes all that lies behind again before it says
anything: the last one may have ended before it could cut.

What does not fit its check is ``damaged``, in words, with the byte at which it begins;
nothing on the disk is changed then. Broken votes of rounds that are over are of no use to anybody:
they are told (``blemish``) and passed over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...collectives.errors import StorageError
from ...collectives.group import Certified, Entry, Vote
from ...collectives.round import SPAN, Log, SealRecord
from .frames import FRAME, MAX_ENTRY_BYTES, check_of, framed, read_frames
from .medium import REAL, Medium, contents_of, make_folder, storage_error, write_atomically

ENTRY, VOTE = b"E", b"V"
_MARK = struct.Struct(">cQ")  # the kind of a frame, and how much of the file was on the medium
_WINDOW = 1 << 20
LOST = "lost"  # the boot of a life that does not know what is on the medium: no other is the same
# How every frame begins: length, check, kind, mark.
_MAYBE = re.compile(rb"(?=\x00[\x00-\x10][\s\S]{18}[EV]\x00)")
_seal = msgspec.msgpack.Decoder(SealRecord)
_certified = msgspec.msgpack.Decoder(Certified)


def _decoded(data: bytes) -> Certified | None:
    try:
        return _certified.decode(data)
    except msgspec.MsgspecError:
        return None


class _Vote(msgspec.Struct, frozen=True, array_like=True):
    round: int
    promised: int
    accepted: tuple[int, Entry] | None
    proof: tuple[Vote, ...] = ()
    echoed: tuple[int, Entry] | None = None


_vote = msgspec.msgpack.Decoder(_Vote)


def boot_id() -> str:
    """Identifies this boot of the machine; "" where the platform does not tell (then every restart
    counts as the same boot).
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def foreign_state(folder: Path, owner: str, me: str) -> StorageError:
    """The error for state that another peer has voted from."""
    return StorageError(
        f"{folder} is the state of peer {owner}, and this node is {me}",
        code="E309",
        exit_code=74,
        why="Folders of two nodes were exchanged, or the key beside this one was. What this node "
        "has voted is not in there: going on from it, it could vote twice in one round.",
        hint="Put each folder back beside the key that it belongs to. Where that cannot be done, "
        "move it away: this node fetches the state from the other members then, as a new life.",
    )


def stored_entries(folder: Path) -> Iterator[Certified]:
    """The entries in the journal of ``folder``, read without opening it: a node may be writing
    there. Raises StorageError.
    """
    path = folder / "entries"
    try:
        with open(path, "rb") as file:
            for number, body in enumerate(read_frames(file, path, growing=True)):
                if body[:1] == VOTE:
                    continue
                certified = _decoded(body[_MARK.size :]) if body[:1] == ENTRY else None
                if certified is None:
                    raise StorageError(
                        f"{path} is damaged: frame {number} is no entry", code="E303", exit_code=74
                    )
                yield certified
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(path, error) from error


class FileJournal:
    """Implements `collectives.round.Journal`. Raises StorageError when it cannot write; nothing is
    answered then.
    """

    WASTE = 1 << 20
    """Bytes of votes of rounds that are over that are never worth writing the file anew."""

    def __init__(
        self,
        folder: Path,
        *,
        incarnation: int = 0,
        medium: Medium = REAL,
        boot: str | None = None,
        owner: str = "",
    ) -> None:
        """``boot``: in place of `boot_id`. ``owner``: the peer that votes from this journal; one
        that says it is another's is refused (StorageError E309), and left as it is.
        """
        self._owner = owner
        self._boot = boot_id() if boot is None else boot
        self._folder, self.incarnation = folder, incarnation
        self._medium = medium
        self._path = folder / "entries"
        self.entries = Log(self._read)
        self._marks = array("Q")  # where every SPANth entry begins
        self._gaps = dict[int, int]()  # where broken votes of rounds that are over begin, and end
        # The newest entry that can be read, also behind damage.
        self.newest: Certified | None = None
        self.promised = -1
        self.accepted: tuple[int, Entry] | None = None
        self.proof: tuple[Vote, ...] = ()
        self.echoed: tuple[int, Entry] | None = None
        self.sealed: SealRecord | None = None
        self.damaged = self.blemish = ""
        self.lost_bytes = 0
        """How much of the end the last life had not forced to the medium, and a power cut has
        broken.
        """
        self._lost: OSError | None = None  # why a sync failed
        self.written = 0
        """How many records were written in this life: see `sync`."""
        self._end = self._on_medium = 0  # of the whole frames in `entries`
        self._begun = False  # whether all that earlier lives have left is forced
        self._marked = 0  # so much of it the frames say to have been on the medium
        self.left_out = 0
        """Bytes of votes of rounds that are over, which this life's start has left out."""
        self._over = 0  # bytes of votes, of all rounds, in what the last life left
        self._log, self._lock = -1, threading.Lock()
        try:
            make_folder(folder, medium)
            self._load_meta()
            self._log = medium.open(self._path)
            self._load()
            self._load_seal()
            if not self.damaged and not self.rebooted:
                self._save_meta(clean=False)
            if not self.damaged:
                self._write_again()
                self.sync()
                self._begun = True
            if self._wasteful:
                self._compact()
        except OSError as error:
            self._let_go()
            raise storage_error(folder, error) from error
        except StorageError:
            self._let_go()
            raise
        self.restarted = self._existed

    # ---- Journal
    def promise(self, ballot: int) -> None:
        self._write_vote(ballot, self.accepted, self.proof, self.echoed)

    def accept(self, ballot: int, entry: Entry, proof: tuple[Vote, ...] = ()) -> None:
        self._write_vote(ballot, (ballot, entry), proof, self.echoed)

    def echo(self, ballot: int, entry: Entry) -> None:
        self._write_vote(ballot, self.accepted, self.proof, (ballot, entry))

    def append(self, certified: Certified) -> None:
        """Record an applied entry."""
        at = self._end
        self._write(ENTRY, msgspec.msgpack.encode(certified))
        self._take(certified, at)
        self.newest, self.promised, self.accepted, self.restarted = certified, -1, None, False
        self.proof, self.echoed = (), None

    def seal(self, record: SealRecord) -> None:
        """Record a seal. The control loop waits for the disk: usual rounds are not sealed."""
        write_atomically(
            self._folder.with_name("seal"),
            framed(msgspec.msgpack.encode(record)),
            medium=self._medium,
        )
        self.sealed = record

    def sync(self) -> None:
        """All that was written before is on the medium when this returns. From any thread. Raises
        StorageError, from then on always: nobody knows what is there, and this life must say
        nothing more.
        """
        with self._lock:  # so that the file is not closed meanwhile
            end = self._end
            if self._log < 0 or end == self._on_medium:
                return
            try:
                if self._lost is not None:
                    raise self._lost
                self._medium.sync(self._log)
            except OSError as error:
                if self._lost is None:
                    self._lose(error)
                raise storage_error(self._path, error) from error
            self._on_medium = end

    def _lose(self, error: OSError) -> None:
        """A sync has failed: of what is not forced the system may drop any page. Where it cannot be
        cut off, the next life is told to judge the end as after a power cut. What an earlier life
        has written stays: it may have been forced, and said.
        """
        self._lost = error
        try:
            if not self._begun:
                raise error
            self._medium.truncate(self._log, self._on_medium)
        except OSError:
            self._boot = LOST
            with contextlib.suppress(StorageError):  # then the next life may find damage
                self._save_meta(clean=False)

    # ---- life
    def note_boot(self) -> None:
        """To be called after a reboot without a clean stop, once what it left was taken up: from
        now on a broken end is judged as after a kill. Raises StorageError.
        """
        self._save_meta(clean=False)

    def renew(self, incarnation: int) -> None:
        """Record a new life; the entries here are as good as before. Raises StorageError."""
        self.incarnation = incarnation
        self._save_meta(clean=False)

    def close(self, *, clean: bool = True) -> None:
        """End of this life; ``clean``: nothing was lost on the way to the disk."""
        if self._log < 0:
            return
        try:
            if clean:
                self.sync()
        finally:
            self._let_go()
        if not self.damaged:
            self._save_meta(clean=clean)

    def _let_go(self) -> None:
        with self._lock:
            if self._log >= 0:
                with contextlib.suppress(OSError):
                    self._medium.close(self._log)
            self._log = -1

    def _load_meta(self) -> None:
        path = self._folder / "meta.json"
        self._existed = self._medium.exists(path)
        self.rebooted = self._was_clean = False
        self._was_long = 0
        if self._existed:
            try:
                meta = json.loads(contents_of(path, self._medium))
                self.incarnation, self._was_clean = int(meta["incarnation"]), bool(meta["clean"])
                self._was_long = int(meta["bytes"])
                self.rebooted = not self._was_clean and meta["boot_id"] != self._boot
                if not isinstance(owner := meta.get("peer", ""), str):
                    raise TypeError("peer is no text")
                self._check_owner(owner)
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._unknown_life(f"meta.json: {error}")
        elif self._medium.exists(self._path) and contents_of(self._path, self._medium):
            self._unknown_life("meta.json is missing")

    def _check_owner(self, owner: str) -> None:
        """A journal from before owners were named says none, and takes its present one. Raises
        StorageError.
        """
        if self._owner and owner and owner != self._owner:
            raise foreign_state(self._folder.parent, owner, self._owner)
        self._owner = self._owner or owner

    def _unknown_life(self, why: str) -> None:
        """Which incarnations were used cannot be told: the next one must be larger than any that
        counted from 0, or from a clock.
        """
        self.damaged, self.incarnation = why, int(time.time())

    def _save_meta(self, *, clean: bool) -> None:
        # The control loop waits for this: at the start of a life, before anything is said in it,
        # and at its end.
        meta = {
            "peer": self._owner,
            "incarnation": self.incarnation,
            "boot_id": self._boot,
            "clean": clean,
            "bytes": self._end,
        }
        write_atomically(self._folder / "meta.json", json.dumps(meta).encode(), medium=self._medium)

    # ---- reading
    def _load(self) -> None:
        """Check all frames. A broken end that was never forced is cut off; anything else that does
        not fit is damage.
        """
        total, at, forced = self._medium.size(self._log), 0, self._was_long * self._was_clean
        whole_from = -1  # where the last whole frame begins
        broken: int | None = None  # the first broken byte, unless it is known to do no harm
        last: bytes | None = None  # the newest vote: those of rounds that are over are not read
        window = _Window(self._medium, self._log, total)
        while at < total:
            body = window.frame(at)
            if body is None:
                broken = at if broken is None else broken
                at = window.next_frame(at + 1)
                if at < total:
                    self._gaps[broken] = at
                continue
            whole_from = at
            mark, stop = _MARK.unpack_from(body)[1], at + FRAME.size + len(body)
            forced = max(forced, mark)
            if body[:1] == VOTE:
                self._over += stop - at
                last = body if broken is None else last
            else:
                certified = _decoded(body[_MARK.size :])
                before, self.newest = self.newest, certified or self.newest
                if broken is not None and self._continues(certified, before):
                    self.blemish = self.blemish or f"entries: broken votes at byte {broken}"
                    broken = None
                if not self.damaged and broken is None:
                    if certified is None or not self._continues(certified, before):
                        self._damage(
                            f"entries: frame {len(self.entries)}, at byte {at}, "
                            "does not continue the log"
                        )
                    else:
                        self._take(certified, at)
            at = stop
        if broken is None and total < forced:
            broken = total
        if broken is not None:
            # A kill cuts the last write short, no other.
            tail = self.rebooted or broken > whole_from
            if self._was_clean or broken < forced or not tail:
                self._damage(
                    f"entries: frame {len(self.entries)}, at byte {broken}, fails its check"
                )
            else:
                self._cut(broken, total)
                total = broken
        self._end, self._marked = total, min(forced, total)
        vote = None if last is None else self._decode_vote(last)
        if vote is not None and vote.round == len(self.entries) and not self.damaged:
            self.promised, self.accepted = vote.promised, vote.accepted
            self.proof, self.echoed = vote.proof, vote.echoed

    # ---- votes that are of no use any more
    @property
    def _wasteful(self) -> bool:
        whole = not self.damaged and not self.blemish and not self._gaps
        return whole and self._over > max(self.WASTE, (self._end - self._over) // 4)

    def _compact(self) -> None:
        """Write the entries, and what was promised and voted in the open round, to a file that
        takes the place of this one. Raises OSError.

        Where the disk has no room for it, all stays as it is.
        """
        beside = self._path.with_name("entries.new")
        medium, marks, end, at = self._medium, array("Q"), 0, 0
        piece, count = bytearray(), 0
        file = -1
        try:
            medium.remove(beside)  # of a life that was cut short
            file = medium.open(beside)
            window = _Window(medium, self._log, self._end)
            while at < self._end:
                body = window.frame(at)
                if body is None:
                    raise OSError(errno.EIO, "it is not what was read before")
                at += FRAME.size + len(body)
                if body[:1] == ENTRY:
                    if count % SPAN == 0:
                        marks.append(end + len(piece))
                    piece += framed(_MARK.pack(ENTRY, end) + body[_MARK.size :])
                    count += 1
                if len(piece) >= _WINDOW:
                    medium.write(file, bytes(piece), end)
                    end, piece = end + len(piece), bytearray()
            medium.write(file, bytes(piece), end)
            end += len(piece)
            vote = framed(_MARK.pack(VOTE, end) + msgspec.msgpack.encode(self._vote_now()))
            medium.write(file, vote, end)
            end += len(vote)
            medium.sync(file)
            medium.replace(beside, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                if file >= 0:
                    medium.close(file)
                medium.remove(beside)
            return
        old, self._log = self._log, file
        self.left_out = self._end - end
        self._end = self._on_medium = end
        self._marks = marks
        medium.close(old)
        medium.sync_folder(self._folder)  # before anything is written that only this file has

    def _continues(self, certified: Certified | None, before: Certified | None) -> bool:
        return (
            certified is not None
            and certified.entry.round == len(self.entries)
            and (before is None or certified.entry.base == before.entry.hash())
        )

    def _cut(self, at: int, total: int) -> None:
        """What lies behind was never said: it need not be there."""
        self.lost_bytes = total - at
        self._gaps = {first: stop for first, stop in self._gaps.items() if first < at}
        if not self.damaged:
            self._medium.truncate(self._log, at)

    def _take(self, certified: Certified, at: int) -> None:
        if len(self.entries) % SPAN == 0:
            self._marks.append(at)
        self.entries.append(certified)

    def _read(self, first: int, stop: int) -> list[Certified]:
        """Entries that are no longer in memory. Raises StorageError."""
        try:
            return list(self._between(first, stop))
        except OSError as error:
            raise storage_error(self._path, error) from error

    def _between(self, first: int, stop: int) -> Iterator[Certified]:
        at, number = self._marks[first // SPAN], first - first % SPAN
        window = _Window(self._medium, self._log, self._end)
        while number < stop:
            if at in self._gaps:
                at = self._gaps[at]
                continue
            body = window.frame(at)
            kind = body[:1] if body is not None else b""
            if body is not None and kind == ENTRY and number >= first:
                certified = _decoded(body[_MARK.size :])
                if certified is None or certified.entry.round != number:
                    body = None
                else:
                    yield certified
            if body is None:
                raise StorageError(
                    f"{self._path} is damaged: frame {number} is not what was written",
                    code="E303",
                    exit_code=74,
                    why="the file was changed, or the disk returned other bytes",
                    hint="check the disk, then start the node again",
                )
            number += kind == ENTRY
            at += FRAME.size + len(body)

    def _damage(self, why: str) -> None:
        self.damaged = self.damaged or why

    def _load_seal(self) -> None:
        path = self._folder.with_name("seal")
        data = contents_of(path, self._medium) if self._medium.exists(path) else b""
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

    def _write_again(self) -> None:
        """What lies behind the newest mark: where an earlier life's sync has failed, the system
        holds pages for written that never were, and only a new write brings them to the medium.
        Raises OSError.
        """
        for at in range(self._marked, self._end, _WINDOW):
            piece = self._medium.read(self._log, min(_WINDOW, self._end - at), at)
            self._medium.write(self._log, piece, at)

    def _decode_vote(self, body: bytes) -> _Vote | None:
        try:
            return _vote.decode(body[_MARK.size :])
        except msgspec.MsgspecError:
            self._damage("entries: a vote that nobody can have written")
            return None

    # ---- writing
    def _write_vote(
        self,
        promised: int,
        accepted: tuple[int, Entry] | None,
        proof: tuple[Vote, ...],
        echoed: tuple[int, Entry] | None,
    ) -> None:
        vote = _Vote(len(self.entries), promised, accepted, proof, echoed)
        self._write(VOTE, msgspec.msgpack.encode(vote))
        self.promised, self.accepted = promised, accepted
        self.proof, self.echoed = proof, echoed

    def _vote_now(self) -> _Vote:
        return _Vote(len(self.entries), self.promised, self.accepted, self.proof, self.echoed)

    def _write(self, kind: bytes, payload: bytes) -> None:
        data = framed(_MARK.pack(kind, self._on_medium) + payload)
        try:
            if self._lost is None:
                self._medium.write(self._log, data, self._end)
            if self._lost is not None:  # perhaps only since: `sync` is called from any thread
                raise self._lost
        except OSError as error:
            with contextlib.suppress(OSError):
                end = self._end if self._lost is None else self._on_medium
                self._medium.truncate(self._log, end)
            raise storage_error(self._path, error) from error
        self._end += len(data)
        self.written += 1


class _Window:
    """Reads frames of a file, a part of it at a time."""

    def __init__(self, medium: Medium, file: int, total: int) -> None:
        self._medium, self._file, self._total = medium, file, total
        self._first, self._data = 0, b""

    def _bytes(self, at: int, nbytes: int) -> bytes:
        if not self._first <= at <= at + nbytes <= self._first + len(self._data):
            self._first = at
            self._data = self._medium.read(self._file, max(nbytes, _WINDOW), at)
        return self._data[at - self._first : at - self._first + nbytes]

    def frame(self, at: int) -> bytes | None:
        """The body of the frame at ``at``; None where there is no whole one."""
        if at + FRAME.size > self._total:
            return None
        size, check = FRAME.unpack(self._bytes(at, FRAME.size))
        if not _MARK.size <= size <= MAX_ENTRY_BYTES:
            return None
        if at + FRAME.size + size > self._total:
            return None
        body = self._bytes(at + FRAME.size, size)
        return body if body[:1] in (ENTRY, VOTE) and check_of(body) == check else None

    def next_frame(self, at: int) -> int:
        """Where the next whole frame begins, or the end of the file."""
        while at < self._total:
            data = self._medium.read(self._file, _WINDOW, at)
            for found in _MAYBE.finditer(data):
                if self.frame(at + found.start()) is not None:
                    return at + found.start()
            at += max(1, len(data) - 2 * FRAME.size)
        return self._total
