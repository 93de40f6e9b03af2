"""What the log says to scripts: who was counted, of the data, which they read by lease
(`optim.data.leases`), and of how long rounds take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from ...collectives.group import Certified, Contributor, Member, Reading
from ...collectives.outcomes import Share, Tally
from ...collectives.round import Log, rounds_in

AT_ONCE = 12  # entries, where they are of few members
NAMES_AT_ONCE = 6144  # names in them are half a megabyte; a control frame holds one


def shares_of(
    contributors: Sequence[Contributor], weights: Sequence[float] = ()
) -> tuple[Share, ...]:
    """Who was counted; ``weights``: what a rule of whole vectors gave each, if known."""
    known = list(weights) or [None] * len(contributors)
    return tuple(
        Share(c.member.peer, c.weight, weight)
        for c, weight in zip(contributors, known, strict=True)
    )


def tallies(entries: Log, first: int) -> list[Tally]:
    """Applied entries from number ``first`` on, one message's worth. Raises StorageError."""
    counted, round_ = list[Tally](), entries.rounds(first - 1)
    names = 0
    for certified in islice(entries.since(first), AT_ONCE):
        entry, shares = certified.entry, Counter[Member]()
        names += len(entry.contributors) + len(entry.next_config)
        if counted and names > NAMES_AT_ONCE:
            break
        for each in entry.contributors:
            shares[each.member] += each.weight
        round_ += rounds_in(entry)
        counted.append(
            Tally(entry.round, round_, tuple(shares.items()), entry.next_config, entry.hash())
        )
    return counted


def newest_readings(entries: Log, frontier: Sequence[Certified], entry: int) -> list[Reading]:
    """What contributors say of the newest round that is in the state after log entry ``entry``;
    empty before the first. ``entries``: the applied ones; ``frontier``: certified ones that follow.
    """
    ahead = {certified.entry.round: certified for certified in frontier}
    for number in range(min(entry, max([len(entries) - 1, *ahead])), 0, -1):
        found = entries[number] if number < len(entries) else ahead[number]
        if found.entry.contributors:
            return [contributor.reading for contributor in found.entry.contributors]
    return []
