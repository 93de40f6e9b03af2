"""Outer values that are known to work, by what governs them: peers, inner steps a round, rounds;
and where each comes from.

Nesterov's first step moves lr·(1+μ) times the mean, and a constant mean is amplified lr/(1-μ)
times, 7 times at 0.7/0.9: a short run has no time to damp that. So published values are for long
runs, and those for short ones were tried (`scripts/bench/bench_methods.py`; the table is in
docs/benchmarks-training.md). The size of the model hardly matters (scaling laws of DiLoCo, arXiv
2503.09799).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...collectives.swarm import OuterSettings

FEW_ROUNDS = 50

Overlap = Literal["none", "late", "eager"]


@dataclass(frozen=True, slots=True)
class Preset:
    """Outer values under a name, the runs that they are for, and where they come from."""

    name: str
    outer: OuterSettings
    source: str
    overlap: tuple[Overlap, ...] = ("none",)
    short: bool = False  # below FEW_ROUNDS
    part: bool = False  # with overlap: results are adopted before half a round is over
    workers: bool = False  # members send running means ([robust] momentum)
    peers: int = 1 << 30  # at most
    mixing: float | None = None  # of late results, where the manifest says nothing

    def fits(
        self,
        *,
        rounds: int | None,
        peers: int,
        sync_every: int | None,
        overlap: Overlap,
        delay: int | None,
        worker_momentum: bool,
    ) -> bool:
        """Whether it is for such runs."""
        if worker_momentum or self.workers:
            return worker_momentum and self.workers
        short = rounds is not None and rounds < FEW_ROUNDS
        part = delay is not None and sync_every is not None and 2 * delay <= sync_every
        return (
            overlap in self.overlap
            and short == self.short
            and part >= self.part
            and peers <= self.peers
        )


PRESETS = (
    Preset(
        "alone",
        OuterSettings("nesterov", 0.7, 0.8),
        peers=1,
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
        overlap=("late", "eager"),
        mixing=0.5,
        source=(
            "many rounds with overlap: as published (Streaming DiLoCo, H = 30 and 100, arXiv "
            "2501.18512; eager updates, H = 30, arXiv 2502.12996)"
        ),
    ),
    Preset(
        "short",
        OuterSettings("nesterov", 0.9, 0.6),
        short=True,
        source=(
            "few rounds: best of the values tried with 2, 4 and 8 peers, H = "
            "10 to 50, 6 to 30 rounds"
        ),
    ),
    Preset(
        "short-delay",
        OuterSettings("nesterov", 0.9, 0.6),
        short=True,
        overlap=("late", "eager"),
        part=True,
        source=(
            "few rounds, results adopted before half the next is over: as without overlap, tried "
            "with 4 peers, H = 10, delay = 3"
        ),
    ),
    Preset(
        "short-late",
        OuterSettings("nesterov", 1.0, 0.4),
        short=True,
        overlap=("late",),
        source=(
            "few rounds, results a whole round late: less momentum, best of the values tried with "
            "4 peers, H = 10, 30 rounds"
        ),
    ),
    Preset(
        "short-eager",
        OuterSettings("nesterov", 0.9, 0.0),
        short=True,
        overlap=("eager",),
        source=(
            "few rounds with eager updates: no momentum, best of the values tried with 4 "
            "peers, H = 10, 30 rounds"
        ),
    ),
    Preset(
        "co2",
        OuterSettings("co2", 1.0, 0.5),
        short=True,
        overlap=(),
        source=(
            "CO2 with late results: best of the values tried with 4 peers, H = 10, 30 rounds; best "
            "with a delay; take it by name"
        ),
    ),
    Preset(
        "worker-momentum",
        OuterSettings("sgd", 4.0, 0.0),
        workers=True,
        source=(
            "runs with [robust] momentum = 0.9: the members' momentum in place of the outer one, 7 "
            "peers, H = 10, 200 rounds (2 to 7 tried)"
        ),
    ),
    Preset(
        "short-muloco",
        OuterSettings("nesterov", 0.7, 0.6),
        short=True,
        overlap=(),
        source=(
            "few rounds with Muon inside (MuLoCo, arXiv 2505.23725): best of the values tried with "
            "4 peers, H = 10, 30 rounds; take it by name"
        ),
    ),
    Preset(
        "sparse",
        OuterSettings("sgd", 1.0),
        overlap=(),
        source=(
            "many rounds of sparse contributions, whose residual is the momentum: as published "
            "(SparseLoCo, arXiv 2508.15706); take it by name"
        ),
    ),
    Preset(
        "short-sparse",
        OuterSettings("sgd", 2.0),
        short=True,
        overlap=(),
        source=(
            "few rounds of sparse contributions: tried with 4 peers, H = 10, 30 rounds, 64 to 256 "
            "of each 4,096 values; take it by name"
        ),
    ),
)
"""In the order in which they are looked through: the first that fits is taken."""


def choose(
    *,
    rounds: int | None,
    peers: int = 4,
    sync_every: int | None = None,
    overlap: Overlap = "none",
    delay: int | None = None,
    worker_momentum: bool = False,
) -> Preset:
    """The preset for a run of so many rounds (None: open-ended) and peers, H = ``sync_every`` inner
    steps (None: it ends rounds otherwise).
    """
    return next(
        preset
        for preset in PRESETS
        if preset.fits(
            rounds=rounds,
            peers=peers,
            sync_every=sync_every,
            overlap=overlap,
            delay=delay,
            worker_momentum=worker_momentum,
        )
    )


def outer_preset(
    rounds: int | None,
    *,
    peers: int = 4,
    sync_every: int | None = None,
    overlap: Overlap = "none",
    delay: int | None = None,
) -> OuterSettings:
    """The values of `choose`."""
    return choose(
        rounds=rounds, peers=peers, sync_every=sync_every, overlap=overlap, delay=delay
    ).outer
