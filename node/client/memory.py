"""A script's mappings of an opened run. They outlive the node: a script whose node was killed still reads what it had leased."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...collectives.errors import LocalProtocolError
from ..control.protocol import OPENED_FDS
from ..shared_memory import AnchorSlot, ReadOnlyFloats, WritableFloats, received

if TYPE_CHECKING:
    from torch import Tensor


class RunMemory:
    """The contribution buffer and the anchor slots of one session; float32, shape (numel,). Takes ``fds`` over."""

    def __init__(self, fds: list[int], numel: int) -> None:
        contribution, *slots = received(fds, OPENED_FDS)
        self.numel = numel
        self.contribution = WritableFloats(contribution, numel)
        self.slots = [ReadOnlyFloats(fd, numel) for fd in slots]


class SlotView:
    """An AnchorView on one leased slot. The node never writes it before `release`, not even when the connection is lost."""

    def __init__(self, memory: RunMemory, slot: AnchorSlot, give_back: Callable[[], None]) -> None:
        self.round = slot.round
        self._digest = slot.digest
        self.numel = memory.numel
        self._floats: ReadOnlyFloats | None = memory.slots[slot.slot]
        self._give_back = give_back

    @property
    def digest(self) -> str:
        """blake3 of the anchor's bytes, in hex; computed when first asked for, unless the node knew it."""
        if not self._digest:
            self._digest = self._held().digest()
        return self._digest

    @property
    def released(self) -> bool:
        """Whether the lease was given back."""
        return self._floats is None

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """See AnchorView. Raises LocalProtocolError after `release`, or when range or destination do not fit."""
        self._held().copy_into(destination, start)

    def _held(self) -> ReadOnlyFloats:
        if self._floats is None:
            raise LocalProtocolError("this view of the anchor was released")
        return self._floats

    def release(self) -> None:
        """See AnchorView."""
        if self._floats is not None:
            self._floats = None
            self._give_back()
