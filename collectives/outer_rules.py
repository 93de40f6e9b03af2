"""What is known of outer optimizers without torch: a record each, from which the tables come of the
manifest, the planner and memory. What they do: `optim.outer.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass


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
