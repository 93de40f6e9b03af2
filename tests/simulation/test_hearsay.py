"""Membership of large runs: beats to partners, their word for the others, and what a liar can do
by that.
"""

from __future__ import annotations

import pytest

from atoll.collectives.identifiers import PeerId
from atoll.node.run import membership_records as wire
from atoll.node.run.membership import MembershipTiming
from atoll.node.run.partners import mesh_of

from .test_membership import Swarm, suspicions

SMALL = MembershipTiming(sparse_above=8)


def beats(swarm: Swarm, seconds: float) -> float:
    """Messages a member and second, gossip included."""
    before = sum(swarm.network.sent.values())
    swarm.world.run(until=swarm.world.now + seconds)
    return (sum(swarm.network.sent.values()) - before) / seconds / len(swarm.members)


@pytest.mark.slow
def test_members_of_a_large_run_beat_to_few_and_nobody_is_suspected() -> None:
    rates = dict[int, float]()
    for count in (36, 144):
        swarm = Swarm(count, watch=True)
        swarm.world.run(until=3.0)
        rates[count] = beats(swarm, 10.0)
        now = swarm.world.now
        for peer, m in swarm.members.items():
            assert all(m.live(now, other) for other in swarm.members), peer
            assert not any(m.suspected(now, other) for other in swarm.members)
    # 10 and 22 partners twice a second, questions and their answers, probes and gossip
    assert rates[36] < 2 * 10 + 8
    assert rates[144] < 2.2 * rates[36]


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("count", [9, 40, 90])
def test_a_dead_peer_is_suspected_by_all_within_a_beat_more_than_detect_s(
    count: int, how: str
) -> None:
    swarm = Swarm(count, watch=True, timing=SMALL)
    target = PeerId("p005")
    swarm.world.run(until=6.0)
    assert not any(suspicions(swarm, target))
    swarm.stopped.add(target)
    if how == "killed":
        swarm.network.detach(target)
    swarm.world.run(until=6.0 + 2.5 - 2 * 0.5 - 0.1)  # it was heard last a beat before
    assert not any(suspicions(swarm, target))
    swarm.world.run(until=6.0 + 2.5 + 0.5 + 0.1)  # detect_s, a beat, the ways
    assert all(suspicions(swarm, target))
    others = [peer for peer in swarm.members if peer != target]
    assert not any(swarm.members[others[0]].suspected(swarm.world.now, peer) for peer in others)
    swarm.stopped.clear()
    if how == "stopped":
        swarm.world.run(until=13.0)
        assert not any(suspicions(swarm, target))


def test_half_of_all_may_die_at_once_and_exactly_they_are_suspected() -> None:
    swarm = Swarm(48, watch=True, timing=SMALL)
    swarm.world.run(until=6.0)
    dead = {peer for number, peer in enumerate(swarm.members) if number % 2}
    swarm.stopped |= dead
    for _ in range(60):
        swarm.world.run(until=swarm.world.now + 0.5)
        living = [m for peer, m in swarm.members.items() if peer not in dead]
        now = swarm.world.now
        assert not any(m.suspected(now, peer.me) for m in living for peer in living)
        if now > 10.0:
            assert all(m.suspected(now, peer) for m in living for peer in dead)


def test_who_is_cut_off_with_few_suspects_all_others() -> None:
    swarm = Swarm(48, watch=True, timing=SMALL)
    swarm.world.run(until=6.0)
    few = {peer: 1 for number, peer in enumerate(swarm.members) if number % 16 == 0}
    swarm.network.partition(few)
    swarm.world.run(until=10.0)
    now = swarm.world.now
    for peer, m in swarm.members.items():
        for other in swarm.members:
            assert m.suspected(now, other) == ((peer in few) != (other in few))
    swarm.network.partition(None)
    swarm.world.run(until=20.0)
    assert not any(
        m.suspected(swarm.world.now, other) for m in swarm.members.values() for other in few
    )


def liars(swarm: Swarm, who: set[PeerId], say: dict[PeerId, bool]) -> None:
    """These say in each beat that they have heard certain others, or that they have not."""
    mesh = mesh_of(tuple(sorted(swarm.members)))

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: bytes) -> bool:
        message = wire.decode(payload, sender) if sender in who else None
        if not isinstance(message, wire.HeardBeat) or message.mesh != mesh.name:
            return False
        number = int.from_bytes(message.bits, "little")
        for peer, heard in say.items():
            if (bit := mesh.bits(sender).get(peer)) is not None:
                number = number | 1 << bit if heard else number & ~(1 << bit)
        lie = wire.encode(wire.HeardBeat(mesh.name, number.to_bytes(len(message.bits), "little")))
        if lie == payload:
            return False
        swarm.world.after(0.01, lambda: swarm._deliver(receiver, sender, lie))
        return True

    swarm.network.tap = tap


def test_a_liar_keeps_no_dead_member_alive_and_two_but_for_a_bounded_time() -> None:
    swarm = Swarm(36, watch=True, timing=SMALL)
    peers = sorted(swarm.members)
    mesh = mesh_of(tuple(peers))
    target = peers[14]  # row 2, column 2
    fooled = peers[0]  # by those who stand between
    swarm.world.run(until=30.0)
    two = set(mesh.between(fooled, target))
    liars(swarm, two, {target: True})
    swarm.stopped.add(target)
    swarm.world.run(until=30.0 + 2 * 2.5 + 1.0)  # one liar is believed no more
    now = swarm.world.now
    believing = {
        peer for peer, m in swarm.members.items() if peer != target and m.live(now, target)
    }
    assert believing == {fooled}
    # 8 √36 beats after its last word to this member, at the latest
    swarm.world.run(until=30.0 + 24.0 + 3.0)
    assert all(suspicions(swarm, target))


def test_a_liar_alone_is_believed_for_twice_detect_s() -> None:
    swarm = Swarm(36, watch=True, timing=SMALL)
    target = sorted(swarm.members)[14]
    swarm.world.run(until=30.0)
    liars(swarm, {sorted(swarm.members)[2]}, {target: True})  # a partner of it
    swarm.stopped.add(target)
    swarm.world.run(until=30.0 + 2 * 2.5 + 1.0)
    assert all(suspicions(swarm, target))


def test_a_liar_that_withholds_its_word_kills_nobody_and_costs_a_few_questions() -> None:
    swarm = Swarm(36, watch=True, timing=SMALL)
    peers = sorted(swarm.members)
    swarm.world.run(until=3.0)
    honest = beats(swarm, 10.0)
    liars(swarm, set(peers[:3]), dict.fromkeys(peers[3:], False))
    lied = beats(swarm, 20.0)
    assert not any(
        m.suspected(swarm.world.now, other) for m in swarm.members.values() for other in peers
    )
    assert lied < 1.5 * honest


def test_newcomers_and_leavers_move_the_grid_and_nobody_is_suspected_for_that() -> None:
    swarm = Swarm(50, watch=True, timing=SMALL)
    peers = sorted(swarm.members)
    rng = swarm.world.stream("churn")
    gone = {peers[7], peers[30]}
    swarm.stopped |= gone
    present = [peer for peer in peers if peer not in gone]
    swarm.world.run(until=4.0)
    while swarm.world.now < 30.0:  # an entry a second
        config = [*rng.sample(present, len(present) - 3), *gone]
        for peer in present:
            m = swarm.members[peer]
            swarm.world.after(
                rng.random(), lambda m=m, config=config: m.watch(swarm.world.now, config)
            )
        swarm.world.run(until=swarm.world.now + 1.0)
        now = swarm.world.now
        for peer in present:
            assert not any(swarm.members[peer].suspected(now, other) for other in present)
            if swarm.world.now > 8.0 and peer in config:
                assert all(not swarm.members[peer].live(now, each) for each in gone)


@pytest.mark.parametrize(("before", "after"), [(33, 32), (40, 21)])
def test_nobody_is_suspected_because_a_run_is_no_longer_large(before: int, after: int) -> None:
    """Those that leave it are dead, and two of those that stay."""
    swarm = Swarm(before, watch=True)
    peers = sorted(swarm.members)
    kept = swarm.world.stream("kept").sample(peers, after)
    dead = set(kept[:2])
    swarm.world.run(until=6.0)
    swarm.stopped |= set(peers) - set(kept)
    swarm.world.run(until=10.0)
    swarm.stopped |= dead  # nobody knows of these when the others are evicted
    living = [swarm.members[peer] for peer in kept if peer not in dead]
    phase = swarm.world.stream("narrows")
    for m in living:
        swarm.world.after(phase.random(), lambda m=m: m.watch(swarm.world.now, kept))
    for _ in range(80):
        swarm.world.run(until=swarm.world.now + 0.05)
        now = swarm.world.now
        assert not any(m.suspected(now, other.me) for m in living for other in living)
    assert all(m.suspected(now, peer) for m in living for peer in dead)


def test_outside_a_large_run_one_beats_to_a_row_and_a_column_and_is_answered() -> None:
    swarm = Swarm(50, watch=False, timing=SMALL)
    peers = sorted(swarm.members)
    for peer in peers:
        swarm.members[peer].watch(0.0, peers[1:])
    swarm.world.run(until=10.0)
    outside, now = swarm.members[peers[0]], swarm.world.now
    beside = set(mesh_of(tuple(peers[1:])).beside(peers[0]))
    live = {peer for peer in peers[1:] if outside.live(now, peer)}
    assert beside <= live  # and those that gossip just now
    assert len(live) < len(beside) + 10
    assert not any(outside.suspected(now, peer) for peer in peers)
