"""Heads of sites are checked while the round runs: who states another sum is named in that round,
and what is decided is the flat mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from kits.rounds.swarm import Options, SimSwarm, run_seed
from session_table import LAYOUT, Table

from atoll.collectives import messages as m
from atoll.collectives.digest import chunk_hash
from atoll.collectives.exchange import Exchange
from atoll.collectives.exchange import header as record_header
from atoll.collectives.group import Entry
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.reduce import MEAN
from atoll.collectives.round import routes
from atoll.collectives.swarm import RunSettings
from atoll.collectives.terms import CheckedSum
from atoll.collectives.trees import trees_of
from atoll.node.session import events as ev
from atoll.node.session.session import ROUND

SITES = ("lab-0", "lab-0", "lab-0", "lab-1", "lab-1", "lab-1")
Change = Callable[[PeerId, Any, bytes], bytes]
"""What becomes of a record: sender, header, payload."""


class Labs(Table):
    """Two sites of three members."""

    def __init__(self) -> None:
        outer = OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
        super().__init__(
            len(SITES), RunSettings(sync_every=1, codec="fp32", plan="checked", outer=outer)
        )
        self.place = replace(
            self.place,
            sites={peer.name: site for peer, site in zip(self.peers, SITES, strict=True)},
        )
        self.played = 0
        self.vectors: dict[bytes, torch.Tensor] = {}
        self.all_in()

    def forge(self, change: Change, rng: Random | None = None) -> None:
        """All records go through ``change``. By ``rng`` some messages are lost, and more of the
        accounts.
        """

        def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
            if channel != "record":
                return rng is not None and rng.random() < 0.1
            record = record_header.parse(payload[0], sender)
            if rng is not None and record.kind == record_header.ACCOUNT and rng.random() < 0.3:
                return True
            data = change(sender, record, bytes(payload[1]))
            if data == payload[1]:
                return False
            self.network.tap = None
            self.network.send(
                sender,
                receiver,
                channel,
                (record_header.pack(*record._replace(length=len(data))), data),
            )
            self.network.tap = tap
            return True

        self.network.tap = tap

    def play(self) -> Entry:
        """One round of all; what was decided."""
        self.played += 1
        for index, peer in enumerate(self.peers):
            vector = torch.randn(
                LAYOUT.numel, generator=torch.Generator().manual_seed(100 * self.played + index)
            )
            cid = f"{self.played}/{index}".encode().ljust(16, b".")
            self.vectors[cid] = vector
            peer.do(
                lambda session, now, cid=cid, vector=vector: session.contribute(now, cid, 5, vector)
            )
        self.until(
            lambda: all(
                len([e for e in peer.rounds() if e.contributors]) >= self.played
                for peer in self.peers
            )
        )
        return next(
            c.entry
            for c in reversed([*self.peers[0].machine.journal.entries[:]])
            if c.entry.contributors
        )

    def checks(self) -> list[CheckedSum]:
        """Of the plan that is carried out."""
        plan = self.peers[0].machine.open.plan
        return (
            [check for tree in trees_of(plan, MEAN) for check in tree.checks()]
            if plan is not None
            else []
        )

    def left_out(self, sender: PeerId, chunk: int) -> bytes:
        """What a head makes of a chunk that leaves out the last of its site."""
        of = next(check.of for check in self.checks() if check.partial.peer == sender)
        vectors = [
            self.vectors[term.cid][4 * chunk : 4 * chunk + 4] * multiplier
            for term, multiplier in zip(of.terms, of.factors.multipliers, strict=True)
        ]
        return (torch.stack(vectors[:-1]).sum(0) / of.factors.divisor).numpy().tobytes()

    def check(self) -> None:
        """All have the flat means of what was given by whom the entries name, and the same bits."""
        entries = [
            c.entry for c in self.peers[0].machine.journal.entries[:] if c.entry.contributors
        ]
        flat = -sum(
            torch.stack([self.vectors[c.cid] for c in entry.contributors]).mean(0)
            for entry in entries
        )
        anchors = [peer.session.replica.anchor[: LAYOUT.numel] for peer in self.peers]  # type: ignore[union-attr]
        for anchor in anchors:
            assert torch.allclose(anchor, flat, rtol=0, atol=1e-6)
        assert len({anchor.numpy().tobytes() for anchor in anchors}) == 1

    def named(self) -> set[PeerId]:
        """Whom anybody has accused."""
        return {
            event.peer
            for peer in self.peers
            for event in peer.heard
            if isinstance(event, ev.PeerMisbehaved)
        }

    def apart(self) -> set[PeerId]:
        """For whom, and with whom, nobody adds up: all members say the same."""
        (found,) = {frozenset(peer.machine.disputes.pairs) for peer in self.peers}
        return set(found)


def site_of(entry: Entry, peer: PeerId) -> set[PeerId]:
    """Whose contributions were added up with that of a peer before they went to owners."""
    members = [c.member.peer for c in entry.contributors]
    groups = dict(zip(members, entry.topology.groups, strict=True)) if entry.topology.groups else {}
    return {other for other in groups if groups[other] == groups.get(peer)}


def one_element(data: bytes) -> bytes:
    found = np.frombuffer(data, np.float32).copy()
    found[1] = np.nextafter(found[1], np.float32(9))
    return found.tobytes()


def scaled(data: bytes) -> bytes:
    return (np.frombuffer(data, np.float32) * np.float32(2)).tobytes()


def zeros(data: bytes) -> bytes:
    return bytes(len(data))


def test_honest_sites_decide_the_flat_mean_by_checked_sums() -> None:
    labs = Labs()
    seen: list[int] = []
    labs.forge(lambda sender, record, data: seen.append(record.kind) or data)
    for _ in range(3):
        entry = labs.play()
        assert entry.topology.kind == "checked"
        assert len(entry.contributors) == 6
    labs.check()
    assert record_header.ACCOUNT in seen
    assert labs.named() == labs.apart() == set()


@pytest.mark.parametrize("lie", [one_element, scaled, zeros, None])
@pytest.mark.parametrize("hides", [False, True])
def test_a_head_that_states_another_sum_is_named_in_that_round_and_nobody_adopts_it(
    lie: Callable[[bytes], bytes] | None, hides: bool
) -> None:
    """``lie``: None leaves a member out. ``hides``: its account is of what it states. One element
    of the smallest other value is enough.
    """
    labs = Labs()
    labs.play()
    liar: list[PeerId] = []
    sums: dict[int, bytes] = {}

    def change(sender: PeerId, record: Any, data: bytes) -> bytes:
        if record.kind not in (record_header.PARTIAL, record_header.ACCOUNT) or (
            liar and liar[0] != sender
        ):
            return data
        if record.kind == record_header.PARTIAL:
            liar[:] = [sender]
            sums[record.chunk] = (
                lie(data) if lie is not None else labs.left_out(sender, record.chunk)
            )
            return sums[record.chunk]
        return (
            chunk_hash(sums[record.chunk]) + data[32:]
            if hides and liar and record.chunk in sums
            else data
        )

    labs.forge(change)
    entry = labs.play()
    labs.check()
    assert (entry.topology.kind, len(entry.contributors)) == (
        "butterfly",
        6,
    )  # its contribution counts as everybody's does
    assert labs.named() == {liar[0]} == labs.apart()
    told = [
        event for peer in labs.peers for event in peer.heard if isinstance(event, ev.SumDisputed)
    ]
    (owner,) = {event.owner for event in told}
    assert {event.wrong for event in told} == {(liar[0],)}
    assert len(told) == 5  # all but the owner, which has found it out
    assert owner != liar[0]
    labs.forge(lambda sender, record, data: data)
    entry = labs.play()
    assert entry.topology.kind == "checked"
    assert site_of(entry, liar[0]) == {liar[0]}  # nobody's head any more
    labs.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_head_that_lies_whenever_it_can_is_found_each_time_through_loss(seed: int) -> None:
    """It may be head again where the one who convenes has not heard of it. A plan may also have
    been revised without it, or it is alone in one.
    """
    labs = Labs()
    lied: set[int] = set()

    def change(sender: PeerId, record: Any, data: bytes) -> bytes:
        if sender == "p4" and record.kind == record_header.PARTIAL:
            lied.add(labs.peers[0].machine.round)
            return zeros(data)
        return data

    labs.forge(change, Random(seed))
    entries = [labs.play() for _ in range(6)]
    labs.check()
    assert labs.named() == {"p4"}
    assert lied
    assert all(site_of(entry, "p4") <= {"p4"} for entry in entries if entry.round in lied)


def test_a_witness_that_doubts_a_true_sum_is_named_and_the_head_goes_on() -> None:
    labs = Labs()
    doubter: list[PeerId] = []

    def change(sender: PeerId, record: Any, data: bytes) -> bytes:
        doubter.extend([check.witness for check in labs.checks()][: not doubter])
        return (
            bytes(32) + data[32:]
            if record.kind == record_header.ACCOUNT and [sender] == doubter
            else data
        )

    labs.forge(change)
    assert labs.play().topology.kind == "butterfly"
    labs.check()
    assert labs.named() == set(doubter) == labs.apart()


def test_a_head_that_blames_a_member_convinces_nobody_and_is_head_no_more() -> None:
    """It says that it was given something else, which nobody can know: nobody is named, and its sum
    is not used.
    """
    labs = Labs()
    pair: list[PeerId] = []
    sums: dict[int, bytes] = {}

    def change(sender: PeerId, record: Any, data: bytes) -> bytes:
        for check in labs.checks()[: not pair]:
            pair.extend((check.partial.peer, check.witness))
        if [sender] != pair[:1] or record.kind not in (
            record_header.PARTIAL,
            record_header.ACCOUNT,
        ):
            return data
        if record.kind == record_header.PARTIAL:
            sums[record.chunk] = scaled(data)
            return sums[record.chunk]
        return (
            chunk_hash(sums[record.chunk]) + bytes(32) + data[64:] if record.chunk in sums else data
        )  # it is witness of another part

    labs.forge(change)
    assert labs.play().topology.kind == "butterfly"
    labs.check()
    assert labs.named() == set()
    assert labs.apart() == set(pair)


def test_who_was_in_a_dispute_takes_part_in_sums_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "APART_ROUNDS", 2)
    labs = Labs()
    labs.forge(
        lambda sender, record, data: (
            bytes(32) + data[32:] if record.kind == record_header.ACCOUNT else data
        )
    )
    first = labs.play()
    assert first.topology.kind == "butterfly"
    labs.network.tap = None
    second, third = labs.play(), labs.play()
    assert len({*second.topology.groups}) > 2
    assert {*third.topology.groups} == {0, 1}
    labs.check()


@pytest.mark.parametrize("seed", range(901, 903))
def test_through_faults_no_honest_member_is_named(seed: int) -> None:
    """A swarm in which anybody accuses an honest member has broken a rule (`SimSwarm.heard`), as
    one whose result is not that of its contributors.
    """
    assert run_seed(seed, Options(plan="checked")).problem == ""


def test_a_member_that_slanders_changes_no_plan_and_is_heard_once_a_round() -> None:
    """Only the owner of the part speaks of its sums, under the plan in force; and only who it was
    that put somebody apart lets it in again.
    """
    labs = Labs()
    labs.play()
    one, liar = labs.peers[0], PeerId("p5")

    def say(body: m.Disputed, sender: PeerId = liar) -> None:
        data = m.encode(m.Envelope(one.session.log, one.machine.round, 0, body))
        one.do(lambda session, now: session.on_message(now, sender, ROUND + data))

    plan_id = bytes(16)
    one.machine.disputes.pairs[PeerId("p3")] = PeerId("p4"), one.machine.round
    for wrong in ((), ("p1",), ("p2",), ("\x1b[2Jx",)):
        say(m.Disputed(plan_id, 0, PeerId("p3"), PeerId("p1"), tuple(map(PeerId, wrong))))
    say(m.Disputed(plan_id, 0, PeerId("p3"), PeerId("p1"), (PeerId("p1"),)), PeerId("p9"))
    assert [event for event in one.heard if isinstance(event, ev.SumDisputed)] == [
        ev.SumDisputed(liar, (PeerId("p1"),))
    ]
    assert set(one.machine.disputes.pairs) == {"p3"}
    assert labs.play().topology.kind == "checked"
    labs.check()
    say(m.Disputed(plan_id, 0, PeerId("p3"), PeerId("p1"), (PeerId("p1"),)), PeerId("p4"))
    assert labs.apart() == set()


class Zeroed(SimSwarm):
    """A swarm through faults, one member of which states zeros whenever it is head."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Options(plan="checked", lies=()))
        self.liar = self.names[-1]
        self.liars = frozenset((self.liar,))
        self.lies, tap = 0, self.network.tap
        assert tap is not None

        def bent(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
            kind = record_header.parse(payload[0], sender).kind if channel == "record" else 0
            if sender != self.liar or kind != record_header.PARTIAL:
                return tap(sender, receiver, channel, payload)
            self.lies += 1
            self.network.tap = tap
            self.network.send(sender, receiver, channel, (payload[0], bytes(len(payload[1]))))
            self.network.tap = bent
            return True

        self.network.tap = bent


def test_through_faults_a_head_that_lies_is_the_only_one_that_is_named_and_no_result_is_its(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every entry is computed again by the simulation. Without the comparison one of the same
    swarms decides a wrong one.
    """
    lied = list[int]()
    for seed in range(
        14, 60
    ):  # it is head in few of them, and in which ones changes with every change of the rounds
        swarm = Zeroed(seed)
        assert swarm.run().problem == "", seed
        lied += [seed] if swarm.lies else []
        if len(lied) == 2:
            break
    assert len(lied) == 2
    monkeypatch.setattr(Exchange, "_disputes", lambda *_: False)
    assert any("honest outcome" in Zeroed(seed).run().problem for seed in lied)
