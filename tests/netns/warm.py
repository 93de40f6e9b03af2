"""Processes on hosts of a laboratory, forked from one that has imported everything: a dozen of them
start in the time of one.

    process = fork(lab.hosts[0], "netns.reach_peer")    # its main([]), with pipes of its own
    process.tell("…")
    process.lines.get()
    process.kill()

The one they are forked from is started with the first of them, and lives as long as this process;
they all end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn, Protocol

from netns.lab import enter

PROGRAMS = ("atoll.node.__main__", "netns.lane_peer", "netns.reach_peer")
"""Modules whose ``main``, given its arguments, can be run."""
MAX_ORDER = 65_536


class Place(Protocol):
    """A host of the laboratory, in front of a router or behind one."""

    namespace: str


class Forked:
    """A process. ``lines``: what it has said and nobody has taken; after the last one, when it has
    ended, "". It stays a zombie until all end, so that its pid is never another's."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.lines = pid, queue.Queue[str]()
        self._stdin = stdin
        self._reader = threading.Thread(target=self._read, args=(stdout,), daemon=True)
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                self.lines.put(line)
        self.lines.put("")

    def tell(self, line: str) -> None:
        """To its stdin."""
        print(line, file=self._stdin, flush=True)

    def kill(self) -> None:
        """End it. Idempotent."""
        os.kill(self.pid, signal.SIGKILL)
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


def fork(place: Place, program: str, *argv: str, stderr: int = 2, **environ: str) -> Forked:
    """One of `PROGRAMS` there, with these arguments, and this environment beside the present one's."""
    order = {"namespace": place.namespace, "program": program, "argv": argv, "environ": environ}
    theirs_in, stdin = os.pipe()
    stdout, theirs_out = os.pipe()
    warm = _warm()
    socket.send_fds(warm, [json.dumps(order).encode()], [theirs_in, theirs_out, stderr])
    os.close(theirs_in)
    os.close(theirs_out)
    pid = warm.recv(64)
    assert pid, "the process from which others are forked has ended"
    return Forked(int(pid), os.fdopen(stdin, "w"), os.fdopen(stdout))


@functools.cache
def _warm() -> socket.socket:
    """The line to the process that has imported everything."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "netns.warm", str(its.fileno())],
            cwd=Path(__file__).parents[1],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


# ── the process that they are forked from
# ─────────────────────────────────────────────────────────────────────────────────


def main(line: socket.socket) -> None:
    """Fork a process for every order; when nobody can give one any more, end them all."""
    for program in PROGRAMS:
        importlib.import_module(program)
    importlib.import_module("atoll.node.composing.process")  # what a node takes long to import
    gc.freeze()  # what all share is looked at, and so copied, by none of them
    pids: list[int] = []
    while True:
        order, fds, _, _ = socket.recv_fds(line, MAX_ORDER, 3)
        if not order:
            break
        pid = os.fork()
        if not pid:
            _live(line, fds, **json.loads(order))
        for fd in fds:
            os.close(fd)
        pids.append(pid)
        line.send(str(pid).encode())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _live(
    line: socket.socket,
    fds: Sequence[int],
    *,
    namespace: str,
    program: str,
    argv: list[str],
    environ: dict[str, str],
) -> NoReturn:
    """The life of a forked process."""
    status = 1
    try:
        line.close()
        for standard, fd in enumerate(fds):
            os.dup2(fd, standard)
            os.close(fd)
        os.environ.update(environ)
        enter(namespace)
        status = sys.modules[program].main(argv)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
