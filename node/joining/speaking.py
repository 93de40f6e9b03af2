"""What a plain script says of its run: one line for each happening, on stderr, through `logging`;
and how it ends.

An error of atoll that nobody catches is a page of what happened and what to type, as in `atoll
join`, in place of a traceback, and gives the exit status; Ctrl-C ends a script without a word. An
error of the script's own has its traceback, without frames of atoll between the script's.

The lines are records of the logger ``atoll``. A script that has set up logging itself decides what
becomes of them; for one that has not, `join` lets them through. ``join(quiet=True)``, or
``ATOLL_QUIET=1``, leaves warnings only.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TextIO

from ...collectives.errors import AtollError
from ..home.logs import OneLine

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
        print_traceback(error)
        return
    from ..home.output import Terminal, show_error  # the page of a code; nothing else needs it

    script = getattr(sys.modules.get("__main__"), "__file__", None)
    frames = [f for f in traceback.extract_tb(trace) if f.filename == script]
    for frame in frames:
        print(f"{frame.filename}:{frame.lineno}: {frame.line}", file=sys.stderr)
    show_error(Terminal(), error)
    raise SystemExit(error.exit_code)


def print_traceback(error: BaseException) -> None:
    """The traceback of an error of the script's own, to stderr: without our frames, and those that
    started the script. An error that was raised in atoll itself is a defect: it has all frames.
    """
    trace = traceback.TracebackException.from_exception(error)
    parts: list[traceback.TracebackException | None] = [trace]
    while parts:
        part = parts.pop()
        if part is None:
            continue
        parts += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
        if part.stack and not _is_ours(part.stack[-1].filename):
            others = [frame for frame in part.stack if not _is_ours(frame.filename)]
            part.stack = traceback.StackSummary.from_list(others)
    print("".join(trace.format()), end="", file=sys.stderr, flush=True)


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


_ROOT = Path(__file__).parents[2]
_OURS = (
    "<frozen runpy>",
    *(os.path.join(_ROOT, part, "") for part in ("collectives", "security", "optim", "node")),
)
