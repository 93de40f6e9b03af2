"""Reducing one chunk: all that the plan wants in it, in its order, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codec import Wire
from ..identifiers import PeerId
from .plans import PlanState
from .pool import Workspace
from .slot import Frozen
from .ways import Job

Source = tuple[PeerId, bytes]


class ChunkReducer:
    """Reduces chunks. Owns scratch memory: one encoded chunk for my own contribution, decoded rows only for reducers that need them."""

    def __init__(self) -> None:
        self._workspace = Workspace()  # for my own contribution
        self._rows: Tensor | None = None
        self._out: Tensor | None = None

    def reduce(self, state: PlanState, chunk: int, own: Frozen | None, out: Wire) -> Source | None:
        """Write the encoded result, or partial sum, of a chunk to ``out``. Returns None, or the contribution that made it impossible.

        My own contribution goes through its encoding like everybody's, so the result depends on encoded bytes alone.
        """
        wires: list[Wire] = []
        job = state.job(chunk)
        for peer, cid, held in job.sources:
            if cid == job.own_cid:
                assert own is not None
                wire, finite = own.wire(state.slot, chunk, self._workspace, look=job.factors is None)  # no sum hides what is not finite
                if not finite:
                    return (peer, cid)
                wires.append(wire)
            else:
                wires.append(held[chunk])
        if self._combine(state, job, chunk, wires, out):
            return None
        return self._culprit(state, job, chunk, wires)

    def _combine(self, state: PlanState, job: Job, chunk: int, wires: Sequence[Wire], out: Wire) -> bool:
        codec = state.slot.grid.codec(chunk)
        if job.factors is not None:
            return codec.weighted_mean(wires, job.factors.multipliers, job.factors.divisor, out)
        assert state.reducer.form == "rows"
        if self._rows is None or self._rows.shape[0] != len(wires) or self._rows.shape[1] < out.elements:
            self._rows = torch.empty(len(wires), out.elements, dtype=torch.float32, device="cpu")
            self._out = torch.empty(out.elements, dtype=torch.float32, device="cpu")
        assert self._out is not None
        rows, result = self._rows[:, : out.elements], self._out[: out.elements]
        for row, wire in zip(rows.unbind(0), wires, strict=True):
            codec.decode(wire, row)
        state.reducer.reduce(rows, job.weights, result)
        return all(codec.finite(wire) for wire in wires) and state.slot.results.codec(chunk).encode(result, out)

    def _culprit(self, state: PlanState, job: Job, chunk: int, wires: Sequence[Wire]) -> Source:
        """Whose values made the result overflow: the first that is not finite, else the largest."""
        codec = state.slot.grid.codec(chunk)
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
