"""What governs the rounds of a run at a member's script, whatever else the run asks for. All of a
run's settings: `swarm.RunSettings`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from .growth import MOST_GROWTH, RoundLengths
from .outer_rules import PLAIN_MEAN, OuterSettings

MAX_SAMPLES = 1 << 48
"""A contribution has fewer."""


class WorkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a site of a run of sites does in a round, one of the three: so many inner ``steps``,
    so many ``samples``, or so many ``epochs`` of its own examples. It contributes when that is
    done, whatever others have done, and the round waits for all who take part (`round.turns`).

    ``weights``: what a site counts in the mean: its number of examples, which it has declared, or
    as much as any other. Never what it has processed.
    """

    steps: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    samples: Annotated[int, msgspec.Meta(ge=1, lt=MAX_SAMPLES)] | None = None
    epochs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    weights: Literal["examples", "equal"] = "examples"

    @property
    def declares(self) -> bool:
        """Whether each site must say how many examples it has."""
        return self.weights == "examples" or self.epochs is not None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps} steps"
        if self.samples is not None:
            return f"{self.samples} samples"
        return "one epoch" if self.epochs == 1 else f"{self.epochs} epochs"


class SampleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many members take part in a round: a share of them, or a number (``count``), and at least
    ``least`` (`round.sampling`).
    """

    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    count: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    least: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1

    def wanted(self, members: int) -> int:
        """How many of so many."""
        return min(
            members,
            max(
                self.least,
                self.count if self.count is not None else math.ceil(self.share * members),
            ),
        )


MOST_REPLAYED = 16
"""Rounds: a checkpoint is tried after so many at the latest, since all results that follow one are
kept.
"""


class RoundSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When rounds end, what is trained on meanwhile, and when the run is over."""

    sync_every: int | None = 100  # H: inner steps a round; None: rounds end by time
    round_s: float | None = None  # seconds a round, when sync_every is None
    target_samples: int | None = None  # samples of all members a round, when both are None
    local_after: int = 0  # rounds of one inner step before those of sync_every (post-local SGD)
    # The first so many rounds of sync_every are made as shorter ones, of one step at first
    # (`collectives.growth`).
    growth: Annotated[int, msgspec.Meta(ge=0, le=MOST_GROWTH)] = 0
    # What is trained on while a round is under way (`optim.rounds.replica`).
    overlap: Literal["none", "late", "eager"] = "none"
    # Inner steps from a contribution to its result, with overlap; None: to the end of the next
    # round.
    delay: int | None = None
    # Of the time to be spent on training: sync_every and delay are planned again as rounds go on;
    # None: never.
    share: float | None = None
    # The longest round that is planned; None: by the size of the model.
    max_steps: int | None = None
    # Share of live parameters kept on an anchor without all of one's own progress; None: all of
    # that.
    mixing: float | None = None
    rounds: int | None = None  # committed rounds after which the run is done; None: no end
    # How long a script waits for a round before it trains on; None: from measured rates.
    deadline_s: float | None = None

    @property
    def lengths(self) -> RoundLengths:
        """How many inner steps each round has."""
        return RoundLengths(self.sync_every, self.growth, self.local_after)

    @property
    def work(self) -> WorkSettings | None:
        """What a site does in a round of a run of sites; None in other runs."""
        return None

    @property
    def noised(self) -> bool:
        """Whether contributions are bounded and get noise."""
        return False

    @property
    def may_be_without(self) -> bool:
        """Whether rounds may be without a member that would hold up all others: not where each has
        to take part, or where rounds choose whom they wait for in another way.
        """
        return True

    @property
    def effective_outer(self) -> OuterSettings:
        """The outer optimizer that the run really uses."""
        return PLAIN_MEAN
