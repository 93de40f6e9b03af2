"""``[robust]`` of a manifest: what a round makes of its contributions, where some of them may be
anything; and what such a run must be.
"""

from __future__ import annotations

from ...collectives.codec_names import RESULTS
from ...collectives.group import MAX_STAR
from ...security.rule_names import (
    MAX_F_MDA,
    parse_step,
)
from .manifest import Manifest
from .refusals import Row, against

# of the outer momentum beside worker momentum: two of 0.9 swing (docs/operating/hostile.md)
MOST_OUTER = 0.6


def robust_rows(manifest: Manifest) -> list[Row]:
    """What a run with a robust rule must be: whatever one contribution says may move the result by
    a bounded amount only.
    """
    robust = manifest.robust
    if robust.rule == "mean":
        return []
    missing = Row(
        robust.f is None,
        "$.robust.f",
        "It says how many contributions may be hostile; a round needs 2 f + 1 contributors, with "
        "krum and multi_krum 2 f + 3.",
        "f = 1 (for runs of at least 3 members; krum, multi_krum: 5)",
        says=f"$.robust.rule is {robust.rule!r}, and $.robust.f is missing",
    )
    return [missing, *_rule_rows(manifest), *_momentum_rows(manifest), *_rest_rows(manifest)]


def _rule_rows(manifest: Manifest) -> list[Row]:
    """The rule itself: its steps are ones that it has."""
    robust, parsed = manifest.robust, manifest.robust.parsed
    strange = [
        step
        for step in dict.fromkeys(robust.before)
        if parse_step(step) is None or robust.before.count(step) > 1
    ]
    small = robust.f is None or (parsed is not None and parsed.least <= MAX_STAR)
    return [
        *(
            Row(
                True,
                "$.robust.before",
                "It names steps before the rule, each kind once: nnm, arc, bucketing2 (to "
                "bucketing16), clipping10 (the greatest length).",
                'Leave it out, or before = ["nnm"].',
                says=f"$.robust.before has {step!r}",
            )
            for step in strange
        ),
        Row(
            not strange and not small,
            "$.robust.rule",
            f"mda looks at all ways to leave out f contributions: f is at most {MAX_F_MDA}. A "
            f"kind of step is taken once. And a round has at most {MAX_STAR} contributors.",
            'before = ["nnm"] and rule = "trimmed_mean", or f = 1 and leave before out',
            says=f"$.robust.rule is {robust.reducer}",
        ),
    ]


def _rest_rows(manifest: Manifest) -> list[Row]:
    """What other tables say does not undo the rule."""
    exchange, train = manifest.exchange, manifest.train
    coarse = sorted({exchange.codec, *exchange.codecs.values()} & RESULTS.keys())
    listed = exchange.codec not in coarse
    return against(
        f'$.robust.rule = "{manifest.robust.rule}"',
        [
            (
                exchange.plan != "butterfly",
                "$.exchange.plan",
                "A partial sum does not show whose values are in it.",
                'plan = "butterfly", or leave [exchange] tree out and leave it out.',
            ),
            (
                bool(coarse),
                "$.exchange.codecs" if listed else "$.exchange.codec",
                "Most values of such a contribution are zeros or coarse: so is the middle one.",
                "Leave it out." if listed else 'codec = "int8", or leave it out.',
            ),
            (
                train.outer.stretch,
                "$.train.outer.stretch",
                "It follows the lengths that members claim.",
                "Leave it out.",
            ),
            (
                train.inner.samples is not None,
                "$.train.inner.samples",
                "It follows the samples that members claim, and one could end the schedule: inner "
                "steps do.",
                "Leave it out.",
            ),
        ],
    )


def _momentum_rows(manifest: Manifest) -> list[Row]:
    """The momentum of contributions."""
    robust = manifest.robust
    twice = (
        robust.momentum > 0
        and manifest.kind != "federated"
        and manifest.train.outer.settings().momentum > MOST_OUTER
        and manifest.train.method == "diloco"
    )
    return against(
        f'$.robust.rule = "{robust.rule}"',
        [
            (
                robust.momentum > 0 and manifest.train.overlap == "eager",
                "$.robust.momentum",
                "Members train on from what they expect of the contribution they made; what they "
                "send is another, its running mean.",
                'Leave it out, or [train] overlap = "late".',
            ),
            (
                twice,
                "$.train.outer.momentum",
                "Members send running means already ($.robust.momentum). Two momenta on top of "
                "each other swing, and the loss grows without an attack.",
                'Leave [train.outer] out (the run then has preset = "worker-momentum"), or '
                f"momentum = {MOST_OUTER}, or leave [robust] momentum out.",
            ),
        ],
    )
