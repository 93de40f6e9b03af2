"""Whether two members read the same data in the same order. A digest of each round's first batch
goes to the node, which compares it with the others' (`node.run.same_order`).

What a plain loop reads nobody sees. There the gradients before a round's first step are what is
digested: members that start from one anchor have equal ones if they read the same, on machines of
one kind and without dropout that differs. Where one of them makes fewer steps in a round than the
other, as the slower one does, it reads the same order some batches later from then on. So the node
of who is ahead is also told what its script has read, `MOST_READ` batches at most, and finds the
other's first ones among them. Gradients do not show that: by then their anchors are unlike.

The digest is salted with the run and the round, so it tells who has not the same batch nothing but
whether it is the same. It is never made in a run with [privacy], [secure] or a federated method.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from blake3 import blake3
from torch import Tensor

from ...collectives.digest import batch_digest
from ...collectives.script_swarm import Swarm

MOST_ELEMENTS = 1 << 20  # of a tensor that are looked at
REMEMBERED = 64  # rounds
MOST_READ = 2048  # batches that a node is told of, all together
GRADIENTS, SAMPLED = 16, 64  # that are looked at, about; elements of each


class FirstBatches:
    """Of one attachment."""

    def __init__(self, swarm: Swarm) -> None:
        settings = swarm.settings
        shows = settings.secure is None and settings.privacy is None and settings.site is None
        # what has no node to tell, such as a SoloSwarm or a rank that is not the first, has none
        self._tell = getattr(swarm, "first_batch", None) if shows else None
        self._tell_read = getattr(swarm, "read_batch", None) if shows else None
        self._run, self._round, self._read = swarm.run_id, -1, 0
        self._before = deque[bytes](maxlen=REMEMBERED)  # gradients that were told

    def saw(self, batch: Any, round_: int) -> None:
        """``batch`` is read in the round after ``round_`` committed ones. The first of a round is
        told.
        """
        if self.wants(round_):
            self._show(content := content_of(batch), round_)
        elif self._tell_read is not None and self._read < MOST_READ and _on_host(batch):
            content = content_of(batch)
        else:
            return
        if content is not None and self._tell_read is not None and self._read < MOST_READ:
            self._read += 1
            self._tell_read(content)

    def wants(self, round_: int) -> bool:
        """Whether nothing was seen yet in the round after ``round_`` committed ones."""
        return self._tell is not None and round_ != self._round

    def trained(self, parameters: Sequence[Tensor], round_: int) -> None:
        """A step is made with the gradients of these: told where no batch was seen before. None
        that were told before: where training stands still they say nothing of what is read.
        """
        if not self.wants(round_):
            return
        content = gradients_of(parameters)
        known = content is None or content in self._before
        if content is not None and not known:
            self._before.append(content)
        self._show(None if known else content, round_)

    def _show(self, content: bytes | None, round_: int) -> None:
        self._round = round_
        if content is not None and self._tell is not None:
            self._tell(round_, batch_digest(self._run, round_, content))


def content_of(batch: Any) -> bytes | None:
    """A hash of the tensors, numbers and texts in a batch; None where it holds none. Of a tensor of
    more than `MOST_ELEMENTS` it looks at so many, evenly spaced.
    """
    hasher = blake3()
    return hasher.digest() if _add(hasher, batch) else None


@torch.no_grad()
def gradients_of(parameters: Sequence[Tensor]) -> bytes | None:
    """A hash of some elements of some gradients; None where these say nothing: none, all zero, or
    not finite.
    """
    step = max(1, len(parameters) // GRADIENTS)
    parts = dict[torch.device, list[Tensor]]()
    for parameter in parameters[::step]:
        grad = parameter.grad
        if grad is None or grad.layout is not torch.strided or hasattr(grad, "device_mesh"):
            continue
        flat = grad.reshape(-1)
        part = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].float()
        parts.setdefault(part.device, []).append(part)
    if not parts:
        return None
    values = torch.cat([torch.cat(each).cpu() for each in parts.values()])
    if not (values.any() and values.isfinite().all()):
        return None
    return blake3(values.numpy().tobytes()).digest()


def _on_host(part: Any) -> bool:
    """Whether no tensor of a batch has to be waited for."""
    if isinstance(part, Tensor):
        return part.device.type == "cpu"
    if isinstance(part, Mapping):
        part = cast("Mapping[Any, Any]", part).values()
    elif not isinstance(part, (list, tuple)):
        return True
    return all(_on_host(each) for each in cast("Iterable[Any]", part))


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
