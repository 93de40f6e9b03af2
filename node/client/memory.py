"""A script's mappings of an opened run. They outlive the node: a script whose node was killed still
reads what it had leased.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType

from blake3 import blake3

from ...collectives.errors import LocalProtocolError
from ..control.descriptors import Descriptor, let_go, received
from ..control.protocol import opened_fds
from ..control.shared_memory import (
    SLOTS,
    AnchorSlot,
    ReadOnlyFloats,
    WritableFloats,
    map_bytes,
)
from .eager import eager
from .reclaiming import Reclaiming

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.codecs.encoded import EncodedVector
    from .link import Link
    from .pending import ReduceTicket

MAPPED = 8  # mappings kept: contribution and result of a few operations at once


class RunMemory:
    """The contribution buffer of one session, float32 of the whole model, and the anchor slots of
    each fragment. Takes ``fds`` over.

    ``numels``: length of each fragment.
    """

    def __init__(self, fds: Sequence[int | Descriptor], numels: Sequence[int]) -> None:
        contribution, *slots = received(fds, opened_fds(len(numels)))
        self.contribution = WritableFloats(contribution, sum(numels))
        self.bounds = [
            (stop - numel, stop) for numel, stop in zip(numels, accumulate(numels), strict=True)
        ]
        self.slots = [
            [ReadOnlyFloats(slots.pop(0), numel) for _ in range(SLOTS)] for numel in numels
        ]


class VectorEncoding(NamedTuple):
    """How a vector is encoded."""

    codec: str
    numel: int
    chunk_elements: int


class ReductionMemory:
    """A script's mappings of contributions and results of reductions, kept by number: made anew,
    every page would fault in again.
    """

    def __init__(self) -> None:
        # The newest last.
        self._mapped: dict[int, tuple[tuple[VectorEncoding, bool], EncodedVector]] = {}
        self._lock = threading.RLock()  # any thread may call, and a signal handler within

    def contribution(
        self, number: int, fd: int | Descriptor, chunking: VectorEncoding
    ) -> EncodedVector:
        """Where to encode a contribution. Takes ``fd`` over."""
        return self._map(number, fd, chunking, writable=True)

    def result(self, number: int, fd: int | Descriptor, chunking: VectorEncoding) -> EncodedVector:
        """What to decode; it cannot be written to. Takes ``fd`` over."""
        return self._map(number, fd, chunking, writable=False)

    def _map(
        self, number: int, fd: int | Descriptor, chunking: VectorEncoding, *, writable: bool
    ) -> EncodedVector:
        from ...collectives.codecs import codec  # loads torch, as the caller has
        from ...collectives.codecs.encoded import EncodedVector

        with self._lock:
            known = self._mapped.pop(number, None)
            if known is not None and known[0] == (chunking, writable):
                let_go(fd)
                vector = known[1]
            else:
                chunks = (
                    codec.Chunking(*chunking) if writable else codec.Chunking(*chunking).results
                )
                vector = EncodedVector(
                    chunks,
                    memoryview(map_bytes(fd, chunks.nbytes, writable=True, copy=not writable)),
                )
            self._mapped[number] = (chunking, writable), vector
            while len(self._mapped) > MAPPED:
                del self._mapped[next(iter(self._mapped))]
        return vector


class Attached:
    """A connection with an open session, and its memory.

    Attributes: ``operations``: its operations by id, from before the node is asked to open one
    until it is asked to close it (with ``closing`` held): a second call of an id that is in there
    is refused. So whoever closes an id closes its own operation, and no other call's. A dead
    reference is an operation that the script has let go of, and the node does not know that yet.
    """

    def __init__(self, link: Link, memory: RunMemory) -> None:
        self.link = link
        self.memory = memory
        self.reductions = ReductionMemory()
        self.reclaiming = Reclaiming(memory.contribution, memory.bounds)
        self.operations: dict[str, ReferenceType[ReduceTicket]] = {}
        self.closing = threading.RLock()


def copy_range(vector: EncodedVector, destination: Tensor, start: int) -> None:
    """Decode elements [start, start + destination.numel()) into ``destination``: float32,
    contiguous, on the CPU or a GPU.
    """
    import torch  # the caller has it

    # Each step of torch gives up the interpreter's lock.
    plain = destination.dim() == 1 and not destination.requires_grad
    chunking, out = vector.chunking, destination if plain else destination.detach().view(-1)
    if start == 0 and out.numel() == chunking.numel:
        return vector.decode(out)
    scratch = torch.empty(
        min(chunking.chunk_elements, chunking.numel), dtype=torch.float32, device="cpu"
    )
    for chunk in range(
        start // chunking.chunk_elements, -(-(start + out.numel()) // chunking.chunk_elements)
    ):
        first = chunk * chunking.chunk_elements
        values = scratch[: min(chunking.chunk_elements, chunking.numel - first)]
        chunking.codec(chunk).decode(vector.wire(chunk), values)
        low, high = max(start, first), min(start + out.numel(), first + values.numel())
        out[low - start : high - start] = values[low - first : high - first]
    return None


class SlotView:
    """An AnchorView on one leased slot. The node never writes it before `release`, not even when
    the connection is lost.
    """

    def __init__(
        self, memory: RunMemory, slot: AnchorSlot, give_back: Callable[[], None], fragment: int = 0
    ) -> None:
        start, stop = memory.bounds[fragment]
        self.round, self.fragment, self.start, self.numel = (
            slot.round,
            fragment,
            start,
            stop - start,
        )
        self.samples, self.lag, self.steps, self._digest = (
            slot.samples,
            slot.lag,
            slot.steps,
            slot.digest,
        )
        self._floats: ReadOnlyFloats | None = memory.slots[fragment][slot.slot]
        self._give_back = give_back

    @property
    def digest(self) -> str:
        """blake3 of the anchor's bytes in hex; computed when first asked, unless known."""
        if not self._digest:
            self._digest = self._held().digest()
        return self._digest

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """Raises LocalProtocolError after `release`, or when range or destination do not fit."""
        with eager():
            self._held().copy_into(destination, start)

    def feed(self, digest: blake3) -> None:
        """Add its bytes to a digest."""
        self._held().feed(digest)

    def _held(self) -> ReadOnlyFloats:
        if self._floats is None:
            raise LocalProtocolError("this view of the anchor was released")
        return self._floats

    @property
    def held(self) -> bool:
        """Whether it can still be read."""
        return self._floats is not None

    def release(self) -> None:
        if self._floats is not None:
            self._give_back()
            self._floats = None


class WholeView:
    """An AnchorView on all fragments: its round is that of the one that is behind."""

    def __init__(self, views: Sequence[SlotView]) -> None:
        self._views = views
        self.round, self.samples = (
            min(view.round for view in views),
            min(view.samples for view in views),
        )
        self.lag, self.steps = views[0].lag, views[0].steps
        self.numel = sum(view.numel for view in views)

    @property
    def digest(self) -> str:
        """blake3 of all bytes, in hex; computed when asked for."""
        digest = blake3()
        for view in self._views:
            view.feed(digest)
        return digest.hexdigest()

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """Raises LocalProtocolError as `SlotView` does."""
        stop = start + destination.numel()
        if start < 0 or stop > self.numel:
            raise LocalProtocolError(f"no elements [{start}, {stop}) of an anchor of {self.numel}")
        flat = destination.detach().view(-1)
        for view in self._views:
            low, high = max(start, view.start), min(stop, view.start + view.numel)
            if low < high:
                view.copy_into(flat[low - start : high - start], low - view.start)

    def release(self) -> None:
        for view in self._views:
            view.release()
