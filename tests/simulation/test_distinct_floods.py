"""What a member can make others keep of an open round does not grow with how much it says, however
different each message is from the one before.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import msgspec
import pytest
from seeds import RARE

from atoll.collectives import messages as m
from atoll.collectives.group import NO_READING, Contributor, Entry, Member
from atoll.collectives.layout import make_layout
from atoll.collectives.modes.byzantine.signed import (
    claim_payload,
    given_payload,
    pledge_payload,
    reduced_payload,
    slot_payload,
)
from atoll.collectives.round import RoundMachine, vote_payload
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.run import membership_records as wire
from atoll.node.session.session import MEMBERSHIP, ROUND, Session
from atoll.node.simulation.process import sign_as

LAYOUT = make_layout([("w", (64,))])
FEW, MANY = 400, 1600  # messages before the first measurement, and between it and the second
MOST_GROWTH = 32 << 10  # bytes that are no growth: tables that happened to be resized


class Flood:
    """Distinct messages of one member, as of the round that is open at another."""

    def __init__(self, machine: RoundMachine, liar: Member) -> None:
        self.machine, self.liar = machine, liar
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

    def sign(self, payload: bytes) -> bytes:
        return sign_as(self.liar.peer, payload)

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
ONCE_KEPT = {m.Accept, m.Accepted}  # all of them, in an earlier version
KINDS = sorted(set(m.Body.__args__) - ELSEWHERE, key=lambda kind: kind.__name__)


def kept(session: Session) -> int:
    """Bytes of all Python objects that a session can reach, but not by its driver."""
    seen, todo, total = {id(session.ports)}, list[object]([session]), 0
    while todo:
        one = todo.pop()
        apart = isinstance(one, (type, ModuleType, FunctionType, BuiltinFunctionType))
        if id(one) in seen or apart or type(one).__module__.startswith("atoll.node.simulation"):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        todo.extend(gc.get_referents(one))
    return total


def with_open_round(lying: int, do: Callable[[Session, Member], None]) -> None:
    """One round is decided by four members (five where one may lie); then ``do`` is called at the
    last, which has offered something, with another member."""
    members = 5 if lying else 4
    settings = RunSettings(codec="fp32", sync_every=1, lying=lying)
    swarm = LocalSwarm(members, settings=settings, latency_s=0.01, seed=5)

    def script(member: Any) -> None:
        member.open(LAYOUT, lambda into: into.zero_())
        session = member._session(0)
        while len(member.members()) < members or len(session.machine.config) < members:
            member.sleep(0.1)
        member.sleep(5.0)
        member.contribute(samples=1, write=lambda into: into.zero_()).wait(60.0)
        member.sleep(5.0)
        if member.index == members - 1:
            liar = next(who for who in session.machine.config if who != session.machine.me)
            do(session, liar)
        else:
            member.sleep(30.0)

    swarm.run(script, limit_s=200.0)


@pytest.mark.parametrize(
    ("kind", "lying"),
    [
        pytest.param(
            kind,
            lying,
            id=f"{kind.__name__}-{lying}",
            marks=[] if kind in ONCE_KEPT and not lying else RARE,
        )
        for kind in KINDS
        for lying in (0, 1)
    ],
)
def test_distinct_messages_of_a_member_are_bounded(kind: type, lying: int) -> None:
    sizes = list[int]()

    def flood(session: Session, liar: Member) -> None:
        assert session.machine is not None
        made, began = Flood(session.machine, liar), session._now
        for number in range(FEW + MANY):
            if number in (FEW, FEW + MANY - 1):
                sizes.append(kept(session))
            envelope = m.Envelope(
                session.log, session.machine.round, liar.incarnation, made.make(kind, number)
            )
            # a hundred a second: what is bounded by the rate alone grows for as long as it comes
            session.on_message(began + number / 100, liar.peer, ROUND + m.encode(envelope))

    with_open_round(lying, flood)
    assert sizes[1] - sizes[0] < MOST_GROWTH, sizes


def gossip(session: Session, liar: Member, kind: type, number: int) -> wire.Message:
    """A message of a member about who is there, unlike all before it."""
    nonce = number.to_bytes(8, "big")
    match kind.__name__:
        case "Beat":
            return wire.Beat(bool(number % 2))
        case "HeardBeat":
            return wire.HeardBeat(nonce, nonce)
        case "Probe":
            return wire.Probe(session.me, nonce)
        case "ProbePing":
            return wire.ProbePing(liar.peer, nonce)
        case "Alive":
            return wire.Alive(liar.peer, session.me, nonce, os.urandom(64))
        case "TableHash":
            return wire.TableHash(Flood.hash(number))
        case "Digest":
            return wire.Digest(nonce + nonce)
        case _:
            lived = Flood.cid(number)[-8:]
            record = wire.Record(
                *(session.run, liar.peer, (1 << 42) + number, 1 << 47),
                addresses=(f"/ip4/10.0.{number % 250}.1/tcp/1",),
                round=number,
                life=lived,
                beside=lived,
                first_batch=(number, Flood.cid(number)),
            )
            signed = wire.sign_record(record, lambda data: sign_as(liar.peer, data))
            return wire.Records((signed,), nonce)


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("kind", wire.Message.__args__, ids=lambda kind: kind.__name__)
def test_distinct_gossip_of_a_member_is_bounded(kind: type) -> None:
    sizes = list[int]()

    def flood(session: Session, liar: Member) -> None:
        began = session._now
        for number in range(FEW + MANY):
            if number in (FEW, FEW + MANY - 1):
                sizes.append(kept(session))
            data = MEMBERSHIP + wire.encode(gossip(session, liar, kind, number))
            session.on_message(began + number / 100, liar.peer, data)

    with_open_round(0, flood)
    assert sizes[1] - sizes[0] < MOST_GROWTH, sizes
