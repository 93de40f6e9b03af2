"""How a script's process ended: whether it is gone, and with which signal or exit status, as far as
the system tells one that is not its parent.

Linux 6.15 and later keep the exit status for whoever holds the process's descriptor. Before that it
can be read for as long as the process's parent has not taken note of its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from pathlib import Path

import trio

POLL_S = 0.05
STATUS_S = 1.0
"""So long the parent of a process may take to take note of its end."""
_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO, of a struct of 64 bytes
_EXIT = 1 << 3


class ScriptProcess:
    """A script's process, from its attaching on. ``pid`` 0 or less: nobody can tell."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = -1
        if pid > 0 and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._fd = os.pidfd_open(pid)

    async def ended(self, patience_s: float) -> bool:
        """Whether it is gone, or goes within ``patience_s``. False where nobody can tell."""
        with trio.move_on_after(patience_s):
            if self._fd >= 0:
                await trio.lowlevel.wait_readable(self._fd)
                return True
            while self.pid > 0 and _runs(self.pid):
                await trio.sleep(POLL_S)
            return self.pid > 0
        return False

    async def how(self) -> tuple[str, int | None]:
        """How it ended: in words, and as `subprocess.Popen.returncode`, None where nobody can
        tell.
        """
        found: int | None = None
        with trio.move_on_after(STATUS_S):
            while (found := self._status()) is None:
                await trio.sleep(POLL_S)
        if found is None:
            found = self._unburied()
        if found is None:
            return "is gone", None
        code = os.waitstatus_to_exitcode(found)
        if code >= 0:
            return f"ended with exit status {code}", code
        return f"died of {_signal_name(-code)}", code

    def close(self) -> None:
        """Let go of it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _status(self) -> int | None:
        """Its wait status, once its parent has taken note of it; None before, and on older
        systems.
        """
        if self._fd < 0:
            return None
        answer = bytearray(struct.pack("<Q", _EXIT).ljust(64, b"\0"))
        try:
            fcntl.ioctl(self._fd, _GET_INFO, answer)
        except OSError:
            return None
        found = struct.unpack_from("<Q", answer)[0] & _EXIT
        return struct.unpack_from("<i", answer, 60)[0] if found else None

    def _unburied(self) -> int | None:
        """Its wait status, as long as its parent has not taken note of its end."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return int(state[-1]) if state[0] == "Z" else None
        return None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
