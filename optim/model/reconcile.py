"""What live parameters become when an anchor moves. All pure: they read sources and write the live
tensors.

With A the new anchor, L the live values and S where their uncounted progress starts:

* contribution counted, nothing trained since it was frozen: ``L ← A``, an exact copy (`adopt`);
* counted, trained on since: ``L ← A + (L - S)``, S = the live values when training went on
  (`rebase`);
* not counted, and the anchor has not moved: ``L`` stays as it is and is contributed again;
* not counted, and the others' round went on without it: what they did is mostly what one did
  oneself, and taking both whole would be a step too long. ``L ← L + (1 - α)·(A - S)``, S = the live
  values when it was frozen, α = `LOST_SHARE` (`mix`): a share of its distance to the new anchor
  stays, with all that was trained since, and is contributed again. With 30 % of contributions lost
  this costs 1 % of loss and not 5 (docs/benchmarks-training.md);
* either, in a run that mixes: ``L ← α·L + (1 - α)·A`` with an α of its own (Streaming DiLoCo, arXiv
  2501.18512).

So each sample is in the log once or is still to be contributed, never both. What members train on
while a round is under way is another matter: their own values as they are, or what they expect of
the round (`expect`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from .vector import ModelVector, RangeSource

LOST_SHARE = 0.5  # 0.3 and 0.5 were equally good


def adopt(flat: ModelVector, new: RangeSource) -> None:
    """Make the live values the new anchor, exactly."""
    flat.read_from(new)


@torch.no_grad()
def rebase(flat: ModelVector, new: RangeSource, start: RangeSource) -> None:
    """``live ← new + (live - start)``, computed in float32, in segments.

    ``start`` is an anchor or a snapshot of the live values; both are taken as the live tensors
    would hold them.
    """
    scratch = _Scratch()
    for segment, live in flat.pull():
        part = scratch.of(segment.numel)
        start.copy_into(part, segment.start)
        flat.round_to_live(segment, part)
        live.sub_(part)
        new.copy_into(part, segment.start)
        live.add_(part)
        flat.push(segment, live)


@torch.no_grad()
def mix(flat: ModelVector, new: RangeSource, share: float, start: Tensor | None = None) -> None:
    """``live ← share·live + (1 - share)·new``; with ``start`` that of ``start`` plus what was
    trained since: ``live + (1 - share)·(new - start)``.
    """
    scratch = _Scratch()
    for segment, live in flat.pull():
        part = scratch.of(segment.numel)
        new.copy_into(part, segment.start)
        if start is None:
            live.lerp_(part, 1 - share)
        else:
            live.add_(part.sub_(start[segment.start : segment.stop]).mul_(1 - share))
        flat.push(segment, live)


@torch.no_grad()
def expect(flat: ModelVector, base: RangeSource, own: Tensor, rate: float, momentum: float) -> None:
    """Replace one's whole progress since the anchor ``base`` by what the outer step will make of
    one's share in the mean.

    With Δ = base - live: ``own ← momentum·own + Δ``; ``live ← base - rate·(Δ + momentum·own)``.
    This is eager DiLoCo (arXiv 2502.12996) with an anchor that all members share. There every
    member steps an anchor of its own by gᵣ = Δᵣ/k + (mean - Δ/k)ᵣ₋₁; those sums telescope, and
    Nesterov is linear, so that anchor is the common one of a round ago less Nesterov's step on
    one's own Δ/k, with a momentum ``own`` of one's own. float32 (numel,), zero at first; ``rate``:
    the outer learning rate times one's share of the samples.
    """
    scratch = _Scratch()
    for segment, live in flat.pull():
        part, mine = scratch.of(segment.numel), own[segment.start : segment.stop]
        base.copy_into(part, segment.start)
        torch.sub(part, live, out=live)
        mine.mul_(momentum)
        mine.add_(live)
        live.add_(mine * momentum)
        live.mul_(rate)
        torch.sub(part, live, out=live)
        flat.push(segment, live)


@torch.no_grad()
def complete(flat: ModelVector, base: RangeSource, fresh: Collection[int]) -> None:
    """Add to new masters what rounding took of the anchor that they were made of: ``master ← master
    + (base - rounded base)``. ``fresh``: ids of the live tensors whose masters they are.
    """
    for spec, tensor in zip(flat.layout.tensors, flat.tensors, strict=True):
        if id(tensor) in fresh:
            master = flat.masters[id(tensor)]
            start = torch.empty(spec.numel, dtype=torch.float32, device="cpu")
            base.copy_into(start, spec.offset)
            start.sub_(start.to(tensor.dtype))
            master.add_(start.view(spec.shape).to(master.device))
            tensor.copy_(master)


class _Scratch:
    """One buffer, as long as the longest segment."""

    def __init__(self) -> None:
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def of(self, numel: int) -> Tensor:
        if self._values.numel() < numel:
            self._values = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._values[:numel]
