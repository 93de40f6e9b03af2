"""Words from outside, before a person sees them: whatever a peer, a router, a file or an invite
said goes through `quoted` or `escaped`.

A terminal obeys what is written to it: a control character moves its cursor, sets its title, writes
its clipboard; a mark of direction or of no width shows another text than is there; a newline begins
a line of the log that nobody wrote. So none of these is ever shown as it is. `quoted` is for a
sentence of ours that tells what somebody else says, `escaped` for a value in a document or an
event. `PLAIN`, `WORDS` and `LINES` are patterns for fields of messages, which refuse such text
where it is decoded.
"""

from __future__ import annotations

LONGEST = 200
"""Characters of somebody else's text that are shown, unless a caller asks for fewer or more."""

PLAIN = r"\A[!-~]*\Z"
"""Of identifiers and addresses: visible ASCII without spaces."""

WORDS = (
    r"\A[^\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u2000-\u200f\u2028-\u202f\u205f-\u206f"
    r"\u3000\u3164\ud800-\uf8ff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\U000e0000-\U0010ffff]*\Z"
)
"""Of names and sentences: nothing that a terminal obeys, and nothing that is not seen. No newline
either.
"""

LINES = WORDS.replace(r"\x00-\x1f", r"\x00-\x09\x0b-\x1f")
"""The same, of several lines."""

_UNSEEN = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"
    + "".join(map(chr, range(0xFE00, 0xFE10)))
    + "".join(map(chr, range(0xE0100, 0xE01F0)))
)
"""Printable by Unicode's account, and shown as nothing: fillers, joiners and selectors of variants.
"""


def escaped(text: object, limit: int = LONGEST, *, keep: str = "") -> str:
    r"""``text`` on one line, with what a terminal obeys or does not show as ``\x1b``, ``\n``,
    ``\u202e``; at most ``limit`` characters of it.

    Escapes every character that Unicode calls a control, a format, a surrogate, private,
    unassigned, or a separator other than the space, but those in ``keep``. Text without any of them
    comes back as it is, so escaping twice does what escaping once does.
    """
    found = str(text)
    if len(found) > limit:
        found = found[: max(0, limit - 1)] + "…"
    if found.isprintable() and _UNSEEN.isdisjoint(found):
        return found
    return "".join(
        c
        if c in keep or (c.isprintable() and c not in _UNSEEN)
        else c.encode("unicode_escape").decode("ascii")
        for c in found
    )


def quoted(text: object, limit: int = LONGEST) -> str:
    """``text`` as somebody else's words: escaped, cut, and between “ and ”, which do not occur in
    it any more.
    """
    inside = escaped(text, limit).replace("“", "'").replace("”", "'")
    return f"“{inside}”"


def shown(text: str) -> str:
    """A whole text of ours on its way to a terminal or a log: as it is, newlines included, but for
    what a terminal would obey.

    The last line of defence: what comes from outside has been quoted by whoever put it into the
    text.
    """
    return escaped(text, len(text), keep="\n\t")
