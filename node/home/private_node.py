"""Private nodes: a script that finds no running node starts one of its own, as a child that ends
with it.

Both ends of one inherited socket pair: `ParentLink` in the node, `PrivateNode` in the script. The
node says on it, once, where it listens or why it cannot start, and from then on waits for its end
(`node.composing.parent`). The arguments it gets are ``--private [--home H] --parent-pid P
--parent-fd N``; its stdout and stderr go to ``private-node.log`` in the log folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...collectives.errors import AtollError, StateError, SwarmClosedError
from .failures import Failure, error_of, failure
from .forks import close_in_children
from .interpreter import PYTHON
from .logs import open_log
from .paths import Paths, user_path
from .refusals import storage_error
from .sockets import remove_stale_socket

READY_S = 120.0  # a cold start imports libp2p and torch from a slow disk
END_S = 30.0  # a private node hands over its round; then SIGTERM, then SIGKILL
TERM_S = 5.0
_READY_BYTES = 1 << 16


class _Ready(msgspec.Struct, frozen=True):
    """What a private node writes to its script: where it listens, or why it could not start."""

    socket: str = ""
    error: Failure | None = None


class ParentLink:
    """A private node's end of the link to its script: says once how the start went, then only
    listens for the end.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For waiting until it is readable."""
        return self._socket.fileno()

    def ready(self, path: Path) -> None:
        """The control socket listens at ``path``."""
        self._say(_Ready(socket=str(path)))

    def failed(self, error: AtollError) -> None:
        """The node cannot start."""
        self._say(_Ready(error=failure(0, error)))

    def _say(self, ready: _Ready) -> None:
        with contextlib.suppress(OSError):  # the script is gone: `ended` will tell
            self._socket.sendall(msgspec.json.encode(ready) + b"\n")

    def ended(self) -> bool:
        """Whether the script closed its end (or died). Never blocks; a script says nothing here, so
        bytes are dropped.
        """
        try:
            while self._socket.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()


class PrivateNode:
    """A node process of this script's own. It ends when `end` is called, and also when the script
    dies in any way.
    """

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, log: Path) -> None:
        self._process = process
        self._link = link
        self._log = log
        self._owner = os.getpid()
        self.socket: Path | None = None
        close_in_children(self)

    @classmethod
    def start(
        cls, paths: Paths, *, home: str | Path | None = None, command: Sequence[str] = ()
    ) -> PrivateNode:
        """Start the process; `wait_ready` before using it. ``command`` replaces ``python -m
        atoll.node`` (tests).

        Raises StorageError when its log cannot be written, SwarmClosedError (E161) when it cannot
        be executed.
        """
        paths.ensure()
        log = paths.log_dir / "private-node.log"
        ours, theirs = socket.socketpair()
        arguments = [
            *(command or (*PYTHON, "-m", "atoll.node")),
            "--private",
            "--parent-pid",
            str(os.getpid()),
            "--parent-fd",
            str(theirs.fileno()),
        ]
        if home is not None:
            arguments += ["--home", str(user_path(home))]
        try:
            with _open_log(log) as output:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    # Ctrl-C is the script's: the node hands over its round when the script ends
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise SwarmClosedError(
                f"cannot start a node: {arguments[0]}: {error.strerror}", code="E161"
            ) from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def ended_in_order(self) -> bool:
        """Whether it ended in order, and not at this script's wish: somebody told it to."""
        return self._process.poll() == 0

    def wait_ready(
        self, timeout_s: float = READY_S, *, give_up: Callable[[], bool] | None = None
    ) -> Path:
        """The path of its control socket. Raises what the node says it failed of, or
        SwarmClosedError (E161); it is then gone.
        """
        try:
            line = self._read_line(time.monotonic() + timeout_s, give_up)
            ready = msgspec.json.decode(line, type=_Ready)
        except msgspec.MsgspecError as error:
            self.end(0)
            raise self._not_started(f"said something strange: {error}") from None
        except BaseException:  # also Ctrl-C: leave no process behind
            self.end(0)
            raise
        if ready.error is not None:
            self.end(TERM_S)
            raise error_of(ready.error)
        self.socket = Path(ready.socket)
        return self.socket

    def _read_line(self, until: float, give_up: Callable[[], bool] | None) -> bytes:
        data = b""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        while not data.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0:
                raise self._not_started("did not become ready in time")
            if give_up is not None and give_up():
                raise self._not_started("is no longer wanted")
            if poll.poll(min(left, 0.25) * 1000):
                more = self._link.recv(_READY_BYTES)
                if not more or len(data) > _READY_BYTES:
                    raise self._not_started("ended while starting")
                data += more
        return data

    def _not_started(self, what: str) -> SwarmClosedError:
        last = ""
        with contextlib.suppress(OSError):
            last = (
                self._log.read_bytes()[-4096:].decode(errors="replace").strip().rpartition("\n")[2]
            )
        return SwarmClosedError(
            f"the private node {what}",
            code="E161",
            why=f"Its last words: {last}" if last else "",
            hint=f"Read {self._log}",
        )

    def end(self, timeout_s: float = END_S) -> None:
        """Close the link, wait for the process; SIGTERM it after ``timeout_s``, SIGKILL it at last.
        Idempotent.

        Ctrl-C while waiting kills the process and goes on as KeyboardInterrupt.
        """
        if self._owner != os.getpid():
            return
        self._link.close()
        try:
            self._wait(timeout_s, signal.SIGTERM)
            self._wait(TERM_S, signal.SIGKILL)
        finally:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._remove_files()

    def _wait(self, timeout_s: float, then: signal.Signals) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(then)

    def _remove_files(self) -> None:
        """A node that was killed leaves its socket file; nobody can listen there now unless a new
        node does.
        """
        if self.socket is not None:
            with contextlib.suppress(OSError, StateError):
                remove_stale_socket(self.socket)

    def in_child(self) -> None:
        self._link.close()
        # Not this process's child: neither waited for nor warned about.
        self._process.returncode = 0


def _open_log(path: Path) -> BinaryIO:
    try:
        return open_log(path)
    except OSError as error:
        raise storage_error(f"cannot write {path}", error) from None
