"""How much a run and each of its members train on in a second, by what the log counted of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

NEWEST = 20  # rounds that are looked at
KEPT_ROUNDS = 256  # that are remembered for it
CAUGHT_UP_S = 0.02
"""A round that came so soon after the one before was decided while this node was away: it says
nothing of how long the others trained."""


class TrainingRate(msgspec.Struct, frozen=True):
    """In ``unit`` a second, waiting included: ``all`` together, and ``members`` each."""

    unit: str
    all: float
    members: dict[str, float]


def rate_of(
    rounds: Sequence[tuple[float, Mapping[str, int]]], members: Sequence[str], unit: str
) -> TrainingRate | None:
    """Of the newest rounds, each with when it was decided, in seconds, and the samples of its
    contributors; of one fragment only, since each of them counts the same samples. None before two
    rounds are known.

    A member counts from the round before the first that it is in; all together count over the whole
    time, in which some may not have been there.

    >>> rounds = [(0.0, {"a": 8}), (10.0, {"a": 30, "b": 10}), (20.0, {"a": 50, "b": 10})]
    >>> rate_of(rounds, ["a", "b"], "tokens")
    TrainingRate(unit='tokens', all=5.0, members={'a': 4.0, 'b': 1.0})
    """
    first = _beginning([at for at, _ in rounds])
    if len(rounds) - first < 2 or (span := rounds[-1][0] - rounds[first][0]) <= 0:
        return None
    counted = rounds[first + 1 :]
    found = dict[str, float]()
    for peer in members:
        there = next((at for at, (_, by) in enumerate(counted, first) if peer in by), None)
        if there is not None and (own_s := rounds[-1][0] - rounds[there][0]) > 0:
            found[peer] = round(sum(by.get(peer, 0) for _, by in counted) / own_s, 4)
    return TrainingRate(unit, round(sum(sum(by.values()) for _, by in counted) / span, 4), found)


def _beginning(at: Sequence[float]) -> int:
    """From which round on time is counted: the newest ones, and as many more as it takes to begin
    with one that was not caught up with; of who has only caught up, the last such.
    """

    def soon(later: int) -> bool:
        """Whether that round came with the one before."""
        return 0 < later < len(at) and at[later] - at[later - 1] < CAUGHT_UP_S

    first = max(0, len(at) - 1 - NEWEST)
    while first > 0 and (soon(first) or soon(first + 1)):
        first -= 1
    if first == 0:
        first = next(later for later in range(len(at)) if not soon(later + 1)) if at else 0
    return first


def rate_words(unit: str, all_s: float, members: int) -> str:
    """For people.

    >>> rate_words("tokens", 1234.5, 2)
    '1,234 learned tokens a second, of 2 members'
    """
    learned = "learned " if unit == "tokens" else ""
    who = f"{members} member{'s' * (members != 1)}"
    return f"{rate_number(all_s)} {learned}{unit} a second, of {who}"


def rate_number(value: float) -> str:
    """Whole where it is large.

    >>> rate_number(1234.5), rate_number(12.34), rate_number(0.1234)
    ('1,234', '12.3', '0.123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
