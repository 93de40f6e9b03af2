"""Client sampling: who takes part in a round of a run that asks only some of its members. The log
draws them, so that everybody draws alike and anybody can check the draw.

The draw of a round is ordered by ``blake3(run, hash of the entry before, peer)``. Nobody knows it
before that entry is decided, and no member influences its own place. The first of the order take
part: a share of the configuration, or a number. Whoever convenes an entry can choose among the
contributions that it names, and so among a few draws of the next round: the draw is random for
everybody else, not a lottery that holds against its organisers.

Where the drawn members give too little, an entry without contributors ends their round, and its
hash makes another draw. The log decides that, not whoever convenes: an acceptor votes for such an
entry only if it sees by itself that too few can contribute, or that they had their time
(`RoundMachine.may_end`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from blake3 import blake3

from ..group import Config, Member
from ..messages import Ready
from ..round_settings import SampleSettings

TURNS = 8  # times the last round with contributors: so long drawn members have for theirs
AGAIN = 1.1  # times the draw before: also members that have become that much slower get there
# times what drawn members have: their offers may be under way so long, if conveners try in vain
DELIVERED = 2.0
# a turn counts as at most so many times the turn before: scripts may have rested in it
SLOWER = 2.0
UNKNOWN = 2.0  # as `AGAIN`, where no round was seen here: nobody knows how long one takes


def draw_members(run: str, base: bytes, config: Config, sample: SampleSettings | None) -> Config:
    """The members of ``config`` that take part in the round after the entry with hash ``base``, in
    the configuration's order; all where there is no sample."""
    if sample is None:
        return config

    def key(member: Member) -> bytes:
        return blake3(msgspec.msgpack.encode(("atoll/sample/1", run, base, member.peer))).digest()

    chosen = set(sorted(config, key=key)[: sample.wanted(len(config))])
    return tuple(member for member in config if member in chosen)


class Draw:
    """The draw of the open round as one member sees it: who was drawn, and how long they have."""

    def __init__(
        self,
        members: Config,
        *,
        whole: bool,
        least: int,
        last_s: float,
        counted: bool,
        redraw_s: float,
        before: Draw | None,
    ) -> None:
        """``members``: the drawn ones; ``whole``: all members are drawn; ``least``: contributions
        that the round needs. ``last_s``: how long the round before was open, in seconds (0 where it
        was not seen); ``counted``: it had contributors. ``redraw_s``: the least time that drawn
        members have. ``before``: the draw of the round before, None at a start.
        """
        self.members, self.whole, self.least = members, whole, least
        self.waiting = False  # a script waits for the end of this round without taking part in it
        self.turn_s: float = last_s if counted else 0.0  # of the last round with contributors
        if before is not None and before.turn_s:
            self.turn_s = (
                min(last_s, max(SLOWER * before.turn_s, redraw_s)) if counted else before.turn_s
            )
        vain_s = (
            0.0
            if counted
            else last_s
            if before is None
            else min(last_s, DELIVERED * before.patience_s)
        )
        self.patience_s = max(
            redraw_s, TURNS * self.turn_s, (AGAIN if self.turn_s else UNKNOWN) * vain_s
        )
        self.elapsed = 0.0  # how long they have had, in multiples of `patience_s`

    def look(self, open_s: float) -> None:
        """Note that the round has been open for ``open_s`` seconds."""
        self.elapsed = open_s / self.patience_s

    def is_hopeless(self, offers: Iterable[Ready | None], elapsed: float) -> bool:
        """Whether too few of the drawn members can still contribute, or have done so in time.

        ``offers``: what each drawn member that is not silent has announced, None where nothing.
        ``elapsed``: as `elapsed`; a voter that allows for other clocks gives a greater one.
        """
        if self.whole:
            return False
        return sum(_may_count(offer, elapsed) for offer in offers) < self.least


def _may_count(offer: Ready | None, elapsed: float) -> bool:
    """Whether a member may still contribute, or what it has offered may still arrive."""
    return elapsed <= 1 if offer is None else offer.cid is not None and elapsed <= DELIVERED
