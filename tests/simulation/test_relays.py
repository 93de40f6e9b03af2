"""Rounds whose news goes over relays: dead, silent and lying ones cost time, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from kits.rounds.injection import AIMED, ALL_FAULTS
from kits.rounds.swarm import Options, run_seed
from seeds import daily
from session_table import Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes import relays
from atoll.node.session import events as ev
from atoll.node.simulation.process import NodeProcess

MEMBERS = 9


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """Nine members, whose configurations have relays from three on."""
    monkeypatch.setattr(relays, "RELAYED_ABOVE", 2)
    table = Table(MEMBERS)
    table.all_in()
    table.wait(5.0)
    yield table
    table.end()


def body_of(sender: PeerId, channel: str, payload: Any) -> m.Body | None:
    """A message of a round; None: something else."""
    if channel != "control" or payload[:1] != b"R":
        return None
    return m.decode(payload[1:], sender).body


def give(table: Table, name: str, peers: list[Peer] | None = None) -> None:
    """Members contribute to the open round, and all of them that live see it decided."""
    peers = table.peers if peers is None else peers
    rounds = peers[0].session.completed
    for peer in peers:
        peer.contribute(f"{name} {peer.name}")
    table.until(lambda: all(peer.session.completed > rounds for peer in peers))


def convener(table: Table) -> PeerId:
    """Of the open round."""
    return table.peers[0].machine.convener_of(0).peer


def others(table: Table, *but: PeerId) -> list[Peer]:
    """Members that are none of these."""
    return [peer for peer in table.peers if peer.name not in but]


def accused(table: Table) -> list[ev.PeerMisbehaved]:
    """Whom members have accused."""
    heard = [event for peer in table.peers for event in peer.heard]
    return [event for event in heard if isinstance(event, ev.PeerMisbehaved)]


def test_a_vote_goes_to_the_convener_and_the_decision_once_to_each_member(table: Table) -> None:
    first, sent, to = table.peers[0], Counter[type[m.Body]](), set[PeerId]()

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        body = body_of(sender, channel, payload)
        if body is not None:
            sent[type(body)] += 1
            if isinstance(body, m.Accepted):
                to.add(receiver)
        return False

    table.network.tap = tap
    owner = convener(table)
    give(table, "1")
    assert to == {owner}
    assert sent[m.Accepted] == sent[m.QuorumVotes] == MEMBERS - 1
    assert sent[m.Catch] == sent[m.PlanMessage] == 0
    # to the convener, and to the two others of each row of three; and each to its column at most
    assert sent[m.Ready] <= (MEMBERS - 1) + 2 * MEMBERS + (MEMBERS - 1)
    assert sent[m.RoundCloses] <= 2 * MEMBERS
    certificate = first.machine.journal.entries[-1].votes
    assert len(certificate) == MEMBERS // 2 + 1
    assert {vote.ballot for vote in certificate} == {0}


def test_all_hear_that_a_round_closes_of_one_contribution(table: Table) -> None:
    closing = {
        peer.name: sum(isinstance(event, ev.RoundClosing) for event in peer.heard)
        for peer in table.peers
    }
    giver = table.peers[4]
    giver.contribute("1")
    table.wait(0.01)
    for peer in table.peers:
        if peer is not giver:
            now = sum(isinstance(event, ev.RoundClosing) for event in peer.heard)
            assert now == closing[peer.name] + 1


def test_a_relay_that_passes_nothing_on_costs_its_row_a_patience(table: Table) -> None:
    owner, withheld = convener(table), Counter[PeerId]()

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        body = body_of(sender, channel, payload)
        selfish = isinstance(body, m.QuorumVotes) and sender != owner and not body.pass_on
        withheld[receiver] += selfish
        return selfish

    table.network.tap = tap
    started = table.world.now
    give(table, "1")
    assert sum(withheld.values()) == 4  # two of each of the two other rows
    assert {c.entry.round for peer in table.peers for c in [peer.machine.journal.entries[-1]]} == {
        table.peers[0].machine.round - 1
    }
    assert table.world.now - started < 10 * table.place.timing.pull_s
    assert not accused(table)


def test_where_the_convener_dies_with_the_votes_the_next_one_decides_the_same(
    table: Table,
) -> None:
    owner = convener(table)
    table.network.tap = lambda sender, receiver, channel, payload: (
        sender == owner and isinstance(body_of(sender, channel, payload), m.QuorumVotes)
    )
    for peer in table.peers:
        peer.contribute(f"1 {peer.name}")
    dying = next(peer for peer in table.peers if peer.name == owner)
    table.until(lambda: dying.machine.open.decided is not None)
    decided = dying.machine.open.decided
    assert decided is not None
    rounds = others(table, owner)[0].session.completed
    dying.kill()
    living = others(table, owner)
    table.until(lambda: all(peer.session.completed > rounds for peer in living))
    found = {peer.machine.journal.entries[decided.entry.round].entry.hash() for peer in living}
    assert found == {decided.entry.hash()}
    ballots = {
        vote.ballot
        for peer in living
        for vote in peer.machine.journal.entries[decided.entry.round].votes
    }
    assert min(ballots) > 0


@pytest.mark.parametrize("lie", ["another entry", "too few", "one twice", "signature"])
def test_no_relay_makes_others_believe_what_was_not_decided(table: Table, lie: str) -> None:
    owner = convener(table)
    seen = list[m.Envelope]()

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        if isinstance(body_of(sender, channel, payload), m.QuorumVotes):
            seen.append(m.decode(payload[1:], sender))
            return True
        return isinstance(body_of(sender, channel, payload), m.Fetch)

    table.network.tap = tap
    for peer in table.peers:
        peer.contribute(f"1 {peer.name}")
    table.until(lambda: bool(seen))
    body = seen[0].body
    assert isinstance(body, m.QuorumVotes)
    votes = body.votes
    if lie == "another entry":
        body = msgspec.structs.replace(body, entry_hash=bytes(32))
    elif lie == "too few":
        body = msgspec.structs.replace(body, votes=votes[:-1])
    elif lie == "one twice":
        body = msgspec.structs.replace(body, votes=(*votes[:-1], votes[0]))
    else:
        forged = msgspec.structs.replace(votes[-1], signature=bytes(64))
        body = msgspec.structs.replace(body, votes=(*votes[:-1], forged))
    liar, victim = others(table, owner)[:2]
    assert victim.machine.open.decided is None
    envelope = msgspec.structs.replace(seen[0], body=body, incarnation=0)
    assert victim.node is not None
    victim.node.deliver(liar.name, "control", b"R" + m.encode(envelope))
    assert victim.machine.open.decided is None
    assert [event.peer for event in accused(table)] == [liar.name]
    table.network.tap = None
    give_up = victim.session.completed
    table.until(lambda: all(peer.session.completed > give_up for peer in table.peers))


def test_a_convener_takes_no_vote_that_is_not_signed(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, honest = convener(table), NodeProcess.sign
    liar = others(table, owner)[0]

    def sign(process: NodeProcess, payload: bytes) -> bytes:
        false = process.peer == liar.name and b"atoll/vote/" in payload[:16]
        return bytes(64) if false else honest(process, payload)

    monkeypatch.setattr(NodeProcess, "sign", sign)
    give(table, "1", others(table, liar.name))
    votes = table.peers[0].machine.journal.entries[-1].votes
    assert liar.name not in {vote.member.peer for vote in votes}
    assert {event.peer for event in accused(table)} == {liar.name}


def test_a_newcomer_asks_the_owners_of_one_ballot_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first three are dead, and nobody else has anything to do."""
    monkeypatch.setattr(relays, "RELAYED_ABOVE", 2)
    table = Table(MEMBERS + 1)
    *members, newcomer = table.peers
    table.found()
    for peer in members[1:]:
        peer.start().attach()
    table.until(
        lambda: all(peer.inside and len(peer.machine.config) == MEMBERS for peer in members)
    )
    machine = members[0].machine
    owners = [machine.convener_of(ballot).peer for ballot in range(MEMBERS)]
    always = {*owners[:3], *machine.next_conveners(3), members[0].name}
    for peer in members:
        if peer.name in owners[:3]:
            peer.kill()
    table.wait(5.0)
    knocks = dict[float, set[PeerId]]()

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        if not isinstance(body_of(sender, channel, payload), m.Join):
            return False
        knocks.setdefault(table.world.now, set()).add(receiver)
        return True

    table.network.tap = tap
    newcomer.start().attach()
    table.until(lambda: len(knocks) == 4)
    first, then = always.union(owners[3:8]), always.union(owners[8:], owners[:4])
    assert list(knocks.values())[:3] == [first, then, first]
    table.network.tap = None
    table.until(lambda: newcomer.inside)
    table.end()


@pytest.mark.parametrize("seed", daily(5, range(12)))
def test_all_promises_hold_over_relays_whatever_strikes(seed: int) -> None:
    options = Options(peers=(3, 9), faults=(*ALL_FAULTS, *AIMED[:1]), relayed_above=2, rounds=6)
    assert run_seed(10_000 + seed, options).problem == ""
