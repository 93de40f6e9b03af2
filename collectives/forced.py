"""Names on the medium: a file that is forced is lost all the same while the name of it, or of its
folder, is not.

A script calls this, too, in which an exception may come between any two lines (Ctrl-C, a signal
handler that raises): an object owns each descriptor from the step of the interpreter that opens it.
"""

from __future__ import annotations

import contextlib
import os
import select
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

# The standard library's one type that closes any descriptor with its last reference, without a line
# of Python in which an exception could come, and without a warning. It looks at nothing before that
# but the number.
OWNER: Any = getattr(select, "epoll", None) or getattr(select, "kqueue", None)


def new_file(path: Path, mode: int) -> BinaryIO:
    """A file to write to: made, or emptied. Raises OSError."""
    return open(path, "wb", opener=partial(os.open, mode=mode))


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the medium when this returns. Raises OSError."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    for descriptor in map(OWNER.fromfd, map(os.open, (folder,), (flags,))):
        os.fsync(descriptor.fileno())
        descriptor.close()


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
