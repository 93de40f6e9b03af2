"""What a plain script says of its run: one line for each happening, on stderr, through `logging`.

The lines are records of the logger ``atoll``. A script that has set up logging itself decides what becomes of them; for one that has
not, `join` lets them through. ``join(quiet=True)``, or ``ATOLL_QUIET=1``, leaves warnings only.
"""

from __future__ import annotations

import logging
import os
from typing import TextIO

from ..logs import OneLine

QUIET_VARIABLE = "ATOLL_QUIET"


class _Unless(logging.StreamHandler[TextIO]):
    """Writes to stderr for as long as the script has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        if not logging.getLogger().handlers:
            super().emit(record)


def speak(quiet: bool | None = None) -> None:
    """Write the records of the logger ``atoll`` to stderr, unless the script has handlers of its own.

    ``quiet``: warnings only; None: as ``ATOLL_QUIET`` says. Called again, it adds no second handler. A level that the script has
    given the logger stays.
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
