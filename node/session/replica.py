"""Anchor and outer momentum of one run, in generations: what the node owns of a model."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...collectives.codecs.codec import Chunking
from ...collectives.digest import chunk_hash
from ...collectives.errors import DigestMismatchError
from ...collectives.group import Entry
from ...collectives.layout import Layout
from ...collectives.outer_rules import OuterSettings
from ...optim.outer import OuterStep

MIB = 1 << 20


def state_chunk_bytes(numel: int) -> int:
    """Chunk size of a state in transfer: 1 MiB, 4 MiB above 64M parameters (so that its hashes fit
    one message).
    """
    return MIB if numel <= 64 * MIB else 4 * MIB


class Slots(Protocol):
    """Three generations of the anchor, float32 (numel,); a leased one is never written
    (`node.shared_memory.AnchorSlots`).
    """

    def next_slot(self) -> int:
        """A slot that is neither current nor leased."""
        ...

    def tensor(self, slot: int) -> Tensor:
        """The slot's memory, float32 (numel,)."""
        ...

    def publish(self, slot: int, round_: int, digest: str) -> Any:
        """Make the slot current."""
        ...


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return tensor.numpy().data.cast("B")


class ModelReplica:
    """State of one run at one node: anchor generations in ``slots``, the outer step's state beside
    them. ``generation``: the round whose state scripts see, -1 before there is one; ``applied``:
    the round whose entry was applied last. `apply`, `hashes` and `snapshot` are heavy.
    """

    def __init__(self, layout: Layout, outer: OuterSettings, slots: Slots) -> None:
        self.layout, self.slots = layout, slots
        self.generation = -1
        self.applied = -1
        self._step = OuterStep(outer, layout)
        self.momentum = torch.zeros(
            self._step.state_numel(layout.numel), dtype=torch.float32, device="cpu"
        )
        self._slot = 0  # of the newest applied generation
        self._chunking = lru_cache(1)(Chunking)
        # Hashes of chunks of a state that no step reads or writes, by where they start.
        self._unchanging: dict[int, bytes] = {}

    @property
    def anchor(self) -> Tensor:
        """The newest applied anchor, float32 (numel,)."""
        return self.slots.tensor(self._slot)

    def initialise(self, values: Tensor) -> None:
        """Set the initial parameters: the state after the genesis."""
        self._slot = self.slots.next_slot()
        self.anchor.copy_(values)
        self.applied = 0

    def apply(self, entry: Entry, result: memoryview | None) -> None:
        """Outer step of a decided entry, chunk by chunk, in a fixed order of separately rounded
        operations. Scripts see it after `publish`.
        """
        target = self.slots.next_slot()
        if result is None:
            self.slots.tensor(target).copy_(self.anchor)  # only the configuration changed
        else:
            means = self._chunking(entry.codec, entry.numel, entry.chunk_elements).results.decode(
                result
            )
            reported = [(c.weight, c.reading) for c in entry.contributors]
            out = self.slots.tensor(target)
            self._step.run(self.anchor, means, self.momentum, out, reported, entry.round)
        self._slot = target
        self.applied = entry.round

    @property
    def plain_since(self) -> int:
        """The entry from which on the governor takes the plain mean; 0: it does not."""
        return self._step.plain_since(self.momentum, self.layout.numel)

    def publish(self, round_: int) -> None:
        """Make the newest applied generation current for scripts. Idempotent."""
        if round_ == self.generation:
            return
        self.generation = round_
        self.slots.publish(self._slot, round_, "")

    def hashes(self) -> list[bytes]:
        """blake3 of each chunk of the state: the anchor's bytes, then the momentum's."""
        anchor, momentum = bytes_of(self.anchor), bytes_of(self.momentum)
        step = state_chunk_bytes(self.layout.numel)
        size = len(anchor)
        length = len(anchor) + len(momentum)
        hashes = list[bytes]()
        for start in range(0, length, step):
            stop = min(start + step, length)
            if start < size < stop:
                hashes.append(chunk_hash(bytes(anchor[start:]) + bytes(momentum[: stop - size])))
            elif stop <= size:
                hashes.append(chunk_hash(anchor[start:stop]))
            elif self._step.needs_momentum:
                hashes.append(chunk_hash(momentum[start - size : stop - size]))
            else:
                if start not in self._unchanging:
                    self._unchanging[start] = chunk_hash(momentum[start - size : stop - size])
                hashes.append(self._unchanging[start])
        return hashes

    def snapshot(self) -> memoryview:
        """A copy of the state's bytes."""
        size = 4 * self.layout.numel
        copy = np.empty(self._step.state_bytes(self.layout.numel), dtype=np.uint8)
        copy[:size] = np.frombuffer(bytes_of(self.anchor), dtype=np.uint8)
        copy[size:] = np.frombuffer(bytes_of(self.momentum), dtype=np.uint8)
        return copy.data

    def install(self, data: memoryview, round_: int) -> None:
        """Take over a state that was received and verified. Raises DigestMismatchError when its
        length is wrong.
        """
        size = 4 * self.layout.numel
        if len(data) != self._step.state_bytes(self.layout.numel):
            raise DigestMismatchError(
                f"state of {len(data)} bytes for a model of {self.layout.numel} elements"
            )
        self._slot = self.slots.next_slot()
        bytes_of(self.anchor)[:] = data[:size]
        bytes_of(self.momentum)[:] = data[size:]
        self._unchanging.clear()
        self.applied = round_


class PlainSlots:
    """Anchor slots in ordinary memory, for simulations. As those of a node they forget what is
    neither current nor being written: it becomes NaN, so that whoever reads it is found.
    """

    def __init__(self, numel: int) -> None:
        self._tensors = [torch.zeros(numel, dtype=torch.float32, device="cpu") for _ in range(3)]
        self.current: int | None = None
        self.leased: int | None = None
        self.round = -1
        self._writing: int | None = None

    def next_slot(self) -> int:
        """A slot that is neither current nor leased."""
        taken = self.current, self.leased
        self._writing = next(slot for slot in range(3) if slot not in taken)
        return self._writing

    def tensor(self, slot: int) -> Tensor:
        return self._tensors[slot]

    def publish(self, slot: int, round_: int, digest: str) -> None:
        self.current, self.round = slot, round_
        for idle in {0, 1, 2} - {slot, self.leased, self._writing}:
            self._tensors[idle].fill_(math.nan)
