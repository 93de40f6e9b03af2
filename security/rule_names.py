"""Names of the rules that a plan can carry, as ``median:1`` or ``bucketing2+nnm+multi_krum/k2:1``:
steps before the rule, the rule, what it is told beside (`RuleFacts.options`), and f, how many
contributions may be anything. Loads nothing heavy.

The name is in plans, entries and digests, so all members of a run use the same rule with the same
f. A name stands for one rule for ever.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, get_args

from ..collectives.swarm import CoordinateRule, GramRule

RUNNING = "running"
MAX_F = 127  # of at most 256 members fewer than half
MAX_F_MDA = 2  # it looks at all ways to leave out f contributions: 32,640 of two among 256


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """A robust rule, without torch.

    ``options``: what it can be told, in this order: ``k2``: keep n - f - 2, in place of n - f;
    ``n1``: score by the n - f - 1 nearest others, as byzfl, in place of n - f - 2; ``running``:
    clip at the median distance in rounds before. ``reads``: the settings of ``[robust]`` that say
    so. ``margin``: it outvotes f of 2 f + ``margin`` contributions; ``most_f``: the largest f.
    """

    name: str
    options: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    margin: int = 1
    most_f: int = MAX_F


RULE_FACTS = {
    name: RuleFacts(name) for name in (*get_args(CoordinateRule), *get_args(GramRule))
} | {
    facts.name: facts
    for facts in (
        RuleFacts("krum", ("n1",), ("neighbours",), margin=3),
        RuleFacts("multi_krum", ("k2", "n1"), ("keep", "neighbours"), margin=3),
        RuleFacts("mda", most_f=MAX_F_MDA),
        RuleFacts("centred_clip", (RUNNING,), ("radius",)),
    )
}
"""The robust rules that a run can have. Those without a row of their own have nothing of their own.
"""

BY_COORDINATE: tuple[CoordinateRule, ...] = get_args(CoordinateRule)
BY_GRAM: tuple[GramRule, ...] = get_args(GramRule)
_RULE = re.compile(rf"({'|'.join(RULE_FACTS)})((?:/[a-z0-9]+)*):(0|[1-9][0-9]{{0,2}})")
_STEP = re.compile(
    r"nnm|arc|bucketing([2-9]|1[0-6])|clipping((?:0|[1-9][0-9]{0,5})(?:\.[0-9]{0,5}[1-9])?)"
)


class RuleStep(NamedTuple):
    """A step before a rule. ``number``: of contributions in a bucket, or the length to which longer
    ones are clipped; 0 for the others.
    """

    kind: str
    number: float


class RuleName(NamedTuple):
    """What a name says."""

    rule: str
    f: int
    before: tuple[RuleStep, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def least(self) -> int:
        """How many contributions it needs to outvote f of them: Krum's rules 2 f + 3, the others,
        and Krum's by byzfl's neighbours, 2 f + 1; of as many buckets."""
        margin = 1 if self.options == ("n1",) else RULE_FACTS[self.rule].margin
        least = 2 * self.f + margin
        for step in reversed(self.before):
            if step.kind == "bucketing":
                least = int(step.number) * (least - 1) + 1
            elif step.kind != "clipping":
                least = max(least, 2 * self.f + 1)
        return least

    @property
    def by_coordinate(self) -> bool:
        """Whether each element's result follows from it alone: then no Gram matrix is needed."""
        return self.rule in BY_COORDINATE and not self.before


def reducer_name(
    rule: str, f: int, before: tuple[str, ...] = (), options: tuple[str, ...] = ()
) -> str:
    """The name of a rule with its f and options, after steps that are named as in a manifest."""
    return "+".join([*before, f"{'/'.join([rule, *options])}:{f}"])


def parse_step(text: str) -> RuleStep | None:
    """A step as manifests name it: ``nnm``, ``arc``, ``bucketing2`` (to 16), ``clipping10`` (or
    ``clipping0.5``); None for anything else.
    """
    found = _STEP.fullmatch(text)
    if found is None or text == "clipping0":
        return None
    return RuleStep(text.rstrip("0123456789."), float(found[1] or found[2] or 0))


def parse_reducer(name: str) -> RuleName | None:
    """What a name says; None where it is no robust rule's. ``name`` may be hostile."""
    *before, rule = name.split("+", 4)
    found, steps = _RULE.fullmatch(rule), [parse_step(text) for text in before]
    kinds = [step.kind for step in steps if step is not None]
    if found is None or len(set(kinds)) < len(steps):
        return None
    options = tuple(found[2].split("/")[1:])
    if options != tuple(option for option in RULE_FACTS[found[1]].options if option in options):
        return None
    parsed = RuleName(
        found[1], int(found[3]), tuple(step for step in steps if step is not None), options
    )
    return None if parsed.f > RULE_FACTS[parsed.rule].most_f else parsed
