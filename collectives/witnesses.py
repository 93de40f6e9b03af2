"""Who adds up a part where members may lie: its owner, and ``count`` others, its *witnesses*, who
are sent the same contributions and state what comes of them. Pure functions.

Of ``count`` + 1 members one is honest if no more than ``count`` lie, whoever they are: so an entry
whose parts are stated alike by all of these has the sums that follow from its contributions. Who is
drawn follows from the entry before and the round, and nobody chooses it; it spreads the work.
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from .group import Entry, Plan
from .identifiers import PeerId


def stated_by(bound: Plan | Entry, count: int) -> tuple[tuple[PeerId, ...], ...]:
    """By part, who states its sum: the owner, then ``count`` witnesses (fewer where fewer
    contribute).

    Owners stand in a circle in an order drawn anew in each round, and each has the ``count`` after
    it for witnesses: so each adds up for as many others, and links too thin to own anything add up
    nothing. Only where they are too few the other contributors stand in the circle, too. Partial
    sums have no witnesses.
    """
    owners = dict.fromkeys(part.owner for part in bound.parts)
    if not count or bound.topology.kind != "butterfly":
        return tuple((part.owner,) for part in bound.parts)

    def drawn(peer: PeerId) -> bytes:
        return blake3(
            msgspec.msgpack.encode(("atoll/witness/1", bound.log, bound.base, bound.round, peer))
        ).digest()

    circle = sorted(owners, key=drawn)
    if len(circle) <= count:
        peers = {c.member.peer for c in bound.contributors} - set(circle)
        circle += sorted(peers, key=drawn)
    at = {peer: index for index, peer in enumerate(circle)}
    twice = circle * 2
    most = min(count + 1, len(circle))
    return tuple(tuple(twice[at[part.owner] : at[part.owner] + most]) for part in bound.parts)
