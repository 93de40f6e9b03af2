"""How many members a run may have, by its plan and by what one message carries: what fits goes over
the wire, and one more is refused where it would be made, proposed or opened.
"""

from __future__ import annotations

import msgspec
import pytest
from exchange_kit import Net, cid_of, make_plan
from hypothesis import given
from hypothesis import strategies as st
from kits.rounds.swarm import Options, SimSwarm

from atoll.collectives import bounds
from atoll.collectives import messages as m
from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.collectives.group import (
    MAX_MEMBERS,
    MAX_STAR,
    Certified,
    Contributor,
    Entry,
    Member,
    Part,
    Reading,
    Topology,
    TopologyKind,
    Vote,
)
from atoll.collectives.identifiers import PeerId
from atoll.collectives.partition import check_plan

READING = Reading(0.123456789, 1.23456789, 12.3456789)


def members(count: int, chars: int = 52) -> tuple[Member, ...]:
    return tuple(Member(PeerId(f"{number:0{chars}d}"), 3) for number in range(count))


def entry_of(config: tuple[Member, ...], contributing: int, kind: TopologyKind) -> Entry:
    """As large as one of so many contributions gets."""
    who = tuple(
        Contributor(member, number.to_bytes(16), 1 << 30, READING)
        for number, member in enumerate(config[:contributing])
    )
    places = tuple(range(contributing)) if kind != "butterfly" else ()
    owners = min(len(config), bounds.MOST_OWNERS)
    return Entry(
        "main/x" * 20,
        1 << 20,
        bytes(32),
        bytes(32),
        who,
        tuple(Part(member.peer, 1 << 30, 1 << 31) for member in config[:owners]),
        (bytes(32),) * owners,
        1 << 40,
        1 << 20,
        "int8",
        "mean",
        config,
        Topology(kind, places, places if kind == "three-level" else ()),
    )


def test_an_entry_of_4096_members_and_its_votes_go_into_one_message() -> None:
    config = members(MAX_MEMBERS)
    entry = entry_of(config, MAX_MEMBERS, "three-level")
    assert bounds.entry_fault(entry, config, "three-level") is None
    votes = tuple(Vote(member, 1 << 20, bytes(64)) for member in config[: MAX_MEMBERS // 2 + 1])
    for body in (m.Catch((Certified(entry, votes),), 1, 1), m.Accept(5, entry)):
        data = m.encode(m.Envelope("main/x", 1, 0, body))
        assert len(data) < m.MAX_MESSAGE_BYTES
        assert m.decode(data, PeerId("p")).body == body
    assert bounds.room_for(config[:-3], members(4200)[4093:], "three-level") == 3


@given(st.integers(40, 128), st.integers(257, 4600), st.sampled_from(["two-level", "three-level"]))
def test_whatever_is_let_in_fits_a_message(chars: int, count: int, kind: TopologyKind) -> None:
    """Members are let in while an entry in which all contribute fits, and such an entry does."""
    wanted = members(count, chars)
    config, room = wanted[:MAX_STAR], 1
    while room:  # entry after entry, no more than are there
        room = bounds.room_for(config, wanted[len(config) : 2 * len(config)], kind)
        config = wanted[: len(config) + room]
    assert MAX_STAR < len(config) <= MAX_MEMBERS
    assert len(config) == min(count, MAX_MEMBERS) or chars > 52
    entry = entry_of(config, len(config), kind)
    assert bounds.entry_fault(entry, config, kind) is None
    votes = tuple(Vote(member, 1 << 48, bytes(64)) for member in config[: len(config) // 2 + 1])
    data = m.encode(m.Envelope("x", 1, 0, m.Catch((Certified(entry, votes),), 1, 1)))
    assert len(data) <= m.MAX_MESSAGE_BYTES


def test_what_is_too_large_is_named() -> None:
    many = members(MAX_MEMBERS + 1)
    fault = bounds.entry_fault(entry_of(many, 9, "three-level"), many[:9], "three-level")
    assert fault == "an entry that makes 4,097 members of a three-level run: at most 4,096"
    star = members(MAX_STAR + 1)
    fault = bounds.entry_fault(entry_of(star, 9, "butterfly"), star[:9], "butterfly")
    assert fault == "an entry that makes 257 members of a butterfly run: at most 256"
    long = members(4000, 128)
    fault = bounds.entry_fault(entry_of(long, 4000, "two-level"), long, "two-level")
    assert fault is not None
    assert "contributions and 4,000 members: a message has 1,048,576" in fault
    assert bounds.room_for(members(250), members(270)[250:], "butterfly") == 6
    assert bounds.room_for(members(250), members(270)[250:], "ring") == 6
    assert bounds.room_for(members(250), members(270)[250:], "two-level") == 20
    for kind in ("butterfly", "ring"):
        text = bounds.why_so_many(kind)
        assert "256" in text
        assert "4,096" in text


@pytest.mark.parametrize(
    ("kind", "count", "says"),
    [
        ("butterfly", 256, None),
        ("butterfly", 257, "257 contributors in a butterfly: at most 256"),
        ("ring", 257, "257 contributors in a ring: at most 256"),
        ("two-level", 257, None),
    ],
)
def test_a_star_of_more_is_no_plan(kind: TopologyKind, count: int, says: str | None) -> None:
    peers = [member.peer for member in members(count)]
    plan = make_plan(
        [(peer, number.to_bytes(16), 1) for number, peer in enumerate(peers)],
        peers[:4],
        40,
        1,
        "fp32",
        topology=Topology(kind, () if kind == "butterfly" else (0,) * count),
    )
    assert check_plan(plan) == says


def test_an_exchange_is_opened_among_no_more_than_its_plan_bears() -> None:
    net = Net(1)
    node = net.nodes[net.peers[0]]
    many = [member.peer for member in members(MAX_MEMBERS + 1)]
    node.open_round("x", 1, many[:MAX_STAR], 100, 10, "fp32")
    with pytest.raises(LocalProtocolError, match="among 257 members, where 256 is the most") as no:
        node.open_round("y", 1, many[: MAX_STAR + 1], 100, 10, "fp32")
    assert "4,096" in no.value.why
    most = bounds.most_members("three-level")
    node.open_round("y", 1, many[:most], 100, 10, "fp32", most=most)
    with pytest.raises(LocalProtocolError, match="4,097 members, where 4,096 is the most"):
        node.open_round("z", 1, many, 100, 10, "fp32", most=most)


@pytest.mark.parametrize("kind", ["butterfly", "three-level"])
def test_a_member_takes_no_entry_of_more_members(kind: TopologyKind) -> None:
    """`entry_fits` says no, a proposal of it is its convener's breach, and nobody proposes one."""
    swarm = SimSwarm(1, Options(peers=(3, 3), faults=(), fragments=1, plan=kind, codec="fp32"))
    swarm._start()
    swarm.world.run(until=3.0)
    process = swarm.members[swarm.organiser].process
    assert process is not None
    machine = process.run.sessions[0].machine
    assert machine is not None
    assert len(machine.config) == 3
    shape, most = machine.shape, bounds.most_members(kind)
    assert shape.most == most
    crowd = tuple(sorted((*machine.config, *members(most))))

    def proposed(config: tuple[Member, ...]) -> Entry:
        assert machine is not None
        return Entry(
            machine.log,
            machine.round,
            machine.base,
            bytes(32),
            (),
            (),
            (),
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            shape.reducer,
            config,
        )

    assert machine.entry_fits(proposed(crowd[:most]))
    assert not machine.entry_fits(proposed(crowd))
    who = machine.convener_of(machine.journal.promised)
    with pytest.raises(RemoteProtocolError, match=f"{kind} run: at most {most:,}") as caught:
        machine.on_acceptor_message(3.0, who, m.Accept(machine.journal.promised, proposed(crowd)))
    assert caught.value.peer == who.peer
    welcome = len(machine.entrance.welcome(members(most + 9)))  # what they show must fit, too
    assert welcome == most - 3 if kind == "butterfly" else 1000 < welcome < most
    process.end()


def test_owners_of_a_large_plan_are_the_fastest_in_turn() -> None:
    assert bounds.owners_for([1.0] * 256, 7) == [1.0] * 256
    rates = [1.0] * 900 + [0.0] * 50 + [2.0] * 50
    chosen = [bounds.owners_for(rates, round_) for round_ in range(100)]
    for found in chosen:
        assert sum(rate > 0 for rate in found) == bounds.MOST_OWNERS
        assert found[950:] == [2.0] * 50
        assert not any(found[900:950])
    owned = [sum(found[index] > 0 for found in chosen) for index in range(900)]
    assert min(owned) >= 1


def test_votes_are_no_longer_than_what_is_counted_for_them() -> None:
    for member in (members(1)[0], members(1, 128)[0]):
        vote = Vote(member, 1 << 48, bytes(64))
        assert len(msgspec.msgpack.encode(vote)) <= (
            len(msgspec.msgpack.encode(member)) + bounds.VOTE_BYTES
        )
    contribution = Contributor(members(1)[0], cid_of(1), 1 << 48, READING)
    assert len(msgspec.msgpack.encode(contribution)) + 6 <= (
        len(msgspec.msgpack.encode(members(1)[0])) + bounds.CONTRIBUTION_BYTES
    )
