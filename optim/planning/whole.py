"""What a run costs from its first round on: rounds that begin short among them, each as long as the
run makes it (`collectives.growth`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ...collectives.cold_start import GROWTH, measured_cold
from ...collectives.growth import RoundLengths
from .conditions import Conditions
from .estimate import Choice, RoundCost, estimate, round_of


@dataclass(frozen=True, slots=True)
class RunCost:
    """So many rounds, one after the other: ``steps`` of the fastest machine, ``seconds`` from the
    first step to the last result, the ``share`` of them that is training, and the most bytes that
    one peer sends (``nbytes``) and receives (``received``).

    >>> RunCost(rounds=179, steps=2000, seconds=1046.0, share=0.956, nbytes=0, received=0).steps
    2000
    """

    rounds: int
    steps: int
    seconds: float
    share: float
    nbytes: int
    received: int


def lengths_of(conditions: Conditions, choice: Choice) -> RoundLengths:
    """How long the rounds of a run with these settings are, if it leaves how they begin to atoll.

    >>> from .conditions import PeerConditions
    >>> peers = tuple(PeerConditions(f"p{i}", 1e7, 1e7, 0.5) for i in range(2))
    >>> cold = Conditions(1_000_000, peers, steps=2000, cold=True)
    >>> lengths_of(cold, Choice(20)).growth, lengths_of(cold, Choice(20, "int4")).growth
    (20, 0)
    """
    rounds = full_rounds(conditions.steps, choice.sync_every)
    waits = choice.overlap == "none" and choice.fragments == 1
    cold = conditions.cold and waits and measured_cold(choice.sync_every, choice.codec, rounds)
    return RoundLengths(choice.sync_every, GROWTH if cold else 0)


def full_rounds(steps: int | None, sync_every: int) -> int | None:
    """How many rounds of full length a run of so many steps has, as a manifest's text counts them;
    None: it has no end.

    >>> full_rounds(2000, 20), full_rounds(2000, 30), full_rounds(None, 20)
    (100, 67, None)
    """
    return None if steps is None else max(1, round(steps / sync_every))


def run_cost(
    conditions: Conditions,
    choice: Choice,
    lengths: RoundLengths,
    rounds: int,
    *,
    one: RoundCost | None = None,
    margin: float = 1.0,
) -> RunCost:
    """What the first ``rounds`` rounds cost, those that begin short among them. ``one``,
    ``margin``: as in `estimate`.
    """
    one = one or round_of(conditions, choice.codec, choice.fragments)
    short = min(rounds, lengths.short_rounds)
    counts = Counter(lengths.short(done) or choice.sync_every for done in range(short))
    counts[choice.sync_every] += rounds - short
    steps, seconds, training_s, nbytes, received = 0, 0.0, 0.0, 0, 0
    for length, count in counts.items():
        found = estimate(conditions, replace(choice, sync_every=length), one=one, margin=margin)
        steps += count * length
        seconds += count * found.period_s
        training_s += count * found.compute_s
        nbytes += count * found.nbytes
        received += count * found.received
    return RunCost(rounds, steps, seconds, training_s / seconds, nbytes, received)
