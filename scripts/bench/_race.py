"""What bench_race.py says of a race, without running one: links, rules by which a race is void, when
a loss was reached, and what atoll's contestants are told.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LATE, HELD, AGAIN = 0.01, 0.95, 0.02
"""Of the time, by how much steps may be late; of its first rate, what plain TCP must keep; and by
how much a loss that was reached may be exceeded afterwards (nats)."""
OFFLINE = ("alone", "ddp", "local")  # their losses by step do not depend on time
LIVE = ("planned", "plain", "hivemind", "torchft")
ARMS = (*OFFLINE, *LIVE)
Points = Sequence[Sequence[float]]
"""(seconds, step, held-out loss), in order."""


@dataclass(frozen=True)
class Link:
    """What each host has: Mbit/s up and down, and ms between any two."""

    up: float
    down: float
    rtt_ms: float


LINKS = {
    "100": Link(100.0, 100.0, 50.0),
    "20-100": Link(20.0, 100.0, 80.0),
    "1000": Link(1000.0, 1000.0, 5.0),
}


def ring_over_step(link: Link, parameters: int, workers: int, step_s: float) -> float:
    """Seconds of a ring all-reduce of fp32 gradients at line rate, over those of a step.

    >>> round(ring_over_step(LINKS["100"], 1_060_000, 4, 0.5), 2)
    1.02
    """
    sent = 2 * (workers - 1) / workers * 4 * parameters
    return sent / (min(link.up, link.down) * 1e6 / 8) / step_s


def reached(points: Points, target: float) -> float | None:
    """The second from which on no loss is above ``target`` by more than AGAIN, if one is at it;
    None: never.

    >>> reached([(1, 20, 3.0), (2, 40, 3.1), (3, 60, 3.0), (4, 80, 3.01)], 3.0)
    3
    """
    held: float | None = None
    for seconds, _, loss in points:
        if held is None and loss <= target:
            held = seconds
        elif held is not None and loss > target + AGAIN:
            held = None
    return held


def void(found: Mapping[str, Any]) -> list[str]:
    """Why what was measured does not count; empty: it does, or was computed. ``found``: ``late`` (share of the time),
    ``rates`` (bytes/s of plain TCP between two spare hosts, the first before the race) and
    ``on_target`` (pings).

    >>> void({"late": 0.002, "rates": [100, 96], "on_target": True})
    []
    >>> void({"late": 0.02, "rates": [100, 80], "on_target": True})
    ['steps were 2.0% late', 'plain TCP kept 80% of its rate']
    """
    if "rates" not in found:
        return []
    kept = min(found["rates"]) / found["rates"][0]
    rows = (
        (found["late"] > LATE, f"steps were {found['late']:.1%} late"),
        (kept < HELD, f"plain TCP kept {kept:.0%} of its rate"),
        (not found["on_target"], "pings were off target"),
    )
    return [says for when, says in rows if when]


def targets(alone: Sequence[tuple[int, float]], at: Sequence[int]) -> dict[int, float]:
    """Where one machine alone is after so many steps: the losses that are raced to."""
    by_step = dict(alone)
    return {step: by_step[step] for step in at}


def table(
    raced: Mapping[str, Sequence[Points]], losses: Sequence[Mapping[int, float]]
) -> dict[str, dict[int, float | None]]:
    """Of each contestant the median second of each target over its seeds; None: not reached by
    half of them. ``losses``: the targets of each seed.
    """
    found = dict[str, dict[int, float | None]]()
    for arm, seeds in raced.items():
        found[arm] = {}
        for at in losses[0]:
            times = [reached(points, each[at]) for points, each in zip(seeds, losses, strict=True)]
            sure = sorted(float("inf") if one is None else one for one in times)
            middle = statistics.median_low(sure)
            found[arm][at] = None if middle == float("inf") else round(middle, 2)
    return found


def manifest(tables: Mapping[str, Mapping[str, Any]], parameters: int, workers: int) -> str:
    """The text of a run with these settings that begins when all are there."""
    lines = [
        'schema = 1\nname = "race"\n[model]\nentry = "local:race"',
        f"parameters = {parameters}",
    ]
    for name, values in tables.items():
        more = {"start_with": workers} if name == "train" else {}
        rows = (f"{key} = {json.dumps(value)}" for key, value in {**values, **more}.items())
        lines += [f"[{name}]", *rows]
    return "\n".join(lines) + "\n"


def plain_settings(steps: int, every: int) -> dict[str, dict[str, Any]]:
    """The plain mean of every so many steps."""
    return {
        "train": {"sync_every": every, "rounds": max(1, steps // every), "growth": 0},
        "train.outer": {"optimizer": "sgd", "lr": 1.0},
        "exchange": {"codec": "int8"},
    }


class Records:
    """What was measured, a JSON line each, and kept from run to run."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        text = out.read_text(encoding="utf-8") if out is not None and out.exists() else ""
        self._known = {line["key"]: line for line in map(json.loads, text.splitlines())}

    def find(self, *key: object) -> dict[str, Any] | None:
        """What is known by this key."""
        return self._known.get(" ".join(map(str, key)))

    def keep(self, found: Mapping[str, Any], *key: object) -> dict[str, Any]:
        """Remember it, also for the next run."""
        name = " ".join(map(str, key))
        self._known[name] = line = {"key": name, **found}
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return line
