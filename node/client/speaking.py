"""What a plain script says of its run: one line for each happening, on stderr, through `logging`;
and how it ends.

An error of atoll that nobody catches is a page of what happened and what to type, as in `atoll
join`, in place of a traceback, and gives the exit status; Ctrl-C ends a script without a word.

The lines are records of the logger ``atoll``. A script that has set up logging itself decides what
becomes of them; for one that has not, `join` lets them through. ``join(quiet=True)``, or
``ATOLL_QUIET=1``, leaves warnings only.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from types import TracebackType
from typing import TextIO

from ...collectives.errors import AtollError
from ..logs import OneLine

QUIET_VARIABLE = "ATOLL_QUIET"


class _Unless(logging.StreamHandler[TextIO]):
    """Writes to stderr for as long as the script has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        if not logging.getLogger().handlers:
            super().emit(record)


def speak(quiet: bool | None = None) -> None:
    """Write the records of the logger ``atoll`` to stderr, unless the script has handlers of its
    own.

    ``quiet``: warnings only; None: as ``ATOLL_QUIET`` says. Called again, it adds no second
    handler. A level that the script has given the logger stays.
    """
    logger = logging.getLogger("atoll")
    if logger.handlers or logging.getLogger().handlers:
        return
    if quiet is None:
        quiet = os.environ.get(QUIET_VARIABLE, "") not in ("", "0")
    handler = _Unless()
    handler.setFormatter(OneLine("atoll: %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING if quiet else logging.INFO)


def end_in_words() -> None:
    """Let errors of atoll, and Ctrl-C, end this script in words, unless it has a hook for
    exceptions of its own (as notebooks have).
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _ended


def _ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The interpreter's last word on an exception that nobody caught. It takes a SystemExit from
    here for the exit status.
    """
    if isinstance(error, KeyboardInterrupt):
        raise SystemExit(130)
    if not isinstance(error, AtollError):
        sys.__excepthook__(kind, error, trace)
        return
    from ..cli.output import Terminal, show_error  # the page of a code; nothing else needs it

    script = getattr(sys.modules.get("__main__"), "__file__", None)
    frames = [f for f in traceback.extract_tb(trace) if f.filename == script]
    for frame in frames:
        print(f"{frame.filename}:{frame.lineno}: {frame.line}", file=sys.stderr)
    show_error(Terminal(), error)
    raise SystemExit(error.exit_code)
