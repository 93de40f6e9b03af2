"""The seam of codecs: what one does, and the typed views of encoded bytes it works on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# lengths a codec keeps work space for: a run has one chunk length, a shorter last chunk, and a few
# mixed ones
MAX_SCRATCH = 16
NO_BYTES = memoryview(b"")


class EncodedChunk:
    """Typed views of one encoded chunk, made once and used often.

    ``data``: its bytes, writable, exactly ``wire_bytes(elements)``; empty when the wire lies in a
    device's memory. The other fields are the codec's own: ``values`` the encoded values; ``scales``
    one a block; ``columns`` the scales as (rows, 1), one tensor a shape of block; ``unit`` what
    scales are relative to; ``tail`` the padding; ``parts`` the pieces of a mixed chunk.
    """

    __slots__ = ("columns", "data", "elements", "parts", "scales", "tail", "unit", "values")

    def __init__(
        self,
        data: memoryview | Tensor,
        elements: int,
        values: Tensor,
        scales: Tensor | None = None,
        columns: tuple[Tensor, ...] = (),
        *,
        unit: Tensor | None = None,
        tail: Tensor | None = None,
        parts: tuple[EncodedChunk, ...] = (),
    ) -> None:
        self.data = NO_BYTES if isinstance(data, Tensor) else data
        self.elements = elements
        self.values = values
        self.scales = scales
        self.columns = columns
        self.unit = unit
        self.tail = tail
        self.parts = parts


class LazyWire(EncodedChunk):
    """A wire whose views are made when somebody looks at them: compiled kernels need only its
    address, and views cost more than short work.
    """

    __slots__ = ("_make", "address")

    def __init__(
        self, data: memoryview, elements: int, make: Callable[[memoryview, int], EncodedChunk]
    ) -> None:
        self.data, self.elements, self._make = data, elements, make
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        if self.address % 4:
            raise ValueError("a wire's bytes are aligned to 4")

    def __getattr__(self, name: str) -> Any:  # only for a slot that is still empty
        wire = self._make(self.data, self.elements)
        for slot in EncodedChunk.__slots__:
            setattr(self, slot, getattr(wire, slot))
        return object.__getattribute__(self, name)


class Codec(Protocol):
    """A chunk of float32 values ⇄ wire bytes. Lossy or not, decoding depends on the bytes alone,
    and any bytes of the right length decode.

    Buffers are wrapped once in a `EncodedChunk` and used often; nothing is allocated in the loop. A
    codec owns scratch memory, so it belongs to one thread. Values and wire may both lie in a
    device's memory; the bits are the same as on the CPU.
    """

    name: str
    zero_copy: bool
    """Whether the wire bytes of a float32 chunk are that chunk's own memory."""

    @property
    def results(self) -> Codec:
        """The codec of a mean over encoded values: this one, unless means lie off its chunking."""
        ...

    def wire_bytes(self, elements: int) -> int:
        """Length of ``elements`` encoded values, a multiple of 4."""
        ...

    def wire(self, data: memoryview | Tensor, elements: int) -> EncodedChunk:
        """Views of exactly ``wire_bytes(elements)`` bytes, aligned to 4: a writable buffer, or a
        uint8 tensor on any device. No copy.
        """
        ...

    def encode(self, x: Tensor, out: EncodedChunk) -> bool:
        """Encode x (float32, shape (elements,), of any strides). False when an encoded value is not
        finite: such bytes must not be sent.

        Raises LocalProtocolError for another type, length or device than the wire's, where a
        compiled kernel would read it.
        """
        ...

    def decode(self, wire: EncodedChunk, out: Tensor, *, cold: bool = False) -> None:
        """Decode into out (float32, shape (elements,), contiguous). ``cold``: nobody will read it
        soon, so it need not pass the caches.

        Raises LocalProtocolError for a target that a compiled kernel cannot write to: another type,
        length or device, strides.
        """

    def accumulate(
        self, wire: EncodedChunk, weight: float, acc: Tensor, *, first: bool = False
    ) -> None:
        """acc += weight * decoded, each operation rounded by itself; ``first``: acc = weight *
        decoded. acc: float32 (elements,).
        """

    def weighted_mean(
        self,
        wires: Sequence[EncodedChunk],
        weights: Sequence[float],
        divisor: float,
        out: EncodedChunk,
    ) -> bool:
        """Encode (sum over i of weights[i] * decoded(wires[i])) / divisor, in this order, as
        `results` does: ``out`` is a wire of it.

        False when the result is not finite.
        """
        ...

    def finite(self, wire: EncodedChunk) -> bool:
        """Whether all values of an encoded chunk, whoever made it, decode to finite numbers. (False
        also for bytes that no encoder makes, where a codec can tell.)"""
        ...


class Scratch(Generic[T]):
    """Work space by (length, device), made on first use, at most `MAX_SCRATCH` of them."""

    def __init__(self, make: Callable[[int, torch.device], T]) -> None:
        self._make = make
        self._made: dict[tuple[int, torch.device], T] = {}

    def get(self, elements: int, device: torch.device) -> T:
        """The work space for chunks of this length."""
        key = (elements, device)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MAX_SCRATCH:
                self._made.clear()
            found = self._made[key] = self._make(elements, device)
        return found


def view(data: memoryview | Tensor, dtype: torch.dtype, count: int, offset: int = 0) -> Tensor:
    """``count`` values of ``dtype`` that lie ``offset`` bytes into a buffer or a uint8 tensor."""
    if isinstance(data, Tensor):
        return data[offset : offset + count * dtype.itemsize].view(dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset)


def tail_of(data: memoryview | Tensor, used: int) -> Tensor | None:
    """The padding behind ``used`` bytes, if there is any. It is hashed like the rest, so it is
    never left to chance.
    """
    left = len(data) - used
    return view(data, torch.uint8, left, used) if left else None


def padded(nbytes: int) -> int:
    """The next multiple of 4."""
    return -(-nbytes // 4) * 4


def check_length(codec: Codec, data: memoryview | Tensor, elements: int) -> None:
    """Raises ValueError unless the buffer has the length of ``elements`` encoded values."""
    if elements < 1 or len(data) != codec.wire_bytes(elements):
        raise ValueError(f"{len(data)} bytes cannot hold {elements} values of {codec.name}")
