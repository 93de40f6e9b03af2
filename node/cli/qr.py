"""A text as a QR code in a terminal, by segno: pure Python without dependencies, so it adds nothing
to compile and nobody else to trust. An encoder of our own would have to be tried with every reader.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..home.output import Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

QUIET_ZONE, LEAST_ZONE = 4, 2
"""Light modules around the code: what the standard asks for, and with how many readers still find
it on a terminal that is not wider.
"""
MOST = 2953  # bytes in the largest code
_HALVES = " ▄▀█"  # of two modules, one above the other: whether the upper and the lower is dark
_BLACK, _WHITE = 16, 231  # of the 256 colours those that no theme changes


def modules(text: str) -> list[list[bool]]:
    """Rows of modules, dark ones True, with the least error correction: an invite on a screen is
    not scratched, and fewer modules are larger ones.
    """
    import segno

    return [[bool(module) for module in row] for row in segno.make_qr(text, error="l").matrix]


def half_blocks(rows: Sequence[Sequence[bool]], zone: int, *, inverted: bool) -> list[str]:
    """Lines of text, two rows of modules each. ``inverted``: light modules are drawn, for light
    letters on a dark ground.
    """
    width = len(rows[0]) + 2 * zone
    beside = [False] * zone
    around = [[False] * width for _ in range(zone)]
    framed = [*around, *([*beside, *row, *beside] for row in rows), *around]
    if len(framed) % 2:
        framed.append([False] * width)
    upper, lower = framed[::2], framed[1::2]
    return [
        "".join(_HALVES[2 * (a ^ inverted) + (b ^ inverted)] for a, b in zip(*pair, strict=True))
        for pair in zip(upper, lower, strict=True)
    ]


def show_qr(terminal: Terminal, text: str) -> None:
    """Draw ``text`` to stderr (stdout has the text itself), or say why it is not drawn."""
    if terminal.json or terminal.quiet:
        return
    encoding = (sys.stderr.encoding or "").lower().replace("-", "")
    if encoding != "utf8":
        terminal.say(
            f"No QR code: this terminal's encoding is {encoding or 'unknown'}, and the code is "
            "drawn with characters of UTF-8. Try: LC_ALL=C.UTF-8 atoll ..."
        )
        return
    if len(text) > MOST:
        terminal.say(f"No QR code: {len(text)} characters are too many, it holds {MOST}.")
        return
    rows = modules(text)
    needed = len(rows) + 2 * LEAST_ZONE
    if needed > terminal.width:
        terminal.say(
            f"No QR code: it needs {needed} columns, and this terminal has {terminal.width}. "
            "Widen it or use a smaller font. Fewer addresses make a smaller code: "
            "--bootstrap ADDRESS"
        )
        return
    zone = QUIET_ZONE if len(rows) + 2 * QUIET_ZONE <= terminal.width else LEAST_ZONE
    colour = terminal.colour(sys.stderr)
    for line in half_blocks(rows, zone, inverted=not colour):
        terminal.say(terminal.style(line, sys.stderr, fg=_BLACK, bg=_WHITE))
