"""``[robust]`` of a manifest: what a round makes of its contributions, where some of them may be
anything; and what such a run must be.
"""

from __future__ import annotations

from ...collectives.codec_names import RESULTS
from ...collectives.errors import ConfigError
from ...collectives.group import MAX_STAR
from ...security.rule_names import (
    MAX_F_MDA,
    parse_step,
)
from .manifest import Manifest
from .refusals import Refusal, refuse

# of the outer momentum beside worker momentum: two of 0.9 swing (docs/operating/hostile.md)
MOST_OUTER = 0.6


def check_robust(manifest: Manifest, name: str) -> None:
    """What a run with a robust rule must be: whatever one contribution says may move the result by
    a bounded amount only.
    """
    robust = manifest.robust
    if robust.rule == "mean":
        given = [
            key
            for key in ("f", "before", "keep", "neighbours", "radius", "momentum")
            if getattr(robust, key)
        ]
        if given:
            key = f"$.robust.{given[0]}"
            raise ConfigError(
                f'{name}: {key} is given, and $.robust.rule is "mean"',
                key=key,
                why="A mean follows a single hostile contribution wherever it wants.",
                hint=f'rule = "trimmed_mean", or leave {key.rsplit(".")[-1]} out',
            )
        return
    if robust.f is None:
        raise ConfigError(
            f"{name}: $.robust.rule is {robust.rule!r}, and $.robust.f is missing",
            key="$.robust.f",
            why=(
                "It says how many contributions may be hostile; a round needs 2 f + 1 "
                "contributors, with krum and multi_krum 2 f + 3."
            ),
            hint="f = 1, for runs of at least 3 members (krum, multi_krum: 5)",
        )
    _check_rule(manifest, name)
    _check_rest(manifest, name)


def _check_rule(manifest: Manifest, name: str) -> None:
    """The rule itself: its steps and options are ones that it has."""
    robust = manifest.robust
    for step in robust.before:
        if parse_step(step) is None or robust.before.count(step) > 1:
            raise ConfigError(
                f"{name}: $.robust.before has {step!r}",
                key="$.robust.before",
                why="It names steps before the rule, each kind once.",
                hint=(
                    "one of nnm, arc, bucketing2 (to bucketing16), clipping10 (the greatest length)"
                ),
            )
    _check_rule_options(manifest, name)
    parsed = robust.parsed
    if parsed is None or parsed.least > MAX_STAR:
        raise ConfigError(
            f"{name}: $.robust.rule is {robust.reducer}",
            key="$.robust.rule",
            why=f"mda looks at all ways to leave out f contributions: f is at most {MAX_F_MDA}. A "
            f"kind of step is taken once. And a round has at most {MAX_STAR} contributors.",
            hint='before = ["nnm"] and rule = "trimmed_mean"',
        )


def _check_rest(manifest: Manifest, name: str) -> None:
    """What other tables say does not undo the rule."""
    exchange, train = manifest.exchange, manifest.train
    coarse = sorted({exchange.codec, *exchange.codecs.values()} & RESULTS.keys())
    refused: list[Refusal] = [
        (
            exchange.plan != "butterfly",
            "$.exchange.plan",
            "A partial sum does not show whose values are in it.",
            'plan = "butterfly"',
        ),
        (
            bool(coarse),
            "$.exchange.codec" if exchange.codec in coarse else "$.exchange.codecs",
            "Most values of such a contribution are zeros or coarse: so is the middle one.",
            'codec = "int8"',
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
            "It follows the samples that members claim: one could end the schedule.",
            "Give $.train.inner.steps instead.",
        ),
    ]
    refuse(refused, manifest, name, f'$.robust.rule = "{manifest.robust.rule}"')


def _check_rule_options(manifest: Manifest, name: str) -> None:
    """What a rule is told beside f, and the momentum of its contributions."""
    robust, krums = manifest.robust, ("krum", "multi_krum")
    twice = (
        robust.momentum > 0
        and manifest.train.outer.optimizer != "sgd"
        and manifest.train.outer.momentum > MOST_OUTER
        and manifest.train.method == "diloco"
    )
    eager = (
        "Members train on from what they expect of the contribution they made; what they send is "
        "another, its running mean."
    )
    refused: list[Refusal] = [
        (
            robust.keep is not None and robust.rule != "multi_krum",
            "$.robust.keep",
            "Multi-Krum alone is the mean of those it keeps.",
            'rule = "multi_krum"',
        ),
        (
            robust.neighbours is not None and robust.rule not in krums,
            "$.robust.neighbours",
            "Krum's rules alone score by neighbours.",
            'rule = "multi_krum"',
        ),
        (
            robust.radius is not None and robust.rule != "centred_clip",
            "$.robust.radius",
            "Centred clipping alone has one.",
            'rule = "centred_clip"',
        ),
        (
            robust.momentum > 0 and manifest.mode == "federated",
            "$.robust.momentum",
            (
                "Sites that take part now and then would send old directions again; and methods "
                "have momentum of their own."
            ),
            'Leave it out, or [federated] method = "fedavg_m".',
        ),
        (
            robust.momentum > 0 and manifest.train.overlap == "eager",
            "$.robust.momentum",
            eager,
            'overlap = "late"',
        ),
        (
            twice,
            "$.train.outer.momentum",
            (
                "Members send running means already ($.robust.momentum). Two momenta on top of "
                "each other swing, and the loss grows without an attack."
            ),
            '[train.outer] preset = "worker-momentum"',
        ),
    ]
    refuse(refused, manifest, name, f'$.robust.rule = "{robust.rule}"')
