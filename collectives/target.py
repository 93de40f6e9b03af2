"""Where the result of a collective goes: a tensor of its caller, as it was when it was given."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import LocalProtocolError
from .plain import CPU, flat_of

if TYPE_CHECKING:
    from torch import Tensor


class Target:
    """``flat``: its elements, in its own memory. Raises LocalProtocolError for what is no plain
    tensor, as `flat_of`, and where it is to be ``written`` for memory that cannot be.
    """

    def __init__(
        self,
        tensor: Tensor,
        dtype: Any = None,
        *,
        devices: Collection[str] = CPU,
        written: bool = True,
    ) -> None:
        self.flat = flat_of(tensor, dtype, devices=devices)
        self._tensor, self._place = tensor, _place(tensor)
        on_cpu = written and self.flat.device.type == "cpu"
        if on_cpu and not _writable(self.flat.data_ptr()):
            raise LocalProtocolError(
                "the tensor lies in memory that cannot be written to, such as a mapped file",
                hint="give a clone() of it",
            )

    def check(self) -> None:
        """Raise LocalProtocolError where its memory is no longer what the caller's tensor shows:
        what is written would be seen by nobody, or end the process.
        """
        if _place(self._tensor) != self._place:
            raise LocalProtocolError(
                "the tensor was given other memory or another shape (p.data = ..., set_, resize_) "
                "between the call and its wait",
                why="The result would be written where nobody looks; nothing was written.",
                hint="wait() first; or keep the memory, and use tensor.copy_(values)",
            )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What is the same as long as the tensor shows the same memory in the same order. Storage that
    has been freed under it is shorter than it was.
    """
    end = tensor.storage_offset() + tensor.numel()
    whole = tensor.untyped_storage().nbytes() >= end * tensor.element_size()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), whole


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _written() -> Any:
    """process_vm_writev, None where there is none."""
    return getattr(ctypes.CDLL(None, use_errno=True), "process_vm_writev", None)


def _writable(address: int) -> bool:
    """Whether a byte can be written there, as far as the system says: it is written onto itself, by
    the system, which fails where the process would end.
    """
    write = _written()
    if write is None:
        return True
    here = ctypes.byref(_Span(address, 1))
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    failed = write(os.getpid(), here, one, here, one, none) < 0
    return not (failed and ctypes.get_errno() == errno.EFAULT)
