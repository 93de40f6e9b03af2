"""Forks and tips from other members: bounded, validated, and without effect where they break a
rule.
"""

from __future__ import annotations

import functools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.rounds.swarm import Options, SimSwarm

from atoll.collectives import messages as m
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.group import MAX_PATH, Certified, Contributor, Entry, Member, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import branch_log
from atoll.node.session import Session
from atoll.node.session.events import BranchBegun, PeerMisbehaved

P1, P2 = map(PeerId, ("p1", "p2"))


class Scene:
    """Three of five are dead, p1 and p2 go on in a branch of two; what p1 hears from "p2" is
    written by the test.
    """

    def __init__(self) -> None:
        swarm = SimSwarm(4, Options(peers=(5, 5), faults=(), rounds=4))
        swarm.place.branch_after_s = 1.0
        swarm.world.run(until=0.0)
        swarm._start()
        swarm.faults.plan.heal_s = 1e9
        swarm.world.run(until=3.0)
        for name in ("p0", "p3", "p4"):
            swarm.crash(PeerId(name))
        swarm.world.run(until=9.0)
        self.swarm, self.events = swarm, list[object]()
        process = swarm.members[P1].process
        assert process is not None
        self.session: Session = process.session
        process.session.ports.emit = self.events.append  # type: ignore[method-assign]
        assert self.session.branching.branch is not None
        self.genesis, self.base = self.session.branching.branch.genesis, self.session.branching.tip

    def hear(self, body: m.Body, raw: bytes | None = None) -> list[object]:
        """What p1 says after this message of p2, whose process is silent meanwhile."""
        machine = self.session.machine
        assert machine is not None
        self.events.clear()
        data = (
            raw
            if raw is not None
            else m.encode(m.Envelope(self.session.log, machine.round, 0, body))
        )
        self.session.on_message(self.swarm.world.now, P2, b"R" + data)
        return list(self.events)

    def fork(self, **changes: object) -> Entry:
        """Another genesis of a branch, of p1 and p2."""
        return msgspec.structs.replace(self.genesis.entry, log=branch_log(b"n" * 16), **changes)


@functools.cache
def scene() -> Scene:
    """Made once: nothing that is sent here may change it."""
    return Scene()


MALFORMED = {
    "a stranger in it": {"next_config": (Member(P1, 0), Member(P2, 0), Member(PeerId("px"), 0))},
    "a member twice": {"next_config": (Member(P1, 0), Member(P2, 0), Member(P2, 0))},
    "another log": {"log": "main/other"},
    "a round of its own": {"round": 3},
    "another vector": {"numel": 7},
    "contributions of its own": {"contributors": (Contributor(Member(P1, 0), b"c" * 16, 1),)},
}


@pytest.mark.parametrize("what", list(MALFORMED))
def test_a_malformed_fork_is_an_offence_and_nothing_else(what: str) -> None:
    here = scene()
    before = here.session.branching.branch
    said = here.hear(m.Fork(msgspec.structs.replace(here.fork(), **MALFORMED[what]), None))
    assert [type(event) for event in said] == [PeerMisbehaved]
    assert here.session.branching.branch is before


def test_nobody_consents_while_its_branch_goes_on_nor_begins_without_everyones_consent() -> None:
    here = scene()
    before, genesis = here.session.branching.branch, here.fork()
    assert here.hear(m.Fork(genesis, None)) == []
    alone = Certified(genesis, (Vote(Member(P2, 0), 0, b"s" * 64),))
    assert here.hear(m.Begin(alone, None)) == []  # it never consented to that one
    assert here.hear(m.Consent(genesis.hash(), b"s" * 64)) == []  # nor did it propose it
    assert here.session.branching.branch is before
    assert not any(isinstance(event, BranchBegun) for event in here.events)


def test_a_path_must_be_of_this_round() -> None:
    here = scene()
    tip = here.base
    assert tip is not None
    for path in (
        msgspec.structs.replace(tip, base=b"x" * 32),
        msgspec.structs.replace(tip, length=MAX_PATH),
    ):
        said = here.hear(m.Fork(here.fork(base_state=path.digest), path))
        assert [type(event) for event in said] == [PeerMisbehaved]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_messages_of_branches_never_raise_and_never_move_a_member(
    data: st.DataObject,
) -> None:
    here = scene()
    tip, before, machine = here.base, here.session.branching.branch, here.session.machine
    assert tip is not None
    assert machine is not None
    bodies: list[m.Body] = [
        m.Fork(here.fork(), tip),
        m.Begin(here.genesis, tip),
        m.Consent(here.genesis.entry.hash(), b"s" * 64),
        m.Promise(9, None, None, tip),
    ]
    raw = bytearray(
        m.encode(m.Envelope(here.session.log, machine.round, 0, data.draw(st.sampled_from(bodies))))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    here.hear(m.Fetch(), bytes(raw[: data.draw(st.integers(1, len(raw)))]))
    assert here.session.branching.branch is before


def test_paths_are_bounded() -> None:
    one = Contributor(Member(P1, 0), b"c" * 16, 1)
    for count, fits in ((MAX_PATH, True), (MAX_PATH + 1, False)):
        tip = m.Tip("branch/x", b"b" * 32, 1, (one,) * count, b"d" * 32)
        data = m.encode(m.Envelope("main/x", 1, 0, m.Promise(1, None, None, tip)))
        if fits:
            assert m.decode(data, P1).body == m.Promise(1, None, None, tip)
        else:
            with pytest.raises(RemoteProtocolError):
                m.decode(data, P1)
