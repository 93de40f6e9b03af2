"""Descriptors that came beside an answer: who owns them, and whether they are those that the answer
announces.

The kernel hands descriptors over in the order of the bytes that they were sent with, and nothing
else ties them to an answer. So an answer names the files that its descriptors are of, and its
reader compares.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ...collectives.errors import LocalProtocolError
from ...collectives.forced import OWNER


class Descriptor(Protocol):
    """A descriptor of this process that is closed with its last reference, if not before: whatever
    interrupts the code between its arrival and its use, none is left open.
    """

    def fileno(self) -> int:
        """Its number."""
        ...

    def close(self) -> None:
        """Close it. Idempotent."""
        ...


own: Callable[[int], Descriptor] = OWNER.fromfd
"""Take a descriptor over."""


def numbers(ancillary: Iterable[tuple[int, int, bytes]]) -> array.array[int]:
    """The descriptors in what ``recvmsg`` returned beside the data."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found


def number_of(fd: int | Descriptor) -> int:
    """The number of a descriptor."""
    return fd if isinstance(fd, int) else fd.fileno()


def files_of(fds: Iterable[int | Descriptor]) -> tuple[int, ...]:
    """Which files descriptors are of: the same numbers in every process that has them."""
    return tuple(os.fstat(number_of(fd)).st_ino for fd in fds)


def let_go(fd: int | Descriptor) -> None:
    """Close a descriptor that is not needed any more; a `Descriptor` ends by itself."""
    if isinstance(fd, int):
        os.close(fd)


def close_all(fds: Iterable[int | Descriptor]) -> None:
    """Close them now."""
    for fd in fds:
        if isinstance(fd, int):
            os.close(fd)
        else:
            fd.close()


def received(fds: Sequence[int | Descriptor], expected: int) -> Sequence[int | Descriptor]:
    """Check the number of descriptors that came with a message; closes them and raises
    LocalProtocolError when it is wrong.
    """
    if len(fds) == expected:
        return fds
    close_all(fds)
    raise LocalProtocolError(f"{len(fds)} descriptors came with a message that carries {expected}")
