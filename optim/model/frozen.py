"""What lies frozen under a model's trained parameters: one digest, the same at all members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import torch
from blake3 import blake3
from torch import Tensor

from ...collectives.errors import ConfigError

CHUNK = 1 << 22  # elements hashed at a time
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # those whose values float32 holds


def base_digest(frozen: Sequence[tuple[str, Tensor]], how: Literal["values", "shapes"]) -> bytes:
    """blake3 of frozen parameters, in their order; b"" where there are none.

    "values": names, shapes and values. A value counts and not its type: bfloat16 weights are the
    base that the same weights are in float32. "shapes": names and shapes only, those from before
    packing where a parameter is quantised. Raises ConfigError for values that cannot be read: on
    the meta device, or packed.
    """
    if not frozen:
        return b""
    found = blake3(b"atoll/base/1/" + how.encode(), max_threads=blake3.AUTO)
    for name, tensor in frozen:
        packed = getattr(tensor, "quant_state", None)
        shape = tuple(getattr(packed, "shape", tensor.shape))
        found.update(f"\0{name}\0{[int(dim) for dim in shape]}\0".encode())
        if how == "values":
            if packed is not None or tensor.device.type == "meta":
                raise ConfigError(
                    f"the frozen parameter {name} "
                    + ("is quantised" if packed is not None else "has no values here"),
                    key="$.adapters.base",
                    why="Members compare the values of what is frozen, and these cannot be read.",
                    hint=(
                        'base = "shapes" under [adapters] in the run\'s manifest (another run): '
                        "then names and shapes are compared, and each member sees to its values"
                    ),
                )
            try:
                for data in _bytes_of(tensor.detach()):
                    found.update(data)
            except (RuntimeError, TypeError, ValueError) as error:  # torch cannot read this kind
                raise ConfigError(
                    f"the frozen parameter {name} ({tensor.dtype}, {tensor.layout}) cannot be read:"
                    f" {str(error).strip().partition(chr(10))[0][:300]}",
                    key="$.adapters.base",
                    why="Members compare the values of what is frozen.",
                    hint=(
                        'base = "shapes" under [adapters] in the run\'s manifest (another run): '
                        "then names and shapes are compared, and each member sees to its values"
                    ),
                ) from error
    return found.digest()


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    whole = getattr(tensor, "full_tensor", None)  # a DTensor: all ranks ask for it, in one order
    flat = (tensor if whole is None else cast("Tensor", whole())).reshape(-1)
    for at in range(0, flat.numel(), CHUNK):
        part = flat[at : at + CHUNK].cpu()
        part = part.float() if part.dtype in FLOATS else part.contiguous().view(torch.uint8)
        yield part.contiguous().numpy().data.cast("B")
