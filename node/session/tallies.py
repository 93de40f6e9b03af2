"""What the log says of the data, for scripts that read it by lease (`optim.data.leases`)."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from ...collectives.group import Member
from ...collectives.round import rounds_in
from ...collectives.swarm import Tally

if TYPE_CHECKING:
    from .session import Session

AT_ONCE = 12  # entries of 256 members are a megabyte, which a control frame holds


def tallies(session: Session, first: int) -> list[Tally]:
    """Of the applied entries from number ``first`` on, as many as are told at once. Raises StorageError."""
    if session.machine is None:
        return []
    entries = session.machine.journal.entries
    told, round_ = list[Tally](), entries.rounds(first - 1)
    for certified in islice(entries.since(first), AT_ONCE):
        entry, shares = certified.entry, Counter[Member]()
        for each in entry.contributors:
            shares[each.member] += each.weight
        round_ += rounds_in(entry)
        told.append(Tally(entry.round, round_, tuple(shares.items()), entry.next_config))
    return told
