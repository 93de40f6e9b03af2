"""Folders of ours that nobody else can enter, whatever the user's umask is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ...collectives.errors import ConfigError
from ...collectives.forced import make_folder
from .refusals import storage_error


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can enter, or take the others' rights from one we own.

    Raises ConfigError when the folder belongs to somebody else, StorageError when it cannot be
    made.
    """
    try:
        make_folder(folder)
        found = folder.stat()
        if found.st_uid != os.getuid():
            raise ConfigError(
                f"{folder} belongs to user {found.st_uid}, not to you",
                why="Keys and sockets in a folder of somebody else are not yours.",
                hint="Choose another folder: ATOLL_HOME=~/atoll-home",
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise storage_error(f"cannot make {folder}", error) from None
