"""What rank 0 says is heard by all ranks: the answers to its questions, and the errors that it met.

Over a gloo group of its own, in msgpack. Every call is one of all ranks, in the same order, as
torch's own collectives are.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...collectives import errors
from ...collectives.errors import AtollError, ConfigError

T = TypeVar("T")

FIRST_BYTES = 256  # of a message; most need no second broadcast
# Rank 0 may wait for a round as long as its deadline says; one that dies is noticed at once.
WAIT = timedelta(days=1)


class _Failed(msgspec.Struct, array_like=True):
    """An AtollError."""

    kind: str
    message: str
    why: str
    hint: str
    key: str

    @classmethod
    def of(cls, error: AtollError) -> _Failed:
        return cls(
            type(error).__name__,
            error.message,
            error.why,
            error.hint,
            str(getattr(error, "key", "")),
        )

    def error(self) -> AtollError:
        kind: type[AtollError] = getattr(errors, self.kind, AtollError)
        error = (
            ConfigError(self.message, key=self.key) if kind is ConfigError else kind(self.message)
        )
        error.why, error.hint = self.why, self.hint
        return error


class Ranks:
    """The processes of this job. ``rank`` and ``size`` are those of torch.distributed's default
    group, which must be there.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=WAIT)

    def tell(self, ask: Callable[[], T], kind: Any) -> T:
        """What ``ask`` returns at rank 0, or raises there (AtollError), at all ranks. ``kind``: its
        type, for msgspec.
        """
        if self.rank:
            return self.hear(kind)
        try:
            answer = ask()
        except AtollError as error:
            self.say(_Failed.of(error), failed=True)
            raise
        self.say(answer)
        return answer

    def say(self, message: Any, *, failed: bool = False) -> None:
        """Rank 0: one message to all."""
        data = msgspec.msgpack.encode(message)
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8, device="cpu")
        head = bytes([failed]) + len(data).to_bytes(8, "little") + data[: FIRST_BYTES - 9]
        first[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        dist.broadcast(first, 0, group=self._group)
        if rest := data[FIRST_BYTES - 9 :]:
            dist.broadcast(
                torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0, group=self._group
            )

    def hear(self, kind: Any) -> Any:
        """The other ranks: rank 0's next message, a ``kind``. Raises the error it carries."""
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8, device="cpu")
        dist.broadcast(first, 0, group=self._group)
        head = first.numpy().tobytes()
        length = int.from_bytes(head[1:9], "little")
        data = head[9 : 9 + length]
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8, device="cpu")
            dist.broadcast(rest, 0, group=self._group)
            data += rest.numpy().tobytes()
        if head[0]:
            raise msgspec.msgpack.decode(data, type=_Failed).error()
        return msgspec.msgpack.decode(data, type=kind)

    def total(self, count: int) -> int:
        """The sum of all ranks' counts."""
        sums = torch.tensor([count], dtype=torch.int64, device="cpu")
        dist.all_reduce(sums, group=self._group)
        return int(sums[0])

    def gathered(self, mine: Any, kind: Any) -> list[Any]:
        """Every rank's value, by rank, at all ranks."""
        data = msgspec.msgpack.encode(mine)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(
            lengths, torch.tensor([len(data)], dtype=torch.int64, device="cpu"), group=self._group
        )
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        texts = (
            part.numpy().tobytes()[: int(length)]
            for part, length in zip(parts, lengths, strict=True)
        )
        return [msgspec.msgpack.decode(text, type=kind) for text in texts]

    def agreed(self, found: str) -> str:
        """The first of the ranks' texts that is not empty, at all ranks; "" when all are."""
        return next((text for text in self.gathered(found, str) if text), "")

    def send(self, values: Tensor, rank: int) -> None:
        """A float32 vector to one rank, which must `receive` it."""
        if values.numel():
            dist.send(values, rank, group=self._group)

    def receive(self, values: Tensor, rank: int) -> None:
        """Fill ``values`` with what that rank sends."""
        if values.numel():
            dist.recv(values, rank, group=self._group)
