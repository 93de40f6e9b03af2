"""Spans of time as people write them: ``90s``, ``30min`` or ``30m``, ``12h``, ``7d``, ``2w``."""

from __future__ import annotations

import re

from ...collectives.errors import ConfigError

_TEXT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?|\.[0-9]{1,6})\s*(s|min|m|h|d|w)?")
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


def seconds_in(text: str, bare: str | None = None) -> float | None:
    """The seconds that a text says; None where it says none. ``bare``: the unit of a number that
    stands alone; None: there must be one.
    """
    found = _TEXT.fullmatch(text.strip())
    unit = (found[2] or bare) if found else None
    return float(found[1]) * _UNITS_S[unit] if found and unit else None


def duration_s(text: str) -> float:
    """``7d``, ``12h``, ``30min``, ``90s`` as seconds above 0. Raises ConfigError."""
    seconds = seconds_in(text)
    if not seconds:
        raise ConfigError(
            f"{text!r} is no duration", why="", hint="For example 90s, 30min, 12h, 7d", exit_code=2
        )
    return seconds
