"""A refusal of the system in an exception that nobody expected, as the last resorts tell it."""

from __future__ import annotations

import errno
import os
import re

from ...collectives.errors import AtollError, RefusedBySystemError, StorageError
from .refusals import _ADDRESS, _FILES, _FULL, _MEMORY, _THREADS, REFUSALS, advice

_OF_THE_MACHINE = (_FILES, REFUSALS[errno.ENFILE], _MEMORY, _THREADS, _ADDRESS)


_OF_A_MEDIUM = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS),
    *(errno.ESTALE, errno.ENOTCONN, errno.ENODEV),
)


_OF_RUST = re.compile(r"\(os error ([0-9]{1,3})\)")


_MEMORY_WORDS = ("not enough memory", "allocate memory", "out of memory")


def refused(error: BaseException, where: str) -> AtollError | None:
    """What the system refused, where an exception that nobody expected comes from its refusal, else
    None. ``where``: what was being done.

    E501 for what a file or folder is at fault for, E502 for the machine: open files, memory,
    threads, addresses. Memory that torch cannot have is a RuntimeError of its own; libraries in
    Rust tell the system's refusal in words of their own.
    """
    if not isinstance(error, OSError) and (found := _OF_RUST.search(str(error))):
        error = OSError(int(found[1]), os.strerror(int(found[1])))
    if isinstance(error, OSError):
        why, hint = REFUSALS.get(error.errno or 0, ("", ""))
        if not why and error.filename is None:
            return _no_temporary_folder(error, where)
        about = "" if error.filename is None else f" ({error.filename})"
        what = f"{where}: {error.strerror or error}{about}"
        named = error.filename is not None and (why, hint) not in _OF_THE_MACHINE
        if named or error.errno in _OF_A_MEDIUM:
            why, hint = advice(error)
            return StorageError(what, why=why, hint=hint, exit_code=73)
        return RefusedBySystemError(what, why=why, hint=hint)
    said = str(error)
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in said.lower() for word in _MEMORY_WORDS)
    ):
        why, hint = _MEMORY
    elif isinstance(error, RuntimeError) and "start new thread" in said:
        why, hint = _THREADS
    else:
        return None
    return RefusedBySystemError(f"{where}: {said or 'out of memory'}", why=why, hint=hint)


def _no_temporary_folder(error: OSError, where: str) -> AtollError | None:
    """Python's own word for it has neither a path nor the errno of what was tried."""
    if "temporary directory" not in str(error):
        return None
    return StorageError(
        f"{where}: no file can be made in any folder for temporary files",
        why=f"{_FULL[0]}; or the folders can only be read",
        hint="free some space, or name a folder that can be written: TMPDIR=/folder",
        exit_code=73,
    )
