"""Memory that the node and a script share: made by the node, handed over as file descriptors, gone
when both are gone.

* ``SharedBuffer``  one block of memory: a sealed memfd on Linux, an unlinked temporary file
                    elsewhere. It has no name, so a
  crash of either side leaves nothing behind.
* ``AnchorSlots``   float32 slots in which the node publishes generations of the anchor; it never
                    writes one that is current or
  leased.
* ``WritableFloats``, ``ReadOnlyFloats``, ``map_bytes``  the script's mappings, made of the
  descriptors it was given.

Nothing here loads torch before ``SharedBuffer.tensor`` or ``ReadOnlyFloats.copy_into`` is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import msgspec
from blake3 import blake3

from ...collectives.errors import LocalProtocolError, OutOfDateError, StorageError
from ..home.refusals import advice
from .beside import beside
from .descriptors import Descriptor, let_go, number_of

if TYPE_CHECKING:
    from torch import Tensor

MAX_LEASES = 2  # the anchor a script measures its progress against, and the one it is moving to
SLOTS = MAX_LEASES + 2  # ... the current generation, and one to write the next into
FLOAT_BYTES = 4
_numbers = itertools.count(1)  # of pooled buffers
PIECE_BYTES = 16 << 20  # of memory that is given back
BESIDE_BYTES = 64 << 20  # what is more is given back in a thread of its own
_ZEROS = bytes(1 << 20)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class AnchorSlot(msgspec.Struct, frozen=True):
    """Where one generation of the anchor lies: ``round`` entries of the log are applied to it.
    ``digest``: blake3 of its bytes in hex, or "" where the node has not computed it (the script
    then does, if it asks). ``samples``: contributed to it, ``lag``: of its newest round, ``steps``:
    from it, as in an `AnchorView`; where a script holds it."""

    slot: int
    round: int
    digest: str
    samples: int = 0
    lag: float = 0.0
    steps: int = 0


class SharedBuffer:
    """A writable block of shared memory of ``nbytes`` bytes, zero at first.

    Args:
        nbytes: its size, > 0.
        folder: where the temporary file of the fallback is made (it is unlinked at once); default:
            the system's.
        use_memfd: None takes memfd where the system gives one; False forces the fallback.

    Raises:
        StorageError: there is no room. The fallback reserves all its blocks here, so that a full
            disk is this error and not a SIGBUS at the first write.
    """

    def __init__(
        self, nbytes: int, *, folder: Path | None = None, use_memfd: bool | None = None
    ) -> None:
        self.fd = self._reader_fd = -1
        if nbytes <= 0:
            raise LocalProtocolError(f"shared memory of {nbytes} bytes")
        self.nbytes = nbytes
        self._memfd = memfd = memfd_works() if use_memfd is None else use_memfd
        try:
            self.fd, self._reader_fd = _memfd(nbytes) if memfd else _unlinked_file(nbytes, folder)
            # never closed by hand: torch.frombuffer keeps the mapping alive but does not lock it,
            # so that close() would pull the memory from under a tensor (SIGSEGV); it ends with the
            # last reference
            self._memory: mmap.mmap | None = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            raise _storage_error(nbytes, "memory" if memfd else _where(folder), error) from error

    @property
    def reader_fd(self) -> int:
        """A descriptor of the same memory that cannot be mapped for writing."""
        return self._reader_fd

    def view(self) -> memoryview:
        """All bytes, writable. Raises LocalProtocolError after `close`."""
        return memoryview(self._mapping())

    def tensor(self) -> Tensor:
        """The memory as float32, shape (nbytes / 4,), writable; it keeps the mapping alive. Raises
        LocalProtocolError after `close`.
        """
        import torch  # heavy: only where tensors are touched

        return torch.frombuffer(self._mapping(), dtype=torch.float32)

    def lend(self, start: int, stop: int) -> tuple[Tensor, ReferenceType[Any]]:
        """See `lent`. Raises LocalProtocolError after `close`."""
        return lent(self._mapping(), start, stop)

    def clear(self) -> None:
        """Give the memory back to the system until somebody touches it again: then it is zero. Does
        nothing where that cannot be had.
        """
        if not self._memfd:
            return  # a file would lose the blocks that were reserved for it
        give_back(self._mapping(), 0, self.nbytes)

    def _mapping(self) -> mmap.mmap:
        if self._memory is None:
            raise LocalProtocolError("this shared memory was closed")
        return self._memory

    def close(self) -> None:
        """Close the descriptors and let go of the mapping, which ends with the last tensor or view
        of it. Idempotent.
        """
        for fd in (self.fd, self._reader_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._reader_fd = -1
        self._memory = None

    def __del__(self) -> None:
        for fd in (self.fd, self._reader_fd):
            if fd >= 0:
                os.close(fd)


class PooledBuffer(SharedBuffer):
    """Memory of a pool. ``number`` (> 0) is its own in the life of the process: under the same
    number it is the same memory, so that a script may keep its mapping of it.
    """

    def __init__(self, nbytes: int, folder: Path | None) -> None:
        super().__init__(nbytes, folder=folder)
        self.number = next(_numbers)


@cache
def memfd_works() -> bool:
    """Whether this system gives anonymous files: old kernels have none, sandboxes forbid them."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.memfd_create("atoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        # anything else (no more descriptors) is true of this moment only, and of a file, too
        return error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL)
    return True


def _where(folder: Path | None) -> str:
    if folder is not None:
        return str(folder)
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "a temporary folder"


def _memfd(nbytes: int) -> tuple[int, int]:
    """An anonymous file whose size is sealed: nobody who holds it can shrink it and so kill the
    other side by SIGBUS.
    """
    fd = os.memfd_create("atoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        try:
            return fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except (
            FileNotFoundError
        ):  # no /proc (some sandboxes): the promise not to write is then the client's alone
            return fd, os.dup(fd)
    except BaseException:
        os.close(fd)
        raise


def _sealed(fd: int) -> bool:
    """Whether a descriptor is of memory that `_memfd` made; a file would lose its blocks."""
    if not hasattr(fcntl, "F_GET_SEALS"):
        return False
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _unlinked_file(nbytes: int, folder: Path | None) -> tuple[int, int]:
    fd, name = tempfile.mkstemp(prefix="atoll-", dir=folder)
    try:
        try:
            reader = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.unlink(name)
        try:
            _reserve(fd, nbytes)
        except BaseException:
            os.close(reader)
            raise
    except BaseException:
        os.close(fd)
        raise
    return fd, reader


def _reserve(fd: int, nbytes: int) -> None:
    """Give the file all its blocks now."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    left = nbytes  # macOS has no posix_fallocate
    while left:
        left -= os.write(fd, _ZEROS[: min(left, len(_ZEROS))])


def _storage_error(nbytes: int, where: str, error: OSError) -> StorageError:
    full = error.errno in _FULL
    why, hint = advice(error)
    return StorageError(
        f"no shared memory of {nbytes / 2**20:.1f} MiB in {where}: {error.strerror}",
        why="there is not enough room for the anchor and the contribution of this model"
        if full
        else why,
        hint="free some space, or point TMPDIR to a place that has it" if full else hint,
    )


class WritableFloats:
    """A script's mapping of a buffer it writes: float32, shape (numel,). Takes the descriptor over
    and closes it.
    """

    def __init__(self, fd: int | Descriptor, numel: int) -> None:
        self.numel = numel
        self._sealed = _sealed(number_of(fd))
        self._memory = map_bytes(fd, numel * FLOAT_BYTES, writable=True)

    def tensor(self) -> Tensor:
        """float32, shape (numel,), writable; it keeps the mapping alive."""
        import torch  # heavy: only where tensors are touched

        return torch.frombuffer(self._memory, dtype=torch.float32)

    def lend(self, start: int, stop: int) -> tuple[Tensor, ReferenceType[Any]]:
        return lent(self._memory, start, stop)

    def clear(self, start: int, stop: int, go_on: Callable[[], bool] = lambda: True) -> None:
        """Give the whole pages of elements [start, stop) back to the system: they are zero when
        somebody touches them again. Does nothing where that cannot be had. See `give_back`.
        """
        first = -(-start * FLOAT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop * FLOAT_BYTES
        if stop < self.numel:
            last -= last % mmap.PAGESIZE
        if self._sealed and first < last:
            give_back(self._memory, first, last, go_on)


def give_back(
    memory: mmap.mmap, first: int, last: int, go_on: Callable[[], bool] = lambda: True
) -> None:
    """Give bytes [first, last) of a writable shared mapping back to the system, whole pages of
    which they are: they are zero when somebody touches them again. In pieces of PIECE_BYTES while
    ``go_on()``, which is asked before each; meanwhile other threads have the interpreter's lock.
    What the system refuses stays as it is.
    """
    if not hasattr(mmap, "MADV_REMOVE"):
        return
    madvise = _madvise()
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in range(first, last, PIECE_BYTES):
        if not go_on() or madvise(begin + at, min(PIECE_BYTES, last - at), mmap.MADV_REMOVE):
            return


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """That of the C library: mmap's method would hold the interpreter's lock."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def lent(memory: mmap.mmap, start: int, stop: int) -> tuple[Tensor, ReferenceType[Any]]:
    """Elements [start, stop) of shared memory, float32, and a reference that is dead once nobody in
    this process holds the tensor, or a view of it, any more.
    """
    import numpy as np  # as torch: not before tensors are touched
    import torch

    array = np.frombuffer(memory, dtype=np.float32, count=stop - start, offset=start * FLOAT_BYTES)
    return torch.from_numpy(array), ref(array)


def alive(references: Sequence[ReferenceType[Any]]) -> list[ReferenceType[Any]]:
    """Those (`lent`) whose memory somebody can still read."""
    return [each for each in references if each() is not None]  # an array has no truth value


class ReadOnlyFloats:
    """A script's read-only mapping of float32, shape (numel,). Takes the descriptor over and closes
    it.

    The only way out is a copy: writing through a read-only mapping is a SIGSEGV, and torch warns of
    tensors over one.
    """

    def __init__(self, fd: int | Descriptor, numel: int) -> None:
        self.numel = numel
        self._memory = map_bytes(fd, numel * FLOAT_BYTES, writable=False)

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """Copy elements [start, start + destination.numel()) into ``destination``: float32,
        contiguous, on the CPU.

        Raises LocalProtocolError when the range or the destination does not fit.
        """
        import numpy as np  # as torch: not before tensors are touched
        import torch

        count = destination.numel()
        if (
            destination.dtype != torch.float32
            or destination.device.type != "cpu"
            or not destination.is_contiguous()
        ):
            raise LocalProtocolError(
                f"destination must be float32, contiguous and on the CPU, not {destination.dtype} "
                f"on {destination.device}"
            )
        if start < 0 or start + count > self.numel:
            raise LocalProtocolError(
                f"elements [{start}, {start + count}) of a vector of {self.numel}"
            )
        if count:
            source = np.frombuffer(
                self._memory, dtype=np.float32, count=count, offset=start * FLOAT_BYTES
            )
            np.copyto(destination.detach().view(-1).numpy(), source)

    def digest(self) -> str:
        """blake3 of all bytes, in hex."""
        digest = blake3()
        self.feed(digest)
        return digest.hexdigest()

    def feed(self, digest: blake3) -> None:
        """Add all bytes to a digest."""
        with memoryview(self._memory) as view:
            digest.update(view)


def map_bytes(
    fd: int | Descriptor, nbytes: int, *, writable: bool, copy: bool = False
) -> mmap.mmap:
    """Map and close ``fd``. ``copy``: what is written to the mapping stays in this process (torch
    wants writable memory even where it only reads). Raises StorageError when the file is shorter
    than said (touching the rest would be a SIGBUS), and when the system refuses the mapping."""
    try:
        size = os.fstat(number := number_of(fd)).st_size
        if size < nbytes:
            raise StorageError(f"shared memory has {size} bytes, {nbytes} are needed")
        shared = mmap.MAP_PRIVATE if copy else mmap.MAP_SHARED
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(number, nbytes, shared, protection)
    except OSError as error:
        raise _storage_error(nbytes, "this process", error) from error
    finally:
        let_go(fd)


class AnchorSlots:
    """The node's side of the anchor: float32 slots of shape (numel,), one of which is current.

    Use: ``slot = next_slot()``; write ``tensor(slot)`` (the current generation stays readable
    meanwhile, so the outer step goes from ``tensor(current.slot)`` to ``tensor(slot)``);
    ``publish(slot, round, digest)``. ``next_slot`` and ``tensor`` may be called from a worker
    thread; all else in one thread. `renew` may put other memory with the same content into the
    current slot.

    A slot is **free**, **written** from `next_slot` to `publish`, then **current**, and **leased**
    as long as a script holds it. When it is none of the last three its memory goes back to the
    system (**clearing**), and it is free again: between rounds there is one generation, or two
    where the script is still at an older one.

    The attached script leases slots for as long as it likes, at most MAX_LEASES at a time: the
    anchor it measures its progress against, and the one it moves to. What a script had leased when
    its connection was lost is its own for ever (`abandon`): it may have outlived the connection and
    still read.
    """

    def __init__(
        self, numel: int, *, folder: Path | None = None, use_memfd: bool | None = None
    ) -> None:
        """Raises StorageError. Memory is taken at the first write (memfd) or at once (fallback)."""
        self.numel = numel
        self._folder, self._use_memfd = folder, use_memfd
        self._buffers: list[SharedBuffer] = []
        self._current: AnchorSlot | None = None
        self._leases: list[int] = []
        self._abandoned: set[int] = set()
        # what was handed out to be written since the newest generation was, the newest last
        self._writing: list[int] = []
        self._dirty: set[int] = set()  # not all zero
        self._clearing: set[int] = set()
        self._changed = threading.Condition()  # all that says whose turn a slot is
        try:
            for _ in range(SLOTS):
                self._buffers.append(self._new())
        except BaseException:
            self.close()
            raise

    @property
    def current(self) -> AnchorSlot | None:
        """The newest published generation."""
        return self._current

    @property
    def leased(self) -> list[int]:
        """The slots that the script reads."""
        return list(self._leases)

    def reader_fds(self) -> list[int]:
        """What a script needs: descriptors of all slots, in order; none can be mapped for writing.
        After `renew`.
        """
        return [buffer.reader_fd for buffer in self._buffers]

    def next_slot(self) -> int:
        """A slot that nobody reads, the lowest. The same one until something changes. Waits while
        all that are free are being cleared. Raises StorageError.
        """
        with self._changed:
            free = [slot for slot in range(SLOTS) if not self._taken(slot)]
            self._changed.wait_for(lambda: not self._clearing.issuperset(free))
            slot = next(slot for slot in free if slot not in self._clearing)
            if slot in self._abandoned:
                self._replace(slot, keep=False)
            self._writing = [each for each in self._writing if each != slot] + [slot]
            self._dirty.add(slot)
            return slot

    def tensor(self, slot: int) -> Tensor:
        """float32, shape (numel,). Write it only between ``next_slot`` and ``publish``."""
        return self._buffers[slot].tensor()

    def publish(self, slot: int, round_: int, digest: str) -> AnchorSlot:
        """Make ``slot``, now completely written, the current generation."""
        with self._changed:
            if self._taken(slot):
                raise LocalProtocolError(f"slot {slot} is in use: it may not have been written")
            self._current = AnchorSlot(slot, round_, digest)
            if slot in self._writing:  # what was handed out later is for the next
                self._writing = self._writing[self._writing.index(slot) + 1 :]
            self._dirty.add(slot)
            self._clear_idle()
            return self._current

    def lease(self) -> AnchorSlot:
        """Keep the current slot from being written until `release`. Raises LocalProtocolError on
        too many, OutOfDateError before the first `publish`."""
        with self._changed:
            if len(self._leases) >= MAX_LEASES:
                raise LocalProtocolError(
                    f"the script holds {MAX_LEASES} anchors already",
                    hint="release() the views that anchor() returned",
                )
            if self._current is None:
                raise OutOfDateError("the run has no anchor yet")
            self._leases.append(self._current.slot)
            return self._current

    def release(self, slot: int) -> None:
        """Give one lease of ``slot`` back. Without one it does nothing."""
        with self._changed:
            if slot in self._leases:
                self._leases.remove(slot)
                self._clear_idle()

    def abandon(self) -> None:
        """The script's connection is gone: its leases end, and the memory it had leased is never
        written again.
        """
        with self._changed:
            self._abandoned.update(self._leases)
            self._leases.clear()
            self._clear_idle()

    def renew(self) -> None:
        """Before `reader_fds` go to a new session: other memory for every abandoned slot (the
        current one is copied).

        Raises StorageError.
        """
        with self._changed:
            for slot in sorted(self._abandoned):
                self._replace(slot, keep=self._current is not None and slot == self._current.slot)

    def close(self) -> None:
        """Close all descriptors (mappings live on). Idempotent."""
        while self._buffers:
            self._buffers.pop().close()

    def _clear_idle(self) -> None:
        """Give back the memory of slots that nobody will read again. Whoever reads one that was
        current has leased it; the newest may not be published yet, so what is written stays. An
        abandoned slot gets other memory: the old ends with the script that may still read it.
        """
        if self._use_memfd is not False and memfd_works():  # nothing is reserved for the new memory
            with contextlib.suppress(StorageError, OSError):  # else when it is written next
                for slot in [each for each in sorted(self._abandoned) if not self._taken(each)]:
                    self._replace(slot, keep=False)
        for slot in sorted(self._dirty - self._abandoned - set(self._writing)):
            if self._taken(slot):
                continue
            self._dirty.discard(slot)
            buffer = self._buffers[slot]
            if buffer.nbytes < BESIDE_BYTES:
                buffer.clear()
                continue
            self._clearing.add(slot)
            beside(lambda slot=slot, buffer=buffer: self._clear(slot, buffer))

    def _clear(self, slot: int, buffer: SharedBuffer) -> None:
        try:
            with contextlib.suppress(LocalProtocolError):  # closed meanwhile
                buffer.clear()
        finally:
            with self._changed:
                self._clearing.discard(slot)
                self._changed.notify_all()

    def _taken(self, slot: int) -> bool:
        return slot in self._leases or (self._current is not None and slot == self._current.slot)

    def _replace(self, slot: int, *, keep: bool) -> None:
        fresh = self._new()
        if keep:
            fresh.tensor().copy_(self._buffers[slot].tensor())
        # One step: another thread may be asking for the tensor; the old one goes with its last
        # user.
        self._buffers[slot] = fresh
        self._abandoned.discard(slot)
        if not keep:
            self._dirty.discard(slot)

    def _new(self) -> SharedBuffer:
        return SharedBuffer(
            self.numel * FLOAT_BYTES, folder=self._folder, use_memfd=self._use_memfd
        )
