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

import pytest
from hostile.distinct import KINDS, Flood
from seeds import RARE

from atoll.collectives import messages as m
from atoll.collectives.group import Member
from atoll.collectives.layout import make_layout
from atoll.collectives.round import RoundMachine
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.run import membership_records as wire
from atoll.node.session.session import MEMBERSHIP, ROUND, Session
from atoll.node.simulation.process import sign_as

LAYOUT = make_layout([("w", (64,))])
FEW, MANY = 400, 1600  # messages before the first measurement, and between it and the second
MOST_GROWTH = 32 << 10  # bytes that are no growth: tables that happened to be resized


ONCE_KEPT = {m.Accept, m.Accepted}  # all of them, in an earlier version


def flood_of(machine: RoundMachine, liar: Member) -> Flood:
    return Flood(machine, liar, lambda payload: sign_as(liar.peer, payload))


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
        made, began = flood_of(session.machine, liar), session._now
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
