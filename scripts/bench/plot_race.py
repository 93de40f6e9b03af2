#!/usr/bin/env python3
"""Draw what bench_race.py printed: held-out loss against seconds, a panel for each link, a line for
each contestant, as an SVG that is light or dark as its reader's page is.

    scripts/bench/bench_race.py --out race.jsonl --known > printed.txt
    scripts/bench/plot_race.py printed.txt -o docs/race.svg

A line is the median of the seeds, the band around it all of them. Dashed: where one machine alone is
after --targets steps. The colour of a contestant is the same in all panels; the number behind its
name is its second at the last dashed line (–: it was not there). Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 300, 46, 12, 34, 40
LEGEND, ROW = 26, 17
LOOKS = 120  # places on the axis of seconds at which a median is taken
HEADROOM = 0.6  # nats above the first dashed line: an untrained model would flatten all else
ARMS = {
    "planned": ("atoll, as atoll plan says", "#1f6fb4"),
    "plain": ("atoll, plain mean", "#7fb2dc"),
    "alone": ("one machine alone", "#777777"),
    "ddp": ("DDP over gloo", "#b3261e"),
    "local": ("torch post-local SGD", "#27764a"),
    "hivemind": ("hivemind, local updates", "#d08a1d"),
    "torchft": ("torchft DiLoCo", "#7a4fa3"),
}
LINKS = {
    "100": "100 Mbit/s, 50 ms",
    "20-100": "20 up, 100 down Mbit/s, 80 ms",
    "1000": "1 Gbit/s, 5 ms",
}
STYLE = (
    "text{fill:#222}.grid{stroke:#d4d8de}.aim{stroke:#555;stroke-dasharray:4 3}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444b55}.aim{stroke:#aaa}"
    ".page{fill:#0d1117}}"
)
Curve = list[tuple[float, float]]


def printed(path: Path) -> dict[str, Any]:
    """What the bench said last."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if line.startswith('{"name": "bench_race"')]
    if not found:
        raise SystemExit(f"{path} holds no line of bench_race.py")
    return dict(found[-1])


def at(curve: Curve, second: float) -> float | None:
    """The loss of the last weights that there were by then; None: there were none yet."""
    return next((loss for when, loss in reversed(curve) if when <= second), None)


def band(curves: Sequence[Curve], most_s: float) -> list[tuple[float, float, float, float]]:
    """(second, least, median, most) of the seeds, where all have weights and none has ended.

    >>> band([[(0, 4.0), (5, 2.0)], [(0, 4.0), (5, 3.0)]], 4)[-1]
    (4.0, 4.0, 4.0, 4.0)
    """
    end, found = min(most_s, *(curve[-1][0] for curve in curves)), []
    for place in range(LOOKS + 1):
        second = end * place / LOOKS
        losses = [at(curve, second) for curve in curves]
        there = [loss for loss in losses if loss is not None]
        if len(there) == len(curves):
            found.append((second, min(there), statistics.median(there), max(there)))
    return found


def panel(link: str, rows: Sequence[dict[str, Any]], told: dict[str, Any], left: int) -> list[str]:
    """One link's axes, lines and names."""
    aims = [
        statistics.median(float(each[step]) for each in told["targets"])
        for step in sorted(told["targets"][0], key=int)
    ]
    curves = {
        arm: [[(s, loss) for s, _, loss in row["points"]] for row in rows if row["arm"] == arm]
        for arm in ARMS
    }
    steps_s = [curve[-1][0] for arm in curves for curve in curves[arm] if arm != "alone"]
    most_s = max(steps_s or [1.0])
    bands = {arm: band(each, most_s) for arm, each in curves.items() if each}
    top = max(aims) + HEADROOM
    low = min([*aims, *(least for each in bands.values() for _, least, _, _ in each)]) - 0.05

    def place(second: float, loss: float) -> str:
        x = left + LEFT + (WIDTH - LEFT - RIGHT) * second / most_s
        y = TOP + (HEIGHT - TOP - BOTTOM) * (top - min(loss, top)) / (top - low)
        return f"{x:.1f},{y:.1f}"

    start, end, bottom = left + LEFT, left + WIDTH - RIGHT, HEIGHT - BOTTOM
    name = f"{LINKS[link]}; payload ÷ step {told['r'][link]:g}"
    parts = [f'<text x="{start}" y="20" font-weight="bold">{escape(name)}</text>']
    for part in range(5):
        loss, second = low + (top - low) * part / 4, most_s * part / 4
        _, y = place(0, loss).split(",")
        x, _ = place(second, low).split(",")
        parts.append(f'<path class="grid" d="M{start} {y}H{end}"/>')
        parts.append(f'<text x="{start - 6}" y="{y}" text-anchor="end">{loss:.1f}</text>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{second:.0f}</text>')
    middle = (start + end) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 33}" text-anchor="middle">seconds</text>')
    for loss in aims:
        _, y = place(0, loss).split(",")
        parts.append(f'<path class="aim" d="M{start} {y}H{end}"/>')
    times, last = told["table"].get(link, {}), max(told["targets"][0], key=int)
    for row, (arm, whole) in enumerate(bands.items()):
        each = [one for one in whole if one[2] <= top]  # above it a line would say nothing
        label, colour = ARMS[arm]
        low_edge = " ".join(place(s, least) for s, least, _, _ in each)
        high_edge = " ".join(place(s, most) for s, _, _, most in reversed(each))
        line = " ".join(place(s, median) for s, _, median, _ in each)
        y = HEIGHT + LEGEND + ROW * row
        second = times.get(arm, {}).get(last)
        when = "–" if second is None else f"{second:.0f} s"
        parts += [
            f'<polygon points="{low_edge} {high_edge}" fill="{colour}" opacity="0.18"/>',
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<path d="M{start} {y - 4}h20" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{start + 28}" y="{y}">{escape(label)}</text>',
            f'<text x="{end}" y="{y}" text-anchor="end">{when}</text>',
        ]
    return parts


def picture(told: dict[str, Any]) -> str:
    """The SVG of what the bench said."""
    links = [link for link in LINKS if any(row["link"] == link for row in told["runs"])]
    height = HEIGHT + LEGEND + ROW * len(ARMS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(links)} {height}" '
        f'font-family="sans-serif" font-size="12"><style>{STYLE}</style>',
        f'<rect class="page" width="{WIDTH * len(links)}" height="{height}"/>',
    ]
    for number, link in enumerate(links):
        rows = [row for row in told["runs"] if row["link"] == link]
        parts += panel(link, rows, told, WIDTH * number)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("printed", type=Path, help="what bench_race.py printed")
    parser.add_argument("-o", "--output", type=Path, default=Path("race.svg"))
    given = parser.parse_args()
    told = printed(given.printed)
    if not told["runs"] or not told["targets"]:
        raise SystemExit("no race in there counts for all seeds yet")
    given.output.write_text(picture(told), encoding="utf-8")


if __name__ == "__main__":
    main()
