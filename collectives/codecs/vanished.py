"""Which share of a vector's values a codec makes 0: those that are small beside the largest of
their block. A script that sums a loss, a count and a number of tokens in one vector loses the small
ones, and must hear of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codec import get_codec

RUN = 4096
"""Values that are looked at as one, a whole number of every codec's blocks."""
MOST_RUNS = 16
"""Of a longer vector these are looked at, evenly spaced: a sixteenth of a million values, whatever
its length.
"""


def vanished_share(flat: Tensor, codec: str) -> float:
    """The share of the values of ``flat`` (float32, (numel,), any device) that are not 0 and that
    ``codec`` turns into 0; of a long vector an estimate, from MOST_RUNS runs of it.

    0.0 where nothing of it can be encoded: that is refused elsewhere.
    """
    coder, runs = get_codec(codec), -(-flat.numel() // RUN)
    step = max(1, runs // MOST_RUNS)
    given = gone = 0
    for number in range(0, step * min(runs, MOST_RUNS), step):
        values = flat[RUN * number : RUN * (number + 1)].to("cpu")
        wire = coder.wire(memoryview(bytearray(coder.wire_bytes(len(values)))), len(values))
        if not coder.encode(values, wire):
            continue
        decoded = torch.empty_like(values)
        coder.decode(wire, decoded)
        given += int(values.count_nonzero())
        gone += int(values[decoded == 0].count_nonzero())
    return gone / given if given else 0.0
