"""A node's log: one record a line, whatever the record tells of others, in a file that has a
bound.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TextIO

from ...collectives.foreign import escaped
from .paths import open_private

LONGEST_RECORD, LONGEST_LINE = 4096, 1024
"""Characters of a message, and of a line of a traceback."""

MAX_LOG_BYTES = 8 << 20
"""Of a log's file, and of the one before it, ``….log.1``: a node's log takes at most twice as much,
and one record.
"""


class OneLine(logging.Formatter):
    """Escapes what a terminal would obey, newlines included. Lines of a traceback begin with ``  |
    ``, so that none looks like a record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message, LONGEST_RECORD)
        return super().formatMessage(record)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"  | {escaped(line, LONGEST_LINE)}" for line in lines)


def open_log(path: Path) -> BinaryIO:
    """The file that a node's output is to go to, for its owner only. A long one is put aside first.
    Raises OSError.
    """
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        os.replace(path, path.with_suffix(".log.1"))
    return open_private(path)


class BoundedLog(logging.StreamHandler[TextIO]):
    """Writes to standard error. Where that is one of ``files``, it begins the file anew once it is
    too long.

    Output that is no record (what a library prints) goes to the new file as well, since the
    descriptors are replaced.
    """

    def __init__(self, files: Sequence[Path] = (), most: int = MAX_LOG_BYTES) -> None:
        super().__init__()
        self.files, self.most = files, most

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        with contextlib.suppress(OSError, ValueError):  # a log that cannot be put aside grows
            self._begin_anew()

    def _begin_anew(self) -> None:
        if sys.__stderr__ is None:
            return
        long = os.fstat(sys.__stderr__.fileno())
        if long.st_size <= self.most:
            return
        for path in self.files:
            if path.exists() and os.path.samestat(long, path.stat()):
                os.replace(path, path.with_suffix(".log.1"))
                with open_private(path) as new:
                    for stream in (sys.__stdout__, sys.__stderr__):
                        if stream and os.path.samestat(long, os.fstat(stream.fileno())):
                            os.dup2(new.fileno(), stream.fileno())
                return


def log_to_stderr(level: int = logging.INFO) -> BoundedLog:
    """Let the root logger write such lines to stderr (of a background node: ``node.log``)."""
    handler = BoundedLog()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    return handler
