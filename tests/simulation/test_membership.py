"""Membership: the map of signed records converges, forgeries do not enter, and the silent are told
from the dead.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import BadSignatureError, LocalProtocolError, RemoteProtocolError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.simulation import Network, World
from atoll.node.run import membership_records as wire
from atoll.node.run.membership import HANDED, HANDED_PER_S, Membership, MembershipTiming
from atoll.node.run.membership_records import Record, SignedRecord

RUN = RunId("run")
HERE, THERE = "/ip4/10.0.0.1/tcp/4001", "/dns4/there.example.org/tcp/4001"


def signature(peer: str, data: bytes) -> bytes:
    """Stands in for Ed25519: only whoever may call it with a peer's name can sign for it."""
    return blake3(peer.encode() + b"/" + data).digest()


def verify(peer: PeerId, data: bytes, sig: bytes) -> bool:
    return sig == signature(peer, data)


def member(name: str, seed: int = 0, **kwargs: object) -> Membership:
    peer = PeerId(name)
    return Membership(
        peer,
        RUN,
        sign=lambda data: signature(peer, data),
        verify=verify,
        rng=random.Random(f"{name}/{seed}"),
        **kwargs,
    )  # type: ignore[arg-type]


def signed(
    peer: str,
    sequence: int,
    *,
    run: str = "run",
    expires_s: float = 35.0,
    by: str | None = None,
    round_: int = 0,
    at: tuple[str, ...] = (),
) -> SignedRecord:
    record = Record(run, PeerId(peer), sequence, int(expires_s * 1000), at, round_)
    return wire.sign_record(record, lambda data: signature(by or peer, data))


def table(m: Membership) -> set[bytes]:
    return {blake3(str(record).encode()).digest() for record in m.records()}


class Swarm:
    """Memberships on a simulated network."""

    def __init__(
        self,
        count: int,
        *,
        seed: int = 0,
        watch: bool = False,
        hub: bool = True,
        timing: MembershipTiming | None = None,
    ) -> None:
        self.world = World(seed)
        self.network = Network(self.world, latency_s=0.01, jitter_s=0.01)
        self.members = {
            PeerId(f"p{i:03}"): member(f"p{i:03}", seed, timing=timing or MembershipTiming())
            for i in range(count)
        }
        self.stopped: set[PeerId] = set()
        phase = self.world.stream("phase")
        first = next(iter(self.members))
        for peer, m in self.members.items():
            self.network.attach(
                peer, lambda sender, _c, data, p=peer: self._deliver(p, sender, data)
            )  # type: ignore[arg-type]
            m.announce(0.0, addresses=(f"/ip4/127.0.0.1/tcp/{4000 + int(peer[1:])}",))
            if watch:
                m.watch(0.0, self.members)
            elif hub and peer != first:
                m.learn(0.0, [signed(first, 1)], first)
            self.world.at(phase.random(), lambda p=peer: self._tick(p))

    def _deliver(self, peer: PeerId, sender: PeerId, data: bytes) -> None:
        if peer not in self.stopped:
            self.members[peer].on_message(self.world.now, sender, data)
            self._flush(peer)

    def _tick(self, peer: PeerId) -> None:
        m = self.members[peer]
        if peer not in self.stopped:
            m.tick(self.world.now)
            self._flush(peer)
            self.world.at(m.next_due(), lambda: self._tick(peer))
        else:
            self.world.after(0.05, lambda: self._tick(peer))

    def _flush(self, peer: PeerId) -> None:
        for receiver, data in self.members[peer].drain():
            self.network.send(peer, receiver, "membership", data)

    def agreed(self, count: int) -> bool:
        tables = [table(m) for peer, m in self.members.items() if peer not in self.stopped]
        return all(len(t) == count and t == tables[0] for t in tables)


# ---- the map


def records_of(draw: Sequence[tuple[int, int, int]]) -> list[SignedRecord]:
    return [signed(f"p{peer}", sequence, round_=round_) for peer, sequence, round_ in draw]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 2)), max_size=14),
    st.randoms(use_true_random=False),
)
def test_merging_commutes_and_is_idempotent(
    draw: list[tuple[int, int, int]], shuffle: random.Random
) -> None:
    records = records_of(draw)
    other = records + records[: len(records) // 2]
    shuffle.shuffle(other)
    one, two = member("x"), member("y")
    one.learn(0.0, records, PeerId("z"))
    for record in other:
        two.learn(0.0, [record], PeerId("z"))
    assert table(one) == table(two)
    assert [r.sequence for r in one.records()] == [
        max(s for p, s, _ in draw if f"p{p}" == r.peer) for r in one.records()
    ]
    before = table(one)
    one.learn(0.0, records, PeerId("z"))
    assert table(one) == before


def test_expired_forged_foreign_and_malformed_records_do_not_enter() -> None:
    m = member("x")
    bad = [
        signed("a", 1, expires_s=600.0),
        signed("b", 1, expires_s=1035.0, by="mallory"),
        signed("c", 1, expires_s=1035.0, run="other"),
        signed("d", 1, expires_s=1e6),
    ]
    m.learn(
        1000.0, [*bad, SignedRecord(b"\xc1", b""), signed("e", 1, expires_s=1035.0)], PeerId("z")
    )
    assert [r.peer for r in m.records()] == ["e"]
    assert dict(m.refused) == {"expired": 2, "forged": 1, "foreign": 1, "malformed": 1}


def test_a_record_expires_and_does_not_come_back() -> None:
    m = member("x")
    record = signed("a", 5)
    m.learn(0.0, [record], PeerId("z"))
    m.tick(34.0)
    assert [r.peer for r in m.records()] == ["a"]
    m.tick(36.0)
    m.learn(36.0, [record], PeerId("z"))
    assert m.records() == []
    m.learn(36.0, [signed("a", 6, expires_s=70.0)], PeerId("z"))
    assert [r.sequence for r in m.records()] == [6]


def test_a_process_that_forgot_its_sequence_speaks_above_it() -> None:
    m = member("a")
    m.announce(1.0, round=3)
    m.learn(1.0, [signed("a", 10**9, round_=99)], PeerId("z"))
    (record,) = m.records()
    assert record.sequence == 10**9 + 1
    assert record.round == 3


def own_records(m: Membership, now: float) -> list[SignedRecord]:
    """What a member says of itself to whoever knows nothing."""
    m.drain()
    m.on_message(now, PeerId("z"), wire.encode(wire.Digest(b"")))
    found = [wire.decode(data, m.me) for peer, data in m.drain() if peer == "z"]
    return [
        each
        for message in found
        if isinstance(message, wire.Records)
        for each in message.records
        if wire.open_record(each, m.me).peer == m.me
    ]


def test_two_lives_that_only_greet_a_third_find_one_another_by_what_it_recalls() -> None:
    one, two, other = member("a", 1), member("a", 2), member("b")
    for m in (one, two, other):
        m.announce(1.0, round=1)
    one.reminded(1.0, other.me, other.recall(one.me))  # nothing is known: nothing happens
    assert not one.drain()
    other.learn(1.0, own_records(one, 1.0), one.me)
    for life in (
        two,
        one,
        two,
        one,
    ):  # each takes the other's stream over in turn; which record is the newer, their hashes say
        life.reminded(2.0, other.me, other.recall(life.me))
        for peer, data in life.drain():
            assert peer == other.me
            other.on_message(2.0, life.me, data)
    assert one.is_doubled
    assert two.is_doubled
    assert other.doubled(one.me)
    other.heard(2.0, one.me)  # both beat, and take part in nothing
    assert other.suspected(2.0, one.me)
    assert not other.live(2.0, one.me)
    assert one.me in other._others(2.0, 1)  # each hears of the other by what is handed to it


def test_a_later_life_is_told_of_the_earlier_one_and_is_not_its_double() -> None:
    lives, other = [member("a", seed) for seed in range(4)], member("b")
    for now, life in enumerate(lives):
        life.announce(now, round=1)
        for _ in range(3):  # it loses the connection again and again
            life.reminded(now, other.me, other.recall(life.me))
            other.learn(now, own_records(life, now), life.me)
    assert not any(life.is_doubled for life in lives)
    assert not other.doubled(lives[0].me)
    assert other.record(lives[0].me).life == lives[-1].life  # type: ignore[union-attr]


def test_what_others_recall_of_us_counts_only_where_our_key_signed_it_for_this_run() -> None:
    m = member("a")
    m.announce(1.0, round=1)
    (own,) = m.records()
    for run, peer, by in [("run", "a", "b"), ("run", "b", "b"), ("else", "a", "a")]:
        record = Record(
            run, PeerId(peer), 10**9, 35_000, life=b"another1", beside=m.life, doubled=True
        )
        forged = wire.sign_record(record, lambda data, by=by: signature(by, data))  # type: ignore[misc]
        m.reminded(1.0, PeerId("b"), wire.pack(forged))
    for rubbish in (b"", b"\xc0", b"\x92\xc4\x01x\xc4\x01y", b"\xff" * 100):
        m.reminded(1.0, PeerId("b"), rubbish)
    assert m.records() == [own]
    assert not m.is_doubled
    assert m.drain() == []
    assert sum(m.refused.values()) == 6  # the one that another peer signed for itself is no news


def test_records_of_twins_that_are_over_mark_no_later_life() -> None:
    """Whoever kept what two lives have said of one another can play it back for ever."""
    one, two, other = member("a", 1), member("a", 2), member("b")
    kept = list[SignedRecord]()
    for m in (one, two):
        m.announce(1.0, round=1)
    for now in (2.0, 3.0):
        for life, twin in ((one, two), (two, one)):
            life.learn(now, own_records(twin, now), other.me)
            kept += own_records(life, now)
    assert one.is_doubled
    assert two.is_doubled
    later = member("a", 3)
    later.announce(4.0, round=1)
    for each in kept * 2:
        later.reminded(4.0, other.me, wire.pack(each))
        other.learn(4.0, [each], PeerId("z"))
        other.learn(4.0, own_records(later, 4.0), later.me)
    assert not later.is_doubled
    assert not other.doubled(later.me)


def test_announcing_nothing_new_makes_no_record_and_unknown_fields_are_refused() -> None:
    m = member("a")
    m.announce(0.0, round=1)
    (first,) = m.records()
    m.announce(1.0, round=1)
    assert m.records() == [first]
    m.announce(1.0, round=2, addresses=(HERE,))
    (second,) = m.records()
    assert second.sequence > first.sequence
    assert (second.round, second.addresses) == (2, (HERE,))
    m.announce(2.0, round=3)
    assert m.records()[0].addresses == (HERE,)  # what is not named stays
    with pytest.raises(LocalProtocolError, match="colour"):
        m.announce(1.0, colour="red")


def test_addresses_are_told_once_and_only_those_of_the_peer_itself_that_can_be_dialled() -> None:
    m, a = member("x"), PeerId("a")
    m.announce(0.0, addresses=(HERE,))
    assert m.moved() == {}  # we know where we are
    m.learn(0.0, [signed("a", 1, at=(HERE, THERE)), signed("b", 1)], PeerId("z"))
    assert m.moved() == {a: (HERE, THERE)}
    m.learn(
        0.0,
        [signed("a", 1, at=(HERE, THERE)), signed("a", 2, at=(HERE, THERE), round_=1)],
        PeerId("z"),
    )
    assert m.moved() == {}
    m.learn(
        0.0, [signed("a", 3, at=(THERE,)), signed("a", 4, at=(HERE,), by="mallory")], PeerId("z")
    )
    assert m.moved() == {a: (THERE,)}
    m.learn(0.0, [signed("a", 5, at=(HERE,))], PeerId("z"))
    m.tick(36.0)
    assert m.moved() == {}  # expired before anybody asked


@pytest.mark.parametrize(
    "at",
    [
        ("nowhere",),
        (HERE, HERE),
        ("/ip4/0.0.0.0/tcp/4001",),
        ("/ip4/10.0.0.1/tcp/0",),
        (f"{HERE}/p2p/a",),
        (HERE,) * 9,
        ("/" * 201,),
    ],
)
def test_a_record_with_addresses_that_nobody_could_dial_is_refused(at: tuple[str, ...]) -> None:
    m = member("x")
    m.learn(0.0, [signed("a", 1, at=at)], PeerId("z"))
    assert (m.records(), m.moved(), dict(m.refused)) == ([], {}, {"malformed": 1})


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    m = member("x")
    with contextlib.suppress(RemoteProtocolError):
        m.on_message(0.0, PeerId("evil"), data)
    assert m.records() == []


@pytest.mark.parametrize("message", [wire.Digest(b"x" * 17), wire.Records((), b"x" * 9)])
def test_half_a_line_of_a_digest_is_refused(message: wire.Message) -> None:
    with pytest.raises(RemoteProtocolError, match="are not pieces of"):
        member("a").on_message(0.0, PeerId("b"), wire.encode(message))


def test_too_long_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RemoteProtocolError, match="limit"):
        wire.decode(b"\x92" + b"\x00" * wire.MAX_MESSAGE_BYTES, PeerId("evil"))


# ---- gossip


def test_fifty_members_that_know_one_come_to_know_all() -> None:
    swarm = Swarm(50)
    assert swarm.world.run(
        until=15.0, stop=lambda: swarm.world.events % 50 == 0 and swarm.agreed(50)
    )
    assert swarm.world.now < 10.0
    one = swarm.members[
        PeerId("p031")
    ]  # the only one it knew at first was p000; by now it could dial everybody
    everybody = {
        PeerId(f"p{i:03}"): (f"/ip4/127.0.0.1/tcp/{4000 + i}",) for i in range(50) if i != 31
    }
    assert one.moved() == everybody


def test_a_change_reaches_all_of_fifty_and_quiet_tables_cost_little() -> None:
    swarm = Swarm(50, timing=MembershipTiming(renew_s=1000.0, lifetime_s=3000.0))
    swarm.world.run(until=20.0)
    assert swarm.agreed(50)
    before = sum(swarm.network.bytes_sent.values())
    swarm.world.run(until=30.0)
    assert (
        sum(swarm.network.bytes_sent.values()) - before
    ) / 50 / 10 < 200  # bytes a second of a member: hashes only
    one = swarm.members[PeerId("p007")]
    one.announce(swarm.world.now, round=1)
    swarm._flush(PeerId("p007"))
    assert swarm.world.run(
        until=36.0,
        stop=lambda: all(m.record(PeerId("p007")).round == 1 for m in swarm.members.values()),
    )  # type: ignore[union-attr]


def test_the_dead_are_forgotten_by_all() -> None:
    swarm = Swarm(12)
    swarm.world.run(until=9.0)
    assert swarm.agreed(12)
    swarm.stopped.add(PeerId("p003"))
    swarm.network.detach(PeerId("p003"))
    swarm.world.run(until=70.0)
    assert all(
        m.record(PeerId("p003")) is None for peer, m in swarm.members.items() if peer != "p003"
    )
    assert all(len(m.records()) == 11 for peer, m in swarm.members.items() if peer != "p003")


# ---- liveness


def suspicions(swarm: Swarm, target: PeerId) -> list[bool]:
    return [
        m.suspected(swarm.world.now, target) for peer, m in swarm.members.items() if peer != target
    ]


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_stopped_and_a_dead_peer_are_suspected_after_detect_s(how: str) -> None:
    swarm = Swarm(5, watch=True)
    target = PeerId("p002")
    swarm.world.run(until=5.0)
    assert not any(suspicions(swarm, target))
    swarm.stopped.add(target)
    if how == "killed":
        swarm.network.detach(target)
    swarm.world.run(until=5.7)
    assert not any(suspicions(swarm, target))
    swarm.world.run(until=6.3)
    assert all(suspicions(swarm, target))
    swarm.stopped.clear()
    if how == "stopped":
        swarm.world.run(until=7.0)
        assert not any(suspicions(swarm, target))


def test_a_peer_behind_a_lossy_way_is_given_the_time_that_losses_take() -> None:
    m, lossy, clean = member("x"), PeerId("a"), PeerId("b")
    m.silences = {lossy: 3.0, clean: 0.5}  # less than detect_s: nothing changes
    m.watch(0.0, [lossy, clean])
    for peer in (lossy, clean):
        m.heard(10.0, peer)
    assert [m.suspected(11.1, peer) for peer in (lossy, clean)] == [False, True]
    assert [m.suspected(12.9, peer) for peer in (lossy, clean)] == [False, True]
    assert m.suspected(13.1, lossy)
    m.link(13.2, clean, up=False)
    m.heard(13.3, lossy)
    m.link(13.3, lossy, up=False)  # an ended connection says more than silence, as anywhere
    assert not m.suspected(13.5, lossy)
    assert m.suspected(13.7, lossy)


def test_a_peer_others_hear_is_not_suspected() -> None:
    swarm = Swarm(5, watch=True)
    a, b = PeerId("p000"), PeerId("p001")
    swarm.world.run(until=3.0)
    swarm.network.cut(b, a)
    swarm.network.cut(a, b)
    for until in range(4, 12):
        swarm.world.run(until=float(until))
        assert not swarm.members[a].suspected(swarm.world.now, b)
        assert swarm.members[a].live(swarm.world.now, b)


def test_waking_from_a_freeze_does_not_suspect_everybody() -> None:
    swarm = Swarm(5, watch=True)
    target = PeerId("p002")
    swarm.world.run(until=3.0)
    swarm.stopped.add(target)
    swarm.world.run(until=30.0)
    swarm.stopped.clear()
    for until in (30.05, 30.1, 30.3, 30.6, 31.0, 33.0):
        swarm.world.run(until=until)
        if until > 30.06:
            assert not any(
                swarm.members[target].suspected(swarm.world.now, p) for p in swarm.members
            )
    assert not any(suspicions(swarm, target))


def test_a_lost_connection_is_asked_for_at_once_and_a_stranger_is_never_suspected() -> None:
    m = member("x")
    m.watch(0.0, [PeerId("a"), PeerId("b"), PeerId("c")])
    m.link(0.1, PeerId("a"), up=False)
    asked = {peer: wire.decode(data, peer) for peer, data in m.drain()}
    probes = [probe for probe in asked.values() if isinstance(probe, wire.Probe)]
    assert set(asked) == {PeerId("b"), PeerId("c")}
    assert [(probe.target, probe.nonce) for probe in probes] == 2 * [("a", probes[0].nonce)]
    assert not m.suspected(99.0, PeerId("stranger"))
    assert m.suspected(99.0, PeerId("a"))


def test_an_ended_connection_shortens_the_patience_unless_others_hear_the_peer() -> None:
    swarm = Swarm(5, watch=True)
    a, dead, cut = swarm.members[PeerId("p000")], PeerId("p001"), PeerId("p002")
    swarm.world.run(until=5.0)
    swarm.stopped.add(dead)
    swarm.network.detach(dead)
    swarm.network.cut(cut, PeerId("p000"))
    for peer in (dead, cut):
        a.link(5.0, peer, up=False)
    swarm.world.run(until=5.25)
    assert not a.suspected(5.25, dead)
    swarm.world.run(until=5.45)
    assert a.suspected(5.45, dead)
    for until in (5.45, 6.0, 8.0):
        swarm.world.run(until=until)
        assert not a.suspected(until, cut)
    a.link(8.0, dead, up=True)  # it has come back, and has as long as anybody to say something
    assert a.suspected(8.0, dead)
    a.heard(8.1, dead)
    assert not a.suspected(9.0, dead)


def test_a_process_that_is_no_more_is_suspected_at_once_unless_others_hear_it() -> None:
    m, a, b = member("x"), PeerId("a"), PeerId("b")
    m.watch(0.0, [a, b])
    for peer in (a, b):
        m.heard(0.1, peer)
    m.gone(a)  # its connection has not ended: what is said is of an older one
    assert not m.suspected(0.1, a)
    m.link(0.2, a, up=False)
    assert not m.suspected(0.2, a)
    m.gone(a)
    assert m.suspected(0.2, a)
    m.on_message(0.25, b, alive("a", nonces(m)[-1]))
    assert not m.suspected(0.25, a)
    m.link(0.3, a, up=True)
    m.link(0.4, a, up=False)
    m.heard(0.3, a)
    assert not m.suspected(0.5, a)


def nonces(m: Membership) -> list[bytes]:
    """Of the probes that a member has to send."""
    found = [wire.decode(data, peer) for peer, data in m.drain()]
    return [probe.nonce for probe in found if isinstance(probe, wire.Probe)]


def alive(target: str, nonce: bytes, *, by: str | None = None) -> bytes:
    """What ``target`` has signed for member x, or another peer for it."""
    said = wire.Alive(PeerId(target), PeerId("x"), nonce, b"")
    signed_ = signature(by or target, wire.alive_payload(RUN, said))
    return wire.encode(msgspec.structs.replace(said, signature=signed_))


def test_nobody_keeps_a_dead_member_alive_by_its_word() -> None:
    """Neither an observer nor a member: they would stop every round of which it owns a part. What
    it signed before it died counts for the newest questions only.
    """
    m, dead, b, observer = member("x"), PeerId("dead"), PeerId("b"), PeerId("observer")
    m.watch(0.0, [dead, b])
    m.learn(0.0, [signed("observer", 1), signed("observer2", 1)], observer)
    asked, first = list[bytes](), b""
    for tick in range(60):
        now = tick * 0.1
        m.heard(now, b)
        m.tick(now)
        asked += nonces(m)
        first = first or (asked[0] if asked else b"")
        if asked:
            for sender in (observer, b):
                m.on_message(now, sender, alive("dead", asked[-1], by=sender))
        if now > 4.0:
            m.on_message(now, b, alive("dead", first))
    assert len(asked) > 8
    assert m.suspected(6.0, dead)
    m.on_message(6.0, b, alive("dead", asked[-1]))
    assert not m.suspected(6.0, dead)


def test_what_a_peer_shows_in_a_record_counts_once_its_signature_is_right() -> None:
    here, shown = member("a"), list[tuple[PeerId, bytes]]()
    here.shows = lambda peer, certificate: shown.append((peer, certificate))
    there = member("b")
    there.certificate = b"own"
    there.announce(0.0)
    forged = wire.sign_record(
        Record("run", PeerId("b"), 1, 35_000, certificate=b"made for b"),
        lambda data: signature("liar", data),
    )
    here.learn(0.0, [forged], PeerId("liar"))
    assert shown == []
    here.learn(0.0, own_records(there, 0.0), PeerId("b"))
    assert shown == [("b", b"own")]


def test_one_that_does_not_watch_answers_a_beat_once() -> None:
    m = member("x")
    m.on_message(0.0, PeerId("a"), wire.encode(wire.Beat(True)))
    assert [wire.decode(data, peer) for peer, data in m.drain()] == [wire.Beat(False)]
    m.on_message(0.0, PeerId("a"), wire.encode(wire.Beat(False)))
    assert m.drain() == []


def test_who_is_let_in_cannot_fill_the_table_with_peers_that_do_not_exist() -> None:
    """Each names a peer of whom nothing proves that it is of the run, though the record is signed
    as it should be.
    """
    here = member("a")

    def believes(peer: PeerId, shown: bytes) -> bool:
        if shown != b"lets in " + peer.encode():
            raise BadSignatureError("nothing proves it")
        return True

    here.believes = believes
    here.announce(0.0)
    for number in range(300):
        with contextlib.suppress(RemoteProtocolError):
            here.learn(0.0, [signed(f"fake{number}", 1)], PeerId("liar"))
    assert (len(here.records()), here.refused) == (1, {"forged": 300})
    there = member("b")
    there.certificate = b"lets in b"
    there.announce(0.0)
    here.learn(0.0, own_records(there, 0.0), PeerId("b"))
    assert here.record(PeerId("b")) is not None
    here.drain()
    fake = wire.encode(wire.Records((signed("fake", 1), *own_records(there, 1.0))))
    with pytest.raises(RemoteProtocolError, match="nothing proves it"):
        here.on_message(1.0, PeerId("b"), fake)  # its sender is at fault


def test_by_one_invite_come_three_quarters_of_the_records_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atoll.node.run.membership.MAX_RECORDS", 8)
    monkeypatch.setattr("atoll.node.run.membership.MOST_BY_ONE", 6)
    here = member("a")
    here.invite_of = lambda certificate: certificate[:1]
    here.announce(0.0)

    def comes(name: str, invite: bytes, now: float = 0.0) -> bool:
        peer = member(name)
        peer.certificate = invite + name.encode()
        peer.announce(now)
        here.learn(now, own_records(peer, now), PeerId(name))
        return here.record(PeerId(name)) is not None

    assert [comes(f"minted{number}", b"i") for number in range(20)] == [True] * 6 + [False] * 14
    assert comes("minted3", b"i")  # it is there
    assert comes("honest", b"j")
    assert here.refused["crowded"] == 14
    here.tick(200.0)  # all are over
    assert comes("late", b"i", 200.0)


def test_who_asks_for_all_records_again_and_again_is_handed_few() -> None:
    """An admitted observer says in a few bytes that it knows nobody: each time all were sent to it."""
    here, observer, other = member("a"), PeerId("observer"), PeerId("b")
    here.announce(0.0)
    for number in range(200):
        here.learn(0.0, [signed(f"m{number}", 1)], PeerId(f"m{number}"))
    all_of = len(here.records())
    assert all_of > 200
    nothing, handed = wire.encode(wire.Digest(b"")), 0

    def sent(to: PeerId) -> int:
        found = [wire.decode(data, to) for peer, data in here.drain() if peer == to]
        return sum(len(each.records) for each in found if isinstance(each, wire.Records))

    for number in range(500):
        here.on_message(number * 0.01, observer, nothing)
        handed += sent(observer)
    assert HANDED - all_of <= handed <= HANDED + 5 * HANDED_PER_S
    here.on_message(5.0, other, nothing)
    assert sent(other) == all_of


def test_a_flood_of_newer_records_holds_back_nobody_elses() -> None:
    """Who holds an invite's seed names many peers, and renews their records each second: more than
    are handed on. Their names are made to come first.
    """
    here, honest, other = member("a"), PeerId("honest"), PeerId("b")
    names = [PeerId(f"fake{number}") for number in range(2000)]
    fakes = [name for name in names if wire.short(name) < wire.short(honest)][:600]
    assert len(fakes) == 600
    told, own = 0, 0
    for now in range(1, 121):
        known = [wire.short(fake) + wire.order(now * 1000 - 1, b"\0") for fake in fakes]
        here.announce(now, round=now)
        for name in (*fakes, honest):
            here.learn(now, [signed(name, now * 1000, expires_s=now + 35.0)], name)
        here.drain()
        here.on_message(now, other, wire.encode(wire.Digest(b"".join(known))))
        here.reminded(now, other, wire.pack(signed("a", now, expires_s=now + 35.0)))
        heard = {
            record.peer
            for peer, data in here.drain()
            if isinstance(message := wire.decode(data, peer), wire.Records)
            for record in (wire.open_record(each, peer) for each in message.records)
            if peer == other
        }
        told += honest in heard
        own += here.me in heard
    assert own == 120
    assert told > 10, "a record lives for 35 s, and each second it was newer here"


def test_a_clock_that_is_corrected_blinds_nobody() -> None:
    """A board without a battery starts in 1970, and hears the time a minute later."""
    there, late = member("p000", unix_offset_s=1e9), member("p001")
    late.announce(0.0, addresses=(HERE,))
    there.announce(0.0, addresses=(THERE,))

    def tell(now: float, who: Membership, other: Membership) -> None:
        other.on_message(now, who.me, wire.encode(wire.Records(tuple(own_records(who, now)), b"")))

    tell(1.0, there, late)
    tell(1.0, late, there)
    assert (late.refused["expired"], there.refused["expired"]) == (1, 1)
    late.follow_clock(60.0, 1e9)
    tell(60.0, late, there)
    tell(60.0, there, late)
    assert {record.peer for record in late.records()} == {"p000", "p001"}
    assert {record.peer for record in there.records()} == {"p000", "p001"}
