"""All records of this machine, read once before the first step: what is wrong is refused, with file
and line; the rest lies as tokens in a file without a name, which ends with the process. So data of
any size need no memory, a document is found by its number, and how much there is can be said.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....collectives.errors import ConfigError
from ....collectives.foreign import escaped
from ...home.refusals import storage_error
from ...manifest.tables import DataTable
from .records import HINT, RecordFault, RecordLine, UnfitRecord, file_digest, read_records
from .rendering import ChatRenderer, RenderedText
from .samples import EmptyRecord, Passage, Sample, sample_of, schema_of, share_of, unread_of

SHOWN_FAULTS, MOST_FAULTS = 10, 1000  # of the latter on nothing more is read
SHOWN_UNREAD, MOST_UNREAD = 8, 1000  # keys
TELL_EVERY = 10_000  # records
BY_HEART = 10  # passes: fine-tuning usually makes one to three


class StorePlace(msgspec.Struct, frozen=True):
    """Where another process of this user finds a `TokenStore`: ``file``, as long as its process
    lives; ``ends``: int64, of each document behind the first one's beginning.
    """

    file: str
    ends: bytes
    targets: int
    digest: str


class TokenStore:
    """Documents by number, in a file without a name: 4 bytes a token, of which the lowest bit says
    whether it is learned.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: where the file is; None: where the system keeps such files."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (it lives as long as this)
        weakref.finalize(self, self._file.close)
        self._ends = array("q", [0])
        self._values: NDArray[np.int32] | None = None
        self._digest, self._known = hashlib.sha256(), ""
        self.targets = 0  # tokens that are to be predicted

    @classmethod
    def at(cls, place: StorePlace) -> TokenStore:
        """What another process has stored, to be read. Raises OSError."""
        store = cls()
        store._file.close()
        store._file = open(place.file, "rb")  # noqa: SIM115 (as above)
        weakref.finalize(store, store._file.close)
        store._ends = array("q", place.ends)
        store.targets, store._known = place.targets, place.digest
        return store

    def place(self) -> StorePlace:
        """All is written by then."""
        self._file.flush()
        file = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return StorePlace(file, self._ends.tobytes(), self.targets, self.digest)

    def add(self, text: RenderedText) -> None:
        """The next document. Raises StorageError where the disk is full."""
        values = np.asarray(text.ids, dtype=np.int32) << 1 | np.asarray(text.learned)
        data = values.astype("<i4").tobytes()
        try:
            self._file.write(data)
        except OSError as error:
            raise storage_error("cannot keep the tokens of the data", error) from None
        self._digest.update(len(text.ids).to_bytes(4, "little") + data)
        self._ends.append(self._ends[-1] + len(text.ids))
        self.targets += text.targets
        self._values = None

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """A document: int64 ids and bool learned, each of shape (tokens,)."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._values is None:
            self._file.flush()
            self._values = np.memmap(self._file, dtype="<i4", mode="r")
        values = torch.from_numpy(
            self._values[self._ends[index] : self._ends[index + 1]].astype(np.int64)
        )
        return values >> 1, (values & 1).bool()

    @property
    def tokens(self) -> int:
        """Of all documents together."""
        return self._ends[-1]

    @property
    def digest(self) -> str:
        """SHA-256 of what it holds, hexadecimal."""
        return self._known or self._digest.hexdigest()


@dataclass(slots=True)
class DataSummary:
    """What was read, and what of it is not trained on."""

    records: int = 0
    schemas: Counter[str] = field(default_factory=Counter[str])
    cut: int = 0  # documents, at the end
    cut_tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])  # records, by reason
    first: dict[str, str] = field(default_factory=dict[str, str])  # where, by reason
    unread: dict[str, str] = field(default_factory=dict[str, str])  # where, by what it is
    notes: list[str] = field(default_factory=list[str])

    def leave_out(self, reason: str, where: str) -> None:
        """A record that comes to nothing."""
        self.left_out[reason] += 1
        self.first.setdefault(reason, where)


@dataclass(slots=True)
class PreparedData:
    """Documents to train on, those held out, what was read, and the first sample as it is read."""

    training: TokenStore
    held_out: TokenStore
    summary: DataSummary
    shown: str
    alone: bool = True
    """They are this machine's own, not dealt out among members."""

    def lines(self, tokens_per_step: int, steps: int | None = None) -> list[str]:
        """What is said before the first step. ``steps``: of the run, where it has an end."""
        read, made, kept = self.summary, self.training, self.held_out
        schemas = ", ".join(f"{count:,} of {name}" for name, count in read.schemas.items())
        a_pass = made.tokens / tokens_per_step
        passes = (
            f"a pass is about {a_pass:,.0f} step{'s' * (round(a_pass) != 1)} of "
            f"{tokens_per_step:,} tokens"
            if round(a_pass)
            else f"a step of {tokens_per_step:,} tokens is about {1 / a_pass:,.0f} passes"
        )
        lines = [
            f"{read.records:,} records ({schemas})",
            f"to train on: {len(made):,} documents, {made.tokens:,} tokens, {made.targets:,} of "
            f"them learned; {passes}",
            f"held out: {len(kept):,} documents, {kept.targets:,} tokens to predict",
        ]
        if steps and self.alone and steps / a_pass > BY_HEART:
            lines.append(
                f"the run's {steps:,} steps read these data about {steps / a_pass:,.0f} times: a "
                "model then learns them by heart, and answers the worse beside them. More data, "
                "fewer [train] rounds, or fewer tokens_per_step"
            )
        if read.cut:
            lines.append(
                f"cut at the length: {read.cut:,} documents, {read.cut_tokens:,} tokens left away "
                f"(first: {read.first['cut']})"
            )
        lines += [
            f"left out: {count:,} because {reason} (first: {read.first[reason]})"
            for reason, count in read.left_out.items()
        ]
        if read.unread:
            shown = [f"{what} ({where})" for what, where in read.unread.items()][:SHOWN_UNREAD]
            left = len(read.unread) - len(shown)
            named, more = ", ".join(shown), f", and {left} others" * (left > 0)
            lines.append(f"not read, and where first: {named}{more}")
        return [escaped(line, 500) for line in [*lines, *read.notes]]


def prepare_data(
    source: str,
    tokenizer: Any,
    table: DataTable,
    *,
    folder: Path | None = None,
    vocabulary: int | None = None,
    tell: Callable[[int], None] = lambda records: None,
) -> PreparedData:
    """Read and render everything that ``source`` names. ``vocabulary``: token ids that the model
    has; ``tell`` hears now and then how many records were read.

    Raises ConfigError that names the file and line of each record that cannot be trained on (ten of
    them, and how many there are), and where nothing is left to train on.
    """
    _check_shared(source, table)
    renderer = ChatRenderer(tokenizer, table.loss)
    reading = _Reading(renderer, table, TokenStore(folder), TokenStore(folder))
    for found in read_records(source):
        reading.take(found)
        if reading.summary.records % TELL_EVERY == 0:
            tell(reading.summary.records)
        if len(reading.faults) >= MOST_FAULTS:
            break
    reading.refuse(source)
    summary = reading.summary
    if summary.records and renderer.way and not renderer.learns_to_stop():
        summary.notes.append(
            "the chat template puts no end-of-turn token behind an answer: the model does not "
            "learn to stop"
        )
    summary.notes += renderer.notes
    if vocabulary is not None and reading.largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer makes token {reading.largest:,}, and the model has {vocabulary:,}",
            key="tokenizer",
            why="They do not belong together, or tokens were added and the model was not resized.",
            hint="Take both from one folder or repository; of added tokens: "
            "model.resize_token_embeddings(len(tokenizer)), then save_pretrained of both.",
        )
    return PreparedData(
        reading.training, reading.held_out, summary, reading.shown, table.source != "shared"
    )


def _check_shared(source: str, table: DataTable) -> None:
    if table.source == "shared" and (found := file_digest(source)) != table.sha256:
        raise ConfigError(
            f"{source} is not this run's data set",
            key="$.data.sha256",
            code="E417",
            why=f"Its sha256 is {found}, and the manifest says {table.sha256}.",
            hint="Get the file that the organiser means; it must be the same byte for byte.",
        )


@dataclass(slots=True)
class _Reading:
    renderer: ChatRenderer
    table: DataTable
    training: TokenStore
    held_out: TokenStore
    summary: DataSummary = field(default_factory=DataSummary)
    faults: list[RecordFault] = field(default_factory=list[RecordFault])
    shown: str = ""
    largest: int = 0  # token id
    _schema: str = ""  # of the present file
    _file: str = ""

    def take(self, found: RecordLine | RecordFault) -> None:
        self.summary.records += 1
        if isinstance(found, RecordFault):
            self.faults.append(found)
            return
        try:
            sample = self._understood(found)
            texts = self.renderer.render(sample)
        except EmptyRecord as error:
            self.summary.leave_out(str(error), found.where)
            return
        except UnfitRecord as error:
            self.faults.append(RecordFault(found.where, str(error)))
            return
        if token := self.renderer.controls(sample):
            self._note_control(token, found.where)
        held_out = share_of(sample, self.table.seed) < self.table.held_out
        added = 0
        for text in texts:
            for piece in self._fitted(text, sample, found.where):
                (self.held_out if held_out else self.training).add(piece)
                self.largest = max(self.largest, *piece.ids)
                self.shown = self.shown or self.renderer.show(piece)
                added += 1
        if not added:
            length = self.table.length
            self.summary.leave_out(
                f"nothing learned is in its first {length:,} tokens", found.where
            )

    def _understood(self, found: RecordLine) -> Sample:
        file = found.where.rpartition(":")[0]
        if file != self._file or not self._schema:
            self._file, self._schema = file, ""
            wanted = self.table.format
            self._schema = schema_of(found.value) if wanted == "auto" else wanted
        sample = sample_of(found.value, self._schema)
        self.summary.schemas[self._schema] += 1
        for what in unread_of(found.value, self._schema):
            if len(self.summary.unread) < MOST_UNREAD:
                self.summary.unread.setdefault(what, found.where)
        return sample

    def _fitted(self, text: RenderedText, sample: Sample, where: str) -> Iterable[RenderedText]:
        """The document at the run's length: text in pieces, of which none is lost; what has a
        prompt cut at its end.
        """
        length = self.table.length
        if isinstance(sample, Passage) and not sample.prompt:
            pieces = [
                RenderedText(text.ids[at : at + length], text.learned[at : at + length])
                for at in range(0, len(text.ids), length)
            ]
        else:
            pieces = [text.cut(length)]
            if len(text.ids) > length and pieces[0].targets:
                self.summary.cut += 1
                self.summary.cut_tokens += len(text.ids) - length
                self.summary.first.setdefault("cut", where)
        return [piece for piece in pieces if piece.targets]

    def _note_control(self, token: str, where: str) -> None:
        if "control" not in self.summary.first:
            self.summary.first["control"] = where
            self.summary.notes.append(
                f"{where}: a message holds {token} in its text, which the model reads as a control "
                "token; others may, too"
            )

    def refuse(self, source: str) -> None:
        """Raise ConfigError for what is wrong."""
        if self.faults:
            raise ConfigError(
                _list_faults(self.faults),
                key="data",
                code="E417",
                why="What cannot be read as it was meant is not trained on in silence.",
                hint="Mend these lines, or take them out.",
            )
        if not len(self.training):
            reasons = "; ".join(
                f"{reason} (first: {self.summary.first[reason]})"
                for reason in self.summary.left_out
            )
            held = f"all {len(self.held_out)} documents are held out" if self.held_out else ""
            raise ConfigError(
                f"{source} leaves nothing to train on: {reasons or held or 'it holds no record'}",
                key="data",
                code="E417",
                why="" if held else f"A sample has at most {self.table.length:,} tokens.",
                hint="held_out = 0" if held else f"[data] length, or {HINT}",
            )


def _list_faults(faults: Sequence[RecordFault]) -> str:
    shown = [escaped(f"{fault.where}: {fault.what}", 400) for fault in faults[:SHOWN_FAULTS]]
    more = len(faults) - len(shown)
    if more:
        shown.append(f"and {more:,}{' or more' if len(faults) >= MOST_FAULTS else ''} others")
    return "\n".join(shown)
