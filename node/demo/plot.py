"""Curves in a terminal: a braille plot with marks, and a one-line sparkline. Pure functions of
numbers to text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BARS = "▁▂▃▄▅▆▇█"
# Bits of the eight dots of a braille cell, by [row][column].
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on the x axis, shown as a vertical line with a sign above the plot."""

    x: float
    sign: str  # one character


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


class _Canvas:
    """Dots, two by four a character cell."""

    def __init__(self, columns: int, rows: int) -> None:
        self.width, self.height = columns * 2, rows * 4
        self._cells = [[0] * columns for _ in range(rows)]

    def dot(self, x: int, y: int) -> None:
        if 0 <= x < self.width and 0 <= y < self.height:
            self._cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def line(self, x0: int, y0: int, x1: int, y1: int) -> None:
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            self.dot(round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps))

    def lines(self) -> list[str]:
        return ["".join(chr(0x2800 + cell) for cell in row) for row in self._cells]


def braille_plot(
    curves: Sequence[Sequence[tuple[float, float]]],
    *,
    columns: int = 64,
    rows: int = 12,
    marks: Sequence[Mark] = (),
    x_label: str = "",
) -> list[str]:
    """Lines of text that draw the curves, each a list of (x, y), joined by straight lines. Points
    that are not finite are left out.

    ``marks`` are drawn as dotted vertical lines, their signs in a line above. Without any point the
    result is one line saying so.
    """
    drawn = [found for curve in curves if (found := _finite(curve))]
    if not drawn:
        return ["(nothing to plot)"]
    xs, ys = [x for curve in drawn for x, _ in curve], [y for curve in drawn for _, y in curve]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    wide, tall = (right - left) or 1.0, (high - low) or 1.0
    canvas = _Canvas(columns, rows)

    def place(x: float, y: float) -> tuple[int, int]:
        return round((x - left) / wide * (canvas.width - 1)), round(
            (high - y) / tall * (canvas.height - 1)
        )

    for curve in drawn:
        dots = [place(x, y) for x, y in curve]
        for a, b in zip(dots, dots[1:] or dots, strict=False):
            canvas.line(*a, *b)
    signs = [" "] * columns
    for mark in marks:
        if left <= mark.x <= right:
            x, _ = place(mark.x, low)
            signs[x // 2] = mark.sign
            for y in range(0, canvas.height, 3):
                canvas.dot(x, y)
    return _framed(canvas.lines(), "".join(signs), (low, high), (left, right), x_label)


def _framed(
    body: list[str],
    signs: str,
    y_range: tuple[float, float],
    x_range: tuple[float, float],
    x_label: str,
) -> list[str]:
    low, high = y_range
    labels = [
        f"{high - (high - low) * row / max(1, len(body) - 1):7.3f}"
        if row % 4 == 0 or row == len(body) - 1
        else " " * 7
        for row in range(len(body))
    ]
    lines = [" " * 9 + signs.rstrip()] if signs.strip() else []
    lines += [f"{label} ┤{row}" for label, row in zip(labels, body, strict=True)]
    first, last = f"{x_range[0]:g}", f"{x_range[1]:g} {x_label}".rstrip()
    gap = max(1, len(body[0]) - len(first) - len(last))
    return [*lines, " " * 8 + "└" + "─" * len(body[0]), " " * 9 + first + " " * gap + last]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last ``width`` values as bars between their minimum and maximum; values that are not
    finite are left out.
    """
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)
