"""Hours of the day as people write them: ``22-06``, ``9-17:30``."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...collectives.errors import ConfigError

DAY = 24 * 60
_TEXT = re.compile(
    r"\s*([0-9]{1,2})(?::([0-9]{2}))?\s*-\s*([0-9]{1,2})(?::([0-9]{2}))?\s*", re.ASCII
)


class Hours(NamedTuple):
    """From one minute of the day to another, which may be one of the next day."""

    first: int
    stop: int

    def hold(self, minute: int) -> bool:
        """Whether a minute of the day is among them."""
        return (minute - self.first) % DAY < (self.stop - self.first) % DAY

    @property
    def begin(self) -> str:
        """When they begin: ``22:00``."""
        return f"{self.first // 60:02}:{self.first % 60:02}"


def hours_of(text: str, key: str) -> Hours | None:
    """The hours of a text; None, always, for an empty one. Raises ConfigError naming ``key``."""
    if not text.strip():
        return None
    found = _TEXT.fullmatch(text)
    numbers = [int(part or 0) for part in found.groups()] if found else []
    if numbers and max(numbers[1], numbers[3]) < 60:
        first, stop = 60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]
        if first < DAY and stop <= DAY and first != stop % DAY:
            return Hours(first, stop % DAY)
    raise ConfigError(
        f"{key} is {text!r}, not hours of the day",
        key=f"$.{key}",
        code="E413",
        why="They have a beginning, from 0 to 23:59, and another end, up to 24, by this "
        "machine's clock.",
        hint="Write it like this: 22-06, or 9:30-17",
    )
