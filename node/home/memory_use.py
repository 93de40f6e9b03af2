"""How much memory this process has."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int | None:
    """Bytes in memory now, those shared with other processes included; None where the system does
    not tell.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
