"""What happened in a run, kept on disk for people and for tools: ``events.jsonl`` in the run's
folder, one JSON object a line.

The first line of a file is its head (``{"diary": 1, "run", "name", "at"}``); each other one is an
event as subscribers of the control socket get it (`events`): ``at`` (seconds since 1970), ``event``
(its kind) and what the kind tells. A reader skips keys that it does not know; a number beside
``diary`` changes when one changes its meaning. A file that has grown to `MAX_BYTES` is renamed to
``events.1.jsonl``, the one before to ``events.2.jsonl``, and so on; the `KEPT`-th is deleted. Lines
are not forced to the medium: a power cut may take the last ones, and half of one.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..home.paths import open_private, write_atomic
from .events import RunEvent, document, read_event

VERSION = 1
NEWEST = "events.jsonl"
MAX_BYTES = 8 << 20
KEPT = 4
MAX_LINE = 1 << 20
MAX_AT = 32_503_680_000
"""The year 3000: what is later, no calendar of a reader takes."""
GZIP = b"\x1f\x8b"
UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file may raise, compressed ones included."""
LEAST_LEFT = 64 << 10
"""A file with less room than this is full."""
OF_PEERS_BYTES, OF_PEERS_SHARE = 256 << 10, 8
"""So many bytes of events of peers (`RunEvent.of_peers`) are kept at once; after that one for every
so many bytes of the rest.
"""


class Diary:
    """The writer: one for each run of a node. What a full disk does not take is dropped, and so are
    events of peers beyond their share; the next event that is written says how many were, as
    ``missed``."""

    def __init__(self, folder: Path, run_id: str, name: Callable[[], str]) -> None:
        """Opens nothing yet. ``name``: of the run, once it is known."""
        self._folder, self._run_id, self._name = folder, run_id, name
        self._file: BinaryIO | None = None
        self._bytes = self._missed = 0
        self._of_peers = OF_PEERS_BYTES  # bytes that their events may take now

    def write(self, event: RunEvent) -> None:
        """Append an event. Never raises for what the disk does."""
        if not event.kept:
            return
        line = _line(
            document(msgspec.structs.replace(event, missed=self._missed) if self._missed else event)
        )
        of_peers = event.of_peers
        if of_peers and len(line) > self._of_peers:
            self._missed += 1
            return
        try:
            if self._file is None or self._bytes > MAX_BYTES - LEAST_LEFT:
                self._begin()
            assert self._file is not None
            self._file.write(line)
            self._file.flush()
        except OSError:
            self._missed += 1
            self.close()
        else:
            self._bytes += len(line)
            self._missed = 0
            earned = -len(line) if of_peers else len(line) // OF_PEERS_SHARE
            self._of_peers = min(OF_PEERS_BYTES, self._of_peers + earned)

    def close(self) -> None:
        """Idempotent; a later `write` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _begin(self) -> None:
        """Go on with the file that is there, or, if it is full, with a new one."""
        self.close()
        newest = self._folder / _name(0)
        size = newest.stat().st_size if newest.exists() else 0
        if size > MAX_BYTES - LEAST_LEFT:
            for number in range(KEPT - 1, 0, -1):
                older = self._folder / _name(number - 1)
                if older.exists():
                    older.replace(self._folder / _name(number))
            size = 0
        file = self._file = open_private(newest)
        head = _line(
            {"diary": VERSION, "run": self._run_id, "name": self._name(), "at": time.time()}
        )
        # A torn last line of a life before would swallow this one.
        file.write(b"\n" + head if size else head)
        self._bytes = size + len(head)


def events(folder: Path, since_s: float = 0.0) -> Iterator[RunEvent]:
    """The events in a run's folder, oldest first, that came at ``since_s`` (of 1970) or later.
    Lines that are no events are skipped.
    """
    return (event for number in range(KEPT - 1, -1, -1) for event in _read(folder, number, since_s))


def follow(
    folder: Path, since_s: float, wait: Callable[[], None]
) -> Generator[RunEvent, None, None]:
    """`events`, then new ones as they are written, for ever. ``wait`` is called between."""
    for number in range(KEPT - 1, 0, -1):
        yield from _read(folder, number, since_s)
    newest = folder / _name(0)
    while not newest.exists():
        wait()
    file = newest.open("rb")
    try:
        rest = b""
        while True:
            rest += file.readline()
            if rest.endswith(b"\n"):
                line, rest = rest, b""
                if (event := _event(line)) is not None and event.at >= since_s:
                    yield event
            elif _is_another(newest, file):
                file.close()
                file, rest = newest.open("rb"), b""
            else:
                wait()
    finally:
        file.close()


def record(file: Path, run_id: str, name: str, told: Iterable[RunEvent]) -> None:
    """Write events, oldest first, to a file of their own; compressed where its name ends in
    ``.gz``. Raises StorageError.
    """
    head = {"diary": VERSION, "run": run_id, "name": name, "at": time.time()}
    text = b"".join([_line(head), *(_line(document(event)) for event in told)])
    write_atomic(file, gzip.compress(text, mtime=0) if file.suffix == ".gz" else text, 0o644)


def opened(file: Path) -> BinaryIO:
    """A file of events to read, compressed by gzip or not. Raises OSError; reading it may raise
    whatever is `UNREADABLE`.
    """
    with file.open("rb") as plain:
        packed = plain.read(len(GZIP)) == GZIP
    return gzip.GzipFile(file) if packed else file.open("rb")  # type: ignore[return-value]


def recorded(file: Path, since_s: float = 0.0) -> Iterator[RunEvent]:
    """The events of one file, up to where it cannot be read."""
    with contextlib.suppress(*UNREADABLE), opened(file) as lines:
        while line := lines.readline(MAX_LINE + 1):
            event = _event(line)
            if event is not None and event.at >= since_s:
                yield event


def _read(folder: Path, number: int, since_s: float) -> Iterator[RunEvent]:
    return recorded(folder / _name(number), since_s)


def _is_another(newest: Path, file: BinaryIO) -> bool:
    """Whether the newest file is not the one that is read any more, and all of that one is read."""
    with contextlib.suppress(OSError):
        of = os.fstat(file.fileno())
        return newest.stat().st_ino != of.st_ino and file.tell() == of.st_size
    return False


def _name(number: int) -> str:
    return f"events.{number}.jsonl" if number else NEWEST


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, default=str).encode() + b"\n"


def decoded(line: bytes) -> dict[str, Any] | None:
    """A line as an object whose texts can be printed; None for anything else, one that is nested
    deeper than a reader goes included.
    """
    try:
        found = json.loads(line)
        if b"\\ud" in line.lower():  # half of a pair of surrogates is a text that no output takes
            found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _event(line: bytes) -> RunEvent | None:
    """A line as an event; None for a head, for half a line and for anything else."""
    found = decoded(line) if len(line) <= MAX_LINE else None
    if found is None or not isinstance(found.get("event"), str):
        return None
    at = found.get("at")
    timed = isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at <= MAX_AT
    return read_event(found) if timed else None
