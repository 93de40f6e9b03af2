"""Text to train on, as bytes: the text that ships with Python, a file or folder given by path, or
the records of a data set of one's own. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...collectives.errors import ConfigError
from ...collectives.identifiers import PeerId
from ..home.own_data import KEY, is_factory, site_data
from ..home.paths import user_path

BUILTIN = "builtin:stdlib-text"
# English first; with it three peers beat one machine by most at equal steps (0.90 of its loss)
STDLIB_BYTES = 500_000
MAX_FILE_BYTES = 1 << 30
BLOCK_BYTES = 4096  # unit of the split between training and held-out text
HELD_OUT_EVERY = 10
_TEXT_SUFFIXES = {
    "",
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".json",
    ".csv",
    ".tex",
    ".html",
    ".org",
}


@dataclass(frozen=True, slots=True)
class Corpus:
    """``training`` and ``held_out``: uint8, shape (bytes,). Nine blocks of ten train, the tenth is
    held out.
    """

    name: str
    training: Tensor
    held_out: Tensor


def load_corpus(source: str, context: int) -> Corpus:
    """The corpus named ``builtin:stdlib-text``, the text file or folder at a path, or the records
    that FILE.py:NAME returns (`site_data`).

    Raises ConfigError when they cannot be read or hold less text than a few windows of ``context``
    bytes.
    """
    if source == BUILTIN:
        text = _stdlib_text()
    else:
        text = (
            _records(source, site_data(source))
            if is_factory(source)
            else _path_text(user_path(source))
        )
    training, held_out = split(text)
    need = 4 * (context + 1)
    if min(len(training), len(held_out)) < need:
        raise ConfigError(
            f"{source} holds {len(text):,} bytes of text",
            why=(
                f"A context of {context} needs at least "
                f"{HELD_OUT_EVERY * max(need, BLOCK_BYTES):,}."
            ),
            hint="Give more: --data FILE_OR_FOLDER, or FILE.py:NAME",
        )
    return Corpus(source, _tensor(training), _tensor(held_out))


def split(text: bytes) -> tuple[bytes, bytes]:
    """Training and held-out bytes: every tenth block of 4 KiB is held out, so that both have the
    same mixture.
    """
    blocks = [text[start : start + BLOCK_BYTES] for start in range(0, len(text), BLOCK_BYTES)]
    held_out = b"".join(blocks[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    return b"".join(
        block for i, block in enumerate(blocks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1
    ), held_out


def unique_paragraphs(texts: list[str]) -> str:
    """The texts joined, each paragraph kept where it comes first: repeated boilerplate would leak
    into the held-out part.
    """
    return "\n\n".join(
        dict.fromkeys(
            paragraph for text in texts for paragraph in text.split("\n\n") if paragraph.strip()
        )
    )


def batch(
    tokens: Tensor, context: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows: inputs and the bytes that follow them, both int64 (size, context)."""
    starts = torch.randint(len(tokens) - context, (size, 1), generator=generator)
    windows = tokens[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def peer_generator(seed: int, peer: PeerId) -> torch.Generator:
    """The source of one peer's windows: different for each peer, the same after a restart."""
    digest = hashlib.sha256(f"{seed}/{peer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))


def _stdlib_text() -> bytes:
    """Python's own documentation topics, then the sources of its standard library, without repeated
    paragraphs.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
        texts = list(topics.values())
    except ImportError:  # some distributions leave it out; the sources follow in any case
        texts = []
    size = sum(map(len, texts))
    folder = Path(sysconfig.get_path("stdlib"))
    for file in sorted(folder.glob("*.py")):
        if size >= STDLIB_BYTES:
            break
        texts.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(texts[-1])
    return unique_paragraphs(texts).encode()[:STDLIB_BYTES]


def _records(where: str, data: Any) -> bytes:
    """All records of a data set, an empty line between two."""
    texts: list[bytes] = []
    for index in range(len(data)):
        record = data[index]
        if not isinstance(record, str | bytes):
            why = (
                "The built-in model reads text; what a script of your own trains on is up to that."
            )
            hint = (
                "Return a Dataset of str, or give a script: atoll join --script "
                f"train.py --data {where}"
            )
            raise ConfigError(
                f"sample {index} of {where} is of type {type(record).__name__}, not text",
                key=KEY,
                why=why,
                hint=hint,
            )
        texts.append(record.encode() if isinstance(record, str) else record)
    return b"\n\n".join(texts)


def _path_text(path: Path) -> bytes:
    try:
        if path.is_dir():
            files = sorted(
                file
                for file in path.rglob("*")
                if file.suffix.lower() in _TEXT_SUFFIXES
                and file.is_file()
                and not _hidden(file, path)
            )
            texts = [text for file in files if (text := _as_text(file)) is not None]
            return unique_paragraphs(texts).encode()
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB", hint="Give a part of it."
            )
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the training text {path}: {error.strerror}",
            hint="--data takes a text file or a folder of text files.",
        ) from None


def _hidden(file: Path, top: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(top).parts)


def _as_text(file: Path) -> str | None:
    if file.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
