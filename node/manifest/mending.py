"""Hints that hold together: each fault of a manifest gets a hint such that a file in which all of
them were followed is valid.

A row's hint is right for its setting alone. Beside other faults it may lead to the next one: with
gradient averaging, ``overlap = "late"`` does not mend a ``delay``. So hints are tried before they
are given, on a copy of the table: a hint is kept if it mends its fault and brings no new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...collectives.errors import ConfigError
from .hints import Cure, Edit, contradicts, find_path, follow, read_hint, split_hint, write_hint

MOST_TRIALS = 600
"""Tables that are tried for one file: after them hints are given as their rows have them."""

Find = Callable[[Mapping[str, Any]], list[ConfigError]]
"""The faults of a table."""


def give_hints(
    table: Mapping[str, Any], faults: Sequence[ConfigError], find: Find
) -> list[ConfigError]:
    """The faults with hints that hold together, and with those that show only once these are
    mended. ``find`` has no side effects.
    """
    trials = _Trials(table, find)
    queue, told = list(faults), list[ConfigError]()
    chosen: list[tuple[ConfigError, list[Cure], Cure]] = []
    while queue and trials.left > 0:
        fault = queue.pop(0)
        now = trials.mended
        own = read_hint(fault.hint, fault.key, now)
        cure, new = trials.best(own + _last_cures(fault, now, own), _keys(queue))
        told.append(fault)
        if cure is None:
            continue  # no trial is left
        trials.edits += cure.edits
        chosen.append((fault, own, cure))
        queue += new
    for fault, own, cure in chosen:
        others = [other for other in own if other is not cure and trials.holds(cure, other)]
        _give(fault, own, [cure, *others])
    return _once(told + queue)


def _once(faults: Sequence[ConfigError]) -> list[ConfigError]:
    """Without the further faults of a setting that is to be left out: they go with it. Of a fault
    that came back, since its first cure was undone by another one's, the last.
    """
    last = {(fault.key, fault.message): fault for fault in faults}
    faults = [fault for fault in faults if last[fault.key, fault.message] is fault]
    kept: dict[tuple[str, str], ConfigError] = {}
    for index, fault in enumerate(faults):
        out = fault.hint.startswith("Leave it out")
        kept.setdefault((fault.key, "" if out else str(index)), fault)
    return list(kept.values())


class _Trials:
    """Tables that hints would make. ``edits``: those that are given already."""

    def __init__(self, table: Mapping[str, Any], find: Find) -> None:
        self._table, self._find = table, find
        self.edits: list[Edit] = []
        self.left = MOST_TRIALS

    @property
    def mended(self) -> dict[str, Any]:
        """The table with the hints that are given already."""
        return follow(self._table, self.edits)

    def best(
        self, cures: Sequence[Cure], others: Counter[str]
    ) -> tuple[Cure | None, list[ConfigError]]:
        """The first alternative that leaves no faults but ``others``, or the one that leaves the
        fewest, and these. A misspelt key is spelt right even so, and a wrong or missing value
        written: what is wrong then was meant.
        """
        best, least = None, list[ConfigError]()
        fitting = [cure for cure in cures if not contradicts(cure.edits, self.edits)]
        for cure in fitting or cures[-1:]:
            if self.left <= 0:
                break
            rest = _beside(self._found([*self.edits, *cure.edits]), others)
            if best is None or len(rest) < len(least):
                best, least = cure, rest
            if not rest or (cure.keeps_setting and _keys(rest).keys().isdisjoint(_touched(cure))):
                return cure, rest
        return best, least

    def holds(self, cure: Cure, other: Cure) -> bool:
        """Whether the file is as valid with ``other`` in place of ``cure``."""
        rest = [edit for edit in self.edits if edit not in cure.edits]
        if self.left <= 0 or contradicts(other.edits, rest):
            return False
        return not self._found([*rest, *other.edits])

    def _found(self, edits: Sequence[Edit]) -> list[ConfigError]:
        self.left -= 1
        return self._find(follow(self._table, edits))


def _last_cures(fault: ConfigError, table: Mapping[str, Any], own: Sequence[Cure]) -> list[Cure]:
    """What mends a fault where its own hint does not: without the setting, or without the table
    that it is in.
    """
    path = find_path(table, fault.key)
    names = [step for step in path[:-1] if isinstance(step, str)]
    last = [Cure("leave it out", (Edit(path),))]
    last += [
        Cure(f"leave [{'.'.join(names[:depth])}] out", (Edit(tuple(names[:depth])),))
        for depth in range(len(names), 0, -1)
    ]
    known = [cure.edits for cure in own]
    return [cure for cure in last if cure.edits not in known]


def _give(fault: ConfigError, own: Sequence[Cure], valid: Sequence[Cure]) -> None:
    """Write a fault's hint anew unless its own says just this. ``own``: the alternatives that it
    has; ``valid``: those that hold, the best first.
    """
    if own:
        readable = len(own) == len(split_hint(fault.hint)) or own[0] is not valid[0]
        fault.hint = write_hint(valid) if readable else fault.hint
    elif fault.hint.startswith(("Change ", "Write ")):
        fault.hint = f"{fault.hint.removesuffix('.')}, or {valid[0].words}."
    elif fault.hint:
        words = fault.hint[0].lower() + fault.hint[1:].removesuffix(".")
        fault.hint = f"L{valid[0].words[1:]} ({words})."
    else:
        fault.hint = write_hint(valid)
    fault.annotate()


def _keys(faults: Sequence[ConfigError]) -> Counter[str]:
    return Counter(fault.key for fault in faults)


def _touched(cure: Cure) -> set[str]:
    """Keys that a cure changes."""
    return {f"$.{'.'.join(map(str, edit.path))}" for edit in cure.edits}


def _beside(faults: Sequence[ConfigError], others: Counter[str]) -> list[ConfigError]:
    """Those that are not among ``others``."""
    rest, left = list[ConfigError](), Counter(others)
    for fault in faults:
        if left[fault.key]:
            left[fault.key] -= 1
        else:
            rest.append(fault)
    return rest
