"""Libraries compiled at installation (`native.c` beside the module that calls it): found, or left
out and said; and what they may be given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .errors import LocalProtocolError

log = logging.getLogger("atoll")
Library = TypeVar("Library")


def load(folder: Path, open_it: Callable[[Path], Library], slower: str) -> Library | None:
    """The library in ``folder``, opened, if there is one that can be used. ``slower``: what is,
    without it.
    """
    for path in (folder / ("_native" + suffix) for suffix in EXTENSION_SUFFIXES):
        if path.exists():
            try:
                return open_it(path)
            except (
                OSError,
                AttributeError,
            ) as error:  # built for another machine, or from an older source
                why = (
                    "fast kernels are off, so %s slower: %s does not fit this "
                    "machine or version (%s)"
                )
                log.warning(
                    why + "; install atoll again (in its source tree: pip install -e .)",
                    slower,
                    path,
                    error,
                )
                return None
    return None


def address(x: Tensor, elements: int) -> int:
    """Where the ``elements`` float32 values of ``x`` lie, for a kernel that reads or writes them
    one after another.

    Raises LocalProtocolError for a tensor whose memory is anything else: another type, another
    device, strides, another length.
    """
    if (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and x.numel() == elements
        and x.is_contiguous()
    ):
        return x.data_ptr()
    raise LocalProtocolError(
        f"a kernel takes {elements} contiguous float32 values on the CPU, not {described(x)}"
    )


def address_of_rows(rows: Tensor) -> tuple[int, int]:
    """Where the first of the rows lies, and how many elements further the next one. ``rows``:
    float32 (n, d), each row contiguous.

    Raises LocalProtocolError for a tensor whose memory is anything else.
    """
    if (
        rows.dtype is torch.float32
        and rows.device.type == "cpu"
        and rows.dim() == 2
        and (rows.shape[1] < 2 or rows.stride(1) == 1)
        and (rows.shape[0] < 2 or rows.stride(0) >= rows.shape[1])
    ):
        return rows.data_ptr(), rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
    raise LocalProtocolError(
        f"a kernel takes float32 rows on the CPU, each contiguous, not {described(rows)}"
    )


def described(x: Tensor) -> str:
    """Type, shape, strides and device of a tensor."""
    kind = str(x.dtype).removeprefix("torch.")
    return f"{kind} of shape {tuple(x.shape)} with strides {x.stride()} on {x.device}"
