"""The loss plot as a PNG, by matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path

from .board import Board

_MARKS = {"killed": ("#c0392b", "killed"), "joined": ("#27764a", "joined")}


def draw(board: Board, path: Path) -> bool:
    """Write the plot of held-out loss by round, with marks at kill and join. False where matplotlib
    is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for row in board.rows.values():
        if len(row.losses) > 1:
            axes.plot(
                *zip(*row.losses, strict=True),
                linewidth=0.8,
                alpha=0.45,
                label=f"{row.name}, training (smoothed)",
            )
    if board.solo:
        axes.plot(
            *zip(*board.solo, strict=True),
            color="black",
            linestyle="--",
            label="one machine alone, held out",
        )
    if board.evaluations:
        axes.plot(
            *zip(*board.evaluations, strict=True),
            color="#1f4e9c",
            linewidth=2,
            label="the swarm's anchor, held out",
        )
    for happening in board.happenings:
        colour, word = _MARKS[happening.kind]
        axes.axvline(happening.round, color=colour, linestyle=":")
        axes.annotate(
            f"{happening.name} {word}",
            (happening.round, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -12),
            textcoords="offset points",
            color=colour,
            fontsize=8,
        )
    if len(board.evaluations) > 1:
        axes.set_ylim(
            top=1.35 * board.evaluations[1][1]
        )  # what comes before would flatten the rest
    axes.set_xlabel(f"round ({board.sync_every} steps of each peer)")
    axes.set_ylabel("loss, nats per byte")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    axes.grid(visible=True, alpha=0.25)
    figure.savefig(path, dpi=130)
    return True
