"""Who takes part in a round of a run that asks some of its members only: drawn by the log, so that everybody draws alike and anybody can check it.

The draw of a round is ordered by ``blake3(run, hash of the entry before, peer)``: nobody knows it before that entry is decided, and a member's place in
it hangs on nobody else. The first of the order take part: a share of the configuration, or a number. Who convenes an entry can choose among the
contributions that it names, and so among a few draws of the next round: this is chance for everybody else, not a lottery against its organisers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from ..group import Config, Member
from ..swarm import Sample
from .readiness import send_ready

if TYPE_CHECKING:
    from .machine import RoundMachine


def drawn(run: str, base: bytes, config: Config, sample: Sample | None) -> Config:
    """The members of ``config`` that take part in the round after the entry with hash ``base``, in the configuration's order; all where there is no
    sample."""
    if sample is None:
        return config

    def key(member: Member) -> bytes:
        return blake3(msgspec.msgpack.encode(("atoll/sample/1", run, base, member.peer))).digest()

    chosen = set(sorted(config, key=key)[: sample.wanted(len(config))])
    return tuple(member for member in config if member in chosen)


class Draw:
    """Who takes part in the open round, as one member sees it."""

    def __init__(self, machine: RoundMachine) -> None:
        self.machine = machine
        self.members = drawn(machine.run, machine.base, machine.config, machine.shape.sample)
        self.waiting = False  # a script waits for the end of this round, in which this member takes no part

    @property
    def takes_part(self) -> bool:
        """Whether this member does; in a run without a sample everybody does, who is a member or not."""
        return self.machine.shape.sample is None or self.machine.me in self.members

    @property
    def hopeless(self) -> bool:
        """Whether too few of those that were drawn can still contribute."""
        machine, sample = self.machine, self.machine.shape.sample
        if sample is None:
            return False
        ready = machine.open.ready
        able = [who for who in self.members if not machine.silent(who) and not (who in ready and ready[who].cid is None)]
        return len(able) < max(machine.shape.least, sample.least)

    @property
    def again(self) -> bool:
        """Whether there must be another draw: somebody waits here, and too few can contribute."""
        return self.waiting and self.hopeless

    def wait(self, waiting: bool) -> None:
        """Say whether a script waits for the round's end."""
        self.waiting = waiting
        if waiting:
            send_ready(self.machine)
