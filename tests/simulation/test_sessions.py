"""A few sessions on a simulated network, step by step: who is let in, what settles, what ends a
run, who may vote.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from session_table import LAYOUT, OTHER, SETTINGS, Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.errors import ModelMismatchError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import Phase
from atoll.node.session import events as ev
from atoll.node.session.memory_storage import MemoryStorage
from atoll.node.session.replica import ModelReplica
from atoll.node.session.transfer import STALLED_S


def together(table: Table, peers: list[Peer], name: str) -> None:
    """One round in which these all contribute."""
    rounds = peers[0].session.completed
    cids = [peer.contribute(f"{name} {peer.name}") for peer in peers]
    table.until(lambda: all(peer.session.completed > rounds for peer in peers))
    entry = next(
        c.entry for c in reversed(peers[0].machine.journal.entries) if c.entry.contributors
    )
    assert [c.cid for c in entry.contributors] == cids


# ---- who is let in


def test_a_script_of_another_model_never_enters_the_configuration() -> None:
    table = Table(2)
    first, other = table.found(), table.peers[1].start()
    other.do(
        lambda session, now: session.attach(now, OTHER)
    )  # the run's model is not known here yet
    table.until(lambda: other.session.phase == "running")
    table.wait(5.0)
    assert first.session.config_peers() == ["p0"]
    with pytest.raises(ModelMismatchError, match="only in your model"):
        other.do(lambda session, now: session.attach(now, OTHER))
    other.do(lambda session, now: session.detach(now))
    table.until(lambda: other.inside)  # now it only seeds
    table.end()


def test_a_node_of_one_script_waits_for_it() -> None:
    table = Table(2)
    first, other = table.found(), table.peers[1].start()
    other.session.seeding = False
    table.until(lambda: other.session.phase == "running")
    table.wait(5.0)
    assert first.session.config_peers() == ["p0"]
    other.attach()
    table.until(lambda: other.inside)
    table.end()


@pytest.mark.parametrize("members", [1, 2, 3])
def test_members_that_were_started_again_without_a_script_let_another_in(members: int) -> None:
    """The first ballot after a restart is spent, and none of them has anything to offer in another
    one.
    """
    table = Table(members + 1)
    *old, fresh = table.peers
    first = table.found()
    for peer in old[1:]:
        peer.start().attach()
    table.until(lambda: all(peer.inside for peer in old))
    together(table, old, "one")
    for peer in old:
        peer.kill()
    for peer in old:
        peer.start()
    fresh.start().attach()
    table.until(lambda: fresh.inside and fresh.name in first.session.config_peers())
    together(table, [fresh], "two")
    table.end()


# ---- a run that was founded twice


def test_a_run_that_was_founded_twice_says_so_on_both_sides_and_each_goes_its_way() -> None:
    table = Table(3)
    first, other, third = table.all_in()
    together(table, [first, other, third], "one")
    for peer in table.peers:
        peer.kill()
    first.storage = MemoryStorage(
        table.place.settings.outer, 7
    )  # the organiser's disk is lost, and nobody else is there to say so
    table.found()
    together(table, [first], "mine")
    other.start().attach()
    table.until(lambda: bool(other.session.membership.foreign and first.session.membership.foreign))
    third.start().attach()
    table.until(
        lambda: (
            len(first.session.membership.foreign) == 2 and "p0" in third.session.membership.foreign
        )
    )
    for name in (
        "two",
        "three",
    ):  # each history goes on by itself: two of three are a quorum of the old one
        together(table, [first], name)
        together(table, [other, third], name)
    twice = [
        [event.peer for event in peer.heard if isinstance(event, ev.AnotherHistory)]
        for peer in table.peers
    ]
    assert [sorted(peers) for peers in twice] == [["p1", "p2"], ["p0"], ["p0"]]  # once each
    for peer in (other, third):
        assert not peer.session.membership.live(table.world.now, PeerId("p0"))
        assert PeerId("p0") not in peer.session.others.targets(table.world.now)
    first.kill()
    first.storage = MemoryStorage(
        table.place.settings.outer, 8
    )  # its owner gives up the second history
    first.start().attach()
    table.until(lambda: first.inside and "p0" in other.session.config_peers())
    assert not other.session.membership.foreign
    together(table, [first, other, third], "four")
    assert [other.session.others.there(table.world.now, peer.name) for peer in table.peers] == [
        True
    ] * 3
    table.end()


def test_a_copy_that_decides_alone_makes_a_second_history_that_both_sides_name() -> None:
    """Its configuration was itself alone, so nobody else is asked; the others are two of three, and
    go on, too.
    """
    table = Table(3)
    first, second, third = table.peers
    table.found()
    together(table, [first], "alone")
    copy = first.storage.copy()
    for peer in (second, third):
        peer.start().attach()
    table.until(lambda: second.inside and third.inside)
    together(table, table.peers, "all")
    for peer in table.peers:
        peer.kill()
    first.storage = copy
    first.start().attach()
    table.until(lambda: first.inside)
    together(table, [first], "again")
    parted = first.session.completed
    for peer in (second, third):
        peer.start().attach()
    table.until(lambda: len(first.session.histories.splits) == 2)
    table.until(lambda: all(peer.session.histories.splits for peer in (second, third)))
    for peer in (second, third):
        [split] = peer.session.histories.splits.values()
        mine = first.session.histories.splits[peer.name]
        assert (split.mine, split.theirs) == (mine.theirs, mine.mine)
        assert split.round == mine.round
        assert first.machine.journal.entries[split.round].entry.hash() == split.theirs
        before = first.machine.journal.entries[split.round - 1].entry
        assert peer.machine.journal.entries[split.round - 1].entry == before
    together(table, [second, third], "theirs")
    together(table, [first], "mine")
    assert first.session.completed == parted + 1
    for peer in table.peers:
        assert not [event for event in peer.heard if isinstance(event, ev.PeerMisbehaved)]
    first.kill()
    first.storage = MemoryStorage(table.place.settings.outer, 8)  # its owner gives that one up
    first.start().attach()
    table.until(lambda: first.inside and "p0" in second.session.config_peers())
    assert not second.session.membership.foreign
    assert not second.session.histories.splits
    together(table, table.peers, "one again")
    table.end()


def test_what_would_end_a_wait_is_offered_to_who_can_do_it() -> None:
    """A dead organiser recertifies nothing."""
    table = Table(3)
    first, second, third = table.all_in()
    second.kill()
    third.kill()
    table.wait(60.0)
    assert "the organiser runs atoll recertify" in first.session.waits.look(table.world.now).ends
    for peer in (second, third):
        peer.start().attach()
    table.until(lambda: second.inside and third.inside and first.inside)
    for peer in (first, third):
        peer.kill()
    table.wait(60.0)
    found = second.session.waits.look(table.world.now)
    assert found.state == "no quorum"
    assert found.ends.endswith("atoll export RUN DIR, then atoll new --from DIR --name NAME")
    table.end()


def test_an_organiser_that_lost_its_disk_gives_its_earlier_life_up_and_goes_on() -> None:
    """It is not counted on before. It has the state again from one that kept it, and nobody else
    can know that its earlier life never votes again.
    """
    table = Table(2)
    first, other = table.all_in()
    together(table, [first, other], "one")
    assert [peer.session.others.there(table.world.now, other.name) for peer in table.peers] == [
        True,
        True,
    ]
    first.kill()
    first.storage = MemoryStorage(table.place.settings.outer, 7)
    first.start()
    table.until(
        lambda: (
            first.session.phase == "fetching"
            and other.session.others.there(table.world.now, first.name) is False
        )
    )
    assert other.session.membership.live(table.world.now, first.name)
    table.until(lambda: first.session.phase == "running" and first.inside)
    together(table, [first, other], "two")
    table.end()


def test_only_a_genesis_that_the_organiser_signed_proves_another_history() -> None:
    table = Table(2)
    first, other = table.all_in()
    genesis = first.machine.journal.entries[0]
    forged = msgspec.structs.replace(
        genesis, entry=msgspec.structs.replace(genesis.entry, base=b"another model".ljust(32))
    )
    catch = m.encode(m.Envelope(first.session.log, 0, 0, m.Catch((forged,), 1, 0)))
    first.do(lambda session, now: session.on_message(now, other.name, b"R" + catch))
    assert [event.reason for event in first.heard if isinstance(event, ev.PeerMisbehaved)] == [
        "genesis entry is not signed by the run's organiser"
    ]
    assert not first.session.membership.foreign
    together(table, [first, other], "one")
    table.end()


# ---- what settles


def settled(peer: Peer) -> dict[bytes, bool]:
    """Contributions of earlier lives that were told of: whether counted. Each is told once."""
    told = [event for event in peer.heard if isinstance(event, ev.EarlierSettled)]
    assert len({event.cid for event in told}) == len(told)
    return {event.cid: event.counted for event in told}


@pytest.mark.parametrize(
    "after_s", [0.0, 0.0015, 0.003, 0.0045, 0.006, 0.0075, 0.009, 0.0105, 0.012]
)
@pytest.mark.parametrize("count", [1, 3])
def test_all_nodes_die_in_mid_round_and_every_script_hears_what_became_of_its_work(
    count: int, after_s: float
) -> None:
    """From the first Ready to the last Accepted; a lone member decides by itself."""
    table = Table(count)
    offered = {peer: peer.contribute(f"of {peer.name}") for peer in table.all_in()}
    table.wait(after_s)
    for peer in table.peers:
        peer.kill()
    for peer, cid in offered.items():
        peer.start().attach().do(lambda session, now, cid=cid: session.prior.ask(now, cid))
    table.until(lambda: all(settled(peer) for peer in table.peers))
    log = table.peers[0].machine.journal.entries
    counted = [c.cid for certified in log for c in certified.entry.contributors]
    assert len(set(counted)) == len(counted)
    assert [settled(peer) for peer in table.peers] == [
        {cid: cid in counted} for cid in offered.values()
    ]
    told = [len(peer.rounds()) for peer in table.peers]
    again = [peer.contribute(f"again, {peer.name}") for peer in table.peers]
    table.until(
        lambda: all(
            len(peer.rounds()) > before for peer, before in zip(table.peers, told, strict=True)
        )
    )
    assert [c.cid for c in table.peers[0].machine.journal.entries[-1].entry.contributors] == again
    table.end()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.04, 0.06, 0.08])
def test_a_plan_is_revised_as_soon_as_it_is_known_that_a_process_is_no_more(after_s: float) -> None:
    """Not at the next look, which is due up to 0.1 s later."""
    table = Table(4)
    *others, lost = table.all_in()
    table.wait(after_s)
    for peer in table.peers:
        peer.contribute(f"of {peer.name}")
    convener = next(peer for peer in table.peers if peer.machine.convener_of(0) == peer.machine.me)
    assert convener is not lost
    table.until(lambda: convener.machine.convening.phase is Phase.REDUCE)
    table.network.partition({lost.name: 1})  # what it owns and gives does not arrive
    plan = convener.machine.convening.plan
    assert plan is not None
    assert len(plan.contributors) == 4
    table.wait(0.02)
    assert not any(peer.rounds()[-1].contributors for peer in others)
    lost.kill()
    for peer in others:
        peer.do(lambda session, now: session.on_link(now, lost.name, False))
        peer.do(lambda session, now: session.on_gone(now, lost.name))
    table.wait(0.02)
    assert all(
        [member.peer for member in peer.rounds()[-1].contributors]
        == [other.name for other in others]
        for peer in others
    )
    table.end()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_results_of_an_owner_that_died_are_fetched_from_those_who_live(lost: int) -> None:
    """It has voted, so it is named among those who hold the result."""
    table = Table(4)
    *others, late = table.all_in()
    victim = others.pop(lost)
    for peer in table.peers:
        peer.contribute(f"of {peer.name}")
        table.network.cut(peer.name, late.name)
    table.until(lambda: all(peer.rounds()[-1].contributors for peer in others))
    assert not late.rounds()[-1].contributors
    victim.kill()
    table.network.mend()
    for peer in (*others, late):
        peer.do(lambda session, now: session.on_link(now, victim.name, False))
        peer.do(lambda session, now: session.on_gone(now, victim.name))
    since = table.world.now
    table.until(lambda: bool(late.rounds()[-1].contributors))
    assert table.world.now - since < 0.05
    table.end()


def test_who_joins_is_not_held_up_by_a_source_that_died() -> None:
    """It watches nobody yet, and a dead source does not say that it has nothing; the others' offers
    were lost.
    """
    table = Table(4)
    first, second, third, late = table.peers
    table.found()
    for peer in (second, third):
        peer.start().attach()
    table.until(
        lambda: all(
            peer.inside and len(peer.session.config_peers()) == 3 for peer in (first, second, third)
        )
    )
    together(table, [first, second, third], "one")
    table.network.tap = lambda sender, receiver, channel, payload: (
        receiver == late.name
        and (channel == "record" or (channel == "control" and sender in (first.name, second.name)))
    )
    late.start().attach()
    table.wait(1.0)
    together(table, [first, second, third], "two")
    table.until(
        lambda: (
            [item.sources for item in late.session.transfer.fetching.values() if item.layout]
            == [[third.name]]
        )
    )
    third.kill()
    for peer in (first, second, late):
        peer.do(lambda session, now: session.on_link(now, third.name, False))
        peer.do(lambda session, now: session.on_gone(now, third.name))
    together(table, [first, second], "three")
    table.network.tap = None
    table.wait(STALLED_S)
    table.until(lambda: late.inside)
    table.end()


def test_an_owner_that_died_costs_a_survivor_its_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(4)
    for number, peer in enumerate(table.all_in()):
        values = (
            torch.arange(float(LAYOUT.numel)) + number
        )  # no chunk is like another: that would not be fetched either
        peer.do(
            lambda session, now, number=number, values=values: session.contribute(
                now, bytes([number]) * 16, 1, values
            )
        )
    convener = next(peer for peer in table.peers if peer.machine.convener_of(0) == peer.machine.me)
    table.until(lambda: convener.machine.convening.plan is not None)
    plan = convener.machine.convening.plan
    assert plan is not None
    free = [peer for peer in table.peers if peer is not convener]
    late = next(peer for peer in free if peer.name not in {part.owner for part in plan.parts})
    part, victim = next(
        (part, peer) for part in plan.parts for peer in free if peer.name == part.owner
    )
    table.network.cut(victim.name, late.name)
    others = [peer for peer in table.peers if peer not in (victim, late)]
    table.until(lambda: all(peer.rounds()[-1].contributors for peer in others))
    asked = list[tuple[int, int]]()
    for peer in others:
        assert peer.node is not None
        send = peer.node.plane.send_blob
        monkeypatch.setattr(
            peer.node.plane,
            "send_blob",
            lambda to, name, spans, send=send: (asked.extend(spans), send(to, name, spans)),
        )
    assert not late.rounds()[-1].contributors
    victim.kill()
    for peer in (*others, late):
        peer.do(lambda session, now: session.on_link(now, victim.name, False))
        peer.do(lambda session, now: session.on_gone(now, victim.name))
    table.until(lambda: bool(late.rounds()[-1].contributors))
    assert asked == [(part.first, part.stop)]
    table.end()


def test_rare_checkpoints_do_not_keep_results_without_end() -> None:
    """A node has room for 64 results, and does not vote on one that it cannot keep."""
    table = Table(1)
    table.place.checkpoint_every = 1000
    first = table.found()
    for number in range(80):
        together(table, [first], f"round {number}")
        assert first.machine.round - first.storage.results.first() <= 17
    table.end()


def test_one_node_comes_back_while_the_others_train_on() -> None:
    table = Table(3)
    first, second, third = table.all_in()
    table.network.partition({first.name: 0, second.name: 1, third.name: 2})
    lost = third.contribute("lost")
    third.kill()
    table.network.partition(None)
    third.start().attach().do(lambda session, now: session.prior.ask(now, lost))
    table.until(lambda: bool(settled(third)))  # although nobody has finished anything
    assert settled(third) == {lost: False}
    assert third.rounds()[-1].contributors == ()
    offered = [peer.contribute(f"of {peer.name}") for peer in table.peers]
    table.until(lambda: all(peer.rounds()[-1].contributors for peer in table.peers))
    assert [c.cid for c in first.machine.journal.entries[-1].entry.contributors] == offered
    table.end()


def test_a_node_that_lost_its_disk_says_nothing_of_its_work_before_it_is_let_in_again() -> None:
    """It begins from a state that another was given before; what it replays from there on does not
    tell.
    """
    table = Table(4)
    table.found()
    for peer in table.peers[1:]:
        peer.start().attach()
        table.until(lambda peer=peer: peer.inside)
    together(table, table.peers, "1")
    together(table, table.peers, "2")
    first, odd = table.peers[0], table.peers[2]
    table.network.tap = lambda sender, receiver, channel, payload: (
        channel == "control"
        and payload[:1] == b"R"
        and isinstance(m.decode(payload[1:], sender).body, m.Accepted)
    )
    offered = {peer: peer.contribute(f"3 {peer.name}") for peer in table.peers}
    table.until(lambda: all(peer.machine.journal.accepted is not None for peer in table.peers))
    odd.kill()
    odd.storage.reset()
    odd.start().attach()
    table.until(lambda: odd.session.phase == "running")
    assert odd.machine.round < first.machine.round
    odd.do(lambda session, now: session.prior.ask(now, offered[odd]))
    table.until(lambda: odd.machine.round == first.machine.round)
    assert settled(odd) == {}
    table.network.tap = None
    table.until(lambda: settled(odd) != {})
    assert settled(odd) == {offered[odd]: True}
    table.end()


def test_a_home_from_a_backup_says_nothing_by_entries_that_it_was_only_handed() -> None:
    """Its script gave to the round after the one that the backup lacks: the entry of that one,
    without a vote of this member, shows neither that the journal is old nor what became of the
    work."""
    table = Table(3)
    first, _, odd = table.all_in()
    together(table, table.peers, "1")
    backup = odd.storage.copy()
    silent = [odd.name]
    table.network.tap = lambda sender, receiver, channel, payload: (
        channel == "control"
        and sender in silent
        and payload[:1] == b"R"
        and isinstance(m.decode(payload[1:], sender).body, m.Accepted)
    )
    together(table, table.peers, "2")
    silent[:] = [peer.name for peer in table.peers]
    offered = {peer: peer.contribute(f"3 {peer.name}") for peer in table.peers}
    table.until(lambda: all(peer.machine.journal.accepted is not None for peer in table.peers))
    odd.kill()
    odd.storage = backup
    odd.start().attach().do(lambda session, now: session.prior.ask(now, offered[odd]))
    table.until(lambda: odd.machine.round == first.machine.round)
    assert odd.machine.me.incarnation == 0
    table.network.tap = None
    table.until(lambda: settled(odd) != {})
    assert settled(odd) == {offered[odd]: True}
    assert any(c.entry.counts(odd.name, offered[odd]) for c in first.machine.journal.entries)
    table.end()


# ---- what ends a run


def test_a_run_of_three_rounds_has_three_rounds_with_contributions_however_many_join() -> None:
    table = Table(4, msgspec.structs.replace(SETTINGS, rounds=3))
    first, second = table.found(), table.peers[1].start().attach()
    table.until(lambda: second.inside)
    together(table, [first, second], "1")
    table.peers[2].start().attach()
    table.until(lambda: table.peers[2].inside)
    together(table, table.peers[:3], "2")
    second.kill()
    second.start().attach()  # from its journal
    table.peers[3].start().attach()  # from a fetched state
    table.until(lambda: second.session.completed == 2 and table.peers[3].inside)
    assert [peer.session.completed for peer in table.peers] == [2, 2, 2, 2]
    together(table, table.peers, "3")
    told = [
        [(event.round, bool(event.contributors)) for event in peer.rounds()] for peer in table.peers
    ]
    assert told[0][-1] == (3, True)
    assert sorted(round_ for round_, contributed in told[0] if contributed) == [1, 2, 3]
    assert len(told[0]) > 3  # entries that let somebody in
    cid = first.contribute("one too many")
    assert [event for event in first.heard if isinstance(event, ev.ContributionRefused)] == [
        ev.ContributionRefused(cid, "the run is complete after 3 rounds")
    ]
    table.end()


def test_a_contribution_stands_when_somebody_joins_before_it_is_offered() -> None:
    table = Table(2)
    first, second = table.found(), table.peers[1].start().attach()
    base = first.session.completed
    table.until(lambda: second.inside)  # an entry of the log, and the same anchor
    first.do(
        lambda session, now: session.contribute(
            now, b"first...........", 1, torch.ones(LAYOUT.numel), base
        )
    )
    table.until(lambda: bool(first.rounds()[-1].contributors))
    assert (first.rounds()[-1].round, first.rounds()[-1].counted) == (1, True)
    first.do(
        lambda session, now: session.contribute(
            now, b"second..........", 1, torch.ones(LAYOUT.numel), base
        )
    )
    assert first.heard[-1] == ev.ContributionRefused(
        b"second..........", "it was made on the anchor of round 0, the run is at 1"
    )
    table.end()


# ---- who may vote


def diverge(peer: Peer) -> None:
    """One bit of its anchor flips, and its state is hashed again."""
    replica = peer.session.replica
    assert isinstance(replica, ModelReplica)
    replica.anchor[3] += 1.0
    peer.do(lambda session, now: session.hash_state(peer.machine.round))
    peer.table.wait(0.1)


def in_order(table: Table) -> list[Peer]:
    """The peers, by the ballots of the open entry that they own."""
    machine = table.peers[0].machine
    return [
        next(peer for peer in table.peers if peer.name == machine.convener_of(ballot).peer)
        for ballot in range(len(table.peers))
    ]


def accepted_by_two(table: Table) -> tuple[Peer, Peer, Peer]:
    """The convener and one other voted for its entry, and the convener died: only that other can
    tell. (dead, next convener, witness)
    """
    dead, following, witness = in_order(table)

    def lost(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        if channel != "control" or payload[:1] != b"R":
            return False
        body = m.decode(payload[1:], sender).body
        return isinstance(body, m.Accepted) or (
            isinstance(body, m.Accept) and receiver == following.name
        )

    table.network.tap = lost
    for peer in table.peers:
        peer.contribute(f"of {peer.name}")
    table.until(lambda: witness.machine.journal.accepted is not None)
    dead.kill()
    table.network.tap = None
    assert following.machine.journal.accepted is None
    return dead, following, witness


def voters(peer: Peer) -> set[PeerId]:
    """Who signed the newest entry in this peer's log."""
    return {vote.member.peer for vote in peer.machine.journal.entries[-1].votes}


@pytest.mark.parametrize("ballot", range(3))
def test_a_member_whose_state_diverged_does_not_vote_and_fetches_the_state(ballot: int) -> None:
    """Also where it owns the first ballot: then the next convener takes over."""
    table = Table(3)
    table.all_in()
    odd = in_order(table)[ballot]
    good = next(peer for peer in table.peers if peer is not odd)
    diverge(odd)
    for peer in table.peers:
        peer.contribute(f"of {peer.name}")
    table.until(lambda: all(peer.session.completed == 1 for peer in table.peers))
    assert voters(good) == {peer.name for peer in table.peers if peer is not odd}
    assert [event.entry for event in odd.heard if isinstance(event, ev.StateDiverged)] == [
        good.machine.round - 1
    ]
    table.until(lambda: odd.machine.root is not None and odd.machine.root == good.machine.root)
    table.end()


def test_a_convener_whose_state_diverged_does_not_propose_what_another_accepted() -> None:
    table = Table(3)
    table.all_in()
    diverge(in_order(table)[1])
    dead, odd, witness = accepted_by_two(table)
    table.until(lambda: odd.machine.journal.promised > 2)  # its own ballot has come and gone
    assert odd.machine.journal.accepted is None
    dead.start().attach()
    table.until(lambda: all(peer.session.completed == 1 for peer in table.peers))
    assert voters(witness) == {dead.name, witness.name}
    table.end()


def test_a_convener_does_not_propose_what_another_accepted_before_its_own_state_is_hashed() -> None:
    table = Table(3)
    table.all_in()
    _, following, witness = accepted_by_two(table)
    root, following.machine.root = following.machine.root, None
    assert root is not None
    table.until(lambda: following.machine.convening.phase is Phase.ADOPT)
    table.wait(0.2)
    assert following.machine.journal.accepted is None
    following.do(lambda session, now: following.machine.on_root(now, following.machine.round, root))
    table.until(lambda: witness.session.completed == 1)
    assert voters(witness) == {following.name, witness.name}
    table.end()


def test_a_convener_does_not_propose_what_was_reduced_before_its_own_state_is_hashed() -> None:
    table = Table(3)
    table.all_in()
    first = in_order(table)[0]
    root, first.machine.root = first.machine.root, None
    assert root is not None
    for peer in table.peers:
        peer.contribute(f"of {peer.name}")
    table.until(lambda: first.machine.open.reduced is not None)
    table.wait(0.2)
    assert [peer.machine.journal.accepted for peer in table.peers] == [None, None, None]
    first.do(lambda session, now: first.machine.on_root(now, first.machine.round, root))
    table.until(lambda: all(peer.session.completed == 1 for peer in table.peers))
    assert {vote.ballot for vote in first.machine.journal.entries[-1].votes} == {0}
    table.end()


def test_a_plan_is_said_again_to_whom_it_did_not_reach() -> None:
    """Bulk bytes stand still meanwhile: ten times a second everybody looks what is lacking."""
    table = Table(3)
    table.all_in()
    _, heard, unheard = in_order(table)
    said = Counter[PeerId]()

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        if (
            channel == "control"
            and payload[:1] == b"R"
            and isinstance(m.decode(payload[1:], sender).body, m.PlanMessage)
        ):
            said[receiver] += 1
            return receiver == unheard.name and said[receiver] == 1
        return channel == "record"

    table.network.tap = tap
    for peer in table.peers:
        peer.contribute(f"of {peer.name}")
    table.until(lambda: heard.machine.open.plan is not None)
    table.wait(0.4)
    assert unheard.machine.open.plan == heard.machine.open.plan
    assert said[heard.name] <= 2  # once more when a Ready of it was on its way
    assert 2 <= said[unheard.name] <= 3
    table.wait(0.4)
    assert 2 <= said[heard.name] <= 3  # twice a second everybody hears it
    table.network.tap = None
    table.until(lambda: all(peer.session.completed == 1 for peer in table.peers))
    table.end()


def test_a_member_that_is_evicted_while_nobody_trains_learns_it_from_its_own_questions() -> None:
    table = Table(4)
    *others, away = table.all_in()
    table.network.partition({away.name: 1})
    table.wait(3.0)  # longer than `detect_s`
    for peer in others:
        peer.contribute(f"last {peer.name}")
    table.until(lambda: all(away.name not in peer.session.config_peers() for peer in others))
    table.wait(5.0)
    assert away.inside
    table.network.partition(None)
    table.wait(2 * away.session.timing.quiet_s)
    assert away.inside
    assert away.machine.round == others[0].machine.round
    assert all(away.name in peer.session.config_peers() for peer in others)
    table.end()


def test_who_leaves_is_told_as_left_by_all_and_who_dies_as_lost() -> None:
    """Also where the process that leaves ends before an entry lets it go."""
    table = Table(5)
    first, second, leaver, hasty, dying = table.all_in()
    leaver.do(lambda session, now: session.leave(now))
    table.until(lambda: not leaver.inside)
    assert leaver.rounds()[-1].left == (leaver.name,)

    def heard() -> bool:
        return all(hasty.name in {m.peer for m in p.machine.leavers} for p in (first, second))

    table.network.partition({dying.name: 1})
    hasty.do(lambda session, now: session.leave(now))
    table.until(heard)
    hasty.kill()
    dying.kill()
    table.wait(3.0)
    for peer in (first, second):
        peer.contribute(f"last {peer.name}")
    table.until(lambda: all(len(peer.rounds()[-1].config) == 2 for peer in (first, second)))
    for peer in (first, second):
        events = peer.rounds()
        assert {who for event in events for who in event.left} == {leaver.name, hasty.name}
        assert {who for event in events for who in event.lost} == {dying.name}
        assert not peer.machine.leavers
    table.end()


def test_a_founder_that_lost_its_disk_is_not_counted_on_as_the_member_it_was() -> None:
    """Its vote and the convener's would be a quorum, and everybody else evicted: for ever, as it
    cannot vote.
    """
    table = Table(4)
    table.all_in()
    founder = table.peers[0]
    while in_order(table)[0] is founder:
        together(table, table.peers, f"round {founder.machine.round}")
    convener, *others = [peer for peer in in_order(table) if peer is not founder]
    founder.kill()
    founder.storage = MemoryStorage(table.place.settings.outer, 7)
    table.network.partition({convener.name: 1})
    for peer in (convener, *others):
        peer.contribute(f"of {peer.name}")
    table.until(
        lambda: (
            convener.machine.open.reduced is not None
            and len(convener.machine.open.reduced[0].contributors) == 1
        )
    )
    table.network.partition({convener.name: 1, founder.name: 1})
    founder.start()
    table.until(lambda: convener.session.membership.live(table.world.now, founder.name))
    table.wait(3.0)
    founder.attach()
    table.network.partition(None)
    table.until(
        lambda: all(peer.inside and len(peer.session.config_peers()) == 4 for peer in table.peers)
    )
    table.until(lambda: len({peer.machine.round for peer in table.peers}) == 1)
    assert founder.machine.me.incarnation == 7
    table.end()
