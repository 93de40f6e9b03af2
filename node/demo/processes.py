"""Peers as processes: started in groups of their own, read line by line, killed for good, ended in
order.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_S = 20.0  # a node hands over what is open; then it is killed


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A JSON object that a process printed, or ``{"event": "exit", "code": …}``; ``at`` in seconds
    of the monotonic clock.
    """

    name: str
    role: str
    record: dict[str, Any]
    at: float


Inbox = queue.SimpleQueue[OutputLine]


class DemoProcess:
    """One process of the demo. Its stdout is read as JSON lines into the inbox, other lines and its
    stderr go to the log.
    """

    def __init__(
        self,
        name: str,
        role: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        inbox: Inbox,
    ) -> None:
        self.name, self.role, self.log = name, role, log
        self._inbox = inbox
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                list(command),
                env={**os.environ, **environment},
                # stays open while the demo lives: scripts leave at its end, in whatever way that
                # comes
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                errors="replace",
                # Ctrl-C is the demo's; and one signal reaches whatever the process has started
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"read {name} {role}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, self.log.open("a", encoding="utf-8") as log:
            for line in lines:
                at = time.monotonic()
                record = _object(line)
                if record is None:
                    print(line, end="", file=log, flush=True)
                else:
                    self._inbox.put(OutputLine(self.name, self.role, record, at))
        self._inbox.put(
            OutputLine(
                self.name,
                self.role,
                {"event": "exit", "code": self.process.wait()},
                time.monotonic(),
            )
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within the time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(timeout_s)
        return True

    def close(self) -> None:
        """Close its stdin, after its end."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def last_words(self, lines: int = 12) -> str:
        """The end of its log."""
        try:
            return "\n".join(
                self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
            )
        except OSError:
            return ""


def _object(line: str) -> dict[str, Any] | None:
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else None


def kill(children: Sequence[DemoProcess]) -> float:
    """SIGKILL all of them at once; returns the moment, in seconds of the monotonic clock."""
    at = time.monotonic()
    for child in children:
        child.signal(signal.SIGKILL)
    return at


def end(children: Sequence[DemoProcess], timeout_s: float = END_S) -> None:
    """SIGTERM, a while to end in order, then SIGKILL for the rest. Nothing runs afterwards."""
    for child in children:
        if child.alive:
            child.signal(signal.SIGTERM)
    until = time.monotonic() + timeout_s
    for child in children:
        if not child.wait(max(0.1, until - time.monotonic())):
            child.signal(signal.SIGKILL)
            child.wait(5)
        child.signal(signal.SIGKILL)  # whatever it left behind in its group
        child.close()
