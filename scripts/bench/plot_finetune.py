#!/usr/bin/env python3
"""The picture of a fine-tuning in which one member is killed and comes back and a third joins late,
light and dark, as `bench_finetune.py --fault` left it in a seed's folder: the loss of each member's
step before a round, and below it who contributed to which round, by the time.

    scripts/bench/plot_finetune.py FOLDER/lora-fault-0 --out docs/demo

Writes finetune.png and finetune-dark.png. Needs matplotlib: pip install 'atoll[plot]'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from atoll.node.demo.figure import DARK, DPI, FONT, LIGHT, Theme

NAMES: tuple[str, ...] = ("one", "two", "three")
COLOURS = 64  # of a picture's palette
THEMES = {"finetune.png": LIGHT, "finetune-dark.png": DARK}


@dataclass
class Lane:
    """One member. ``given``: from when to when it worked for a round that has its contribution.
    ``losses``: of its last step before a round. ``gone``: the end of its last round before it was
    killed.
    """

    given: list[tuple[float, float]] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    gone: float | None = None


def told(folder: Path) -> list[dict[str, Any]]:
    """What a member's node wrote, without a line that a kill has cut."""
    found = list[dict[str, Any]]()
    for file in folder.glob("state/runs/*/events.jsonl"):
        for line in file.read_bytes().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def read(folder: Path) -> tuple[dict[str, Lane], list[float]]:
    """A lane for each member and the ends of rounds, in minutes since the first round began."""
    events = {name: told(folder / name) for name in NAMES}
    first = events["one"]
    began = next(each["at"] for each in first if each.get("event") == "run.begun")
    rounds = [each for each in first if each.get("event") == "round.committed"]
    ends = [(each["at"] - began) / 60 for each in rounds]
    own = {
        name: next(each["peer"] for each in of if each.get("event") == "reduction.timed")
        for name, of in events.items()
    }
    seen = {name: [own[name] in each["contributors"] for each in rounds] for name in NAMES}
    lanes = dict[str, Lane]()
    for name in NAMES:
        lane = lanes[name] = Lane()
        for there, start, end in zip(seen[name], [0.0, *ends], ends, strict=False):
            if there:
                lane.given.append((start, end))
        for each in events[name]:
            loss = each.get("metrics", {}).get("loss")
            if each.get("event") == "script.report" and loss is not None:
                lane.losses.append(((each["at"] - began) / 60, float(loss)))
    lanes["two"].gone = ends[seen["two"].index(False) - 1]
    return lanes, ends


def draw(lanes: dict[str, Lane], ends: Sequence[float], title: str, theme: Theme) -> Figure:
    """The picture."""
    figure = Figure(figsize=(9.0, 4.4), facecolor=theme.ground)
    plot, below = figure.subplots(2, sharex=True, gridspec_kw={"height_ratios": [3, 1.5]})
    figure.subplots_adjust(0.075, 0.12, 0.975, 0.84, hspace=0.12)

    def text(colour: str, size: float, weight: str = "normal") -> dict[str, Any]:
        return {"color": colour, "fontsize": size, "fontweight": weight, "fontfamily": FONT}

    figure.text(0.02, 0.94, title, va="center", **text(theme.ink, 13, "bold"))
    colours = dict(zip(NAMES, (theme.swarm, theme.alone, theme.joined), strict=True))
    for axes in (plot, below):
        axes.set_facecolor(theme.ground)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0, labelcolor=theme.muted, labelsize=9, labelfontfamily=FONT)
    plot.set_axisbelow(True)
    plot.grid(visible=True, axis="y", color=theme.faint, linewidth=1)
    plot.set_title(
        "loss of each member's last step before a round, and their mean, nats per token",
        loc="left",
        pad=6,
        **text(theme.muted, 9),
    )
    by_round = list[tuple[float, float]]()
    for end in ends:
        near = [v for lane in lanes.values() for at, v in lane.losses if abs(at - end) < 0.1]
        if near:
            by_round.append((end, statistics.fmean(near)))
    plot.plot(*zip(*by_round, strict=True), color=theme.muted, linewidth=2)
    for name, lane in lanes.items():
        if lane.losses:
            plot.plot(*zip(*lane.losses, strict=True), "o", color=colours[name], markersize=5)
    below.set_ylim(len(lanes) - 0.5, -0.5)
    below.set_yticks(range(len(lanes)), labels=list(lanes))
    below.set_xlim(0, 1.005 * ends[-1])
    gap = 0.004 * ends[-1]
    for row, (name, lane) in enumerate(lanes.items()):
        below.barh(row, ends[-1], height=0.56, color=theme.faint)
        for start, end in lane.given:
            below.barh(row, end - start - gap, height=0.56, left=start, color=colours[name])
        box = {"facecolor": theme.faint, "edgecolor": "none", "pad": 1.0}
        if lane.gone is not None:
            below.text(
                lane.gone + gap,
                row,
                "✕ kill -9, started again",
                va="center",
                bbox=box,
                **text(theme.killed, 8.5, "bold"),
            )
        elif lane.given[0][0] > 0:
            below.text(
                lane.given[0][0] - gap,
                row,
                "joins late ▸",
                va="center",
                ha="right",
                bbox=box,
                **text(theme.joined, 8.5, "bold"),
            )
    below.set_xlabel(
        f"minutes; each block is a contribution to one of {len(ends)} rounds",
        labelpad=6,
        **text(theme.muted, 9),
    )
    return figure


def main() -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="of the seed")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument(
        "--title",
        default="SmolLM2-135M on two machines: one is killed and comes back, a third joins",
    )
    given = parser.parse_args()
    lanes, ends = read(given.folder)
    for name, theme in THEMES.items():
        file = given.out / name
        draw(lanes, ends, given.title, theme).savefig(file, dpi=DPI, facecolor=theme.ground)
        plain = Image.open(file).convert("RGB")
        plain.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
        print(file, file.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
