"""A command at a terminal: what a person sees and types, by real pseudo-terminals; and what the
list of processes shows meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ATOLL = [sys.executable, "-m", "atoll.node.cli"]
PATIENCE_S = 90.0  # a hang only; each wait ends with what it waits for


class Person:
    """Runs a command with a terminal for stdin, stdout and stderr, as a context that leaves no
    process behind.
    """

    def __init__(self, argv: list[str], environment: dict[str, str], cwd: Path) -> None:
        self.seen = ""
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "dumb", **environment},
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        os.close(self._master)

    def wait_for(self, text: str) -> None:
        """Until ``text`` stands on the screen."""
        until = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert self._read(until), f"no {text!r} in:\n{self.seen}"

    def type(self, text: str) -> None:
        """Type it."""
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Read until the command is over; its exit status."""
        until = time.monotonic() + PATIENCE_S
        while self._read(until):
            pass
        return self.process.wait(30)

    def _read(self, until: float) -> bool:
        left = until - time.monotonic()
        if left <= 0 or not select.select([self._master], [], [], left)[0]:
            return False
        data = b""
        with contextlib.suppress(OSError):  # the last process at the terminal has ended
            data = os.read(self._master, 1 << 16)
        self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


def shown_to_all(secret: str) -> list[str]:
    """The processes of this machine whose arguments hold ``secret``."""
    found = list[str]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and secret.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
    return found
