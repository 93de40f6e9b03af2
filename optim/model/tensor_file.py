"""A safetensors file written from where its tensors lie, one after another: the library's own way
copies all of them into memory first, and refuses two that share it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...collectives.forced import make_folder, new_file, sync_folder

PIECE = 1 << 22  # elements on their way to the file
ALIGNED = 64  # bytes, as torch aligns memory of its own
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def can_be_written(tensor: Tensor) -> bool:
    """Whether a safetensors file can hold it: dense, with values, of a type that the format has."""
    return (
        tensor.dtype in CODES
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], mode: int = 0o600
) -> int:
    """Replace a file so that a crash leaves the old or the new one; its size in bytes. Raises
    OSError.
    """
    # Who maps the file computes with tensors where they lie in it, and some kernels add in another
    # order where memory is less aligned than torch's own. So lengths that keep the alignment come
    # first, then larger types, as the library does it: each of the rest is aligned to its elements.
    order = sorted(
        tensors,
        key=lambda name: (
            tensors[name].numel() * tensors[name].element_size() % ALIGNED != 0,
            -tensors[name].element_size(),
            name,
        ),
    )
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % ALIGNED)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    make_folder(path.parent)
    try:
        with new_file(temporary, mode) as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in order:
                flat = tensors[name].detach().reshape(-1)
                for at in range(0, flat.numel(), PIECE):
                    file.write(bytes_of(flat[at : at + PIECE]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return 8 + len(head) + end


def bytes_of(flat: Tensor) -> memoryview:
    """The values of a tensor of one dimension, as they stand in a file (little-endian)."""
    if sys.byteorder != "little":
        raise OSError("models are written on little-endian machines only")
    copied = flat.to("cpu", copy=True)  # numpy would make the memory of a live tensor unresizable
    return copied.view(torch.uint8).numpy().data
