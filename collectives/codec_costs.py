"""What codecs cost, for plans of a run and for exact tensors: no torch."""

from __future__ import annotations

import math

from .codec_names import BYTES_PER_VALUE, FACTS, RESULTS

PLANNED = tuple(
    facts.name
    for facts in sorted(FACTS.values(), key=lambda facts: -facts.bytes_per_value)
    if facts.planned
)
"""Codecs that a plan chooses from, longest first; not those that are sparse both ways: what they
cost was measured for rounds of 5 and 10 steps only, and rises from one to the other
(docs/benchmarks-training.md)."""


EXACT_CODEC, EXACT_EXTRA, EXACT_LEAST = "fp32", 0.03, 4096
"""Of small tensors: their codec; how many more bytes a round may have for it, 3 in 100; and how
many values may have it in any case (16 KiB)."""


def round_bytes_per_value(codec: str) -> float:
    """Mean of what a contribution and a result have a value."""
    return (BYTES_PER_VALUE[codec] + BYTES_PER_VALUE[RESULTS.get(codec, codec)]) / 2


def exact_share(codec: str) -> float:
    """The share of a large model's parameters that may be sent in fp32 in place of a codec, being
    of small tensors: 1 in 100 with int8, fewer with a codec of fewer bits.
    """
    one, exact = round_bytes_per_value(codec), BYTES_PER_VALUE[EXACT_CODEC]
    return EXACT_EXTRA * one / (exact - one) if one < exact else 1.0


def most_exact(codec: str, parameters: int) -> int:
    """How many of so many parameters that are: their share, or EXACT_LEAST if that is more."""
    return min(parameters, max(math.floor(exact_share(codec) * parameters), EXACT_LEAST))


def most_bytes(codec: str, parameters: int) -> tuple[float, float]:
    """What a contribution and a result have at most, with as many values of small tensors as may
    be.
    """
    exact = most_exact(codec, parameters)
    up, down = (BYTES_PER_VALUE[name] for name in (codec, RESULTS.get(codec, codec)))
    head, rest = exact * BYTES_PER_VALUE[EXACT_CODEC], parameters - exact
    return head + rest * up, head + rest * down
