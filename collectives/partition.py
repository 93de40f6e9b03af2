"""Who reduces which chunks: one contiguous range per owner, sized by bandwidth. Pure and
deterministic.

In a butterfly of n peers a peer that owns the share p of the vector sends and receives 1 + (n-2)p
vectors. All finish together when p_i = (T b_i - 1) / (n-2), cut off at 0; T follows from the shares
summing to 1 (the bisection of DeDLOC, arXiv 2106.10207).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from .errors import LocalProtocolError
from .group import Entry, Part, Plan
from .identifiers import PeerId


def parts_for(
    chunks: float, peers: Sequence[tuple[PeerId, float]], most: int | None = None
) -> tuple[Part, ...]:
    """Parts that cover all ``chunks`` in order, in the order of ``peers``: (peer,
    bandwidth_bytes_per_s).

    The last chunk may be shorter than the others: of 244.14, a part that ends with it may have one
    more. Bandwidth 0 means client-only: sends and receives, owns nothing. When nobody has any, all
    are taken to be equal. A peer whose share rounds to no chunk is left out. ``most``: so many
    chunks are a peer's at most (`fair_share`); what is over goes to others that own something,
    then to those that are slow, last to those without bandwidth. Raises LocalProtocolError without
    peers or chunks.
    """
    if not peers or chunks <= 0:
        raise LocalProtocolError(f"cannot divide {chunks} chunks among {len(peers)} peers")
    rates = [max(0.0, float(rate)) for _, rate in peers]
    if not any(rates):
        rates = [1.0] * len(peers)
    shares = _shares(rates)
    exact = [chunks * share for share in shares]
    exact[max(index for index, share in enumerate(shares) if share > 0)] += (
        math.ceil(chunks) - chunks
    )
    counts = _round(exact)
    if most is not None:
        counts = _level(counts, rates, most)
    parts: list[Part] = []
    first = 0
    for (peer, _), count in zip(peers, counts, strict=True):
        if count:
            parts.append(Part(peer, first, first + count))
            first += count
    return tuple(parts)


SAME = 1.5
"""Rates within this factor are taken to be equal: the division is sensitive, and no measurement is
that exact.
"""


def comparable(paces: Sequence[tuple[int, int]]) -> list[float]:
    """Bandwidths for `parts_for` from what members announce: (up, down) in bytes/s, 0 where not
    measured.

    The smaller of the two counts. Rates that are alike become equal: a class holds those up to SAME
    times its slowest. Who has not measured anything is taken for the median of those who have;
    where nobody has, all are equal.
    """
    found = [
        min(rate for rate in pace if rate > 0) if any(rate > 0 for rate in pace) else 0
        for pace in paces
    ]
    known = sorted(rate for rate in found if rate > 0)
    if not known:
        return [1.0] * len(paces)
    floors = known[:1]
    for rate in known:
        if rate > SAME * floors[-1]:
            floors.append(rate)
    usual = known[len(known) // 2]
    means = dict[int, float]()
    for low, high in zip(floors, [*floors[1:], known[-1] + 1], strict=True):
        alike = [rate for rate in known if low <= rate < high]
        means.update(dict.fromkeys(alike, sum(alike) / len(alike)))
    return [means[rate or usual] for rate in found]


def single(
    peers: Sequence[tuple[PeerId, float]], first: PeerId | None
) -> list[tuple[PeerId, float]]:
    """All bandwidth to one of ``peers``, (peer, bandwidth): ``first`` where it can own anything,
    else the first that can. For `parts_for`.
    """
    able = [peer for peer, rate in peers if rate > 0] or [peer for peer, _ in peers]
    chosen = first if first in able else able[0]
    return [(peer, float(peer == chosen)) for peer, _ in peers]


def slots_for(
    chunks: int, members: Sequence[PeerId], contributors: Sequence[PeerId]
) -> tuple[Part, ...]:
    """Parts of a gather: chunks [0, chunks) in equal slots, one a member; that of a member that
    does not contribute goes to one that does.

    Raises LocalProtocolError when there is nobody, or the chunks do not divide.
    """
    if not contributors or not members or chunks % len(members):
        raise LocalProtocolError(
            f"cannot divide {chunks} chunks into slots of {len(members)} members, "
            f"{len(contributors)} of them here"
        )
    size = chunks // len(members)
    owners = [
        peer if peer in contributors else contributors[index % len(contributors)]
        for index, peer in enumerate(members)
    ]
    return tuple(
        Part(owner, index * size, (index + 1) * size) for index, owner in enumerate(owners)
    )


def fair_share(chunks: int, contributors: int, tolerated: int) -> int:
    """How many of the chunks one peer may own where ``tolerated`` members may lie: an equal share
    of ``tolerated`` + 1 of the contributors, so that those that lie never own everything.

    It follows from what the plan itself says, and not from rates, which are members' own words.
    So many can own something in any round: of 3 ``tolerated`` + 1 members.
    """
    return -(-chunks // max(1, min(tolerated + 1, contributors)))


def is_fair(bound: Plan | Entry, tolerated: int) -> bool:
    """Whether no owner of a plan or an entry has more than its fair share."""
    chunks = bound.parts[-1].stop if bound.parts else 0
    owned = Counter[PeerId]()
    for part in bound.parts:
        owned[part.owner] += part.stop - part.first
    most = fair_share(chunks, len(bound.contributors), tolerated)
    return max(owned.values(), default=0) <= most


def check_plan(plan: Plan) -> str | None:
    """Why a plan is not well formed, or None. Run on every plan that comes from outside."""
    if not plan.contributors:
        return "no contributors"
    if len({c.cid for c in plan.contributors}) != len(plan.contributors):
        return "a cid appears twice"
    if len({c.member.peer for c in plan.contributors}) != len(plan.contributors):
        return "a peer contributes twice"
    if plan.numel < 1:
        return "an empty vector"
    if fault := plan.topology.fault(len(plan.contributors)):
        return fault
    position = 0
    for part in plan.parts:
        if part.first != position or part.stop <= part.first:
            return f"part [{part.first}, {part.stop}) does not follow chunk {position}"
        position = part.stop
    return None if position == plan.chunks else f"parts cover {position} of {plan.chunks} chunks"


def _shares(rates: list[float]) -> list[float]:
    """Shares that minimise the time of the slowest peer; they sum to 1."""
    owners = sum(rate > 0 for rate in rates)
    top = max(rates)
    rates = [rate / top for rate in rates]
    n = len(rates)
    if (
        n <= 2 or owners == 1
        # with two peers everyone moves one vector whatever the shares: split the work of reducing
        # evenly
    ):
        return [(rate > 0) / owners for rate in rates]
    low, high = 0.0, float(n) / min(rate for rate in rates if rate > 0)
    for _ in range(100):
        middle = (low + high) / 2
        if sum(max(0.0, middle * rate - 1) for rate in rates) < n - 2:
            low = middle
        else:
            high = middle
    shares = [max(0.0, high * rate - 1) for rate in rates]
    total = sum(shares)
    return [share / total for share in shares]


def _level(counts: list[int], rates: Sequence[float], most: int) -> list[int]:
    """The same number of chunks, nobody with more than ``most`` where that can be."""
    level = [min(count, most) for count in counts]
    over = sum(counts) - sum(level)
    owning = [index for index, count in enumerate(counts) if count]
    slow = [index for index, rate in enumerate(rates) if rate > 0 and not counts[index]]
    idle = [index for index, rate in enumerate(rates) if rate <= 0 and not counts[index]]
    for some in (owning, slow, idle):
        while over and (room := [index for index in some if level[index] < most]):
            for at, index in enumerate(room):
                given = min(-(-over // (len(room) - at)), most - level[index])
                level[index], over = level[index] + given, over - given
    return level if not over else counts


def _round(exact: list[float]) -> list[int]:
    """Integers near these with their sum: largest remainders first, then earliest. Zeros stay."""
    counts = [int(value) for value in exact]
    order = sorted(
        (i for i, value in enumerate(exact) if value > 0), key=lambda i: (counts[i] - exact[i], i)
    )
    for step in range(round(sum(exact)) - sum(counts)):
        counts[order[step % len(order)]] += 1
    return counts
