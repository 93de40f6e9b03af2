"""Whose socket is it? The file permissions of a unix socket already keep other users out; where the
platform tells who is at the other end, both sides check that too.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import Any, Protocol

from ...collectives.errors import NotAdmittedError

_UCRED = struct.Struct("3i")  # Linux: pid, uid, gid
_XUCRED = struct.Struct("=II")  # macOS, first fields: version, uid
_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES = 0, 1, 76


class _HasOptions(Protocol):
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> Any: ...


def peer_uid(sock: _HasOptions) -> int | None:
    """User id of the process at the other end of a connected unix socket, or None where the
    platform does not say.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is not None:
        return _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _UCRED.size))[1]
    if sys.platform == "darwin":
        return _XUCRED.unpack_from(sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES))[1]
    return None


def peer_pid(sock: _HasOptions) -> int | None:
    """The process at the other end of a connected unix socket, by the number that it has here: 0
    where it has none, as behind a container's wall; None where the platform does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    return _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _UCRED.size))[0]


def check_peer(sock: _HasOptions) -> None:
    """Raise NotAdmittedError unless the other end is ours (or root's, who could read our memory
    anyway).
    """
    uid = peer_uid(sock)
    if uid is not None and uid not in (0, os.geteuid()):
        raise NotAdmittedError(
            f"the other end of the control socket belongs to user {uid}, not to you"
        )


def check_folder(path: Path) -> None:
    """Raise NotAdmittedError unless the folder of a socket is a real folder of ours that nobody
    else can write to.

    It matters where the socket lies below the system's temporary folder, in which others may make
    names too.
    """
    found = path.parent.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or stat.S_IMODE(found.st_mode) & 0o022
    ):
        raise NotAdmittedError(
            f"{path.parent} is not a private folder of yours",
            why="Somebody else could have put a socket there, to be taken for your node.",
            hint="Remove it, or choose another place: ATOLL_HOME=~/atoll-home",
        )
