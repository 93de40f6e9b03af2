"""What live parameters become when an anchor moves. All pure: they read sources and write the live tensors.

With A the new anchor, L the live values and S where their uncounted progress starts:

* contribution counted, nothing trained since it was frozen: ``L ← A``, an exact copy (`adopt`);
* counted, trained on since: ``L ← A + (L - S)``, S = the live values when training went on (`rebase`);
* not counted: ``L ← A + (L - S)``, S = the anchor the progress was measured against. The progress stays and is contributed again;
* either, in a run that mixes, wherever ``L - S`` would be added: ``L ← α·L + (1 - α)·A`` (`mix`; Streaming DiLoCo, arXiv 2501.18512). What the
  others did meanwhile is mostly what one did oneself, and is not taken twice.

So, but for `mix`, each unit of work is in the log once or in the live parameters once, never both. What members train on while a round
is under way is another matter: their own values as they are, or what they expect of the round (`expect`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .flat import FlatVector, Source


def adopt(flat: FlatVector, new: Source) -> None:
    """Make the live values the new anchor, exactly."""
    flat.read_from(new)


@torch.no_grad()
def rebase(flat: FlatVector, new: Source, start: Source) -> None:
    """``live ← new + (live - start)``, computed in float32, in segments.

    ``start`` is an anchor or a snapshot of the live values; both are taken as the live tensors would hold them.
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
def mix(flat: FlatVector, new: Source, share: float) -> None:
    """``live ← share·live + (1 - share)·new``."""
    scratch = _Scratch()
    for segment, live in flat.pull():
        part = scratch.of(segment.numel)
        new.copy_into(part, segment.start)
        live.lerp_(part, 1 - share)
        flat.push(segment, live)


@torch.no_grad()
def expect(flat: FlatVector, base: Source, own: Tensor, rate: float, momentum: float) -> None:
    """Replace one's whole progress since the anchor ``base`` by what the outer step will make of one's share in the mean.

    With Δ = base - live: ``own ← momentum·own + Δ``; ``live ← base - rate·(Δ + momentum·own)``. This is eager DiLoCo (arXiv 2502.12996) with
    an anchor that all members share. There every member steps an anchor of its own by gᵣ = Δᵣ/k + (mean - Δ/k)ᵣ₋₁; those sums telescope, and
    Nesterov is linear, so that anchor is the common one of a round ago less Nesterov's step on one's own Δ/k, with a momentum ``own`` of
    one's own. float32 (numel,), zero at first; ``rate``: the outer learning rate times one's share of the samples.
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


class _Scratch:
    """One buffer, as long as the longest segment."""

    def __init__(self) -> None:
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def of(self, numel: int) -> Tensor:
        if self._values.numel() < numel:
            self._values = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._values[:numel]
