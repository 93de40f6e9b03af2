"""Outer values under a name, and which of them a run has that chooses none ("auto").

A run that starts from random weights, or from weights that were trained elsewhere, begins with the
plain mean: the new anchor is the mean of the members' models. Nesterov's first step moves lr·(1+μ)
times the mean of the contributions, and a constant mean is amplified lr/(1-μ) times: 7 times at
0.7 / 0.9 and 2.25 times at 0.9 / 0.6. The contributions of a cold run's first rounds are long and
point the same way, so momentum carries the anchor past the members' models, and with large steps
past the untrained one.

Measured with a byte-level GPT of 10.9 million parameters, 2 members, H = 20, AdamW and 500 steps
(held-out loss, as a multiple of the loss of one machine on the same samples; two seeds): cold with
0.9 / 0.6 1.197 and 1.187, which is worse than one member alone on its own half of the samples
(1.188 and 1.151); cold with the plain mean 1.098 and 1.092; 0.9 / 0.6 after 100 synchronous steps
1.036 and 1.027. Published values, and those that were chosen for few rounds here
(`scripts/bench/bench_methods.py`; docs/benchmarks-training.md), belong to runs that begin with
synchronous steps. No run does that today by its manifest: ``[train] local_after`` begins with
rounds of one inner step, and outer momentum acts on those, too. So these are had by name only.

"cold" begins with short rounds of the plain mean, which grow to H (`collectives.growth`); after 40
of them lr and momentum grow over 40 more to 0.9 and 0.6. In a sweep of plain torch
(`scripts/bench/sweep_outer.py`; docs/benchmarks-outer.md, arm ``0.9/0.6 grow=5 hold=20 warm=20
fade=0.3``) the held-out loss with a quarter as many short rounds was 6.0 % below the plain mean's
on average: below in 38 of 39 runs of 1 to 135 million parameters, 2 to 8 members, H = 10 to 100,
AdamW and Muon, with an inner learning rate that decays; and no anchor from the tenth exchange on
was above the best member alone. That arm returned to the plain mean at the end, which costs 0.9 %
(``0.9/0.6 warm=20``, ten runs, 0.7 to 1.2 %) and which "cold" leaves out. Twice as many short
rounds gained another 2.4 % with the plain mean (``1/0 grow=10``, better than ``1/0 grow=5`` in 29
of 33 runs), and twice as many again another 4.1 % (``1/0 grow=20`` and ``grow=10``: 11 of 11).
"auto" takes "cold" for runs that such a row stands for, and the plain mean for all others.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...collectives.errors import ConfigError
from ...collectives.outer_rules import PLAIN_MEAN, OuterSettings

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Preset:
    """Outer values under a name, and where they come from. ``mixing``: of late results, where the
    manifest gives none. ``growing``: the values of runs whose first rounds are shorter
    (`collectives.growth`), as they are where the manifest does not say how they begin.
    """

    name: str
    outer: OuterSettings
    source: str
    mixing: float | None = None
    growing: OuterSettings | None = None


PRESETS = (
    Preset(
        "plain-mean",
        PLAIN_MEAN,
        source=(
            "the mean of the members' models, without momentum: runs that start cold were 8 to 9 % "
            "better with it than with 0.9 / 0.6 (2 members, H = 20, 25 rounds)"
        ),
    ),
    Preset(
        "cold",
        OuterSettings("nesterov", 0.9, 0.6, warmup=20),
        source=(
            "40 short rounds of the plain mean, then 0.9 / 0.6 over 40 more that grow; with fewer "
            "short rounds 6 % better than the plain mean on average, in 38 of 39 runs that started "
            "cold (2 to 8 peers, H = 10 to 100, a decaying inner learning rate)"
        ),
        growing=OuterSettings("nesterov", 0.9, 0.6, warmup=40, hold=40),
    ),
    Preset(
        "alone",
        OuterSettings("nesterov", 0.7, 0.8),
        source="one peer, many rounds: as published for AdamW with one worker (arXiv 2505.23725)",
    ),
    Preset(
        "published",
        OuterSettings("nesterov", 0.7, 0.9),
        source=(
            "many rounds: as published (DiLoCo, 8 workers, H = 500, arXiv 2311.08105; INTELLECT-1, "
            "14 peers, H = 100, arXiv 2412.01152)"
        ),
    ),
    Preset(
        "published-overlap",
        OuterSettings("nesterov", 0.4, 0.9),
        mixing=0.5,
        source=(
            "many rounds with overlap: as published (Streaming DiLoCo, H = 30 and 100, arXiv "
            "2501.18512; eager updates, H = 30, arXiv 2502.12996)"
        ),
    ),
    Preset(
        "short",
        OuterSettings("nesterov", 0.9, 0.6),
        source=(
            "few rounds: best of the values tried with 2, 4 and 8 peers, H = "
            "10 to 50, 6 to 30 rounds"
        ),
    ),
    Preset(
        "short-delay",
        OuterSettings("nesterov", 0.9, 0.6),
        source=(
            "few rounds, results adopted before half the next is over: as without overlap, tried "
            "with 4 peers, H = 10, delay = 3"
        ),
    ),
    Preset(
        "short-late",
        OuterSettings("nesterov", 1.0, 0.4),
        source=(
            "few rounds, results a whole round late: less momentum, best of the values tried with "
            "4 peers, H = 10, 30 rounds"
        ),
    ),
    Preset(
        "short-eager",
        OuterSettings("nesterov", 0.9, 0.0),
        source=(
            "few rounds with eager updates: no momentum, best of the values tried with 4 "
            "peers, H = 10, 30 rounds"
        ),
    ),
    Preset(
        "co2",
        OuterSettings("co2", 1.0, 0.5),
        source=(
            "CO2 with late results: best of the values tried with 4 peers, H = 10, 30 rounds; best "
            "with a delay"
        ),
    ),
    Preset(
        "worker-momentum",
        OuterSettings("sgd", 2.0),
        source=(
            "runs with [robust] momentum = 0.8: the members' momentum in place of the outer one, 7 "
            "peers, H = 10, 200 rounds; with 4, members that climb the held-out loss do more harm"
        ),
    ),
    Preset(
        "short-muloco",
        OuterSettings("nesterov", 0.7, 0.6),
        source=(
            "few rounds with Muon inside (MuLoCo, arXiv 2505.23725): best of the values tried with "
            "4 peers, H = 10, 30 rounds"
        ),
    ),
    Preset(
        "sparse",
        OuterSettings("sgd", 1.0),
        source=(
            "many rounds of sparse contributions, whose residual is the momentum: as published "
            "(SparseLoCo, arXiv 2508.15706)"
        ),
    ),
    Preset(
        "short-sparse",
        OuterSettings("sgd", 2.0),
        source=(
            "few rounds of sparse contributions: tried with 4 peers, H = 10, 30 rounds, 64 to 256 "
            "of each 4,096 values"
        ),
    ),
)
"""All that there are. Values that a source calls tried were tried after 100 synchronous steps."""

_BY_NAME = {preset.name: preset for preset in PRESETS}


def choose(*, worker_momentum: bool = False, measured: bool = False) -> Preset:
    """The preset of a run that chooses none. ``worker_momentum``: its members contribute running
    means (``[robust] momentum``). ``measured``: it is one for which "cold" was measured.
    """
    if worker_momentum:
        return _BY_NAME["worker-momentum"]
    return _BY_NAME["cold" if measured else "plain-mean"]


def preset_named(name: str) -> Preset:
    """The preset of this name. Raises ConfigError for a name that no preset has."""
    if name not in _BY_NAME:
        raise ConfigError(
            f"{name!r} is no preset of outer values",
            key="$.train.outer.preset",
            code="E413",
            hint=f"Choose one of: {', '.join([AUTO, *_BY_NAME])}",
        )
    return _BY_NAME[name]


def outer_preset(name: str) -> OuterSettings:
    """The values of a preset, for a script: ``RunSettings(outer=outer_preset("published"))``.
    Raises ConfigError for a name that no preset has.
    """
    return (choose() if name == AUTO else preset_named(name)).outer
