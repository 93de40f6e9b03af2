"""Messages of one member about the round that is open at another, of each type, no two of them alike.

The list of types is that of the messages themselves: one that is new has no maker here, and fails
the tests that go through the list.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.collectives import messages as m
from atoll.collectives.group import NO_READING, Contributor, Entry, Member
from atoll.collectives.modes.byzantine.signed import (
    claim_payload,
    given_payload,
    pledge_payload,
    reduced_payload,
    slot_payload,
)
from atoll.collectives.round import RoundMachine, vote_payload


class Flood:
    """Distinct messages of one member, as of the round that is open at another."""

    def __init__(self, machine: RoundMachine, liar: Member, sign: Callable[[bytes], bytes]) -> None:
        """``sign``: as the liar."""
        self.machine, self.liar, self.sign = machine, liar, sign
        tail = machine.tail.entry
        self.entry = msgspec.structs.replace(tail, round=machine.round, base=machine.base)
        owned = [b for b in range(1, 40) if machine.convener_of(b) == liar]
        self.first, self.step = owned[0], owned[1] - owned[0]

    def make(self, kind: type, number: int) -> Any:
        return getattr(self, kind.__name__.lower())(number)

    def ballot(self, number: int) -> int:
        return self.first + number * self.step

    def entry_of(self, number: int) -> Entry:
        mine = Contributor(self.liar, self.cid(number), 1)
        return msgspec.structs.replace(self.entry, contributors=(mine,))

    @staticmethod
    def cid(number: int) -> bytes:
        return number.to_bytes(16, "big")

    @staticmethod
    def hash(number: int) -> bytes:
        return number.to_bytes(32, "big")

    def ready(self, number: int) -> m.Ready:
        return m.Ready(self.machine.base, self.cid(number), 1 + number, False)

    def prepare(self, number: int) -> m.Prepare:
        return m.Prepare(self.ballot(number))

    def promise(self, number: int) -> m.Promise:
        accepted = m.Accepted1(number, self.entry_of(number))
        return m.Promise(self.ballot(number), accepted, self.ready(number))

    def accept(self, number: int) -> m.Accept:
        return m.Accept(self.ballot(number), self.entry_of(number))

    def accepted(self, number: int) -> m.Accepted:
        payload = vote_payload(*self.machine.slot, number, self.hash(number))
        return m.Accepted(number, self.hash(number), self.sign(payload))

    def quorumvotes(self, number: int) -> m.QuorumVotes:
        return m.QuorumVotes(self.hash(number), (), False)

    def missing(self, number: int) -> m.Missing:
        return m.Missing(self.cid(number), ((self.cid(number), ((0, 1),)),))

    def disputed(self, number: int) -> m.Disputed:
        return m.Disputed(self.cid(number), 0, self.liar.peer, self.machine.me.peer)

    def need(self, number: int) -> m.Need:
        return m.Need(self.cid(number), ((0, 1),))

    def fetch(self, number: int) -> m.Fetch:
        return m.Fetch(number + 1)

    def catch(self, number: int) -> m.Catch:
        return m.Catch((), number, 0, number, m.Said(0, 1, number))

    def join(self, number: int) -> m.Join:
        return m.Join(bool(number % 2))

    def get(self, number: int) -> m.Get:
        return m.Get(self.hash(number), ())

    def askstate(self, number: int) -> m.AskState:
        return m.AskState(False, number)

    def offer(self, number: int) -> m.Offer:
        return m.Offer(self.hash(number), self.hash(number), None)

    def gone(self, number: int) -> m.Gone:
        return m.Gone(self.hash(number))

    def trial(self, number: int) -> m.Trial:
        return m.Trial(self.cid(number), self.hash(number))

    def sample(self, number: int) -> m.Sample:
        return m.Sample(self.cid(number), 0, self.hash(number))

    def retained(self, number: int) -> m.Retained:
        return m.Retained(self.cid(number), self.hash(number), os.urandom(64))

    def claim(self, number: int) -> m.Claim:
        said = (self.machine.base, self.cid(number), 1, NO_READING, False, (), (), number)
        machine, blank = self.machine, m.Claim(*said)
        payload = claim_payload(machine.run, machine.log, machine.round, self.liar, blank)
        return msgspec.structs.replace(blank, signature=self.sign(payload))

    def turn(self, number: int) -> m.Turn:
        return m.Turn(number)

    def pledge(self, number: int) -> m.Pledge:
        ballot, accepted = self.ballot(number), m.Accepted1(number, self.entry_of(number))
        payload = pledge_payload(*self.machine.slot, ballot, number, accepted.entry.hash())
        return m.Pledge(ballot, accepted, (), self.ready(number), self.sign(payload))

    def propose(self, number: int) -> m.Propose:
        ballot, entry = self.ballot(number), self.entry_of(number)
        payload = slot_payload("propose", *self.machine.slot, ballot, entry.hash())
        return m.Propose(ballot, entry, (), (), (), self.sign(payload))

    def contributed(self, number: int) -> m.Contributed:
        of = (self.cid(number), number, number + 1, self.hash(number))
        return m.Contributed(*of, self.sign(given_payload(*self.machine.slot, *of)))

    def reduced(self, number: int) -> m.Reduced:
        parts = ((0, self.hash(number)),)
        payload = reduced_payload(self.machine.run, self.liar.peer, self.hash(number), parts)
        return m.Reduced(self.hash(number), parts, self.sign(payload))

    def echo(self, number: int) -> m.Echo:
        payload = slot_payload("echo", *self.machine.slot, number, self.hash(number))
        return m.Echo(number, self.hash(number), self.sign(payload), b"")


ELSEWHERE = {m.PlanMessage, m.PacedPlan, m.RoundCloses, m.Seal, m.Sealed}
"""One plan is in force at a time, a round closes once, and only the organiser may seal."""
KINDS = sorted(set(m.Body.__args__) - ELSEWHERE, key=lambda kind: kind.__name__)
