"""Frames: length, blake3 check, body. The journal's entries lie in them, and what an audit hands
over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from ...collectives.errors import StorageError

FRAME = struct.Struct(">I16s")
MAX_ENTRY_BYTES = 1 << 20


def check_of(data: bytes) -> bytes:
    """The check of a frame's body: 16 bytes."""
    return blake3(data).digest(16)


def framed(data: bytes) -> bytes:
    return FRAME.pack(len(data), check_of(data)) + data


def read_frames(file: BinaryIO, path: Path, *, growing: bool = False) -> Iterator[bytes]:
    """The bodies of all frames from where ``file`` stands; of a ``growing`` file without a last one
    that is being written.

    Raises StorageError E303 for a frame that is cut short, too long, or fails its check.
    """
    number = 0
    while head := file.read(FRAME.size):
        size, check = FRAME.unpack(head.ljust(FRAME.size, b"\0"))
        body = file.read(size) if size <= MAX_ENTRY_BYTES else b""
        if growing and size <= MAX_ENTRY_BYTES and (len(head) < FRAME.size or len(body) < size):
            return
        if len(head) < FRAME.size or len(body) != size or check_of(body) != check:
            raise StorageError(
                f"{path} is damaged: frame {number} fails its check",
                code="E303",
                exit_code=74,
                why="the file was changed, cut short, or the disk returned other bytes",
                hint=(
                    "Ask whoever wrote it for another copy; a node's own journal is fetched "
                    "from the other members."
                ),
            )
        yield body
        number += 1
