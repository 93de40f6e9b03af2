"""Files of a run's base that this machine lacks, from other members. Sans I/O but for its jobs.

The manifest binds the sha256 and the size of each file. Of its chunks a peer says the hashes
(`Offer`), which nothing binds: peers that say the same are believed together, each chunk is checked
against that as it comes, and the whole file against its sha256 before it gets its name. If it is
another, all who said these hashes lied, and are asked for nothing more; what other hashes agree
with is kept. What is here is no word of a journal: after a kill the chunks of the unfinished file
are hashed again.

In the folder: each file under its name once it is right, ``.NAME.part`` until then.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from ...collectives import messages as m
from ...collectives.digest import chunk_hash
from ...collectives.errors import AtollError, NetworkError, RemoteProtocolError, StorageError
from ...collectives.exchange import BadChunk, BlobProgress
from ...collectives.identifiers import HASH_BYTES, PeerId
from ..home.output import bytes_text
from ..home.private_folders import make_private
from ..home.refusals import storage_error
from ..manifest.tables import BaseTable
from ..session.requests import ChunkRequests
from .pieces import Cutting, FilePieces, FilePorts, encode, pieces_of
from .serving import AHEAD

T = TypeVar("T")
ASKED = 8  # peers that are asked for a file at once
ASK_S = 3.0  # so often who has not answered is asked again
SETTLE_S = 1.0  # others may offer the same, and are then sources from the beginning
GONE_S = 4.0  # members may be connected a little later than the first
AGAIN_S = 15.0  # who did not have it may have it then
NOBODY_S = 25.0  # nobody has answered for so long, and
HASHED_BYTES_S = 100e6  # who is asked first hashes the file
STALLED_S = 20.0  # nothing came for so long: all are asked anew, and other hashes tried
MOST_IDLE = 4  # then it ends
LEAST_BYTES = 1 << 20  # in that time, where others offer other hashes
MOST_LISTS = 4  # of hashes that made another file: so many times a file is fetched at most
PULL_S = 0.25  # between two looks at what may be lost
SPARE_BYTES = 64 << 20  # that are left free on the disk
_READ_BYTES = 1 << 20


@dataclass
class SegmentComing:
    """One on its way."""

    number: int
    data: memoryview
    requests: ChunkRequests
    have: int = 0
    missing: Sequence[m.Span] = ()
    reported_at: float = 0.0


@dataclass
class FileComing:
    """The file that is fetched now. ``hashes``: those that are believed, joined; None: none yet.
    ``here``: by segment, whether it is in the unfinished file. ``sources``: who offered them.
    """

    piece: FilePieces
    began_at: float
    asked: dict[PeerId, float] = field(default_factory=dict[PeerId, float])
    gone: dict[PeerId, float] = field(default_factory=dict[PeerId, float])
    offers: dict[bytes, list[PeerId]] = field(default_factory=dict[bytes, list[PeerId]])
    offered_at: float | None = None
    hashes: bytes | None = None
    here: bytearray = field(default_factory=bytearray)
    coming: dict[bytes, SegmentComing] = field(default_factory=dict[bytes, SegmentComing])
    writing: set[int] = field(default_factory=set[int])
    refuted: int = 0
    window: tuple[float, int] = (0.0, 0)  # since when it is looked at what comes, and what had
    idle: int = 0  # such times in which nothing did
    came: int = 0  # chunks

    @property
    def sources(self) -> list[PeerId]:
        return [p for p in self.offers.get(self.hashes or b"", ()) if p not in self.gone]


class BaseFetching:
    """All files of a base, one after the other, into ``folder``; until `over`, with `error` where
    not all are there.
    """

    def __init__(
        self,
        now: float,
        run: str,
        base: BaseTable,
        folder: Path,
        ports: FilePorts,
        rng: Random,
        cutting: Cutting,
    ) -> None:
        self.folder, self.over = folder, False
        self.error: AtollError | None = None
        self.brought = Counter[PeerId]()  # chunks, by who sent them
        self._run, self._base, self._ports, self._rng = run, base, ports, rng
        self._todo = pieces_of(base, cutting)
        self._whole = 0  # bytes of files that are right
        self._fetched = 0  # that have come
        self._file: FileComing | None = None
        self._barred = set[PeerId]()  # who sent what its own hashes refute, or hashes of no use
        self._slow = set[PeerId]()
        self._busy = True  # a job is under way that the next step waits for
        pieces = list(self._todo)
        self._work(lambda: _look(folder, pieces, base.size), self._looked)

    # ---- for whoever waits
    @property
    def have_bytes(self) -> int:
        """Of all files, in place or in the unfinished one."""
        file = self._file
        if file is None:
            return self._whole
        spans = (file.piece.span(number) for number, here in enumerate(file.here) if here)
        return self._whole + sum(stop - first for first, stop in spans)

    @property
    def progress(self) -> tuple[str, int, int]:
        """What is done now; bytes that are here, and of all files."""
        file, done = self._file, (self.have_bytes, self._base.size)
        if file is None:
            return "comparing the base's files", *done
        if file.hashes is None:
            return f"asking members for {file.piece.name}", *done
        count = len(file.sources)
        return f"{file.piece.name} from {count} member{'s' * (count != 1)}", *done

    def document(self) -> dict[str, Any]:
        """What came of it, for JSON."""
        brought = sorted(self.brought)
        return {
            "folder": str(self.folder),
            "bytes": self._whole,
            "fetched": self._fetched,
            "from": brought,
        }

    def stop(self, error: AtollError | None = None) -> None:
        """Ask for nothing more. What is here stays for the next time."""
        if not self.over:
            self.over, self.error = True, error
            self._forget_coming()

    # ---- inputs
    def on_offer(self, now: float, peer: PeerId, offer: m.Offer) -> None:
        """Hashes of a file's chunks. Raises RemoteProtocolError where they are too few or many."""
        file = self._file
        if file is None or self.over or offer.name != file.piece.digest or peer not in file.asked:
            return
        if len(offer.hashes) != file.piece.chunks * HASH_BYTES or offer.layout is not None:
            raise RemoteProtocolError("hashes of another number of chunks", peer=peer)
        if peer in self._barred or any(peer in peers for peers in file.offers.values()):
            return
        file.gone.pop(peer, None)
        file.offers.setdefault(offer.hashes, []).append(peer)
        file.offered_at = now if file.offered_at is None else file.offered_at
        if offer.hashes == file.hashes:
            for name, segment in file.coming.items():
                self._want(name, segment)

    def on_gone(self, now: float, peer: PeerId, name: bytes) -> None:
        """The peer does not have it, or gives no more of it."""
        file = self._file
        if file is None or peer not in file.asked:
            return
        if name == file.piece.digest or name in file.coming:
            file.gone[peer] = now
            # hashes that nobody says any more are forgotten: who takes back what it has offered may
            # offer others without end
            rest = {hashes: [p for p in who if p != peer] for hashes, who in file.offers.items()}
            file.offers = {hashes: who for hashes, who in rest.items() if who}

    def on_bad_chunk(self, event: BadChunk) -> None:
        """What a peer sent is not what it offered."""
        if self._file is not None and event.name in self._file.coming:
            self._bar([event.peer])

    def on_blob(self, now: float, event: BlobProgress) -> None:
        """Progress of a segment, or the answer to a `report`."""
        file = self._file
        segment = file.coming.get(event.name) if file is not None else None
        if file is None or segment is None:
            return
        if event.have > segment.have:
            file.idle, file.came = 0, file.came + 1
            if event.source is not None:
                self.brought[event.source] += 1
                self._slow.discard(event.source)
            segment.requests.came(now, event.source, event.missing)
        segment.have, segment.missing = event.have, event.missing
        if event.missing:
            self._get(event.name, segment.requests.next(now, event.missing, file.sources))
            return
        del file.coming[event.name]
        self._fetched += len(segment.data)
        self._ports.content.unwant(event.name)
        first, _ = file.piece.span(segment.number)
        part = self._part(file.piece)
        file.writing.add(segment.number)

        def written(now: float, nothing: None) -> None:
            file.writing.discard(segment.number)
            if segment.number < len(file.here):  # else other hashes are looked for meanwhile
                file.here[segment.number] = 1
            self._advance(now)

        self._work(lambda: _write(part, first, segment.data), written)

    def tick(self, now: float, peers: Sequence[PeerId]) -> None:
        """Ask, ask again, and go on. ``peers``: members that are connected."""
        if self.over or self._busy:
            return
        file = self._file
        if file is None:
            self._begin_next(now)
            return
        self._look_at_members(now, file, peers)
        if file.hashes is None:
            self._choose(now, file, peers)
        elif not file.sources:
            self._set_aside(now, file)
        elif self._stalls(now, file):
            file.idle += 1
            if file.idle >= MOST_IDLE:
                self.stop(self._nobody(peers))
            else:
                self._set_aside(now, file)
        else:
            self._ask_again(now, file)
            self._advance(now)

    # ---- one file
    def _begin_next(self, now: float) -> None:
        if not self._todo:
            self.stop()
            return
        self._file = FileComing(self._todo[0], now)

    def _look_at_members(self, now: float, file: FileComing, peers: Sequence[PeerId]) -> None:
        """Ask those for the hashes who have not said them, a few at once."""
        for peer in file.sources:
            if peer not in peers:
                file.gone[peer] = now
        for peer, at in list(file.gone.items()):
            if now - at > AGAIN_S:
                del file.gone[peer]
                file.asked.pop(peer, None)
        said = {peer for each in file.offers.values() for peer in each}
        able = [p for p in peers if p not in said | self._barred and p not in file.gone]
        self._rng.shuffle(able)
        able.sort(key=lambda peer: peer not in file.asked)  # those first who owe an answer
        for peer in able[: max(0, ASKED - len(said))]:
            if now - file.asked.get(peer, -1e9) > ASK_S:
                file.asked[peer] = now
                self._ports.send(peer, encode(m.Get(file.piece.digest, ())))

    def _choose(self, now: float, file: FileComing, peers: Sequence[PeerId]) -> None:
        """Believe the hashes that most peers say alike who are not known to be slow."""
        offers = {hashes: who for hashes, who in file.offers.items() if who}
        able = [p for p in peers if p not in file.gone and p not in self._barred]
        waited_s = now - file.began_at
        if offers:
            answered = len(able) <= sum(map(len, offers.values()))
            if answered or (file.offered_at is not None and now - file.offered_at >= SETTLE_S):
                file.hashes = max(
                    offers,
                    key=lambda each: (len(set(offers[each]) - self._slow), self._rng.random()),
                )
                part, piece, hashes = self._part(file.piece), file.piece, file.hashes
                self._busy = True
                self._work(lambda: _scan(part, piece, hashes), self._scanned)
        elif waited_s > (
            GONE_S if peers and not able else NOBODY_S + file.piece.size / HASHED_BYTES_S
        ):
            self.stop(self._nobody(peers))

    def _stalls(self, now: float, file: FileComing) -> bool:
        """Whether nothing comes under these hashes; or hardly anything, while others are offered:
        who made them up might send them for ever.
        """
        at, before = file.window
        if now - at <= STALLED_S:
            return False
        came = (self.brought.total() - before) * file.piece.chunk
        others = [who for hashes, who in file.offers.items() if who and hashes != file.hashes]
        file.window = (now, self.brought.total())
        return not came or (bool(others) and came < LEAST_BYTES)

    def _ask_again(self, now: float, file: FileComing) -> None:
        for name, segment in file.coming.items():
            if now - segment.reported_at > 4 * PULL_S:
                segment.reported_at = now
                self._want(name, segment)
                self._ports.content.report_blob(name)
            self._get(name, segment.requests.late(now, file.sources, PULL_S))

    def _scanned(self, now: float, here: bytearray) -> None:
        self._busy = False
        if (file := self._file) is not None:
            file.here, file.window = here, (now, self.brought.total())
            self._advance(now)

    def _advance(self, now: float) -> None:
        """Keep a few segments on their way; compare the file when all are here."""
        file = self._file
        if file is None or file.hashes is None or self._busy or self.over:
            return
        coming = {segment.number for segment in file.coming.values()}
        coming |= file.writing
        if not coming and all(file.here):
            part, piece, target = self._part(file.piece), file.piece, self.folder / file.piece.name
            self._busy = True
            self._work(lambda: _finish(part, piece, target), self._finished)
            return
        for number in range(len(file.here)):
            if len(file.coming) + len(file.writing) >= AHEAD:
                break
            if not file.here[number] and number not in coming:
                self._begin_segment(now, file, number)

    def _begin_segment(self, now: float, file: FileComing, number: int) -> None:
        first, stop = file.piece.span(number)
        name = file.piece.segment_name(self._run, number)
        requests = ChunkRequests(now, file.piece.chunk)
        data = memoryview(bytearray(stop - first))
        file.coming[name] = SegmentComing(number, data, requests, reported_at=now)
        self._want(name, file.coming[name])
        self._ports.content.report_blob(name)  # answered by `on_blob`

    def _want(self, name: bytes, segment: SegmentComing) -> None:
        file = self._file
        assert file is not None
        assert file.hashes is not None
        hashes = [
            file.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            for at in file.piece.numbers(segment.number)
        ]
        self._ports.content.want(name, segment.data, file.piece.chunk, hashes, file.sources)

    def _get(self, name: bytes, gets: Sequence[tuple[PeerId, list[m.Span]]]) -> None:
        for peer, spans in gets:
            self._ports.send(peer, encode(m.Get(name, tuple(spans))))

    def _finished(self, now: float, right: bool) -> None:
        """The unfinished file was compared with its sha256."""
        self._busy = False
        file = self._file
        if file is None or self.over:
            return
        if right:
            self._whole += file.piece.size
            self._todo.pop(0)
            self._file = None
            self._begin_next(now)
            return
        assert file.hashes is not None
        hashes, part, piece = file.hashes, self._part(file.piece), file.piece

        def compared(now: float, here: bytearray) -> None:
            self._busy = False
            if all(here):  # the disk has what came: these hashes are of another file
                self._bar(file.offers.pop(hashes, []))
                file.refuted += 1
                file.hashes, file.here, file.began_at = None, bytearray(), now
                if file.refuted >= MOST_LISTS:
                    self.stop(self._refuted(file))
            else:
                file.here = here

        self._busy = True
        self._work(lambda: _scan(part, piece, hashes), compared)

    def _set_aside(self, now: float, file: FileComing) -> None:
        """Nothing comes under these hashes: all are asked anew, and other hashes tried."""
        self._slow |= set(file.sources)
        self._forget_coming()
        file.hashes, file.offered_at, file.here = None, None, bytearray()
        file.began_at = now
        for peers in file.offers.values():
            for peer in peers:
                file.asked.pop(peer, None)
        file.offers.clear()

    def _forget_coming(self) -> None:
        if self._file is not None:
            for name in self._file.coming:
                self._ports.content.unwant(name)
            self._file.coming.clear()

    def _bar(self, peers: Sequence[PeerId]) -> None:
        self._barred |= set(peers)
        if self._file is not None:
            for known in self._file.offers.values():
                known[:] = [peer for peer in known if peer not in self._barred]

    def _part(self, piece: FilePieces) -> Path:
        return self.folder / f".{piece.name}.part"

    # ---- jobs
    def _looked(self, now: float, found: dict[str, int]) -> None:
        """``found``: the files that are right already, and their bytes."""
        self._busy = False
        self._todo = [piece for piece in self._todo if piece.name not in found]
        self._whole = sum(found.values())

    def _work(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """What the disk refuses ends the fetching."""

        def tried() -> T | AtollError:
            try:
                return work()
            except OSError as error:
                return storage_error(f"cannot write into {self.folder}", error)
            except AtollError as error:
                return error

        def finished(now: float, result: T | AtollError) -> None:
            if self.over:
                return
            if isinstance(result, AtollError):
                self.stop(result)
            else:
                done(now, result)

        self._ports.work(tried, finished)

    # ---- words
    def _nobody(self, peers: Sequence[PeerId]) -> NetworkError:
        file = self._file
        name = file.piece.name if file is not None else "the base"
        here = self.have_bytes
        kept = f"{bytes_text(here)} of {bytes_text(self._base.size)} are kept. " if here else ""
        if not peers:
            what, why = "no member of the run is connected", "They are off, or not reached."
        elif file is not None and file.came:
            what, why = f"members send no more of {name}", "They left, or their links are down."
        else:
            what = f"no member of the run that is connected ({len(peers)}) gives {name}"
            why = (
                "They lack it themselves, their copy has changed since they joined, or their "
                "owners do not share it ([models] share = false)."
            )
        return NetworkError(
            f"the base cannot be had from members: {what}",
            code="E415",
            why=kept + why,
            hint="The same command again, once somebody is there who has it; or get the files "
            "yourself: atoll join … --model PATH",
        )

    def _refuted(self, file: FileComing) -> NetworkError:
        return NetworkError(
            f"what members sent as {file.piece.name} is not the run's, {file.refuted} times",
            code="E415",
            why="Its sha256 is another than the manifest's; those who sent it are asked no more.",
            hint="Get the files from somebody whom you trust: atoll join … --model PATH",
        )


def _look(folder: Path, pieces: list[FilePieces], size: int) -> dict[str, int]:
    """The files that are right already, with their bytes; empty ones are made. Raises OSError,
    StorageError where the disk has no room for the rest.
    """
    make_private(folder)
    found = dict[str, int]()
    missing = 0
    for piece in pieces:
        path, part = folder / piece.name, folder / f".{piece.name}.part"
        if not piece.size:
            path.write_bytes(b"")
        if path.is_file() and path.stat().st_size == piece.size and _sha256(path) == piece.digest:
            found[piece.name] = piece.size
            part.unlink(missing_ok=True)
            continue
        path.unlink(missing_ok=True)
        if part.is_file() and part.stat().st_size > piece.size:
            part.unlink()
        taken = part.stat().st_blocks * 512 if part.is_file() else 0
        missing += max(0, piece.size - taken)
    free = shutil.disk_usage(folder).free
    if missing + SPARE_BYTES > free:
        raise StorageError(
            f"the base needs {bytes_text(missing)} more in {folder}, where {bytes_text(free)} are "
            "free",
            why=f"It has {bytes_text(size)}; {bytes_text(SPARE_BYTES)} are left free.",
            hint="Free some space, or have caches on another disk: XDG_CACHE_HOME=/another/disk",
            exit_code=73,
        )
    return found


def _scan(part: Path, piece: FilePieces, hashes: bytes) -> bytearray:
    """By segment, whether the unfinished file has it, as these hashes say."""
    here = bytearray(piece.segments)
    if not part.is_file():
        return here
    with part.open("rb") as file:
        for segment in range(piece.segments):
            file.seek(piece.span(segment)[0])
            here[segment] = all(
                chunk_hash(file.read(piece.nbytes(chunk)))
                == hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
                for chunk in piece.numbers(segment)
            )
    return here


def _write(part: Path, first: int, data: memoryview) -> None:
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        file.seek(first)
        while data:
            data = data[file.write(data) :]


def _finish(part: Path, piece: FilePieces, target: Path) -> bool:
    """Give the unfinished file its name, if it is the manifest's."""
    if part.stat().st_size != piece.size or _sha256(part) != piece.digest:
        return False
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)
    return True


def _sha256(path: Path) -> bytes:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            found.update(data)
    return found.digest()
