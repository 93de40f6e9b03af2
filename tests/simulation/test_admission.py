"""Who may do what in a run, through real sessions: roles of invites, probation, how many may enter
an hour, and who votes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import pytest
import torch
from doors_kit import toy, toy_doors
from session_table import LAYOUT, SETTINGS, Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.codecs.codec import Chunking
from atoll.collectives.digest import chunk_hash
from atoll.collectives.errors import NotAdmittedError, RemoteProtocolError
from atoll.collectives.group import Admitted, Contributor, Entry, Member, Part
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Accepted, Envelope, Ready, encode
from atoll.collectives.round import Doors
from atoll.collectives.round.certificate import vote_payload
from atoll.node.run.evidence import check
from atoll.node.session import admission
from atoll.node.session import events as ev
from atoll.node.session.admission import draw_chunk, judge_sample
from atoll.node.session.session import ROUND
from atoll.node.simulation.process import sign_as, verify_as

DoorsOf = Callable[[PeerId], Doors]


def give_role(table: Table, who: str, role: str) -> None:
    """Everybody has seen the invite of ``who``."""
    for peer in table.peers:
        if peer.node is not None:
            peer.session.membership.roles[PeerId(who)] = role


def round_of(table: Table, number: int, *contributing: Peer, value: float = 1.0) -> None:
    """One round that counts these."""
    for peer in contributing:
        peer.contribute(f"{number}/{peer.name}", value)
    table.until(lambda: all(event_round(peer) >= number for peer in contributing))


def event_round(peer: Peer) -> int:
    return max([event.round for event in peer.rounds() if event.contributors], default=0)


def test_who_aggregates_votes_and_owns_a_part_and_contributes_nothing() -> None:
    table = Table(3)
    table.place.chunk_elements = 2
    first, second, helper = table.found(), table.peers[1].start().attach(), table.peers[2].start()
    give_role(table, "p2", "aggregate")
    helper.attach()
    table.until(lambda: second.inside and helper.inside)
    with pytest.raises(NotAdmittedError) as caught:
        helper.contribute("mine")
    assert caught.value.code == "E206"
    round_of(table, 1, first, second)
    committed = first.rounds()[-1]
    assert {share.peer for share in committed.contributors} == {"p0", "p1"}
    assert "p2" in {part.owner for part in committed.parts}
    assert "p2" in committed.config
    for peer in (first, second):
        peer.contribute(f"2/{peer.name}", 3.0)
    table.until(lambda: first.machine.open.plan is not None)
    helper.kill()  # an owner that contributes nothing is replaced like any other
    table.until(lambda: event_round(first) == event_round(second) == 2)
    assert {part.owner for part in first.rounds()[-1].parts} == {"p0", "p1"}
    assert {share.peer for share in first.rounds()[-1].contributors} == {"p0", "p1"}


def test_a_contribution_of_who_may_not_is_refused_in_its_name_and_so_is_a_plan_with_it() -> None:
    table = Table(3)
    first, second, liar = table.all_in()
    give_role(table, "p2", "observe")
    base = first.machine.base

    def says(body: m.Body) -> None:
        data = ROUND + encode(Envelope(first.session.log, first.machine.round, 0, body))
        first.do(lambda session, now: session.on_message(now, PeerId("p2"), data))

    says(Ready(base, b"c" * 16, 5, False))
    says(m.Join())
    assert [(event.peer, event.reason.split(",")[0]) for event in misbehaved(first)] == [
        ("p2", "a contribution of p2"),
        ("p2", "its invite is to observe: it cannot become a member"),
    ]
    entry = Entry(
        first.session.log,
        first.machine.round,
        base,
        b"s" * 32,
        (Contributor(Member(PeerId("p2"), 0), b"c" * 16, 1),),
        (Part(PeerId("p0"), 0, 2),),
        (b"d" * 32,),
        LAYOUT.numel,
        4,
        "fp32",
        "mean",
        first.machine.config,
    )
    says(m.Accept(0, entry))
    assert misbehaved(first)[-1].reason.startswith("a contribution of p2")
    assert first.machine.open.pending is None
    round_of(table, 1, first, second)
    assert {share.peer for share in first.rounds()[-1].contributors} == {"p0", "p1"}
    assert liar.inside  # it had become a member before; a role says what it may do from now on


@pytest.mark.parametrize("banned", [True, False])
def test_who_is_evicted_soon_after_it_came_is_not_let_in_again_by_what_it_said_then(
    *, banned: bool
) -> None:
    table = Table(3)
    first, second, bad = table.all_in()
    for peer in (first, second):
        if banned:
            peer.session.membership.banned = {PeerId("p2")}
    if not banned:
        bad.kill()
    for number in range(1, 6):
        round_of(table, number, first, second)
    configs = ["p2" in event.config for event in first.rounds() if event.contributors]
    assert configs == sorted(configs, reverse=True)
    assert not configs[-1]


def misbehaved(peer: Peer) -> list[ev.PeerMisbehaved]:
    return [event for event in peer.heard if isinstance(event, ev.PeerMisbehaved)]


def test_an_observer_has_the_model_and_is_no_member() -> None:
    table = Table(2)
    first = table.found()
    second = table.peers[1].start()
    give_role(table, "p1", "observe")
    second.attach()
    round_of(table, 1, first)
    table.until(lambda: second.session.completed == 1)
    assert first.session.config_peers() == ["p0"]
    with pytest.raises(NotAdmittedError):
        second.contribute("mine")


def test_a_newcomer_is_a_member_after_good_rounds_and_its_work_counts_only_then() -> None:
    table = Table(3)
    table.place.probation = 3
    first = table.found()
    first.session.membership.trusted = {PeerId("p1")}
    known = table.peers[1].start().attach()
    table.until(lambda: known.inside)
    new = table.peers[2].start().attach()
    table.until(lambda: new.session.completed >= 0)
    for number in range(1, 4):
        new.contribute(f"new {number}", 1.0)
        table.world.run(
            until=table.world.now + 0.5
        )  # its hashes are known before the round is decided
        round_of(table, number, first, known)
        table.until(
            lambda number=number: judged(first, "p2") == number and judged(known, "p2") == number
        )
        assert {share.peer for share in first.rounds()[-1].contributors} == {"p0", "p1"}
        assert first.rounds()[-1].config == ("p0", "p1")
    table.until(lambda: new.inside)
    assert [event.fault for event in verdicts(first)] == ["", "", ""]
    round_of(table, 4, first, known, new)
    assert {share.peer for share in first.rounds()[-1].contributors} == {"p0", "p1", "p2"}


def verdicts(peer: Peer) -> list[ev.WorkJudged]:
    return [event for event in peer.heard if isinstance(event, ev.WorkJudged)]


def judged(peer: Peer, who: str) -> int:
    return peer.session.admission.good.get(PeerId(who), 0)


def test_ten_strangers_that_do_no_work_have_no_weight_and_no_vote() -> None:
    table = Table(12)
    table.place.probation = 2
    first = table.found()
    first.session.membership.trusted = {PeerId("p1")}
    second = table.peers[1].start().attach()
    table.until(lambda: second.inside)
    for stranger in table.peers[2:]:
        stranger.start().attach()
    table.until(lambda: all(stranger.session.completed >= 0 for stranger in table.peers[2:]))
    for number in range(1, 5):
        for stranger in table.peers[2:]:
            stranger.contribute(f"{number}/{stranger.name}", 0.0)  # nothing
        table.world.run(until=table.world.now + 0.5)
        round_of(table, number, first, second)
    assert first.rounds()[-1].config == ("p0", "p1")
    assert {event.fault for event in verdicts(first)} == {"its values are all zero"}
    assert set(first.session.admission.good.values()) == {0}


def test_as_many_as_may_enter_in_an_hour_do_and_who_is_trusted_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "HOUR_S", 30.0)
    table = Table(6)
    table.place.per_hour = 2
    first = table.found()
    for peer in table.peers[1:5]:
        peer.start().attach()
    table.until(lambda: len(first.session.config_peers()) == 3)
    table.world.run(until=table.world.now + 20)
    assert len(first.session.config_peers()) == 3
    for peer in table.peers[:5]:
        peer.session.membership.trusted = {PeerId("p5")}
    table.peers[5].start().attach()
    table.until(lambda: "p5" in first.session.config_peers())
    assert len(first.session.config_peers()) == 4
    table.world.run(until=table.world.now + 30)
    assert set(first.session.config_peers()) == {"p0", "p1", "p2", "p3", "p4", "p5"}


# ---- by what one enters: every acceptor looks
def guarded(table: Table, revoked: dict[str, set[bytes]] | None = None, **shown: bytes) -> None:
    """A run by invite whose members have all seen these certificates; ``revoked``: what each has
    heard of.
    """
    table.place.doors = lambda peer: toy_doors(
        PeerId("p0"), lambda: table.world.now, shown, (revoked or {}).get(peer)
    )


@pytest.mark.parametrize("lying", [0, 1])
def test_of_two_who_show_an_invite_for_one_to_different_members_one_becomes_a_member(
    lying: int,
) -> None:
    table = Table(6, msgspec.structs.replace(SETTINGS, lying=lying))
    general = {f"p{index}": toy(f"p{index}", b"general") for index in range(1, 4)}
    once = {who: toy(who, b"once", uses=1) for who in ("p4", "p5")}
    for index in range(6):  # p4 has shown its own to one half, p5 to the other
        heard = {"p4": once["p4"]} if index % 2 else {"p5": once["p5"]}
        doors = toy_doors(PeerId("p0"), lambda: table.world.now, {**general, **heard})
        table.place.doors = _added(table.place.doors, f"p{index}", doors)
    first = table.found()
    for peer in table.peers[1:4]:
        peer.start().attach()
    table.until(lambda: len(first.session.config_peers()) == 4)
    for peer in table.peers[4:]:
        peer.start().attach()
    table.until(lambda: any(peer.session.completed >= 0 for peer in table.peers[4:]))
    round_of(table, 1, *table.peers[:4])  # the next is convened by one of the other half
    table.until(lambda: len(first.session.config_peers()) == 5)
    for number in range(2, 4):
        round_of(table, number, *table.peers[:4])
    table.wait(10)
    tallies = {peer.machine.journal.entries.tally.hash for peer in table.peers[:4]}
    assert len(tallies) == 1
    assert len(first.session.config_peers()) == 5
    assert len(set(first.session.config_peers()) & {"p4", "p5"}) == 1


@pytest.mark.parametrize("lying", [0, 1])
def test_of_two_who_show_an_invite_for_one_and_never_ask_to_be_members_one_gets_the_model(
    lying: int,
) -> None:
    table = Table(6, msgspec.structs.replace(SETTINGS, lying=lying))
    general = {f"p{index}": toy(f"p{index}", b"general") for index in range(1, 4)}
    once = {who: toy(who, b"once", uses=1) for who in ("p4", "p5")}
    for index in range(6):  # p4 has shown its own to one half, p5 to the other
        mine = "p4" if index % 2 == 0 else "p5"
        doors = toy_doors(PeerId("p0"), lambda: table.world.now, {**general, mine: once[mine]})
        table.place.doors = _added(table.place.doors, f"p{index}", doors)
    first = table.found()
    for peer in table.peers[1:4]:
        peer.start().attach()
    table.until(lambda: len(first.session.config_peers()) == 4)
    round_of(table, 1, *table.peers[:4])
    guests = [peer.start() for peer in table.peers[4:]]
    for peer in guests:
        give_role(table, peer.name, "observe")
    table.until(lambda: any(peer.session.completed >= 1 for peer in guests))
    round_of(table, 2, *table.peers[:4])
    table.wait(20)
    assert sorted(peer.session.completed for peer in guests) == [-1, 2]
    counted = {
        (peer.machine.journal.entries.tally.hash, len(peer.session.config_peers()))
        for peer in table.peers[:4]
    }
    assert counted == {(first.machine.journal.entries.tally.hash, 4)}
    assert first.machine.journal.entries.tally.size == 1
    refused = next(peer for peer in guests if peer.session.completed < 0)
    assert refused.session.waits.look(table.world.now).what.startswith("to be counted")


def test_every_member_hears_by_which_certificate_another_has_come() -> None:
    table = Table(3)
    shown = {who: toy(who, b"general") for who in ("p1", "p2")}
    guarded(table, **shown)
    first, second = table.found(), table.peers[1].start().attach()
    table.until(lambda: second.inside)
    table.peers[2].start().attach()
    table.until(lambda: len(first.session.config_peers()) == 3)
    table.wait(2)
    for peer in (first, second):
        let_in = [
            each for event in peer.heard if isinstance(event, ev.LetIn) for each in event.admitted
        ]
        assert (let_in[-1].peer, let_in[-1].certificate) == ("p2", shown["p2"])


def test_who_fetches_a_state_hears_by_which_certificates_the_members_have_come() -> None:
    table = Table(4)
    shown = {who: toy(who, b"general") for who in ("p1", "p2", "p3")}
    guarded(table, **shown)
    first, second = table.found(), table.peers[1].start().attach()
    table.until(lambda: second.inside)
    table.peers[2].start().attach()
    table.until(lambda: len(first.session.config_peers()) == 3)
    for number in range(1, 4):
        round_of(table, number, first, second)
    late = table.peers[3].start().attach()
    for _ in range(2):  # and again when it is started again
        table.until(lambda: late.inside)
        let_in = {
            each.peer: each.certificate
            for event in late.heard
            if isinstance(event, ev.LetIn)
            for each in event.admitted
        }
        assert {who: let_in.get(PeerId(who)) for who in shown} == shown
        late.kill()
        late.heard.clear()
        late.start().attach()


def _added(known: DoorsOf, who: str, doors: Doors) -> DoorsOf:
    return lambda peer: doors if peer == who else known(peer)


class Wide:
    """What a convener believes that lies: everybody may come, by nothing."""

    def warrant(self, peer: PeerId) -> Admitted | None:
        return Admitted(peer, b"")

    def guest(self, peer: PeerId) -> Admitted | None:
        return None

    def limited(self, peer: PeerId) -> bool:
        return False

    def name(self, admitted: Admitted) -> str:
        return ""

    def valid(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> bool:
        return True

    def objection(self, new: Collection[PeerId], admitted: Collection[Admitted]) -> str:
        return ""


def test_a_convener_that_lies_lets_in_nobody_who_has_no_certificate() -> None:
    table = Table(4)
    guarded(table, **{f"p{index}": toy(f"p{index}", b"general") for index in (1, 2)})
    table.place.doors = _added(table.place.doors, "p1", Wide())
    first = table.found()
    honest = [table.peers[0], table.peers[2]]
    for peer in table.peers[1:3]:
        peer.start().attach()
    table.until(lambda: len(first.session.config_peers()) == 3)
    table.peers[3].start().attach()  # it asks everybody, without an invite
    for number in range(1, 7):
        for peer in table.peers[:3]:
            peer.contribute(f"{number}/{peer.name}", 1.0)
        table.until(lambda number=number: all(event_round(each) >= number for each in honest))
    assert all("p3" not in event.config for peer in honest for event in peer.rounds())
    assert not table.peers[3].inside


def by_a_leaked_invite(*told: str) -> Table:
    """Six rounds of three members, while a fourth asks in by an invite whose revocation only
    ``told`` have heard of.
    """
    table = Table(4)
    shown = {f"p{index}": toy(f"p{index}", b"general") for index in (1, 2)}
    guarded(table, {who: {b"leaked"} for who in told}, **shown, p3=toy("p3", b"leaked"))
    first = table.found()
    for peer in table.peers[1:3]:
        peer.start().attach()
    table.until(lambda: len(first.session.config_peers()) == 3)
    table.peers[3].start().attach()
    for number in range(1, 7):
        round_of(table, number, *table.peers[:3])
    return table


def test_who_convenes_without_having_heard_of_a_revocation_is_overruled() -> None:
    table = by_a_leaked_invite("p1", "p2")  # p0 has not heard
    assert set(table.peers[0].session.config_peers()) == {"p0", "p1", "p2"}


def test_what_has_a_quorum_is_decided_whatever_one_member_holds_against_it() -> None:
    table = by_a_leaked_invite("p2")
    table.until(lambda: table.peers[2].session.config_peers() == ["p0", "p1", "p2", "p3"])


# ---- what is wrong with a sample
NUMEL, CHUNK = 8, 4
ENTRY = Entry(
    "log",
    3,
    bytes(32),
    bytes(32),
    tuple(Contributor(Member(PeerId(f"c{i}"), 0), bytes([i]) * 16, 1) for i in range(4)),
    (),
    (),
    NUMEL,
    CHUNK,
    "fp32",
    "mean",
    (Member(PeerId("p0"), 0),),
)
NEW = PeerId("new")


def fault_of(
    values: list[float], *, said: list[float] | None = None, chunk: int | None = None
) -> str:
    shown = torch.tensor(values).numpy().tobytes()
    drawn_chunk, wardens = draw_chunk(ENTRY, NEW)
    assert wardens == ["p0"]
    hashes = [bytes(32)] * 2
    hashes[drawn_chunk] = chunk_hash(torch.tensor(said or values).numpy().tobytes())
    result = memoryview(bytearray(torch.ones(NUMEL).numpy().tobytes()))
    return judge_sample(
        ENTRY, NEW, b"".join(hashes), drawn_chunk if chunk is None else chunk, shown, result
    )


def test_what_is_found_wrong_with_a_newcomers_work() -> None:
    assert Chunking("fp32", NUMEL, CHUNK).chunks == 2
    limit = 3.0 * 4**0.5  # times the mean's values
    assert fault_of([1.0, 2.0, -1.0, 0.5]) == ""
    assert fault_of([limit, limit, limit, limit * 0.999]) == ""
    assert "1.1 times as long" in fault_of([1.1 * limit] * 4)
    assert fault_of([0.0] * 4) == "its values are all zero"
    assert fault_of([1.0, float("nan"), 1.0, 1.0]) == "its values are not finite"
    assert "other values" in fault_of([1.0] * 4, said=[2.0] * 4)
    assert "another chunk" in fault_of([1.0] * 4, chunk=1 - draw_chunk(ENTRY, NEW)[0])
    assert "another chunk" in fault_of([1.0] * 3)


# ---- who votes twice
def test_two_votes_for_one_ballot_are_a_proof_that_anybody_can_check() -> None:
    table = Table(3)
    first, _, liar = table.all_in()
    session, machine = first.session, first.machine

    def vote(hash_: bytes, signature: bytes | None = None, ballot: int = 0) -> None:
        payload = vote_payload(*machine.slot, ballot, hash_)
        body = Accepted(ballot, hash_, signature or sign_as(liar.name, payload))
        first.do(
            lambda session, now: session.on_message(
                now, liar.name, ROUND + encode(Envelope(session.log, machine.round, 0, body))
            )
        )

    vote(b"a" * 32)
    vote(b"a" * 32)
    vote(b"b" * 32, ballot=1)
    vote(b"c" * 32, signature=b"x" * 32)
    assert not [
        event for event in first.heard if isinstance(event, ev.Equivocated)
    ]  # nothing is proven yet
    vote(b"c" * 32)
    (proof,) = [event for event in first.heard if isinstance(event, ev.Equivocated)]
    assert proof.peer == liar.name

    accused, words = check(proof.evidence, session.run, verify_as, first.name)
    assert (accused, "two" in words) == (liar.name, True), words
    with pytest.raises(RemoteProtocolError):
        check(proof.evidence, session.run, lambda *_: False, first.name)
