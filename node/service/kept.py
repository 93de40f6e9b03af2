"""Results of durable operations, received into the files that keep them: nothing is written once
more before the vote.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...collectives.errors import StorageError

if TYPE_CHECKING:
    from .run import RunService


def kept_buffer(run: RunService, log: str, nbytes: int) -> memoryview | None:
    """Where the result of a durable operation of this run is received (called in the engine
    thread). None: it is of no such operation, or there is no room; who writes it down later is told
    so."""
    session, files = run.session, next(iter(run.files.values()), None)
    if session is None or files is None or not session.operations.keeps(log):
        return None
    try:
        return files.votes.allocate(nbytes)
    except StorageError:
        return None


def kept_file(run: RunService, result: memoryview) -> Path | None:
    """The file that a result of `kept_buffer` is in."""
    return next(
        (file for files in run.files.values() if (file := files.votes.file_of(result)) is not None),
        None,
    )


def abandon(run: RunService, result: memoryview) -> None:
    """A script that cannot be asked may read this for ever: its memory, or its file, is not used
    again.
    """
    run.node.results.abandon(result)
    for files in run.files.values():
        files.votes.abandon(result)
