"""What other settings would cost this run: the planner, asked with what was seen of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...collectives.codec_costs import round_bytes_per_value
from ...collectives.codec_names import CODECS, DEFAULT_CODEC
from ...collectives.errors import ConfigError
from ...optim.planning import Choice, Conditions, PeerConditions, estimate, price
from .view import RunPicture

OVERLAPS = ("none", "late", "eager")
AMONG = {"codec": CODECS, "overlap": OVERLAPS}
"""The settings that have a few values only, and which these are."""
RATE, RTT_S = 12_500_000.0, 0.05  # where nothing was measured: 100 Mbit/s


def given(view: RunPicture) -> dict[str, Any]:
    """What the questions begin with: the run's own settings, and what was measured."""
    rows = [row for row in list(view.rounds)[-50:] if row.period_s]
    steps = view.about.sync_every or 20
    busy = [max(row.period_s - (row.waited_s or 0.0), 1e-3) for row in rows if row.period_s]
    step_s = sorted(busy)[len(busy) // 2] / steps if busy else 0.25
    times = [row.link.get("rtt_ms") for row in view.peers if row.member]
    rtt = max([float(rtt) for rtt in times if isinstance(rtt, int | float)], default=RTT_S * 1000)
    return {
        "parameters": view.about.parameters or 1_000_000,
        "peers": max(2, sum(row.member for row in view.peers)),
        "step_ms": round(step_s * 1000, 3),
        "rtt_ms": rtt,
        "mbit": RATE * 8 / 1e6,
        "sync_every": steps,
        "codec": view.about.codec if view.about.codec in CODECS else DEFAULT_CODEC,
        "overlap": view.about.overlap,
    }


def what_if(asked: Mapping[str, str]) -> dict[str, Any]:
    """What these settings cost; ``asked``: the keys of `given` as text. Raises ConfigError."""
    rate = _number(asked, "mbit", 0.001, 1e6) * 125_000
    step_s = _number(asked, "step_ms", 1e-3, 1e8) / 1000
    peers = int(_number(asked, "peers", 1, 256))
    codec, overlap = asked.get("codec", DEFAULT_CODEC), asked.get("overlap", "none")
    if codec not in CODECS or overlap not in OVERLAPS:
        raise ConfigError("no such codec or overlap", key="codec")
    steps = int(_number(asked, "sync_every", 1, 1e6))
    parameters = int(_number(asked, "parameters", 1, 1e12))
    conditions = Conditions(
        parameters,
        tuple(PeerConditions(f"p{number}", rate, rate, step_s) for number in range(peers)),
        _number(asked, "rtt_ms", 0, 1e6) / 1000,
    )
    choice = Choice(steps, codec, overlap)
    found, cost = estimate(conditions, choice), price(parameters, choice, peers)
    return {
        "training_share": found.share,
        "period_s": found.period_s,
        "round_s": found.round.seconds,
        "bytes": found.nbytes,
        "bytes_per_value": round_bytes_per_value(codec),
        "bound": found.round.bound,
        "price": [
            f"{cost.loss - 1:.1%} more loss than synchronous training on as many samples, from a "
            "table of small models and published figures",
            f"of that: rounds of {steps} steps {cost.steps - 1:.1%}, {codec} {cost.codec - 1:.1%}, "
            f"late results {cost.late - 1:.1%}",
            f"{cost.samples - 1:.0%} more samples to the same loss",
        ],
    }


def _number(asked: Mapping[str, str], key: str, low: float, high: float) -> float:
    try:
        found = float(asked[key])
    except (KeyError, ValueError):
        raise ConfigError(f"{key} is no number", key=key) from None
    if not low <= found <= high:
        raise ConfigError(f"{key} is {found:g}, not from {low:g} to {high:g}", key=key)
    return found
