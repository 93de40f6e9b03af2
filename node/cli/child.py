"""The training process that `atoll join` starts: in a process group of its own, so that Ctrl-C asks
it to drain and does not cut it off.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import IO, Self, cast

from ...collectives.errors import ConfigError
from ..home.ending import GRACE_S, end_signals


class ChildCommand:
    """A running command, as a context.

    The first Ctrl-C (SIGTERM, a closed terminal) reaches it as SIGINT: it finishes or hands over
    its round. The second kills it. Its stdin stays open until this process ends, in whatever way.
    ``say`` takes its output line by line, and ``redraw`` a line that the next one is written over,
    such as a progress bar's; without ``say`` it writes to our own stdout and stderr
    (``to_stderr``: both to stderr, because stdout is for one JSON object).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        say: Callable[[str], None] | None,
        *,
        redraw: Callable[[str], None] = lambda line: None,
        to_stderr: bool,
        term_s: float | None = None,
    ) -> None:
        """``term_s``: how long after SIGTERM it is killed; None: when a second signal says so."""
        self.interrupted = 0
        self._term_s = term_s
        self._ended = threading.Event()
        self._say = say
        output = subprocess.PIPE if say is not None else sys.stderr if to_stderr else None
        try:
            self._process = subprocess.Popen(
                list(command),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if say is not None else None,
                process_group=0,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from None
        self._threads = [threading.Thread(target=self._reap, name="atoll-child", daemon=True)]
        if say is not None and self._process.stdout is not None:
            self._threads.append(
                threading.Thread(
                    target=self._read,
                    args=(self._process.stdout, say, redraw),
                    name="atoll-child-output",
                    daemon=True,
                )
            )
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        for number in end_signals():
            self._before[number] = signal.signal(number, self._signalled)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._ended.is_set():
            self._kill(signal.SIGINT)
            if not self._ended.wait(GRACE_S):
                self._kill(signal.SIGKILL)
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, timeout_s: float | None) -> int | None:
        """The exit status as a shell shows it; None while the process runs."""
        return self.exit_status if self._ended.wait(timeout_s) else None

    @property
    def exit_status(self) -> int:
        """130, 143 and 129 after a signal to us, 128 + n after one to the process, else what the
        process returned.
        """
        code = self._process.wait()
        if self.interrupted:
            return 128 + self.interrupted
        return 128 - code if code < 0 else code

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        # Shell and system may both tell that the terminal is closed.
        again = self.interrupted != 0 and number != signal.SIGHUP
        self.interrupted = self.interrupted or number
        self._kill(signal.SIGKILL if again else signal.SIGINT)
        if number == signal.SIGTERM and self._term_s is not None and not again:
            timer = threading.Timer(self._term_s, self._kill, (signal.SIGKILL,))
            timer.daemon = True
            timer.start()

    def _kill(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    def _reap(self) -> None:
        self._process.wait()
        self._ended.set()

    def _read(
        self, output: IO[str], say: Callable[[str], None], redraw: Callable[[str], None]
    ) -> None:
        cast("io.TextIOWrapper", output).reconfigure(newline="")  # a line may end with \r alone
        for line in output:
            # the terminal is gone: read on, or the process would wait for us
            with contextlib.suppress(OSError):
                (redraw if line.endswith("\r") else say)(line.rstrip("\r\n"))
