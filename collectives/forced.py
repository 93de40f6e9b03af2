"""Names on the medium: a file that is forced is lost all the same while the name of it, or of its
folder, is not.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the medium when this returns. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Make a folder and its parents where they are missing, and force the names of those that were
    made. Raises OSError.
    """
    if folder.is_dir():
        return
    if not folder.parent.is_dir():
        make_folder(folder.parent, mode)
    folder.mkdir(mode=mode, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a parent that may be written and not be read
        sync_folder(folder.parent)
