"""Bandwidth as people write it: ``20 Mbit/s``, ``2.5MB/s``, ``300000`` (bytes a second)."""

from __future__ import annotations

import re

from ...collectives.errors import ConfigError

UNITS = {
    "": 1.0,
    "b/s": 1.0,
    "kb/s": 1e3,
    "mb/s": 1e6,
    "gb/s": 1e9,
    "bit/s": 1 / 8,
    "kbit/s": 1e3 / 8,
    "mbit/s": 1e6 / 8,
    "gbit/s": 1e9 / 8,
}
LEAST = 50_000  # bytes/s: less does not keep lanes alive
_TEXT = re.compile(r"([0-9]{1,18}(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z/]*)", re.IGNORECASE)


def bytes_per_s(text: str, key: str) -> int:
    """A limit in bytes/s; 0, none, for an empty text. B is for bytes, bit for bits, k, M and G for
    powers of 1000.

    Raises ConfigError naming ``key``.
    """
    if not text.strip():
        return 0
    found = _TEXT.fullmatch(text.strip())
    unit = (
        (found[2].lower() + ("/s" if found[2] and not found[2].lower().endswith("/s") else ""))
        if found
        else ""
    )
    if found is None or unit not in UNITS:
        raise ConfigError(
            f"{key} is {text!r}, not a bandwidth",
            key=f"$.{key}",
            hint=f"For example {key} = 20Mbit/s, or 2.5MB/s",
        )
    rate = int(float(found[1]) * UNITS[unit])
    if rate < LEAST:
        raise ConfigError(
            f"{key} is {text!r}: less than 0.4 Mbit/s is not enough to take part",
            key=f"$.{key}",
            hint=f"{key} = 1Mbit/s",
        )
    return rate
