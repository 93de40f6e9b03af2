"""Who takes part in a round of a run that asks some of its members only: drawn by the log, so that
everybody draws alike and anybody can check it.

The draw of a round is ordered by ``blake3(run, hash of the entry before, peer)``: nobody knows it
before that entry is decided, and a member's place in it hangs on nobody else. The first of the
order take part: a share of the configuration, or a number. Who convenes an entry can choose among
the contributions that it names, and so among a few draws of the next round: this is chance for
everybody else, not a lottery against its organisers.

Where those that were drawn give too little, an entry without contributors ends their round, and by
its hash there is another draw. It is for the log to say that, not for whoever convenes: nobody
votes for such an entry who does not see by itself that too few can contribute, or that they had
their time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from ..group import Config, Entry, Member
from ..swarm import Sample
from .readiness import my_ready, send_ready

if TYPE_CHECKING:
    from .machine import RoundMachine

TURNS = 8  # times the last round with contributors: so long those that were drawn have for theirs
AGAIN = 1.1  # times the draw before: also members that have become that much slower get there
# times what those that were drawn have: so long what they offered may be on its way, if conveners
# try in vain
DELIVERED = 2.0
SLOWER = (
    2.0  # times the turn before, at most, is what a turn counts as: scripts may have rested in it
)
UNKNOWN = 2.0  # as `AGAIN`, where no round was seen here: nobody knows how long one takes


def drawn(run: str, base: bytes, config: Config, sample: Sample | None) -> Config:
    """The members of ``config`` that take part in the round after the entry with hash ``base``, in
    the configuration's order; all where there is no sample."""
    if sample is None:
        return config

    def key(member: Member) -> bytes:
        return blake3(msgspec.msgpack.encode(("atoll/sample/1", run, base, member.peer))).digest()

    chosen = set(sorted(config, key=key)[: sample.wanted(len(config))])
    return tuple(member for member in config if member in chosen)


class Draw:
    """Who takes part in the open round, as one member sees it."""

    def __init__(self, machine: RoundMachine, before: Draw | None) -> None:
        """``before``: of the round before, None where this member has just been started."""
        self.machine = machine
        self.members = drawn(machine.run, machine.base, machine.config, machine.shape.sample)
        self.waiting = (
            False  # a script waits for the end of this round, in which this member takes no part
        )
        last_s, counted = (
            machine.round_s or 0.0,
            bool(machine.journal.entries[-1].entry.contributors),
        )
        least_s = machine.timing.redraw_s
        self.turn_s: float = last_s if counted else 0.0  # of the last round with contributors
        if before is not None and before.turn_s:
            self.turn_s = (
                min(last_s, max(SLOWER * before.turn_s, least_s)) if counted else before.turn_s
            )
        vain_s = (
            0.0
            if counted
            else last_s
            if before is None
            else min(last_s, DELIVERED * before.patience_s)
        )
        self.patience_s = max(
            least_s, TURNS * self.turn_s, (AGAIN if self.turn_s else UNKNOWN) * vain_s
        )
        self._had = 0.0  # of that, in multiples

    @property
    def takes_part(self) -> bool:
        """Whether this member does; in a run without a sample everybody does, who is a member or
        not.
        """
        return self.machine.shape.sample is None or self.machine.me in self.members

    @property
    def declines(self) -> bool:
        """Whether this member was drawn, others were not, and it has offered nothing: if it will
        not, all are told.
        """
        return (
            not self.whole and self.machine.me in self.members and self.machine.contribution is None
        )

    @property
    def whole(self) -> bool:
        """Whether all members take part."""
        return len(self.members) == len(self.machine.config)

    @property
    def hopeless(self) -> bool:
        """Whether too few of those that were drawn can still contribute, or have done so in time."""
        return self._too_few(self._had)

    @property
    def again(self) -> bool:
        """Whether there must be another draw: somebody waits here, and too few can contribute."""
        return self.waiting and self.hopeless

    def look(self, now: float) -> None:
        """Note how long those that were drawn have had."""
        self._had = (now - self.machine.open.born) / self.patience_s

    def wait(self, waiting: bool) -> None:
        """Say whether a script waits for the round's end."""
        self.waiting = waiting
        if waiting:
            send_ready(self.machine)

    def allows(self, ballot: int, entry: Entry) -> bool:
        """Whether an entry may be voted for here. One that does nothing but end the round, and so
        draw again, only if this member sees why; who convenes the ballot votes last, so that what
        the others do not want binds no later convener. What was voted for before is voted for
        again: later conveners must adopt it, and nothing else could be decided."""
        machine, voted = self.machine, self.machine.journal.accepted
        if (
            entry.contributors
            or entry.next_config != machine.config
            or self.whole
            or (voted is not None and voted[1] == entry)
        ):
            return True
        if not self._too_few(2 * self._had):  # clocks differ
            return False
        others = machine.open.votes.get((ballot, entry.hash()), {})
        return (
            bool(machine.lying)
            or machine.convener_of(ballot) != machine.me
            or machine.quorum([*others, machine.me])
        )

    def _too_few(self, had: float) -> bool:
        machine = self.machine
        if self.whole:
            return False
        least = max(
            machine.shape.least,
            machine.shape.sample.least if machine.shape.sample is not None else 1,
        )
        return sum(self._gives(who, had) for who in self.members) < least

    def _gives(self, who: Member, had: float) -> bool:
        """Whether a member may still contribute, or has done so and what it offered may still come,
        after so many times `patience_s`.
        """
        offer = (
            my_ready(self.machine) if who == self.machine.me else self.machine.open.ready.get(who)
        )
        return not self.machine.silent(who) and (
            had <= 1 if offer is None else offer.cid is not None and had <= DELIVERED
        )
