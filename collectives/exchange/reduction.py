"""Measuring or reducing one chunk: all that the plan wants in it, in its order, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs.codec import EncodedChunk
from ..identifiers import PeerId
from ..reduce import Statistics
from .pool import Workspace
from .routes import Job
from .slot import FrozenVector, PlanState

Source = tuple[PeerId, bytes]


class ChunkReducer:
    """Reduces chunks. Owns scratch memory: one encoded chunk for my own contribution, decoded rows
    only for reducers that need them.
    """

    def __init__(self) -> None:
        self._workspace = Workspace()  # for my own contribution
        self._rows: Tensor | None = None
        self._out: Tensor | None = None

    def reduce(
        self, state: PlanState, chunk: int, own: FrozenVector | None, out: EncodedChunk
    ) -> list[EncodedChunk] | Source:
        """Write the encoded result, or partial sum, of a chunk to ``out``. Returns what it is made
        of, until the next call, or the contribution that made it impossible.

        My own contribution goes through its encoding like everybody's, so the result depends on
        encoded bytes alone.
        """
        job = state.job(chunk)
        wires = self._wires(state, job, chunk, own)
        if isinstance(wires, tuple):
            return wires
        if self._combine(state, job, chunk, wires, out):
            return wires
        if state.slot.overflows and self._given_finite(state, job, chunk, wires):
            state.overflowed = True
            return wires
        return self._culprit(state, job, chunk, wires)

    def _given_finite(
        self, state: PlanState, job: Job, chunk: int, wires: Sequence[EncodedChunk]
    ) -> bool:
        """Whether all contributions are, whatever has become of sums of them."""
        codec, cids = state.slot.chunking.codec(chunk), {c.cid for c in state.plan.contributors}
        return all(
            codec.finite(wire)
            for (_, cid, _), wire in zip(job.sources, wires, strict=True)
            if cid in cids
        )

    def measure(
        self, state: PlanState, chunk: int, own: FrozenVector | None
    ) -> Statistics | Source:
        """The statistics of a chunk of my part, or the contribution that made them impossible."""
        job, codec = state.job(chunk), state.slot.chunking.codec(chunk)
        wires = self._wires(state, job, chunk, own)
        if isinstance(wires, tuple):
            return wires
        assert state.reducer.form == "two-phase"
        if not all(codec.finite(wire) for wire in wires):
            return self._culprit(state, job, chunk, wires)
        return state.reducer.measure(self._decoded(state, chunk, wires))

    def measure_own(
        self, state: PlanState, chunk: int, own: FrozenVector | None
    ) -> Statistics | Source:
        """The statistics of my contribution to a chunk of another's part, or not finite."""
        assert state.reducer.form == "two-phase"
        assert own is not None
        wire, finite = own.wire(state.slot, chunk, self._workspace)
        return (
            state.reducer.measure(self._decoded(state, chunk, [wire]))
            if finite
            else (state.me, own.cid)
        )

    def _wires(
        self, state: PlanState, job: Job, chunk: int, own: FrozenVector | None
    ) -> list[EncodedChunk] | Source:
        """All that is added up for a chunk, encoded; or who I am, where my own contribution is not
        finite.
        """
        wires: list[EncodedChunk] = []
        for peer, cid, held in job.sources:
            if cid == job.own_cid:
                assert own is not None
                # No sum hides what is not finite.
                look = job.factors is None
                wire, finite = own.wire(state.slot, chunk, self._workspace, look=look)
                if not finite:
                    return (peer, cid)
                wires.append(wire)
            else:
                wires.append(held[chunk])
        return wires

    def _combine(
        self,
        state: PlanState,
        job: Job,
        chunk: int,
        wires: Sequence[EncodedChunk],
        out: EncodedChunk,
    ) -> bool:
        codec, results = state.slot.chunking.codec(chunk), state.slot.results.codec(chunk)
        if job.factors is not None:
            return codec.weighted_mean(wires, job.factors.multipliers, job.factors.divisor, out)
        weighing = state.measuring.weighing if state.measuring is not None else None
        used = (
            [index for index, factor in enumerate(weighing.factors.multipliers) if factor]
            if weighing and weighing.factors
            else []
        )
        if weighing is not None and weighing.factors is not None and used:
            multipliers = [weighing.factors.multipliers[index] for index in used]
            return codec.weighted_mean(
                [wires[index] for index in used], multipliers, weighing.factors.divisor, out
            )
        rows = self._decoded(state, chunk, wires)
        assert self._out is not None
        result = self._out[: out.elements]
        if weighing is not None:
            result.zero_() if weighing.factors is not None else weighing.reduce(rows, result)
            return results.encode(result, out)
        assert state.reducer.form == "rows"
        state.reducer.reduce(rows, job.weights, result)
        return all(codec.finite(wire) for wire in wires) and results.encode(result, out)

    def _decoded(self, state: PlanState, chunk: int, wires: Sequence[EncodedChunk]) -> Tensor:
        """float32 (contributors, elements), until the next call."""
        codec, elements, count = state.slot.chunking.codec(chunk), wires[0].elements, len(wires)
        if (
            self._rows is None
            or self._out is None
            or self._rows.shape[0] < count
            or self._rows.shape[1] < elements
        ):
            self._rows = torch.empty(count, elements, dtype=torch.float32, device="cpu")
            self._out = torch.empty(elements, dtype=torch.float32, device="cpu")
        rows = self._rows[:count, :elements]
        for row, wire in zip(rows.unbind(0), wires, strict=True):
            codec.decode(wire, row)
        return rows

    def _culprit(
        self, state: PlanState, job: Job, chunk: int, wires: Sequence[EncodedChunk]
    ) -> Source:
        """Whose values made the result overflow: the first that is not finite, else the largest."""
        codec = state.slot.chunking.codec(chunk)
        worst, largest = 0, -1.0
        for index, wire in enumerate(wires):
            if not codec.finite(wire):
                worst = index
                break
            values = torch.empty(wire.elements, dtype=torch.float32, device="cpu")
            codec.decode(wire, values)
            magnitude = values.abs_().max().item()
            if magnitude > largest:
                worst, largest = index, magnitude
        peer, cid, _ = job.sources[worst]
        return (peer, cid)


NOT_FINITE = "contribution is not finite, or not what its codec makes"
