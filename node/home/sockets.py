"""The socket of a node that does not answer, or is no more."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from ...collectives.errors import StateError


def _state_of(pid: int) -> str:
    """The system's letter for the state of a process; "" where it is not known."""
    try:
        # after the name, which is in brackets and may hold anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (Ctrl-Z, a debugger)."""
    return _state_of(pid) in ("T", "t")


def why_silent(pid: int) -> tuple[str, str]:
    """Why the node of process ``pid`` (0: not known) may not answer, and what its user can do."""
    state = _state_of(pid)
    if state in ("T", "t"):
        return f"process {pid} is stopped (Ctrl-Z, a debugger)", f"Let it go on: kill -CONT {pid}"
    if state == "D":
        return (
            f"process {pid} waits for a disk, or a file server, that does not answer",
            "Look at the mount (mount, df) and the system's log (dmesg).",
        )
    end = f"kill {pid}; if nothing comes of it: kill -9 {pid}" if pid else "kill it where it runs"
    return (
        "the machine has too much to do, or the node hangs",
        f"Try again. To end it (what is committed is not lost): {end}",
    )


def remove_stale_socket(path: Path) -> None:
    """Unlink a socket file that nobody listens on. Raises StateError (E102) when somebody does, or
    when it is no socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StateError(
            f"{path} is in the way: it is not a socket",
            code="E102",
            exit_code=73,
            hint=f"Look at it, then: rm {path}",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fsencode(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:  # a full backlog, for example: somebody is there
            pass
    raise StateError(
        f"another node listens at {path}", code="E102", exit_code=73, hint="Use it: atoll status"
    )
