"""What a machine and its run are to each other: which share of its time it trains, how much sooner
the run is at a loss with the machine than without it, and than the machine alone would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

NEWEST = 20  # rounds that are looked at
DDP_BYTES = 4.0
"""Bytes a parameter and step that each of many peers sends in plain data-parallel training: bf16
gradients, all-reduced by a ring, so 2 (k - 1) / k times 2 bytes of k peers."""


def ddp_bytes(peers: int, parameters: int) -> float:
    """Bytes that ``peers`` would send together for one step of that."""
    return DDP_BYTES * (peers - 1) * parameters


def training_share(waits: Iterable[tuple[float, float]], overlap: str) -> float | None:
    """What waiting for results leaves of a machine's time. ``waits``: of the newest rounds, seconds
    waited and seconds in all. None before there is such a round, and where scripts train on while
    one is under way (``overlap`` other than "none"), as they do not wait.
    """
    rows = list(waits)
    whole = sum(period_s for _, period_s in rows)
    if overlap != "none" or not whole:
        return None
    return 1 - sum(min(max(0.0, waited_s), period_s) for waited_s, period_s in rows) / whole


class Gain(NamedTuple):
    """How many times as soon the run is there with this machine: ``without`` it being 1, and
    ``alone``, the machine by itself, being 1. None where that is not known, or nobody else is
    there.
    """

    without: float | None
    alone: float | None


def gain_of(
    rounds: Sequence[Mapping[str, int]], peer: str, training_share: float | None, cost: float
) -> Gain | None:
    """Of the newest rounds, each with the samples of its contributors; None before ``peer`` was in
    one. ``training_share``: of this machine's time, the rest of which it waits for results; alone
    it would train all of the time. ``cost``: how many times as many samples a run needs as one
    machine (`optim.planning.price`).

    >>> gain_of([{"a": 10, "b": 30}], "a", 0.9, cost=1.2)
    Gain(without=1.3333333333333333, alone=3.0)
    """
    newest = [samples for samples in rounds if samples][-NEWEST:]
    total = sum(sum(samples.values()) for samples in newest)
    own = sum(samples.get(peer, 0) for samples in newest)
    if not own:
        return None
    if own == total:  # it is the run
        return Gain(None, training_share)
    alone = None if training_share is None else total / own * training_share / cost
    return Gain(total / (total - own), alone)


def gain_words(gain: Mapping[str, Any]) -> str:
    """A line of it.

    >>> gain_words({"without": 4 / 3, "alone": 0.8})
    '1.33 times as soon with this machine as without it, 0.80 times as soon as this machine alone'
    """
    words = list[str]()
    if (without := gain.get("without")) is not None:
        words.append(f"{without:.2f} times as soon with this machine as without it")
    if (alone := gain.get("alone")) is not None:
        words.append(f"{alone:.2f} times as soon as this machine alone")
    return ", ".join(words)
