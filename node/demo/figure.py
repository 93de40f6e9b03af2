"""The picture of a demo as PNG, light and dark, by matplotlib (the extra `plot`): the held-out loss
of the swarm and of one machine alone, and below it who contributed to which round.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .board import Board

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES, DPI = (9.0, 5.4), 200
FONT = "DejaVu Sans"  # comes with matplotlib: the same picture everywhere
LEFT, RIGHT = 0.085, 0.74  # the labels of the curves stand to the right


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours. Each reads at 4.5 : 1 or better on the ground, and the curves differ in lightness
    and dash, too.
    """

    ground: str
    ink: str
    muted: str
    faint: str
    swarm: str
    alone: str
    killed: str
    joined: str


LIGHT = Theme(
    "#ffffff", "#1f2328", "#59636e", "#e4e8ec", "#0860ca", "#8a4600", "#c0182b", "#116b39"
)
DARK = Theme("#0d1117", "#f0f6fc", "#9aa4af", "#262c36", "#6cb6ff", "#f2a65a", "#ff8182", "#4ac26b")
THEMES = {"loss.png": LIGHT, "loss-dark.png": DARK}


def draw(board: Board, folder: Path) -> list[Path]:
    """Write ``loss.png`` and ``loss-dark.png``; which were written: none where matplotlib is not
    installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    written = list[Path]()
    for name, theme in THEMES.items():
        figure = Figure(figsize=INCHES, facecolor=theme.ground)
        plot, lanes = figure.subplots(
            2, sharex=True, gridspec_kw={"height_ratios": [5, 0.3 * len(board.rows)]}
        )
        figure.subplots_adjust(LEFT, 0.105, RIGHT, 0.8, hspace=0.12)
        figure.text(0.02, 0.95, title(board), va="center", **_text(theme.ink, 14.5, bold=True))
        figure.text(0.02, 0.885, story(board), va="center", **_text(theme.muted, 9.5))
        _curves(plot, board, theme)
        _lanes(lanes, board, theme)
        figure.savefig(folder / name, dpi=DPI, facecolor=theme.ground)
        written.append(folder / name)
    return written


def title(board: Board) -> str:
    """The two numbers that matter, as far as they are there: loss against one machine alone, and
    bytes against plain data-parallel training.
    """
    parts = list[str]()
    if board.solo and board.evaluations:
        share = board.evaluations[-1][1] / board.solo[-1][1] - 1
        parts.append(f"{abs(share):.0%} {'lower' if share < 0 else 'higher'} loss than alone")
    if board.bytes_sent and board.ddp_equivalent_bytes:
        parts.append(f"{board.ddp_equivalent_bytes / board.bytes_sent:.0f}× fewer bytes than DDP")
    return "Trained together: " + (", ".join(parts) or f"{board.round} rounds")


def story(board: Board) -> str:
    """What happened, in a line."""
    parts = [f"{len(board.rows) - 1} peers on one machine"]
    for event in board.happenings:
        what = f"{event.name} {'was killed' if event.kind == 'killed' else 'came late'}"
        recovery = board.recovery_s() if event.kind == "killed" else None
        parts.append(what if recovery is None else f"{what}, next round {recovery:.1f} s later")
    return "  ·  ".join(parts)


def seen_share(board: Board) -> float:
    """Of the samples in the swarm's rounds, how many one machine sees in as many steps."""
    together = sum(row.samples for row in board.rounds)
    # A peer that missed a round contributes two at once: the median is what one round has.
    each = statistics.median([row.samples / len(row.contributors) for row in board.rounds] or [0.0])
    return each * board.rounds_total / together if together else 1.0


def _text(colour: str, size: float, *, bold: bool = False) -> dict[str, Any]:
    weight = "bold" if bold else "normal"
    return {"color": colour, "fontsize": size, "fontweight": weight, "fontfamily": FONT}


def _bare(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.ground)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, labelcolor=theme.muted, labelsize=9, labelfontfamily=FONT)


def _curves(axes: Axes, board: Board, theme: Theme) -> None:
    _bare(axes, theme)
    axes.tick_params(labelbottom=False)
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=theme.faint, linewidth=1)
    swarm, alone = board.evaluations, board.solo
    labels = list[tuple[float, str, str, str]]()
    if alone:
        axes.plot(*zip(*alone, strict=True), color=theme.alone, linestyle=(0, (4, 2)), linewidth=2)
        axes.plot(*zip(*alone, strict=True), "o", color=theme.alone, markersize=4)
        note = f"one machine, {seen_share(board):.0%} of the samples"
        labels.append((alone[-1][1], f"{alone[-1][1]:.2f}  alone", note, theme.alone))
    if swarm:
        axes.plot(*zip(*swarm, strict=True), color=theme.swarm, linewidth=3)
        axes.plot(*zip(*swarm, strict=True), "o", color=theme.swarm, markersize=5)
        note = "equal in every bit on all survivors" if board.identical else "the swarm's model"
        labels.append((swarm[-1][1], f"{swarm[-1][1]:.2f}  together", note, theme.swarm))
    # What comes before the first rounds would flatten the rest.
    seen = [loss for curve in (swarm[1:], alone[1:]) for _, loss in curve]
    low, high = (min(seen), 1.15 * max(seen)) if seen else (0.0, 1.0)
    axes.set_ylim(low - 0.08 * (high - low), high)
    axes.set_xlim(0, 1.006 * board.rounds_total)
    axes.set_title("held-out loss, nats per byte", loc="left", pad=6, **_text(theme.muted, 9))
    _label(axes, labels)


def _label(axes: Axes, labels: list[tuple[float, str, str, str]]) -> None:
    """Each at the end of its curve, and so far apart that they can be read."""
    low, high = axes.get_ylim()
    gap, below = 0.19 * (high - low), -float("inf")
    for loss, words, note, colour in sorted(labels):
        at = max(loss, below + gap)
        for line, points, size in ((words, 0, 12.5), (note, -15, 8.5)):
            axes.annotate(
                line,
                (1.0, at),
                xytext=(10, points),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                annotation_clip=False,
                **_text(colour, size, bold=points == 0),
            )
        below = at


def _lanes(axes: Axes, board: Board, theme: Theme) -> None:
    """A lane for each peer: the rounds that hold its contribution, its kill, its late start."""
    _bare(axes, theme)
    names = list(board.rows)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks([])
    for lane, name in enumerate(names):
        there = [row.round for row in board.rounds if name in row.contributors]
        axes.barh(lane, board.rounds_total, height=0.5, color=theme.faint, left=0)
        axes.barh(
            [lane] * len(there),
            [0.84] * len(there),
            height=0.5,
            left=[number - 0.92 for number in there],
            color=theme.swarm,
        )
        axes.annotate(
            name,
            (0, lane),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            annotation_clip=False,
            **_text(theme.muted, 9),
        )
    for event in board.happenings:
        killed = event.kind == "killed"
        colour = theme.killed if killed else theme.joined
        words = "killed by SIGKILL" if killed else "joined late"
        lane = names.index(event.name)
        last = event.round if killed else event.round - 1
        axes.annotate(
            f"✕ {words}" if killed else f"{words} ▸",
            (last, lane),
            xytext=(5 if killed else -5, 0),
            textcoords="offset points",
            ha="left" if killed else "right",
            va="center",
            bbox={"facecolor": theme.ground, "edgecolor": "none", "pad": 1.5},
            **_text(colour, 9, bold=True),
        )
    axes.set_xlabel(
        f"round, of {board.sync_every} steps of each peer", labelpad=6, **_text(theme.muted, 9)
    )
