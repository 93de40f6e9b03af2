"""How lines of a node's log look: one record a line, whatever the record tells of others."""

from __future__ import annotations

import logging
from types import TracebackType

from ..collectives.foreign import escaped

LONGEST_RECORD, LONGEST_LINE = 4096, 1024
"""Characters of a message, and of a line of a traceback."""


class OneLine(logging.Formatter):
    """Escapes what a terminal would obey, newlines included. Lines of a traceback begin with ``  | ``, so that none looks like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's one line."""
        record.message = escaped(record.message, LONGEST_RECORD)
        return super().formatMessage(record)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        """The traceback."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"  | {escaped(line, LONGEST_LINE)}" for line in lines)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Let the root logger write such lines to standard error. That of a background node is ``node.log``."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
