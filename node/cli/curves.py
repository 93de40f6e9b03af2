"""Curves of simulations as a PNG, with matplotlib where it is installed (`pip install
atoll[plot]`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(curves: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> bool:
    """Accuracy by rounds, by virtual seconds and by bytes, a line for each name. False: matplotlib
    is not installed, and nothing is written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        return False
    figure: Any = Figure(figsize=(13, 4.2), layout="constrained")
    for axes, (key, label) in zip(
        figure.subplots(1, 3, sharey=True),
        (("round", "outer steps"), ("seconds", "virtual seconds"), ("bytes", "bytes")),
        strict=True,
    ):
        for name, points in curves.items():
            axes.plot(
                [point[key] for point in points],
                [point["accuracy"] for point in points],
                label=name,
                linewidth=1.3,
            )
        axes.set_xlabel(label)
        # 500k: whole numbers of bytes would overlap.
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("accuracy on test rows")
    figure.axes[2].legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(file))
    return True
