"""Well-formed messages in masses, in the simulator: they cost what their sender's budget is, and no
round.
"""

from __future__ import annotations

from itertools import count, islice

import pytest
import session_table
from blake3 import blake3
from session_table import Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.exchange.header import PART, RESULT
from atoll.collectives.exchange.slot import unfold
from atoll.collectives.group import LAST_BALLOT
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.node.net.transport.faults import LIMIT, WINDOW_S
from atoll.node.session import events as ev
from atoll.node.session.actions import ROUND_PREFIX, main_log
from atoll.node.session.budgets import (
    BEHIND_S,
    JOBS_AT_ONCE,
    MEMBER_BYTES,
    OPERATION,
    REQUESTS,
    ROUND,
    SHUT_OUT,
    SPANS_BYTES,
)
from atoll.node.session.other_logs import PREFIX
from atoll.node.session.serving import SNAPSHOT_IDLE_S
from atoll.node.session.session import KINDS
from atoll.node.simulation.process import MAX_SERVED

STRANGER = PeerId("stranger")
FLOOD = 55_600
FLOOD_S = 15.0


def wire(body: m.Body, *, round_: int = 1, log: str | None = None) -> bytes:
    return ROUND_PREFIX + m.encode(m.Envelope(log or main_log("run"), round_, 0, body))


def flood(table: Table, victim: Peer, sender: PeerId, data: bytes, count: int = FLOOD) -> None:
    """So many of one message within FLOOD_S of virtual time."""
    at_once = 100

    def some() -> None:
        victim.do(
            lambda session, now: [session.on_message(now, sender, data) for _ in range(at_once)]
        )

    for number in range(count // at_once):
        table.world.after(number * FLOOD_S * at_once / count, some)


def rounds_take(table: Table, count: int) -> list[float]:
    """How long so many rounds of all members take, each."""
    took = list[float]()
    for _ in range(count):
        began, before = table.world.now, [len(peer.rounds()) for peer in table.peers]
        for peer in table.peers:
            peer.contribute(f"{peer.name}/{began}"[:16])
        table.until(
            lambda before=before: all(
                len(peer.rounds()) > had for peer, had in zip(table.peers, before, strict=True)
            )
        )
        took.append(table.world.now - began)
        table.wait(1.0)
    return took


@pytest.fixture
def table() -> Table:
    table = Table(3)
    table.all_in()
    return table


def newest(peer: Peer) -> bytes:
    """The hash of the newest entry."""
    return peer.machine.journal.entries[-1].entry.hash()


def test_chunkless_gets_without_end_are_hashed_once_and_cost_no_round(table: Table) -> None:
    """What stopped all rounds for minutes: each was a job in the queue that applies rounds."""
    victim = table.peers[0]
    quiet = rounds_take(table, 3)
    flood(table, victim, STRANGER, wire(m.Get(newest(victim), ())))
    flooded = rounds_take(table, 12)
    assert max(flooded) <= 1.25 * max(quiet)
    node = victim.node
    assert node is not None
    assert len(node._jobs) <= 1
    assert len(node._served) <= JOBS_AT_ONCE
    table.wait(FLOOD_S)
    rate = REQUESTS["get"]
    refused = victim.session.budgets.refused(STRANGER)
    heard = FLOOD - sum(refused.values())
    assert 0 < heard <= rate.burst + rate.per_s * FLOOD_S
    table.end()


def test_gets_of_everything_that_is_there_have_few_jobs_waiting(table: Table) -> None:
    rounds_take(table, 8)
    victim = table.peers[0]
    names = [it.entry.hash() for it in victim.machine.journal.entries if it.entry.contributors]
    assert len(names) >= 8
    victim.do(
        lambda session, now: [
            session.on_message(now, STRANGER, wire(m.Get(name, ()))) for name in names
        ]
    )
    node = victim.node
    assert node is not None
    assert len(node._served) == JOBS_AT_ONCE
    assert not node._jobs
    table.wait(5.0)
    assert not node._served
    assert victim.session.budgets.refused(STRANGER)["get"] == len(names) - JOBS_AT_ONCE
    table.end()


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind != "get"])
def test_no_type_of_message_is_listened_to_beyond_its_rate(kind: str, table: Table) -> None:
    victim, rate = table.peers[0], REQUESTS.get(kind, ROUND)
    budgets = victim.session.budgets
    passed = sum(budgets.request(100.0, STRANGER, kind) for _ in range(FLOOD))
    assert passed == rate.burst
    assert rate.per_s <= 1024
    table.end()


def test_ballots_without_end_hold_up_no_round_that_needs_who_hears_them(table: Table) -> None:
    """A member convenes ever later ballots at another, in which nothing comes of it. Who followed
    them all would carry out nobody's plan, and of three the other one is no majority.
    """
    victim, liar = table.peers[0], table.peers[1].name
    quiet, _ = trained(table, 6, 0.0, but=1)
    ballots, over = iter(range(1, LAST_BALLOT)), list[bool]()

    def convene() -> None:
        if over:
            return
        machine = victim.machine
        owned = (at for at in ballots if machine.convener_of(at).peer == liar)
        for ballot in islice(owned, 20):
            data = wire(m.Prepare(ballot), round_=machine.round, log=machine.log)
            victim.do(lambda session, now, data=data: session.on_message(now, liar, data))
        table.world.after(0.02, convene)

    convene()
    took, lost = trained(table, 15, 0.0, but=1)
    over.append(True)
    assert not lost
    assert max(took) <= max(quiet) + 0.25, (quiet, took)
    reasons = {each.reason for each in victim.heard if isinstance(each, ev.PeerMisbehaved)}
    assert reasons == {"ballots faster than any clock"}
    assert victim.session.budgets.deaf_to(table.world.now, liar)
    table.end()


@pytest.mark.parametrize("every_s", [1.5, 6.0])
def test_ballots_begun_as_slowly_as_clocks_do_hold_up_few_rounds(
    table: Table, every_s: float
) -> None:
    """A member begins a ballot as each round comes on, and nothing comes of it. Who followed it each
    time would come to no decision at all.
    """
    honest, liar = [table.peers[0], table.peers[2]], table.peers[1].name
    quiet, _ = trained(table, 6, 0.0, but=1)
    over, began = list[bool](), dict[PeerId, float]()

    def convene() -> None:
        if over:
            return
        table.world.after(0.001, convene)
        for peer in honest:
            machine = peer.machine
            comes_on = machine.open.plan or machine.contribution
            if not comes_on or table.world.now - began.get(peer.name, -1e9) < every_s:
                continue
            began[peer.name] = table.world.now
            newest = max(machine.ballot, machine.journal.promised)
            owned = (at for at in count(newest + 1) if machine.convener_of(at).peer == liar)
            data = wire(m.Prepare(next(owned)), round_=machine.round, log=machine.log)
            peer.do(lambda session, now, data=data: session.on_message(now, liar, data))

    convene()
    took, lost = trained(table, 40, 0.0, but=1)
    over.append(True)
    assert not lost
    assert sum(took) <= 40 * max(quiet) + 25.0
    assert max(took[20:]) <= max(quiet) + 0.25, (quiet, took)
    for peer in honest:
        assert not any(isinstance(each, ev.PeerMisbehaved) for each in peer.heard)
    table.end()


@pytest.mark.parametrize("every_s", [0.001, 0.25, 1.5])
def test_what_a_member_announces_anew_without_end_is_waited_for_twice(
    table: Table, every_s: float
) -> None:
    """Each plan names another contribution of it, none of which comes; the third one none. Faster
    than any script works, it is not heard.
    """
    victim, liar = table.peers[0], table.peers[1].name
    quiet, _ = trained(table, 6, 0.0, but=1)
    over, numbers = list[bool](), count()

    def announce() -> None:
        if over:
            return
        machine = victim.machine
        for _ in range(max(1, round(0.02 / every_s))):
            cid = blake3(next(numbers).to_bytes(8, "big")).digest()[:16]
            body = m.Ready(machine.base, cid, 1, False)
            data = wire(body, round_=machine.round, log=machine.log)
            victim.do(lambda session, now, data=data: session.on_message(now, liar, data))
        table.world.after(max(0.02, every_s), announce)

    announce()
    took, lost = trained(table, 12, 0.0, but=1)
    over.append(True)
    assert not lost
    assert max(took) <= max(quiet) + 3.5, (quiet, took)  # 6.5 s where each was waited for
    reasons = {each.reason for each in victim.heard if isinstance(each, ev.PeerMisbehaved)}
    if every_s < 0.02:
        assert max(took[1:]) <= max(quiet) + 0.25, (quiet, took)
        assert reasons == {"contributions faster than any clock"}
        assert victim.session.budgets.deaf_to(table.world.now, liar)
    else:
        assert not reasons
    table.end()


def test_a_member_that_floods_costs_no_round(table: Table) -> None:
    victim, member = table.peers[0], table.peers[1].name
    quiet = rounds_take(table, 3)
    for body in (m.AskState(), m.Fetch(), m.Join(), m.Get(bytes(32), ()), m.Gone(bytes(32))):
        flood(table, victim, member, wire(body), 6000)
    assert max(rounds_take(table, 12)) <= 1.25 * max(quiet)
    assert set(victim.session.budgets.refused(member)) >= {"ask_state", "fetch", "join"}
    table.end()


@pytest.mark.parametrize("log", [None, f"{PREFIX}/8/fp32/mean/all/x/y"])
def test_what_is_beyond_a_budget_is_not_even_decoded(table: Table, log: str | None) -> None:
    """To decode thousands of spans takes longer than to send them: a message is judged by what it
    is called and how long it is.
    """
    victim, member = table.peers[0], table.peers[1].name
    many = (*((0, m.MAX_CHUNK_LIST),) * (m.MAX_CHUNK_LIST - 1), (0, 1))
    lengthy = {
        "missing": m.Missing(bytes(16), ((bytes(16), many),)),
        "need": m.Need(bytes(16), many),
        "get_chunks": m.Get(bytes(32), many),
    }
    breaches, bad = ev.PeerMisbehaved, b""
    for kind, body in lengthy.items():
        data = wire(body, log=log)
        bad = data[:-1] + b"\xc0"  # ends with nil where a number must be
        victim.do(
            lambda session, now, data=data: [
                session.on_message(now, member, data) for _ in range(200)
            ]
        )
        refused = victim.session.budgets.refused(member)[kind if log is None else "operations"]
        rate = (REQUESTS.get(kind, ROUND)) if log is None else OPERATION
        assert 200 * len(lengthy) > refused >= 200 - rate.burst * SPANS_BYTES / (len(data) - 64)
        assert not any(isinstance(event, breaches) for event in victim.heard)
        victim.do(lambda session, now, bad=bad: session.on_message(now, member, bad))
        assert not any(isinstance(event, breaches) for event in victim.heard), kind
    victim.do(lambda session, now: session.on_message(now, STRANGER, bad))
    assert any(isinstance(event, breaches) for event in victim.heard), "who has budget is judged"
    table.end()


def test_a_state_on_disk_is_read_in_the_queue_of_service(table: Table) -> None:
    """Where that is full, whoever asks is refused; no round stands behind what it asked for."""
    rounds_take(table, 12)
    victim, asker = table.peers[0], table.peers[1].name
    assert victim.storage.states.saved(victim.session.round) is not None
    node = victim.node
    assert node is not None
    ask = wire(m.AskState(certified=True))
    victim.do(lambda session, now: session.on_message(now, asker, ask))
    assert not node._jobs
    assert len(node._served) == 1
    table.wait(1.0)
    (snapshot,) = victim.session.serving.snapshots
    table.wait(SNAPSHOT_IDLE_S + 1)
    assert not victim.session.serving.snapshots
    for _ in range(MAX_SERVED + 1):
        assert node.serve(lambda: None, lambda now, made: None)
    victim.do(lambda session, now: session.on_message(now, asker, ask))
    assert not node._jobs
    table.wait(1.0)
    assert not victim.session.serving.snapshots
    victim.do(lambda session, now: session.on_message(now, asker, ask))
    table.wait(1.0)
    assert [it.root for it in victim.session.serving.snapshots] == [snapshot.root]
    table.end()


def break_rules(victim: Peer, sender: PeerId) -> None:
    """As often as it takes to be shut out."""
    victim.do(
        lambda session, now: [session.on_message(now, sender, ROUND_PREFIX) for _ in range(LIMIT)]
    )


def trained(
    table: Table, count: int, late_s: float, *, but: int | None = None
) -> tuple[list[float], int]:
    """Rounds of all (but one), the last of whom is so much later: what each took from its last
    contribution on, and how many contributions of the first and the last did not count."""
    took, lost = list[float](), 0
    honest = [table.peers[0], table.peers[-1]]
    for _ in range(count):
        before = [len(peer.rounds()) for peer in honest]
        for index, peer in enumerate(table.peers):
            if index == but:
                continue
            table.wait(late_s if peer is table.peers[-1] else 0.0)
            peer.contribute(f"{peer.name}/{table.world.now}"[:16])
        began = table.world.now
        table.until(
            lambda before=before: all(
                len(peer.rounds()) > had for peer, had in zip(honest, before, strict=True)
            )
        )
        took.append(table.world.now - began)
        lost += sum(not peer.rounds()[-1].counted for peer in honest)
        table.wait(1.0)
    return took, lost


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_rounds_do_not_wait_for_a_member_that_is_shut_out(table: Table, late_s: float) -> None:
    """Nor lose what others contribute meanwhile, whoever convenes them. The member stays one, and
    is heard again after a minute.
    """
    victim, liar = table.peers[0], table.peers[1].name
    quiet, lost = trained(table, 6, late_s)
    assert not lost
    break_rules(victim, liar)
    assert victim.session.budgets.deaf_to(table.world.now, liar)
    shut_out, lost = trained(table, 15, late_s)
    assert victim.session.budgets.deaf_to(table.world.now, liar)
    assert not lost
    assert victim.session.budgets.refused(liar)[SHUT_OUT] > 0
    assert max(shut_out) <= max(quiet) + 0.25, (quiet, shut_out)
    assert len(victim.session.config_peers()) == 3
    table.wait(WINDOW_S)
    _, lost = trained(table, 6, late_s)
    assert not lost
    assert {share.peer for share in victim.rounds()[-1].contributors} == {
        peer.name for peer in table.peers
    }
    table.end()


def test_rounds_do_not_wait_for_a_member_that_has_used_up_its_bytes(table: Table) -> None:
    victim, liar = table.peers[0], table.peers[1].name
    quiet, _ = trained(table, 6, 0.0)
    data = wire(m.Offer(bytes(32), bytes(m.MAX_HASHES), None))
    pauses = list[float]()

    def flood() -> None:
        for _ in range(200):
            victim.do(lambda session, now: session.on_message(now, liar, data))
            pauses.append(victim.session.budgets.pause_s())

    for number in range(30):
        table.world.after(float(number), flood)
    table.wait(0.1)
    assert max(pauses) > 0
    assert sum(not pause for pause in pauses) <= 1 + MEMBER_BYTES.burst / len(data)
    flooded = dict[PeerId, list[float]]()
    for _ in range(15):  # what the member has to say waits behind its flood
        convener = victim.machine.convener_of(0).peer
        took, lost = trained(table, 1, 0.0, but=1)
        flooded.setdefault(convener, []).extend(took)
        assert not lost
    others = flooded.pop(table.peers[2].name)
    assert max(others) > 1.0, "who is not flooded waits for it"
    assert max(max(took) for took in flooded.values()) <= max(quiet) + 0.25, (quiet, flooded)
    table.wait(30.0 + BEHIND_S)
    assert not victim.session.budgets.deaf_to(table.world.now, liar)
    table.end()


def test_rounds_do_not_wait_for_a_member_that_does_not_read(table: Table) -> None:
    """It speaks as promptly as any, and reads what the other members say."""
    victim, liar = table.peers[0], table.peers[1].name
    quiet, _ = trained(table, 6, 0.0)
    table.network.tap = lambda sender, receiver, channel, payload: (
        channel == "control" and (sender, receiver) == (victim.name, liar)
    )
    table.place.unread.add((victim.name, liar))
    slow, lost = trained(table, 15, 0.0)
    assert not lost
    assert max(slow) <= max(quiet) + 0.25, (quiet, slow)
    table.network.tap = None
    table.place.unread.clear()
    trained(table, 3, 0.0)
    assert {share.peer for share in victim.rounds()[-1].contributors} == {
        peer.name for peer in table.peers
    }
    table.end()


@pytest.mark.parametrize("trickles", [False, True])
@pytest.mark.parametrize(
    ("withheld", "most_s"), [({PART, RESULT}, 1.2), ({PART}, 1.2), ({RESULT}, 4.2)]
)
def test_rounds_wait_about_a_second_for_a_member_that_sends_nothing_of_what_it_offers(
    monkeypatch: pytest.MonkeyPatch, withheld: set[int], most_s: float, *, trickles: bool
) -> None:
    """With no link measured. Longer where the member convenes, and its results are the only ones
    that come late."""
    monkeypatch.setattr(session_table, "LAYOUT", make_layout([("w", (512,))]))
    table = Table(3)
    table.place.chunk_elements = 8
    table.all_in()
    quiet, liar = trained(table, 1, 0.0)[0][0], table.peers[1].name
    sent = dict[str, float]()

    def tap(sender: str, receiver: str, channel: str, payload: object) -> bool:
        if sender != liar or channel != "record":
            return False
        assert isinstance(payload, tuple)
        if payload[0][1] not in withheld:
            return False
        if not trickles or table.world.now - sent.get(receiver, -1e9) < 0.5:
            return True
        sent[receiver] = table.world.now
        return False

    table.network.tap = tap
    took, lost = trained(table, 4, 0.0)
    assert not lost
    assert max(took) <= quiet + most_s
    table.end()


def test_contacts_go_with_their_announcements(table: Table) -> None:
    """A flood of announcements makes a node deaf for nobody once it is over."""
    victim = table.peers[0]
    fakes = [PeerId(f"fake{number}") for number in range(1000)]
    victim.do(lambda session, now: session.add_contacts(now, fakes))
    assert len(victim.session.contacts) == 256
    victim.do(lambda session, now: session.add_contacts(now, [STRANGER]))
    assert victim.session.contacts == [STRANGER]
    table.end()


def test_of_too_many_contacts_those_stay_that_were_heard(table: Table) -> None:
    victim = table.peers[0]
    fakes = [PeerId(f"fake{number}") for number in range(1000)]
    victim.do(lambda session, now: session.on_message(now, STRANGER, wire(m.Fetch())))
    for _ in range(5):
        victim.do(lambda session, now: session.add_contacts(now, [*fakes, STRANGER]))
        assert STRANGER in victim.session.contacts
    table.end()


def test_a_chunk_named_over_and_over_is_asked_for_once() -> None:
    """A Get of 4,096 times everything would be 16 million chunks."""
    spans = [(0, 1 << 48)] * 4096
    assert list(unfold(spans, 4096)) == list(range(4096))
    assert list(unfold([(2, 5), (7, 9)], 8)) == [2, 3, 4, 7]
