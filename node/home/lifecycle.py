"""The life of a node process: one node a home, found by a small file, and private nodes that end
with their script.

Node side (in `python -m atoll.node`; nothing here loads trio):

    paths.ensure()
    link = ParentLink(parent_fd) if private else None
    try:
        lock = NodeLock.acquire(paths)      # E102: another node runs with this home
        ...                                 # start ControlServer at paths.control_socket
        lock.publish(NodeFile(pid=os.getpid(), socket=str(path), peer=peer, ...))
        if link: link.ready(path)
        ...                                 # a private node ends with its parent (watch_parent)
    except AtollError as error:
        if link: link.failed(error)
    finally:
        lock.release()

`ParentLink` and the script's side of private nodes are in `private_node`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import resource
import socket
import sys
import threading
from pathlib import Path

import msgspec

from ...collectives.errors import StateError
from .paths import Paths, make_private, write_atomic
from .refusals import storage_error

NO_LOCKS_HERE = (
    "the file system of this home has no locks: never start a node with it on another machine too"
)
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
OPEN_FILES = 65_536
LOOKS, LOOK_S = 4, 0.05
"""Who only looks at a lock (`node_there`) holds it for a moment: it is tried again so often."""


class NodeFile(msgspec.Struct, frozen=True):
    """``node.json``: which node serves this home."""

    pid: int
    socket: str
    peer: str = ""
    private: bool = False
    parent_pid: int = 0


class NodeLock:
    """The one node of a home. The system drops the lock with the process, however it ends."""

    def __init__(self, fd: int, folder: Path, name: socket.socket | None = None) -> None:
        self._fd = fd
        self._file = folder / "node.json"
        self._name = name

    @property
    def of_this_machine_only(self) -> bool:
        """Whether a node on another machine that has the same home would not see this lock."""
        return self._name is not None

    @classmethod
    def acquire(cls, paths: Paths) -> NodeLock:
        """Raises StateError (E102) if another node holds it, StorageError without a file."""
        make_private(paths.runtime_dir)
        name = paths.runtime_dir / "node.lock"
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(f"cannot open {name}", error) from None
        held: socket.socket | None = None
        for left in reversed(range(LOOKS)):
            try:
                held = _hold(fd, paths.runtime_dir, fcntl.LOCK_EX)
                break
            except BlockingIOError:
                if not left:
                    os.close(fd)
                    raise already_running(paths) from None
                threading.Event().wait(LOOK_S)
            except OSError as error:
                os.close(fd)
                raise storage_error(f"cannot lock {name}", error) from None
        return cls(fd, paths.runtime_dir, held)

    @property
    def in_place(self) -> bool:
        """Whether the file that is locked still is the home's: not where the home was deleted, or
        moved away, and perhaps made anew.
        """
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._file.with_name("node.lock")))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that cannot tell at this moment
            return True

    def publish(self, node: NodeFile) -> None:
        """Let scripts and commands find this node. Call it when the socket listens."""
        write_atomic(self._file, msgspec.json.encode(node))

    def release(self) -> None:
        """Take the file away and give the home free. Idempotent. A file that stays names a process
        that holds no lock.
        """
        if self._fd >= 0:
            if self.in_place:  # else the file is another node's
                with contextlib.suppress(OSError):
                    self._file.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
            if self._name is not None:
                self._name.close()


def _hold(fd: int, folder: Path, kind: int) -> socket.socket | None:
    """Lock an open file as flock does with ``kind``, at once or not at all (BlockingIOError).

    Where the file system has no locks (Lustre mounted without them, NFS without its lock service),
    Linux has another thing that one process holds and that ends with it: the name of a socket. It
    is returned. Raises OSError where there is neither.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS or sys.platform != "linux":
            raise
    text = f"{os.getuid()}:".encode() + os.fsencode(folder.resolve())
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(b"\0atoll-node-" + hashlib.sha256(text).hexdigest().encode())
        return name
    except OSError as error:
        name.close()
        if error.errno == errno.EADDRINUSE:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        raise


def node_there(paths: Paths) -> bool:
    """Whether a process holds the home's lock: a node that runs, starts or ends."""
    try:
        fd = os.open(paths.runtime_dir / "node.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # there was none yet
        return False
    held: socket.socket | None = None
    try:
        held = _hold(fd, paths.runtime_dir, fcntl.LOCK_SH)
        return False
    except BlockingIOError:
        return True
    except OSError:  # no locks at all: then no node could start
        return False
    finally:
        if held is not None:
            held.close()
        os.close(fd)


def raise_file_limit() -> None:
    """Let this process have as many open files and connections as its user may have: shells give
    1,024 or 256 by default, and a node of a large run holds several for each peer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit beside it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def locks_here(folder: Path) -> bool:
    """Whether files in a folder can be locked; True where there is none to try it with."""
    try:
        fd = os.open(folder / "node.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    finally:
        os.close(fd)
    return True


def already_running(paths: Paths) -> StateError:
    """E102: this home has its node."""
    node = read_node_file(paths)
    if node is None:
        return StateError(
            f"a node is starting or ending with {paths.runtime_dir}",
            code="E102",
            exit_code=73,
            hint="Try again in a moment: atoll status",
        )
    if node.private:
        return StateError(
            (
                f"the node of this home (process {node.pid}) belongs to another script, "
                f"process {node.parent_pid}"
            ),
            code="E102",
            exit_code=73,
            why="A private node ends with its script, so two scripts do not share one.",
            hint=(
                "Start a node for both: atoll up      Or give this one a home of its "
                "own: ATOLL_HOME=./node2"
            ),
        )
    return StateError(
        f"a node runs with this home already, process {node.pid}",
        code="E102",
        exit_code=73,
        hint="Use it: atoll status      A second node: atoll up --home ./node2",
    )


def read_node_file(paths: Paths) -> NodeFile | None:
    """The node that says it serves this home (it may be dead: connect and see), or None."""
    try:
        return msgspec.json.decode((paths.runtime_dir / "node.json").read_bytes(), type=NodeFile)
    except (OSError, msgspec.MsgspecError):
        return None
