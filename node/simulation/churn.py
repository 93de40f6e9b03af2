"""What happens to the machines of a simulated run: by a script of a user's own, or drawn. Pure.

A script has one mishap a line; ``#`` begins a comment. Machines are names or numbers from 0,
times count from when training begins:

    at 300 kill 3               # node and script die, for good
    at 300 kill 3 back 60       # and begin again 60 s later, on the same disk
    at 15m freeze 4090-2 for 30 # as after SIGSTOP, or a laptop's lid
    at 20m cut 2 for 60         # it hears nobody, and nobody hears it
    at 1h join 5                # it is not there before

Drawn: ``mtbf=2h, back=10m``: each machine but the first fails after two hours on the mean
(exponentially distributed), and is back after ten minutes on the mean; without ``back`` it is gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop
from random import Random
from typing import Literal, cast

from ...collectives.errors import ConfigError
from ..home.durations import seconds_in

Deed = Literal["kill", "freeze", "cut", "join"]
LINE = re.compile(
    r"at\s+(?P<at>\S+)\s+(?P<deed>kill|freeze|cut|join)\s+(?P<who>\S+)"
    r"(?:\s+(?P<word>back|for)\s+(?P<long>\S+))?"
)
MOST = 10_000
"""Mishaps; of those that are drawn the first so many are played."""
LASTS = {"freeze": "for", "cut": "for", "kill": "back"}


@dataclass(frozen=True, slots=True)
class Mishap:
    """``who``: the machine's index. ``for_s``: how long it lasts; None: for good."""

    at_s: float
    deed: Deed
    who: int
    for_s: float | None = None


def seconds_of(text: str, key: str) -> float:
    """``90``, ``90s``, ``15m``, ``2h``, ``1d`` in seconds. Raises ConfigError naming ``key``."""
    seconds = seconds_in(text, bare="s")
    if seconds is None or seconds > 3650 * 86_400:
        raise ConfigError(
            f"{text!r} is no time", key=key, hint="Seconds, or with a unit: 90, 15m, 2h, 1d"
        )
    return seconds


def parse_script(text: str, names: Sequence[str]) -> list[Mishap]:
    """The mishaps of a script, in its order. Raises ConfigError with the number of the line."""
    found: list[Mishap] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        match = LINE.fullmatch(line)
        if match is None or match["word"] not in (None, LASTS.get(match["deed"])):
            raise _wrong(number, f"{line!r} is none of the things that can happen")
        who, deed = _who(number, match["who"], names), cast("Deed", match["deed"])
        if deed == "join" and who == 0:
            raise _wrong(number, f"{names[0]} founds the run and cannot join late")
        if deed in ("freeze", "cut") and match["long"] is None:
            raise _wrong(number, f"how long? at {match['at']} {deed} {match['who']} for 60")
        lasts = seconds_of(match["long"], "churn") if match["long"] else None
        found.append(Mishap(seconds_of(match["at"], "churn"), deed, who, lasts))
        if len(found) > MOST:
            raise _wrong(number, f"more than {MOST} mishaps")
    return found


def draw(text: str, peers: int, until_s: float, rng: Random) -> list[Mishap]:
    """What ``mtbf=2h, back=10m`` comes to in ``until_s`` seconds, by time. Raises ConfigError."""
    values: dict[str, float] = {}
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        name, equals, value = part.partition("=")
        if name not in ("mtbf", "back") or not equals or name in values:
            raise ConfigError(
                f"{text!r} is no churn",
                key="churn",
                hint='--churn "mtbf=2h, back=10m", or a file of lines: at 300 kill 3 back 60',
            )
        values[name] = seconds_of(value, "churn")
    if not values.get("mtbf"):
        raise ConfigError("how often does a machine fail?", key="churn", hint="mtbf=2h")
    found: list[tuple[float, int, float | None]] = []  # a heap of the first ones, the last on top
    for who in range(1, peers):
        now = rng.expovariate(1 / values["mtbf"])
        while now < until_s and (len(found) < MOST or now < -found[0][0]):
            away_s = max(1.0, rng.expovariate(1 / values["back"])) if values.get("back") else None
            (heappush if len(found) < MOST else heappushpop)(found, (-now, -who, away_s))
            if away_s is None:
                break
            now += away_s + rng.expovariate(1 / values["mtbf"])
    drawn = sorted((-at_s, -who, away_s) for at_s, who, away_s in found)
    return [Mishap(at_s, "kill", who, away_s) for at_s, who, away_s in drawn]


def _who(number: int, text: str, names: Sequence[str]) -> int:
    if text in names:
        return names.index(text)
    if re.fullmatch("[0-9]{1,9}", text) and int(text) < len(names):
        return int(text)
    some = ", ".join(names[:4])
    raise _wrong(number, f"no machine {text!r}: 0 to {len(names) - 1}, or {some} …")


def _wrong(number: int, what: str) -> ConfigError:
    return ConfigError(
        f"line {number} of the churn: {what}",
        key="churn",
        hint="at 300 kill 3 back 60; at 15m freeze 2 for 30; at 20m cut 2 for 60; at 1h join 5",
    )
