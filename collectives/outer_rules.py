"""What is known of outer optimizers without torch: a record each, from which the tables come of the
manifest, the planner and memory. What they do: `optim.outer.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class OuterFacts:
    """An outer optimizer that a manifest can name.

    ``reads``: the numbers of ``[train.outer]`` that it has beside ``lr``. ``vectors``: state
    vectors as long as the anchor, of which the first ``momenta`` hold past steps.
    """

    name: str
    reads: tuple[str, ...] = ()
    vectors: int = 0
    momenta: int = 0


_KEPT = ("momentum", "momentum_dtype")
OUTER_RULES = {
    facts.name: facts
    for facts in (
        OuterFacts("nesterov", (*_KEPT, "warmup", "hold"), 1, 1),
        OuterFacts("sgd"),
        OuterFacts("adam", (*_KEPT, "beta2", "epsilon"), 2, 1),
        OuterFacts("yogi", (*_KEPT, "beta2", "epsilon"), 2, 1),
        OuterFacts("adagrad", ("epsilon",), 1),
        OuterFacts("co2", (*_KEPT, "clip"), 1, 1),
        OuterFacts("adamw", (*_KEPT, "beta2", "epsilon", "weight_decay"), 2, 1),
        OuterFacts("delayed_nesterov", (*_KEPT, "every", "spread"), 2, 2),
        OuterFacts("heloco", (*_KEPT, "agreement"), 1, 1),
    )
}
"""The outer optimizers that a run can have."""

WITHOUT_MOMENTUM = tuple(name for name, facts in OUTER_RULES.items() if not facts.momenta)
"""Those that do not read ``momentum``."""


OuterRule = Literal[
    "nesterov",
    "sgd",
    "adam",
    "yogi",
    "adagrad",
    "co2",
    "adamw",
    "delayed_nesterov",
    "heloco",
]
"""What steps the anchor (`optim.outer.rules`), as manifests name it."""


MOST_WARMUP = 1_000_000
"""Outer steps, which a float32 counts."""


class OuterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outer optimizer, applied to the anchor in the node: one of `optim.outer.rules`. Each
    reads what it needs of the rest. `optim.outer.presets` has values that were tried.
    """

    kind: Literal[OuterRule, "momentum"]
    lr: float
    momentum: float = 0.0
    # Of adam, yogi and adamw; this and the next are published values (arXiv 2003.00295).
    beta2: float = 0.99
    epsilon: float = 1e-3  # of adam, yogi, adagrad and adamw
    weight_decay: float = 0.0  # of adamw
    clip: float = 3.0  # of co2: times the mean norm of the momentum
    # Restart momentum and halve lr for a while when the update's norm or the loss jumps.
    governor: bool = False
    # Make the mean as long as its contributions are on average, however many they are.
    stretch: bool = False
    clip_norm: float | None = None  # the longest mean; a longer one is scaled down to it
    every: int = 4  # of delayed_nesterov: steps between two of momentum
    spread: float = 0.0  # of delayed_nesterov: the share of momentum that the steps between take
    agreement: float = 0.5  # of heloco: the cosine with momentum from which nothing is corrected
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"  # how momenta are kept between rounds
    # Of nesterov and momentum: outer steps over which lr and momentum grow from 1 and 0, those of
    # the plain mean.
    warmup: int = 0
    # Steps of the plain mean before the warm-up. 0: where rounds grow (`growth`), until they have
    # their full length.
    hold: int = 0
    # With a governor that goes by evaluations: after so many readings in a row that speak against
    # averaging it takes the plain mean. 0: it does not go by them.
    watch: int = 0
    # The governor says what it sees, and changes nothing: members that lie could move it.
    advises: bool = False
    # Of how many steps the rounds are short and grow: none of them is a jump to the governor.
    short: int = 0


PLAIN_MEAN = OuterSettings("sgd", 1.0)
"""The new anchor is the mean of the members' models (`optim.outer.presets` says for whom)."""


WARMING = ("nesterov", "momentum")
"""Rules whose lr and momentum may warm up: without momentum they are the plain mean."""
