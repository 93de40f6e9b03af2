"""What the system refuses, in words: one table from an errno to its cause and its cure.

The doors to the system (files, the home's lock, shared memory, sockets) say what they wanted and
take the rest from here; so do the last resorts, where an exception that nobody expected is
told to a user: a refusal of the system is never called a defect of atoll.
"""

from __future__ import annotations

import errno

from ...collectives.errors import StorageError

_MOVE = "move the state: ATOLL_HOME=/another/disk"
_FULL = (
    "the disk is full, or this user may use no more of it",
    f"free some space, or {_MOVE}",
)
_FILES = (
    "more files and connections are open than this process may have",
    "raise the limit (ulimit -n; LimitNOFILE= of a service): 1024 is plenty for most runs",
)
_MEMORY = (
    "the system gives this process no more memory",
    (
        "end something else, or raise the limit (ulimit -v, a container's or a job's): "
        "atoll validate says what a run needs"
    ),
)
_THREADS = (
    "the system starts no more threads or processes for this user",
    "end something else, or raise the limit (ulimit -u, a container's pids limit)",
)
_FORBIDDEN = (
    "the folder or file belongs to somebody else, or a sandbox forbids it",
    "make it yours to use (chown), or move the state: ATOLL_HOME=~/atoll-home",
)
_UNABLE = (
    "this system, or the file system below the folder, cannot do that",
    "put the state on a local disk: ATOLL_HOME=/local/folder",
)
_GONE = (
    "the file system below has gone away, or its server does not answer",
    f"look at the mount (mount, df), then try again, or {_MOVE}",
)
_ADDRESS = (
    "this machine has no such address, or no network of that kind",
    "atoll doctor shows what it has; --listen chooses another",
)

REFUSALS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: (
        "the file would be larger than this user, or the file system, allows",
        f"raise the limit (ulimit -f), or {_MOVE}",
    ),
    errno.EIO: (
        "the medium failed to read or write: this is not about space",
        f"look at the system's log (dmesg) and the disk's health (smartctl), then {_MOVE}",
    ),
    errno.EROFS: (
        (
            "the file system can only be read: mounted so, or made so by the system after an error "
            "of the medium"
        ),
        f"look at the system's log (dmesg), or {_MOVE}",
    ),
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EMFILE: _FILES,
    errno.ENFILE: ("the whole system has too many files open", "end something else, and try again"),
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
    errno.EAGAIN: _THREADS,
    errno.ENOSYS: _UNABLE,
    errno.EOPNOTSUPP: _UNABLE,
    errno.ENOLCK: _UNABLE,
    errno.ENAMETOOLONG: (
        "the path is too long for this file system",
        "choose a shorter folder: ATOLL_HOME=/short/folder",
    ),
    errno.ELOOP: ("links in the path lead in a circle", "look at the path: ls -l"),
    errno.ESTALE: _GONE,
    errno.ENOTCONN: _GONE,
    errno.ENODEV: _GONE,
    errno.ETIMEDOUT: _GONE,
    errno.EADDRINUSE: (
        "another process has this address already",
        "choose another: atoll up --listen ADDRESS",
    ),
    errno.EADDRNOTAVAIL: _ADDRESS,
    errno.EAFNOSUPPORT: _ADDRESS,
    errno.ENETUNREACH: _ADDRESS,
    errno.ENETDOWN: _ADDRESS,
}
"""errno → why it was refused, and what its user can do."""


def advice(error: OSError) -> tuple[str, str]:
    """Why a file operation failed, and the cure: room on a full disk, a new one for a failing."""
    return REFUSALS.get(
        error.errno or 0, ("", "look at the path; atoll config path shows the folders in use")
    )


def storage_error(what: str, error: OSError) -> StorageError:
    """A StorageError with the reason of the system and what to do about it."""
    why, hint = advice(error)
    return StorageError(f"{what}: {error.strerror or error}", why=why, hint=hint, exit_code=73)
