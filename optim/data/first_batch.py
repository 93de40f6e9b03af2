"""Whether two members read the same data in the same order. A digest of each round's first batch
goes to the node, which compares it with the others' (`node.run.same_order`).

The digest is salted with the run and the round, so it tells who has not the same batch nothing but
whether it is the same. It is never made in a run with [privacy], [secure] or a federated method.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from blake3 import blake3
from torch import Tensor

from ...collectives.swarm import Swarm

DIGEST_BYTES = 16
MOST_ELEMENTS = 1 << 20  # of a tensor that are looked at
REMEMBERED = 64  # rounds


class FirstBatches:
    """Of one attachment."""

    def __init__(self, swarm: Swarm) -> None:
        settings = swarm.settings
        shows = settings.secure is None and settings.privacy is None and settings.site is None
        # what has no node to tell, such as a SoloSwarm or a rank that is not the first, has none
        self._tell = getattr(swarm, "first_batch", None) if shows else None
        self._run, self._round = swarm.run_id, -1
        self._before = deque[bytes](maxlen=REMEMBERED)

    def saw(self, batch: Any, round_: int) -> None:
        """``batch`` is read in the round after ``round_`` committed ones. The first of a round is
        told; none that was a round's first before: a small data set repeats by itself.
        """
        if self._tell is None or round_ == self._round:
            return
        self._round, content = round_, content_of(batch)
        if content is None or content in self._before:
            return
        self._before.append(content)
        salt = f"atoll/first-batch/{self._run}/{round_}/".encode()
        self._tell(round_, blake3(salt + content).digest(DIGEST_BYTES))


def content_of(batch: Any) -> bytes | None:
    """A hash of the tensors, numbers and texts in a batch; None where it holds none. Of a tensor of
    more than `MOST_ELEMENTS` it looks at so many, evenly spaced.
    """
    hasher = blake3()
    return hasher.digest() if _add(hasher, batch) else None


def _add(hasher: Any, part: Any) -> bool:
    """Whether anything was added."""
    if isinstance(part, Tensor):
        return _add_tensor(hasher, part)
    if isinstance(part, str | int | float):
        hasher.update(repr(part).encode())
        return True
    if isinstance(part, bytes):
        hasher.update(part)
        return True
    if isinstance(part, Mapping):
        part = cast("Mapping[Any, Any]", part).values()
    elif hasattr(part, "__array__"):
        return _add_tensor(hasher, torch.as_tensor(part))
    elif not isinstance(part, (list, tuple)):
        return False
    return any([_add(hasher, each) for each in cast("Iterable[Any]", part)])  # noqa: C419 (all)


def _add_tensor(hasher: Any, tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    flat = tensor.detach().reshape(-1)
    step = max(1, -(-flat.numel() // MOST_ELEMENTS))
    hasher.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    hasher.update(flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return True
