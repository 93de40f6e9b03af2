"""A busy neighbour: a pure-Python loop in a thread, or, run as a script, in a process of its own.
It loads nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path


class Loop:
    """One loop at a time, in this process or in another one, which ends with this one."""

    def __init__(self) -> None:
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, where: str) -> None:
        """Run it in this process ("script"), in one of its own ("other") or no longer ("")."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._thread = self._process = None
        self._ends = threading.Event()
        if where == "script":
            self._thread = threading.Thread(target=spin, args=(self._ends.is_set,), daemon=True)
            self._thread.start()
        elif where == "other":
            self._process = subprocess.Popen(
                [sys.executable, "-S", str(Path(__file__)), str(os.getpid())]
            )


def spin(over: Callable[[], bool]) -> None:
    """Python work until ``over()``, which is asked every few hundred microseconds."""
    value = 1
    while not over():
        for _ in range(500):
            value = (value * 69_069 + 1) % 4_294_967_296


if __name__ == "__main__":
    parent = int(sys.argv[1])
    spin(lambda: os.getppid() != parent)
