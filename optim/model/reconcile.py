"""What live parameters become when a round is decided.

With A the new anchor, L the live values and S where their uncounted progress starts:

* contribution counted, nothing trained since it was frozen: ``L ← A``, an exact copy;
* counted, trained on since: ``L ← A + (L - S)``, S = the live values at the moment of freezing;
* not counted: ``L ← A + (L - S)``, S = the anchor the progress was measured against. The progress stays and is contributed again.

So each unit of work is in the log once or in the live parameters once, never both.
"""

from __future__ import annotations

import torch

from .flat import FlatVector, Source


def adopt(flat: FlatVector, new: Source) -> None:
    """Make the live values the new anchor, exactly."""
    flat.read_from(new)


@torch.no_grad()
def rebase(flat: FlatVector, new: Source, start: Source) -> None:
    """``live ← new + (live - start)``, computed in float32, in segments.

    ``start`` is an anchor or a snapshot of the live values; both are taken as the live tensors would hold them.
    """
    scratch = torch.empty(0, dtype=torch.float32, device="cpu")
    for segment, live in flat.pull():
        if scratch.numel() < segment.numel:
            scratch = torch.empty(segment.numel, dtype=torch.float32, device="cpu")
        part = scratch[: segment.numel]
        start.copy_into(part, segment.start)
        flat.round_to_live(segment, part)
        live.sub_(part)
        new.copy_into(part, segment.start)
        live.add_(part)
        flat.push(segment, live)
