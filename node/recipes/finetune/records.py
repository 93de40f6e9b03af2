"""Records as they lie in files of this machine: jsonl, csv, tsv, parquet, txt, or what a function
of the machine's own returns. Each is given with its file and line, and so is each that is wrong.

Nothing is read that has no bound: a line has at most `MOST_LINE_BYTES`. Text without records is
cut between paragraphs, at places that follow from the paragraphs themselves; so the same text makes
the same records wherever it stands, and falls on one side of the split into training and held-out.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

from ....collectives.errors import ConfigError
from ....collectives.foreign import quoted
from ...home.own_data import is_factory, site_data
from ...home.paths import user_path

MOST_LINE_BYTES = 4 << 20
"""A million tokens: longer than any model's context, and little memory."""
PARAGRAPHS = 16  # of a record of text, on average
_BLANK = re.compile(r"\s*")
_READ = 1 << 20  # characters of an array at a time
LONGEST_TEXT = 64 << 10  # bytes of a record of text
HINT = "--data FILE (jsonl, csv, tsv, parquet, txt), a folder of such files, or FILE.py:NAME"


@dataclass(frozen=True, slots=True)
class RecordLine:
    """A record: ``where`` is FILE:LINE; ``value`` an object of JSON, a row, or text."""

    where: str
    value: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class RecordFault:
    """What is wrong at ``where``, as the end of a sentence."""

    where: str
    what: str


Found = RecordLine | RecordFault


class UnfitRecord(Exception):
    """A record that cannot be trained on; its text says why."""


def read_records(source: str) -> Iterator[Found]:
    """The records of a file, of a folder's files in the order of their names, or of FILE.py:NAME.

    Raises ConfigError for a file that is missing or of a kind that is not read; a record that is
    wrong comes as a `RecordFault`, and reading goes on behind it where that is possible.
    """
    if is_factory(source):
        yield from _of_factory(source)
        return
    for path, name in files_of(source):
        read = READERS[path.suffix.lower()]
        empty = True
        try:
            for found in read(path, name):
                empty = False
                yield found
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror or error}", key="data", code="E417", hint=HINT
            ) from None
        if empty:
            yield RecordFault(f"{name}:1", "the file holds no record")


def files_of(source: str) -> list[tuple[Path, str]]:
    """The files that are read, and what each is called in messages. Raises ConfigError."""
    top = user_path(source)
    if top.is_dir():
        files = [
            (path, str(path.relative_to(top)))
            for path in sorted(top.rglob("*"))
            if path.suffix.lower() in READERS
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(top).parts)
        ]
        if not files:
            raise ConfigError(f"{top} holds no file of records", key="data", code="E417", hint=HINT)
        return files
    if not top.is_file():
        what = "is no file" if top.exists() else "does not exist"
        raise ConfigError(f"{top} {what}", key="data", code="E417", hint=HINT)
    if top.suffix.lower() not in READERS:
        raise ConfigError(
            f"{top.name} is of a kind that is not read: {top.suffix or 'it has no suffix'}",
            key="data",
            code="E417",
            why="What a file holds is told by its suffix: " + ", ".join(READERS) + ".",
            hint=HINT,
        )
    return [(top, top.name)]


def file_digest(source: str) -> str:
    """SHA-256 of the one file that all members of a run share, hexadecimal. Raises ConfigError."""
    files = [] if is_factory(source) else files_of(source)
    if len(files) != 1 or files[0][0] != user_path(source):
        raise ConfigError(
            f"{source} is not one file",
            key="data",
            code="E417",
            why="This run deals one data set out among its members, by the numbers of its records.",
            hint="Put it into one file, whose sha256 the manifest names.",
        )
    with files[0][0].open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_factory(source: str) -> Iterator[Found]:
    data: Any = site_data(source)
    for index in range(len(data)):
        value, where = data[index], f"{source}[{index}]"
        if isinstance(value, str | Mapping):
            yield RecordLine(where, value)
        else:
            yield RecordFault(where, f"it is of type {type(value).__name__}, not text or a mapping")


def _lines(path: Path, name: str) -> Iterator[tuple[int, str] | RecordFault]:
    """Lines without their ends, numbered from 1; what is no text or too long as a fault."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 2):
            number += 1
            if len(line.rstrip(b"\r\n")) > MOST_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MOST_LINE_BYTES)
                yield RecordFault(
                    f"{name}:{number}", f"the line has more than {MOST_LINE_BYTES >> 20} MiB"
                )
                continue
            if number == 1 and (odd := _no_text(line)):
                yield RecordFault(f"{name}:1", odd)
                return
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield RecordFault(
                    f"{name}:{number}", f"byte {error.start + 1} of the line is not UTF-8"
                )
                continue
            yield number, text.removesuffix("\n").removesuffix("\r")


def _no_text(head: bytes) -> str:
    """What a file is that begins so, where it is no text in UTF-8."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the file is UTF-16; save it as UTF-8"
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh")):
        return "the file is compressed; unpack it first"
    if head.startswith(b"PAR1"):
        return "the file is parquet; its name should end in .parquet"
    return ""


def _of_jsonl(path: Path, name: str) -> Iterator[Found]:
    for line in _lines(path, name):
        if isinstance(line, RecordFault):
            yield line
            continue
        number, text = line
        where = f"{name}:{number}"
        if not text.strip():
            continue
        if number == 1 and text.lstrip().startswith("["):
            yield RecordFault(where, _array(text, name))
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield RecordFault(where, _no_json(text, error))
            continue
        if isinstance(value, dict):
            yield RecordLine(where, value)
        else:
            yield RecordFault(where, f"it is {_kind(value)}, and an object {{…}} is wanted")


def _of_json(path: Path, name: str) -> Iterator[Found]:
    """One array of records, as data sets are often handed round; else an object on each line."""
    with path.open("rb") as file:
        head = file.read(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"{") and not head.partition(b"\n")[0].strip(b"{ \t\r"):
        yield RecordFault(f"{name}:1", f"it begins an object of several lines; {_by_jq('.', name)}")
        return
    if not head.startswith(b"["):
        yield from _of_jsonl(path, name)
        return
    elements = _ArrayReader(path, name)
    for line, value in elements:
        where = f"{name}:{line}"
        if isinstance(value, list) or (isinstance(value, dict) and _is_message(value)):
            own = "{messages: .}" if isinstance(value, dict) else ".[] | {messages: .}"
            yield RecordFault(where, f"it is {_LISTS[type(value)]}; {_by_jq(own, name)}")
            return
        if isinstance(value, dict):
            yield RecordLine(where, value)
        else:
            yield RecordFault(where, f"it is {_kind(value)}, and an object {{…}} is wanted")
    if elements.fault is not None:
        yield elements.fault


class _ArrayReader:
    """The elements of a JSON array with the lines where they begin, of which one at a time is in
    memory. ``fault``: why it ended before the array did.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._text, self._at, self._line, self._ended = "", 0, 1, False
        self.fault: RecordFault | None = None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        decoder, first = json.JSONDecoder(), True
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            try:
                self._pass("[", file)
                while not (first and self._pass("]", file)):
                    self._fill(file)
                    line = self._line
                    yield line, self._element(decoder, file)
                    first = False
                    if self._pass("]", file):
                        break
                    if not self._pass(",", file):
                        self._stop("a comma or ] is wanted between two records")
                if self._fill(file):
                    self._stop("something stands behind the array's ]")
            except UnicodeDecodeError:
                self.fault = RecordFault(f"{self._name}:{self._line}", "what follows is not UTF-8")
            except UnfitRecord as error:
                self.fault = RecordFault(f"{self._name}:{self._line}", str(error))

    def _element(self, decoder: json.JSONDecoder, file: IO[str]) -> Any:
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if self._ended or len(self._text) - self._at > MOST_LINE_BYTES:
                    self._stop(self._why(error))
                self._more(file)
            else:
                self._pass_to(end)
                return value

    def _why(self, error: Exception) -> str:
        if not isinstance(error, json.JSONDecodeError):
            return f"it cannot be read as JSON: {quoted(error, 80)}"
        if error.pos >= len(self._text.rstrip()) or error.msg.startswith("Unterminated"):
            return (
                "the file ends within a record"
                if self._ended
                else f"the record has more than {MOST_LINE_BYTES >> 20} MiB"
            )
        line = self._line + self._text.count("\n", self._at, error.pos)
        return f"it is not JSON: {error.msg} at line {line}"

    def _stop(self, what: str) -> NoReturn:
        raise UnfitRecord(what)

    def _pass(self, sign: str, file: IO[str]) -> bool:
        """Whether ``sign`` comes next; it is passed then."""
        if not self._fill(file):
            self._stop("the file ends within its array")
        found = self._text.startswith(sign, self._at)
        if found:
            self._at += 1
        return found

    def _fill(self, file: IO[str]) -> bool:
        """Skip white space; whether anything is left."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            self._pass_to(blank.end() if blank else self._at)
            if self._at < len(self._text) or self._ended:
                return self._at < len(self._text)
            self._more(file)

    def _more(self, file: IO[str]) -> None:
        read = file.read(_READ)
        self._text, self._at, self._ended = self._text[self._at :] + read, 0, not read

    def _pass_to(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end


def _is_message(value: Mapping[str, Any]) -> bool:
    return bool({"role", "from"} & value.keys()) and bool({"content", "value"} & value.keys())


_LISTS: dict[type, str] = {
    dict: "a message, so the array is one conversation",
    list: "a list, and an object {…} is wanted",
}


def _by_jq(change: str, name: str) -> str:
    stem = Path(name).stem
    made = f"{stem}.jsonl" if f"{stem}.jsonl" != Path(name).name else f"{stem}-lines.jsonl"
    return f"make records of it: jq -c '{change}' {shlex.quote(name)} > {shlex.quote(made)}"


def _array(text: str, name: str) -> str:
    """What to do with a file that begins with an array: of records, or each line of messages."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):  # it goes on in the lines behind
        found = []
    of_messages = bool(found) and isinstance(found[0], dict) and {"role", "from"} & found[0].keys()
    begins, change = ("is a list of messages", "{messages: .}") if of_messages else (
        "begins a JSON array", ".[]"
    )  # fmt: skip
    return f"it {begins}; {_by_jq(change, name)}"


def _no_json(text: str, error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return f"it cannot be read as JSON: {quoted(error, 80)}"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
        return "the line ends within its JSON"
    if error.pos == 0:
        return f"it is not JSON: it begins {quoted(text, 24)}"
    return f"it is not JSON: {error.msg} at column {error.colno}"


def _kind(value: object) -> str:
    names: dict[type, str] = {
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def _of_csv(path: Path, name: str) -> Iterator[Found]:
    faults = list[RecordFault]()

    def text() -> Iterator[str]:
        for line in _lines(path, name):
            if isinstance(line, RecordFault):
                faults.append(line)
                return
            yield line[1] + "\n"

    rows = csv.reader(text(), delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    csv.field_size_limit(MOST_LINE_BYTES)  # Python's own is 128 KiB, for the whole process
    header, first = list[str](), 1
    try:
        for row in rows:
            where, first = f"{name}:{first}", rows.line_num + 1
            if not row:
                continue
            if not header:
                header = [column.strip() for column in row]
                if len(set(header)) < len(header) or "" in header:
                    yield RecordFault(where, "its header names a column twice, or not at all")
                    return
            elif len(row) != len(header):
                yield RecordFault(where, f"{len(row)} columns, and the header has {len(header)}")
            else:
                yield RecordLine(where, dict(zip(header, row, strict=True)))
    except csv.Error as error:
        faults.append(RecordFault(f"{name}:{first}", f"it is not CSV: {error}"))
    yield from faults


def _of_text(path: Path, name: str) -> Iterator[Found]:
    lines, first, size = list[str](), 1, 0
    paragraph = list[str]()
    for line in _lines(path, name):
        if isinstance(line, RecordFault):
            yield line
            continue
        number, text = line
        if not lines and not text.strip():
            continue
        first = first if lines else number
        lines.append(text)
        size += len(text)
        if text.strip():
            paragraph.append(text)
            ends = size > LONGEST_TEXT
        else:
            ends, paragraph = size > LONGEST_TEXT or _ends(paragraph), []
        if ends:
            yield RecordLine(f"{name}:{first}", "\n".join(lines).rstrip())
            lines, paragraph, size = [], [], 0
    if lines:
        yield RecordLine(f"{name}:{first}", "\n".join(lines).rstrip())


def _ends(paragraph: list[str]) -> bool:
    """Whether a record of text ends behind this paragraph."""
    digest = hashlib.sha256("\n".join(paragraph).encode(errors="replace")).digest()
    return bool(paragraph) and digest[0] % PARAGRAPHS == 0


def _of_parquet(path: Path, name: str) -> Iterator[Found]:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"{name} is parquet, which needs pyarrow",
            key="data",
            code="E417",
            hint="pip install 'atoll[parquet]', or give jsonl",
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for group in range(file.num_row_groups):  # so much is in memory at a time
                for row in file.read_row_group(group).to_pylist():
                    number += 1
                    yield RecordLine(f"{name}:row {number}", row)
    except arrow.ArrowException as error:
        yield RecordFault(f"{name}:1", f"it is not parquet: {quoted(error, 120)}")


READERS: dict[str, Callable[[Path, str], Iterator[Found]]] = {
    ".jsonl": _of_jsonl,
    ".ndjson": _of_jsonl,
    ".json": _of_json,
    ".csv": _of_csv,
    ".tsv": _of_csv,
    ".parquet": _of_parquet,
    ".txt": _of_text,
    ".md": _of_text,
}
"""What reads a file, by its suffix."""
