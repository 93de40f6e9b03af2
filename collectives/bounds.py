"""How many members a run may have: as many as its plan bears, and as what one message can carry.
Pure functions.

In a star, a ring, a gather and wherever a rule compares contributions, every member's share of a
round grows with the number of members: at most `MAX_STAR`. In a tree of two or three levels it does
not, and what bounds a run is that an entry names every member and contribution, and travels with
the votes of a quorum in one control message: at most `MAX_MEMBERS`, and fewer where names are long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from .group import MAX_MEMBERS, MAX_PARTS, MAX_STAR, Config, Entry, Member, TopologyKind
from .messages import MAX_MESSAGE_BYTES

TREES: frozenset[TopologyKind] = frozenset(("two-level", "checked", "three-level"))
"""Plans in which no member has more to do where more take part."""
MOST_OWNERS = 64
"""Owners of parts where more than `MAX_STAR` contribute: each part has a tree of all, and with so
many parts no member of a site has much to add up."""
VOTE_BYTES = 80  # of a vote beside its member: ballot, signature of 64 bytes, and their frames
CONTRIBUTION_BYTES = 64  # of a contribution beside its member: cid, weight, reading, its place
PART_BYTES = 64  # of a part beside its owner: where it lies, and its digest
SHOWN_BYTES = 600  # by what a newcomer enters, beside its name: a certificate, numbers
REST_BYTES = 8192  # what a message holds beside the entry and its votes


def most_members(kind: TopologyKind) -> int:
    """How many members a run with this plan may have.

    >>> most_members("butterfly"), most_members("three-level")
    (256, 4096)
    """
    return MAX_MEMBERS if kind in TREES else MAX_STAR


def why_so_many(kind: TopologyKind) -> str:
    """Why it may have no more, for people."""
    if kind in TREES:
        return f"An entry names all members in one message: at most {MAX_MEMBERS:,}."
    return (
        f'With plan = "{kind}" a member\'s share of a round grows with their number: at most '
        f'{MAX_STAR} members. "two-level" and "three-level" bear {MAX_MEMBERS:,}.'
    )


def entry_fault(entry: Entry, config: Config, kind: TopologyKind) -> str | None:
    """Why an entry of a log with this plan, voted for by ``config``, is too large, or None."""
    count, most = len(entry.next_config), most_members(kind)
    if count > most:
        return f"an entry that makes {count:,} members of a {kind} run: at most {most:,}"
    if len(entry.next_config) + len(entry.contributors) + len(config) <= 3 * MAX_STAR:
        return None  # whatever it says: half a megabyte at most
    size = len(msgspec.msgpack.encode(entry)) + _votes(config) + REST_BYTES
    if size > MAX_MESSAGE_BYTES:
        return (
            f"an entry of {size:,} bytes with its votes, of {len(entry.contributors):,} "
            f"contributions and {count:,} members: a message has {MAX_MESSAGE_BYTES:,}"
        )
    return None


def room_for(staying: Sequence[Member], joiners: Sequence[Member], kind: TopologyKind) -> int:
    """How many of ``joiners`` may enter beside those that stay: the first so many. Afterwards an
    entry in which all contribute, and which says by what they enter, still goes into one message.
    """
    count, most, room = len(staying), most_members(kind), 0
    if count + len(joiners) <= MAX_STAR:
        return len(joiners)
    each = list(map(_member_bytes, staying))
    size, longest = 2 * sum(each) + len(each) * CONTRIBUTION_BYTES, max(each, default=0)
    for joiner in joiners:
        own = _member_bytes(joiner)
        longest, count = max(longest, own), count + 1
        size += 3 * own + CONTRIBUTION_BYTES + SHOWN_BYTES
        votes = (count // 2 + 1) * (longest + VOTE_BYTES)
        parts = min(count, MAX_PARTS if count <= MAX_STAR else MOST_OWNERS)
        size_now = size + votes + parts * (longest + PART_BYTES) + REST_BYTES
        if count > most or size_now > MAX_MESSAGE_BYTES:
            break
        room += 1
    return room


def owners_for(rates: Sequence[float], round_: int, most: int = MOST_OWNERS) -> list[float]:
    """Bandwidths of those that may own parts, 0 for all but ``most`` of them where more than
    `MAX_STAR` contribute: the fastest, those alike in turn by the round.
    """
    if len(rates) <= MAX_STAR:
        return list(rates)
    last = sorted(rates, reverse=True)[most - 1]
    chosen = {index for index, rate in enumerate(rates) if rate > last}
    alike = [index for index, rate in enumerate(rates) if rate == last]
    first = round_ * (places := most - len(chosen)) % len(alike)
    chosen.update((alike * 2)[first : first + places])
    return [rate if index in chosen else 0.0 for index, rate in enumerate(rates)]


@lru_cache(maxsize=2 * MAX_MEMBERS)
def _member_bytes(member: Member) -> int:
    return len(msgspec.msgpack.encode(member))


def _votes(config: Config) -> int:
    """Bytes of the votes of a quorum, at most."""
    longest = max(map(_member_bytes, config), default=0)
    return (len(config) // 2 + 1) * (longest + VOTE_BYTES)
