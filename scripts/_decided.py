"""The record of what seeded swarms decide (`check_decided.py`): its file, how it is compared with
what is played now, and how it is renewed.

from _decided import compare_logs, read_record, renew, write_record
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from kits.rounds.decided import DecidedLog

KINDS = {
    "default": (),
    "aimed": ("--faults", "all,moment,twin"),
    "lying": ("--lying", "1"),
    "arrivals": ("--arrivals",),
    "ring": ("--tree", "ring"),
    "checked": ("--tree", "checked"),
    "relayed": ("--relayed-above", "4", "--sparse-above", "3"),
}
"""The arguments of scripts/simulate_rounds.py, by the name of a kind of swarms."""
HEAD = """\
# What seeded swarms decide. Written by scripts/check_decided.py --renew; see "Change what is decided" in CONTRIBUTING.md.
# A line for each seed: kind, seed, a mask of the counters above 0 (the lowest bit is the first), and its logs. Of each log:
# 12 characters for each entry (3 each for contributors, results, next configuration and statuses), ":", 3 for all contributions.
"""

Key = tuple[str, int]
"""A kind of swarms and a seed."""


class RecordError(Exception):
    """The record cannot be read or renewed; says why."""


@dataclass(frozen=True, slots=True)
class PlayedSeed:
    """What a seed decides now. ``values``: what ``logs`` are hashes of."""

    kind: str
    seed: int
    problem: str
    logs: tuple[str, ...]
    counters: tuple[str, ...]  # above 0
    values: tuple[DecidedLog, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedSeed:
    """What it decided when it was recorded. ``mask``: which counters were above 0."""

    logs: tuple[str, ...]
    mask: int


@dataclass(slots=True)
class DecidedRecord:
    """The file: names of counters, why it was written, and all seeds."""

    counters: list[str] = field(default_factory=list[str])
    renewals: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seeds: dict[Key, RecordedSeed] = field(default_factory=dict[Key, RecordedSeed])

    def entered(self, key: Key) -> set[str]:
        """The counters that were above 0 in a recorded seed."""
        mask = self.seeds[key].mask
        return {name for bit, name in enumerate(self.counters) if mask >> bit & 1}

    def mask(self, counters: Sequence[str]) -> int:
        """A mask of these counters; names that are new are added."""
        self.counters += sorted(set(counters) - set(self.counters))
        return sum(1 << self.counters.index(name) for name in set(counters))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a seed first differs from the record: in which log (of which fragment), which entry
    (None: in what became of its contributions, at the end), and in which aspects. ``recorded`` and
    ``now`` are hashes."""

    log: int
    entry: int | None
    aspects: tuple[str, ...]
    recorded: str
    now: str


# ---- the file
def read_record(text: str) -> DecidedRecord:
    """Raises RecordError where a line is not one of the record's."""
    record = DecidedRecord()
    for number, line in enumerate(text.splitlines(), 1):
        kind, _, rest = line.partition(" ")
        try:
            if kind in ("#", ""):
                continue
            if kind == "counters":
                record.counters = msgspec.json.decode(rest, type=list[str])
            elif kind == "renewed":
                record.renewals.append(msgspec.json.decode(rest, type=dict[str, Any]))
            elif kind in KINDS:
                seed, mask, logs = rest.split(" ")
                recorded = RecordedSeed(tuple(logs.split(",")), int(mask, 16))
                record.seeds[kind, int(seed)] = recorded
            else:
                raise ValueError(f"there is no kind {kind!r}")
        except (ValueError, msgspec.MsgspecError) as error:
            raise RecordError(f"line {number} of the record cannot be read: {error}") from None
    return record


def write_record(record: DecidedRecord) -> str:
    """The text of the file: the same for the same record."""
    lines = [HEAD + f"counters {msgspec.json.encode(record.counters).decode()}"]
    lines += [f"renewed {msgspec.json.encode(each).decode()}" for each in record.renewals]
    kinds = list(KINDS)
    for kind, seed in sorted(record.seeds, key=lambda key: (kinds.index(key[0]), key[1])):
        recorded = record.seeds[kind, seed]
        lines.append(f"{kind} {seed} {recorded.mask:x} {','.join(recorded.logs)}")
    return "\n".join(lines) + "\n"


def as_ranges(seeds: Sequence[int]) -> str:
    """Seeds as people write them: "0-4,7"."""
    found = list[list[int]]()
    for seed in sorted(seeds):
        if found and found[-1][-1] == seed - 1:
            found[-1][-1] = seed
        else:
            found.append([seed, seed])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def by_kind(keys: Sequence[Key]) -> dict[str, str]:
    """Seeds of each kind."""
    kinds = dict[str, list[int]]()
    for kind, seed in keys:
        kinds.setdefault(kind, []).append(seed)
    return {kind: as_ranges(seeds) for kind, seeds in kinds.items()}


# ---- comparing
def compare_logs(recorded: Sequence[str], now: Sequence[str]) -> Difference | None:
    """The first difference between the logs of a seed, or None."""
    from kits.rounds.decided import ASPECTS, DIGITS, ENTRY_DIGITS

    def entry(log: str, at: int) -> str:
        return log.partition(":")[0][at * ENTRY_DIGITS : (at + 1) * ENTRY_DIGITS]

    for number in range(max(len(recorded), len(now))):
        one, other = ("" if number >= len(logs) else logs[number] for logs in (recorded, now))
        if one == other:
            continue
        longest = max(len(log.partition(":")[0]) for log in (one, other)) // ENTRY_DIGITS
        for at in range(longest):
            was, came = entry(one, at), entry(other, at)
            if was != came:
                aspects = tuple(
                    name
                    for place, name in enumerate(ASPECTS)
                    if was[place * DIGITS : (place + 1) * DIGITS]
                    != came[place * DIGITS : (place + 1) * DIGITS]
                )
                return Difference(number, at, aspects if was and came else (), was, came)
        was, came = one.partition(":")[2], other.partition(":")[2]
        return Difference(number, None, (), was, came)
    return None


# ---- renewing
def renew(
    record: DecidedRecord,
    played: Sequence[PlayedSeed],
    *,
    why: str,
    entered: Sequence[str],
    date: str,
    tree: str,
    only: Collection[Key] | None = None,
) -> DecidedRecord | None:
    """The record with what was played now, or None where that changes nothing. Raises RecordError
    without a reason, where a seed fails, where a seed has changed that entered none of the counters
    ``entered`` when it was recorded, or where not all recorded seeds of a kind that has changed were
    played (``only``: of these). Kinds that were not played stay as they are recorded, and are compared as before.
    """
    if not why.strip():
        raise RecordError("a renewal needs a reason")
    if failed := [each for each in played if each.problem]:
        raise RecordError(
            f"kind {failed[0].kind}, seed {failed[0].seed} fails ({failed[0].problem}): a seed "
            "that fails decides nothing that could be recorded"
        )
    now = {(each.kind, each.seed): each for each in played}
    new = [key for key in now if key not in record.seeds]
    changed = [
        key for key in now if key in record.seeds and record.seeds[key].logs != now[key].logs
    ]
    if not new and not changed:
        return None
    kinds = {kind for kind, _ in changed}
    wanted = record.seeds if only is None else only
    if missing := [key for key in wanted if key[0] in kinds and key not in now]:
        raise RecordError(
            f"{len(missing)} recorded seeds were not played, and may have changed, too: renew with "
            "at least as many --seeds as are recorded"
        )
    shown = _shown(record, changed, entered)
    renewed = DecidedRecord([*record.counters], [*record.renewals], dict(record.seeds))
    for key in (*new, *changed):
        renewed.seeds[key] = RecordedSeed(now[key].logs, renewed.mask(now[key].counters))
    note: dict[str, Any] = {"why": why.strip(), "date": date, "on": tree}
    if new:
        note["new"] = by_kind(new)
    if changed:
        note["changed"] = {name: by_kind(keys) for name, keys in shown.items()}
    renewed.renewals.append(note)
    return renewed


def _shown(
    record: DecidedRecord, changed: Sequence[Key], entered: Sequence[str]
) -> Mapping[str, list[Key]]:
    """The changed seeds by the first of the counters that was above 0 in each."""
    if unknown := [name for name in entered if name not in record.counters]:
        raise RecordError(
            f"no recorded seed has a counter {unknown[0]!r}; there are: {', '.join(record.counters)}"
        )
    shown, without = dict[str, list[Key]](), list[Key]()
    for key in changed:
        found = record.entered(key)
        name = next((name for name in entered if name in found), None)
        if name is None:
            without.append(key)
        else:
            shown.setdefault(name, []).append(key)
    if without:
        seeds = "; ".join(f"{kind} {seeds}" for kind, seeds in by_kind(without).items())
        what = ", ".join(map(repr, entered)) or "no counter (--entered)"
        raise RecordError(
            f"{len(without)} of {len(changed)} changed seeds never entered what was changed, as "
            f"far as {what} shows: {seeds}"
        )
    return shown
