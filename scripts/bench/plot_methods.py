#!/usr/bin/env python3
"""Draw what bench_methods.py printed: held-out loss by inner steps, one line a method, as a small
SVG.

    python scripts/bench/bench_methods.py --params 1m --seeds 1 --methods ddp,diloco,streaming,late_delay
        > printed.txt
    python scripts/bench/plot_methods.py printed.txt -o docs/methods-1m.svg

Reads the last line of a file, or a journal. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 60, 170, 20, 45
COLOURS = ("#333333", "#1f6fb4", "#27764a", "#d08a1d", "#b3261e", "#7a4fa3")
Point = tuple[float, float]


def read(path: Path, params: str, seed: int) -> list[dict[str, Any]]:
    """Cells of one size and seed that have a curve."""
    found = [
        json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("{")
    ]
    rows = found[-1].get("runs", found)
    return [
        row for row in rows if row["params"] == params and row["seed"] == seed and row.get("curve")
    ]


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """The SVG: axes with five ticks each, a line and its name for each row."""
    points = [tuple(point) for row in rows for point in row["curve"]]
    (x0, x1), (y0, y1) = ((min(values), max(values)) for values in zip(*points, strict=True))

    def place(point: Sequence[float]) -> Point:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (point[0] - x0) / (x1 - x0)
        return round(across, 1), round(
            TOP + (HEIGHT - TOP - BOTTOM) * (y1 - point[1]) / (y1 - y0), 1
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for part in range(5):
        x, y = place((x0 + (x1 - x0) * part / 4, y0 + (y1 - y0) * part / 4))
        parts.append(f'<path d="M{LEFT} {y}H{right}M{x} {bottom}v4" stroke="#c9ced6"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{y0 + (y1 - y0) * part / 4:.2f}</text>'
        )
        parts.append(
            f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{x0 + (x1 - x0) * part / 4:.0f}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">inner steps of each worker</text>'
    )
    parts.append(
        f'<text x="14" y="{(TOP + bottom) / 2}" text-anchor="middle" transform="rotate(-90 14 {(TOP + bottom) / 2})">nats a byte</text>'
    )
    for number, row in enumerate(sorted(rows, key=lambda row: -row["loss"])):
        colour, text = COLOURS[number % len(COLOURS)], f"{row['method']} {row['loss']:.3f}"
        line = " ".join(f"{x},{y}" for x, y in map(place, row["curve"]))
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        parts.append(
            f'<path d="M{right + 8} {TOP + 10 + 20 * number}h18" stroke="{colour}" stroke-width="2.5"/>'
        )
        parts.append(f'<text x="{right + 32}" y="{TOP + 14 + 20 * number}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("printed", type=Path, help="what bench_methods.py printed, or its journal")
    parser.add_argument("--params", default="1m", help="size of the model (default 1m)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("methods.svg"))
    given = parser.parse_args()
    rows = read(given.printed, given.params, given.seed)
    if not rows:
        raise SystemExit("no curves in there")
    given.output.write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
