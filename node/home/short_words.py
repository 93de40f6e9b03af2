"""Peers and spans of time in few words."""

from __future__ import annotations

from ...collectives.foreign import escaped
from .names import name_of


def span_text(seconds: float) -> str:
    """``7300`` as ``2 h 1 min``."""
    seconds = max(0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for big, small, length, part in (
        ("d", "h", 86_400, 3600),
        ("h", "min", 3600, 60),
        ("min", "s", 60, 1),
    ):
        if seconds >= length:
            rest = int(seconds % length // part)
            return (
                f"{int(seconds // length)} {big} {rest} {small}"
                if rest
                else f"{int(seconds // length)} {big}"
            )
    return f"{seconds:.0f} s"


def short_peer(peer: str) -> str:
    """A two-word name and the last eight characters of a peer id."""
    return f"{name_of(peer)} …{escaped(peer[-8:])}"
