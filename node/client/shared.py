"""A tensor that the node reads where it lies: `Swarm.buffer`.

The script sees one tensor at one address. What lies behind the address changes: memory of the node,
so that an operation need not copy; and memory of the script alone, with the same values, once the
node may still be reading the old one after the script was told that its operation is open. So a
contribution that was planned stays frozen, whatever the script writes next.

A forked child gets memory of its own as well, before any code of the script runs in it: like any
other tensor, its copy is its own. (Memory that a child does not inherit would end it at the first
touch; memory that is wiped would be zeros in silence.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ...collectives.errors import LocalProtocolError, StorageError
from ...collectives.plain import buffer_length, plainly
from ...collectives.script_swarm import Call
from ..control.descriptors import Descriptor, let_go, number_of
from ..home.forks import close_in_children

if TYPE_CHECKING:
    from torch import Tensor

    from .pending import ReduceTicket

MOVABLE = sys.platform == "linux"
"""Whether memory can be put behind an address in one step (mremap)."""

READ_IN_PLACE = ("mean", "sum", "max")
FLOAT_BYTES = 4
_MAYMOVE, _FIXED, _POPULATE = 1, 2, 0x8000
_FAILED = ctypes.c_void_p(-1).value


class SharedFloats:
    """float32 (numel,), zero at first, behind an address of its own. It lives as long as the
    tensor; ``ended`` is called after that, in any thread.

    Attributes: ``home``, ``number``: the connection to the node whose memory it is and the buffer's
    number there; None and 0: the script's own. ``ticket``: the operation that it was last given to,
    until it is settled.
    """

    def __init__(self, numel: int, ended: Callable[[int], None]) -> None:
        """Raises StorageError."""
        self.nbytes = numel * FLOAT_BYTES
        self.home: object | None = None
        self.number = 0
        self.ticket: ReduceTicket | None = None
        try:
            memory = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StorageError(
                f"no memory for a buffer of {numel} elements: {error.strerror}"
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = weakref.ref(memory)
        self._fresh: mmap.mmap | None = memory
        weakref.finalize(memory, ended, self.address).atexit = False

    def tensor(self) -> Tensor:
        """The tensor. Once only: afterwards it alone keeps the memory alive."""
        import torch  # the caller has it

        memory, self._fresh = self._fresh, None
        if memory is None:
            raise LocalProtocolError("a buffer has one tensor")
        return torch.frombuffer(memory, dtype=torch.float32)

    def move_to(self, home: object, number: int, fd: int | Descriptor) -> None:
        """Put the node's memory behind the address, with the present values. Takes ``fd`` over.
        Raises StorageError.
        """
        try:
            self._move(mmap.MAP_SHARED | _POPULATE, number_of(fd))
        finally:
            let_go(fd)
        self.home, self.number = home, number

    def detach(self) -> None:
        """Put memory of the script's own behind the address, with the present values. Raises
        StorageError.
        """
        if self.home is not None:
            self._move(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.home, self.number = None, 0

    def in_child(self) -> None:
        """Put a copy of the parent's memory behind the address; nothing, where there is no room."""
        try:
            self.detach()
        except StorageError:
            _libc().munmap(self.address, self.nbytes)
        self.ticket = None

    def _move(self, flags: int, fd: int) -> None:
        held = self._memory()  # not unmapped meanwhile
        if held is None:
            return
        size = self.nbytes
        fresh = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if fresh == _FAILED:
            raise StorageError(f"no memory for a buffer: {os.strerror(ctypes.get_errno())}")
        ctypes.memmove(fresh, self.address, size)
        if (
            _libc().mremap(fresh, size, size, _MAYMOVE | _FIXED, ctypes.c_void_p(self.address))
            == _FAILED
        ):
            reason = os.strerror(ctypes.get_errno())
            _libc().munmap(fresh, size)
            raise StorageError(f"the memory of a buffer cannot be moved: {reason}")


class Buffers:
    """The buffers of one script whose tensors are still there."""

    def __init__(self) -> None:
        self._by_address: dict[int, SharedFloats] = {}
        # Single operations on a deque or a dict are atomic.
        self._ended: deque[tuple[object, int]] = deque()
        close_in_children(self)

    def in_child(self) -> None:
        """What the child writes must not be seen in the parent, nor by the node."""
        for shared in list(self._by_address.values()):
            shared.in_child()
        self._ended.clear()

    def make(self, numel: int) -> Tensor:
        """A new one. Raises LocalProtocolError, StorageError."""
        import torch  # the caller has it

        numel = buffer_length(numel)
        with plainly():
            if not MOVABLE:
                return torch.zeros(numel, dtype=torch.float32, device="cpu")
            shared = SharedFloats(numel, self._end)
            self._by_address[shared.address] = shared
            return shared.tensor()

    def _end(self, address: int) -> None:
        shared = self._by_address.pop(address, None)
        if shared is not None and shared.home is not None:
            self._ended.append((shared.home, shared.number))

    def retire(self, shared: SharedFloats) -> None:
        """Put memory of the script's own behind a buffer. The node's is in `ended`. Raises
        StorageError.
        """
        if shared.home is not None:  # told first: an exception after it has it told twice
            self._ended.append((shared.home, shared.number))
            shared.detach()

    def ended(self) -> Iterator[tuple[object, int]]:
        """Homes and numbers of memory that no buffer lies in any more, since the last call."""
        while self._ended:
            yield self._ended.popleft()

    def of(self, call: Call, values: Tensor) -> SharedFloats | None:
        """The buffer that ``values`` are all of, if the call is of a kind that can read it where it
        lies. Raises LocalProtocolError while an earlier operation has it.
        """
        from ...collectives.reducers import REDUCERS  # loads torch, which the caller has

        # What is not in the table is a robust rule, or the node refuses it.
        elsewhere = call.reducer in REDUCERS and call.reducer not in READ_IN_PLACE
        if not call.weight or elsewhere or values.device.type != "cpu":
            return None
        shared = self._by_address.get(values.data_ptr())
        if shared is None or shared.nbytes != FLOAT_BYTES * values.numel():
            return None
        if shared.ticket is not None and not shared.ticket.done():
            raise LocalProtocolError(
                "this buffer is in an operation that is under way",
                hint="wait() for it, or take another buffer",
            )
        return shared


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = libc.mremap.restype = word
    libc.mmap.argtypes = [word, number, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [word, number, number, ctypes.c_int, word]
    libc.munmap.argtypes = [word, number]
    return libc
