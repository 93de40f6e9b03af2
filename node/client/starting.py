"""A script that waits with its first step until enough members are there (`[train] start_with`), or
somebody says that it begins.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..control import protocol as p

if TYPE_CHECKING:
    from .reattach import Progress

BEGIN_VARIABLE = "ATOLL_BEGIN"
LOOK_S = 0.25  # how often the node is asked


def await_start(
    ask: Callable[[bool], p.Starting | str], run: str, *, begin: bool, progress: Progress | None
) -> None:
    """Return when the run has begun or may begin. ``begin``: at once; Enter says the same at a
    terminal that this process owns.

    ``ask(begin)``: what the node says, or why there is none; another one is waited for.
    ``progress`` is told what is waited for, whenever that changes.
    """
    shown, pause = "", threading.Event()
    how = "Enter begins without" if owns_terminal() else f"begin without: atoll begin {run[:8]}"
    while True:
        found = ask(begin)
        if isinstance(found, p.Starting) and not found.wanted:
            break
        text = (
            f"{found}; waiting for a node"
            if isinstance(found, str)
            else f"{waits_text(found.there, found.wanted)}; {how}"
        )
        if progress is not None and text != shown:
            progress(text, 0, 0)
        shown = text
        pause.wait(LOOK_S)
        begin = begin or enter_pressed()
    if shown and progress is not None:
        progress("training begins", 0, 0)


def waits_text(there: int, wanted: int) -> str:
    """``waiting for 1 more peer (1 of 2 are there)``."""
    more = max(1, wanted - there)
    return f"waiting for {more} more peer{'' if more == 1 else 's'} ({there} of {wanted} are there)"


def enter_pressed() -> bool:
    """Whether a line was typed at stdin, which is then read. Never waits; False where stdin is no
    terminal that this process owns.
    """
    with contextlib.suppress(OSError, ValueError):
        if owns_terminal() and select.select([sys.stdin], [], [], 0)[0]:
            return os.read(sys.stdin.fileno(), 4096).endswith(b"\n")
    return False


def owns_terminal() -> bool:
    """Whether stdin is a terminal and this process in its foreground: other readers are stopped."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # closed, or no terminal at all
        return False
