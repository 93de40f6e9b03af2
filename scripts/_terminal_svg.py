"""Screens of a terminal as one SVG that plays them in a loop: CSS only, so that it moves wherever
an image does, and nothing has to be clicked.

A line that stays as it is over several screens is written once. Who asks for less motion is shown
the last screen.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

CELL, LINE, SIZE, EDGE = 8, 18, 13.3, 18  # pixels; a cell is 0.602 of the size in these fonts
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
KINDS = {
    "": ("", "#c9d1d9"),
    "dim": ("d", "#8b949e"),
    "bold": ("b", "#f0f6fc"),
    "red": ("r", "#ff8182"),
    "green": ("g", "#4ac26b"),
    "yellow": ("y", "#f2a65a"),
    "magenta": ("m", "#d2a8ff"),
    "cyan": ("c", "#6cb6ff"),
}
"""Of what is painted: its class and its colour."""
GROUND = "#0d1117"
MARK = "\x00{kind}\x01{text}\x02"
_PAINTED = re.compile("\x00([a-z]*)\x01([^\x02]*)\x02|([^\x00]+)")


@dataclass(frozen=True, slots=True)
class Screen:
    """Lines, and for how many seconds they are shown."""

    lines: Sequence[str]
    seconds: float


def paint(text: str, *, fg: str = "", bold: bool = False, dim: bool = False) -> str:
    """``text`` with marks that `play` turns into colours."""
    kind = fg if fg else "bold" if bold else "dim" if dim else ""
    kind = kind if kind in KINDS else ""
    return MARK.format(kind=kind, text=text) if kind and text else text


def pieces(line: str) -> list[tuple[int, str, str]]:
    """A line's pieces of one colour: the column where each begins, the colour, the text."""
    found = list[tuple[int, str, str]]()
    column = 0
    for kind, marked, plain in _PAINTED.findall(line):
        text = marked or plain
        if found and found[-1][1] == kind:
            found[-1] = (*found[-1][:2], found[-1][2] + text)
        else:
            found.append((column, kind, text))
        column += len(text)
    return [piece for piece in found if piece[2].strip()]


def play(screens: Sequence[Screen], columns: int, title: str) -> str:
    """The SVG."""
    rows = max(len(screen.lines) for screen in screens)
    total = sum(screen.seconds for screen in screens)
    starts = [sum(s.seconds for s in screens[:index]) / total for index in range(len(screens))]
    ends = [*starts[1:], 1.0]
    spans = dict[tuple[int, int], str]()  # first and last screen of something: its class
    body = list[str]()
    for row in range(rows):
        first = 0
        texts = [screen.lines[row] if row < len(screen.lines) else "" for screen in screens]
        for index in range(1, len(screens) + 1):
            if index < len(screens) and texts[index] == texts[first]:
                continue
            if texts[first].strip():
                where = spans.setdefault((first, index - 1), f"s{len(spans)}")
                body.append(_line(texts[first], row, where))
            first = index
    width, height = columns * CELL + 2 * EDGE, rows * LINE + 2 * EDGE + 22
    style = [
        f"text{{font:{SIZE}px {FONTS};white-space:pre;fill:{KINDS[''][1]}}}",
        *(f".{name}{{fill:{colour}}}" for name, colour in KINDS.values() if name),
        ".b{font-weight:700}",
    ]
    for (first, last), name in spans.items():
        if (first, last) == (0, len(screens) - 1):
            continue
        style.append(_shown(name, starts[first], ends[last], total))
        if last < len(screens) - 1:
            style.append(f"@media (prefers-reduced-motion){{.{name}{{visibility:hidden}}}}")
    style.append("@media (prefers-reduced-motion){*{animation:none!important}}")
    lights = "".join(
        f'<circle cx="{EDGE + 4 + 18 * place}" cy="18" r="5.5" fill="{colour}"/>'
        for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title><style>{''.join(style)}</style>"
        f'<rect width="100%" height="100%" rx="9" fill="{GROUND}" stroke="#30363d"/>{lights}'
        f"{''.join(body)}</svg>\n"
    )


def _shown(name: str, start: float, end: float, total: float) -> str:
    """The rule by which something is seen from ``start`` to ``end``, shares of the whole."""
    steps = [(0.0, "hidden")] if start > 0 else []
    steps += [(start, "visible"), *([(end, "hidden")] if end < 1 else [])]
    frames = "".join(f"{100 * at:.2f}%{{visibility:{how}}}" for at, how in steps)
    return (
        f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {total:.1f}s step-end infinite}}"
    )


def _line(text: str, row: int, name: str) -> str:
    spans = "".join(
        f'<tspan x="{EDGE + CELL * column}"'
        + (f' class="{KINDS[kind][0]}"' if kind else "")
        + f">{html.escape(words)}</tspan>"
        for column, kind, words in pieces(text)
    )
    return f'<text y="{EDGE + 35 + LINE * row}" class="{name}">{spans}</text>'
