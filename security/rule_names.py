"""Names of the rules that a plan can carry, as ``median:1``: the rule, and f, how many contributions may be anything. Loads nothing heavy.

The name is in plans, entries and digests, so all members of a run use the same rule with the same f. A name stands for one rule for ever.
"""

from __future__ import annotations

import re
from typing import Literal

CoordinateRule = Literal["median", "trimmed_mean", "meamed"]
BY_COORDINATE: tuple[CoordinateRule, ...] = ("median", "trimmed_mean", "meamed")
MAX_F = 127  # of at most 256 members fewer than half
_NAME = re.compile(r"(median|trimmed_mean|meamed):(0|[1-9][0-9]{0,2})")


def reducer_name(rule: str, f: int) -> str:
    """The name of a rule with its f."""
    return f"{rule}:{f}"


def parse_reducer(name: str) -> tuple[str, int] | None:
    """(rule, f) of a name; None for anything else. ``name`` may be hostile."""
    found = _NAME.fullmatch(name)
    return (found[1], int(found[2])) if found is not None and int(found[2]) <= MAX_F else None


def least_contributors(f: int) -> int:
    """How many contributions a rule needs to outvote f of them."""
    return 2 * f + 1
