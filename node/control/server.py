"""The node's control socket: listening, accepting, cleaning up (trio)."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import traceback
from dataclasses import dataclass
from pathlib import Path

import trio

from ...collectives.errors import StorageError
from ...collectives.telemetry import Event, emit
from ..home.sockets import remove_stale_socket
from .connection import Connection, Defect
from .service import NodeService

MAX_CONNECTIONS = 64
BACKLOG = 32
_TRY_AGAIN_S = 0.1
_NOT_LISTENING = (errno.EBADF, errno.ENOTSOCK, errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class ControlDefect(Event):
    """Serving a client failed in a way that is a defect of ours; ``trace`` is the traceback. The
    node goes on.
    """

    error: str
    trace: str


def _emit_defect(error: Exception) -> None:
    emit(ControlDefect(repr(error), "".join(traceback.format_exception(error))))


class ControlServer:
    """Serves a NodeService at ``path``. Hold the home's `NodeLock` before ``run``: a socket file
    found there is then stale.
    """

    def __init__(
        self, service: NodeService, path: Path, *, on_defect: Defect = _emit_defect
    ) -> None:
        self.path = path
        self._service = service
        self._on_defect = on_defect
        self._connections: set[Connection] = set()
        self._room = trio.Semaphore(MAX_CONNECTIONS)

    async def run(self, *, task_status: trio.TaskStatus[Path] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen (started with the path) and serve until cancelled; then the socket file is gone
        and every session detached.

        Raises StorageError when the socket cannot be made, StateError (E102) when another node
        answers on it.
        """
        listener = self._bind()
        inode = self.path.stat().st_ino
        try:
            async with trio.open_nursery() as nursery:
                task_status.started(self.path)
                while True:
                    await self._room.acquire()  # when it is full, newcomers wait in the backlog
                    sock = await _accept(listener)
                    if sock is None:
                        self._room.release()
                        await trio.sleep(_TRY_AGAIN_S)
                    else:
                        nursery.start_soon(self._serve, sock)
        finally:
            listener.close()
            self._unlink(inode)

    def announce_end(self, reason: str) -> None:
        """Tell all clients that the node shuts down, so that scripts know why they are cut off."""
        for connection in self._connections:
            connection.end(reason)

    async def _serve(self, sock: trio.socket.SocketType) -> None:
        connection = Connection(self._service, sock, self._on_defect)
        self._connections.add(connection)
        try:
            await connection.run()
        except Exception as error:  # whatever a client did to us, only its own connection ends
            self._on_defect(error)
        finally:
            self._connections.discard(connection)
            self._room.release()

    def _bind(self) -> trio.socket.SocketType:
        remove_stale_socket(self.path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(os.fsencode(self.path))
            self.path.chmod(0o600)  # before listen: nobody can have connected
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise StorageError(
                f"cannot listen at {self.path}: {error.strerror or error}",
                hint="Choose another home: ATOLL_HOME=~/atoll-home",
                exit_code=73,
            ) from error
        return trio.socket.from_stdlib_socket(sock)

    def _unlink(self, inode: int) -> None:
        """One that stays is of no harm: nobody listens, and the next node takes it away."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == inode:  # another node may have taken the name meanwhile
                self.path.unlink()


async def _accept(listener: trio.socket.SocketType) -> trio.socket.SocketType | None:
    """A connection, or None when the next attempt should wait a little."""
    try:
        return (await listener.accept())[0]
    except OSError as error:
        # Out of descriptors, a connection that is gone again, one that the system forbids (EPERM).
        if error.errno in _NOT_LISTENING:
            raise
        return None
