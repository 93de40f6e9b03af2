"""Bans with real nodes: the organiser's reaches all and evicts, is told to whom it strikes,
outlives the organiser's node, and can be lifted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from bad_input_kit import PATIENCE_S, Member, Run, atoll, ended, new_home, new_run, one_round, soon
from process.test_garbage import Stranger
from seeds import RARE

from atoll.collectives.errors import NotAdmittedError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Envelope, Join, encode
from atoll.collectives.round.certificate import vote_payload
from atoll.node.home.paths import find_paths
from atoll.node.net.greeting import PROTOCOL, VERSION, GreetingHello, Proof
from atoll.node.net.transport.framing import frame
from atoll.node.run.membership_records import Beat
from atoll.node.run.membership_records import encode as beat
from atoll.node.run.proof import twice
from atoll.node.service.bans import PROOF
from atoll.node.service.ports import DOMAIN
from atoll.node.session.actions import main_log
from atoll.node.session.session import MEMBERSHIP, ROUND
from atoll.security.key_file import load_or_create

pytestmark = [*RARE]


def others(member: Member) -> dict[str, str]:
    """Whom a node has banned, and why."""
    banned: dict[str, str] = member.state()["banned"]
    return banned


@contextmanager
def four(folder: Path) -> Iterator[tuple[Run, list[Member]]]:
    """A run with its organiser and three more, after a round of all."""
    run = new_run(folder)
    members = [run.organiser(), *(run.member(name) for name in "bcd")]
    with ended(*members):
        one_round(*members)
        yield run, members


def test_the_organisers_ban_evicts_one_of_four_and_a_lift_lets_it_back(tmp_path: Path) -> None:
    with four(tmp_path) as (run, (organiser, b, c, bad)):
        who = bad.swarm.peer
        told = atoll(organiser.home, "ban", who[-8:], "--reason", "garbage")
        assert told.status == 0, told
        assert "for all its members" in told.out
        for member in (organiser, b, c):
            soon(lambda member=member: who in others(member), "the ban is known everywhere")
            assert others(member)[who].endswith("“garbage”")
        outcomes = one_round(organiser, b, c)
        assert all(who not in outcome.contributors for outcome in outcomes)
        one_round(organiser, b, c)  # an entry begins after the ban was known
        soon(
            lambda: all(who not in member.state()["members"] for member in (organiser, b, c)),
            "it is evicted",
        )
        soon(lambda: "E205" in bad.codes() or bad.state()["phase"] == "failed", "it is told")

        assert atoll(b.home, "unban", who).status == 78  # not b's to lift
        assert atoll(organiser.home, "unban", who).status == 0
        soon(lambda: not any(map(others, (organiser, b, c))), "the lift is known everywhere")
        bad.end()
        back = run.member("e")
        with ended(back):
            one_round(organiser, b, c, back)


@pytest.mark.slow
def test_after_a_ban_a_fresh_key_with_the_same_invite_is_in_until_the_invite_is_revoked(
    tmp_path: Path,
) -> None:
    run = new_run(tmp_path)
    invite, organiser = run.invite(), run.organiser()
    bad = Member(new_home(run.folder / "bad"), invite)
    with ended(organiser, bad):
        one_round(organiser, bad)
        told = atoll(organiser.home, "ban", bad.swarm.peer, "--revoke-invite")
        assert told.status == 0, told
        assert "is revoked: nobody enters by it any more" in told.out
        bad.end()  # else it would hand on to its other key what it has itself
        with pytest.raises(NotAdmittedError, match="revoked"):
            Member(new_home(run.folder / "fresh"), invite)
        assert len(organiser.state()["members"]) <= 2


def test_a_ban_on_one_machine_is_its_own_and_the_organisers_outlives_its_node(
    tmp_path: Path,
) -> None:
    with four(tmp_path) as (run, (organiser, b, c, d)):
        assert "from this machine" in atoll(b.home, "ban", c.swarm.peer).out
        assert list(others(b)) == [c.swarm.peer]
        assert others(organiser) == others(d) == {}
        assert atoll(b.home, "unban", c.swarm.peer).status == 0
        one_round(organiser, b, c, d)

        stranger = "12D3KooWGmMhkEcrdKBj9sqTYGDuiKMv1hDF5vjJoYk1uuheBuBS"
        assert atoll(organiser.home, "ban", stranger).status == 0
        soon(lambda: stranger in others(b), "b has the list")
        for invite, told in (
            (run.invite(peer=stranger), "only"),
            (withdrawn := run.invite(), "revoked"),
        ):
            if invite is withdrawn:
                assert atoll(organiser.home, "invite", "revoke", invite).status == 0
            with pytest.raises(NotAdmittedError, match=told):
                Member(new_home(run.folder / told), invite)
        organiser.end()
        late = run.folder / "late"
        told = atoll(b.home, "invite", "new")
        assert told.status == 0, told
        newcomer = Member(new_home(late), told.out.strip())
        with ended(newcomer):
            soon(lambda: stranger in others(newcomer), "handed on without the organiser")


def test_an_invite_for_one_lets_one_in_however_often_it_comes_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    organiser, b = run.organiser(), run.member("b")
    invite = run.invite(uses=1)
    with ended(organiser, b):
        first = Member(new_home(run.folder / "first"), invite)
        with ended(first):
            one_round(organiser, b, first)
        with pytest.raises(NotAdmittedError, match="has let in 1 already"):
            Member(new_home(run.folder / "second"), invite)
        back = Member(run.folder / "first", invite)
        with ended(back):
            one_round(organiser, b, back)


def test_an_observer_that_greets_again_without_its_invite_stays_an_observer(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    organiser, b = run.organiser(), run.member("b")
    with ended(organiser, b):
        one_round(organiser, b)
        stranger = Stranger(run, organiser, run.invite(role="observe"))
        victim, topic, members = PeerId(organiser.swarm.peer), stranger.topic, list[list[str]]()
        join = ROUND + encode(Envelope(main_log(topic), 1, 0, Join()))

        async def escalate() -> None:
            answered = trio.Event()
            async with trio.open_nursery() as nursery:
                await nursery.start(stranger.network.run)
                stranger.network.on_message(
                    topic,
                    lambda *_: answered.set(),
                    greet=lambda _: stranger.certificate,
                    admit=lambda *_: True,
                )
                await stranger.greet()
                with trio.fail_after(PATIENCE_S):
                    while not answered.is_set():
                        stranger.network.send(topic, victim, MEMBERSHIP + beat(Beat(answer=True)))
                        await trio.sleep(0.1)
                await stranger.pour(
                    PROTOCOL,
                    frame(msgspec.msgpack.encode(GreetingHello(VERSION, topic)))
                    + frame(msgspec.msgpack.encode(Proof(b""))),
                )
                for _ in range(3):
                    stranger.network.send(topic, victim, join)
                    await trio.to_thread.run_sync(one_round, organiser, b)
                    members.append(organiser.state()["members"])
                nursery.cancel_scope.cancel()

        trio.run(escalate)
        assert not any(stranger.network.peer in config for config in members)


def test_a_proof_is_checked_by_each_member_handed_on_and_bans_everywhere(tmp_path: Path) -> None:
    with four(tmp_path) as (run, (organiser, b, c, bad)):
        liar = load_or_create(find_paths(bad.home).identity_file)
        votes = [
            vote_payload(run.signed.run_id, "main/x", 1, bytes(32), 0, bytes([i]) * 32)
            for i in (1, 2)
        ]
        one, other = ((payload, liar.sign(DOMAIN, payload)) for payload in votes)
        framed = twice(PeerId(c.swarm.peer), one, other)  # c has not signed these
        witness = Stranger(run, organiser, run.invite())

        async def hand_over() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(witness.network.run)
                witness.network.on_message(
                    witness.topic,
                    lambda *_: None,
                    greet=lambda _: witness.certificate,
                    admit=lambda *_: True,
                )
                await witness.greet()
                for evidence in (framed, twice(liar.peer, one, other)):
                    witness.network.send(
                        witness.topic, PeerId(organiser.swarm.peer), PROOF + evidence.encode()
                    )
                    with trio.fail_after(PATIENCE_S):
                        while evidence.peer == liar.peer and liar.peer not in others(organiser):
                            await trio.sleep(0.05)
                    await trio.sleep(0.5)
                nursery.cancel_scope.cancel()

        trio.run(hand_over)
        for member in (organiser, b, c):
            soon(
                lambda member=member: list(others(member)) == [liar.peer],
                "the proof is everywhere, and nobody else is banned",
            )
        one_round(organiser, b, c)
        one_round(organiser, b, c)
        soon(
            lambda: all(liar.peer not in member.state()["members"] for member in (organiser, b, c)),
            "it is evicted",
        )
        audited = json.loads(atoll(b.home, "audit", run.signed.run_id, "--json").out)
        assert [(row["peer"], row["by"]) for row in audited["bans"]] == [
            (liar.peer, "this machine")
        ]
        assert atoll(b.home, "unban", liar.peer).status == 0
        assert others(b) == {}


def test_an_invite_to_observe_gives_the_model_and_no_part_in_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    organiser, b = run.organiser(), run.member("b")
    with ended(organiser, b):
        one_round(organiser, b)
        observer = Member(new_home(tmp_path / "observer"), run.invite(role="observe"))
        with ended(observer):
            with pytest.raises(NotAdmittedError) as caught:
                observer.swarm.contribute(samples=1, write=lambda vector: None).wait(PATIENCE_S)
            assert caught.value.code == "E206"
            one_round(organiser, b)
            soon(lambda: observer.anchor() == organiser.anchor(), "it has the model")
            assert observer.state()["role"] == "observe"
            assert set(organiser.state()["members"]) == {organiser.swarm.peer, b.swarm.peer}
            rows = json.loads(atoll(b.home, "peers", "--json").out)["peers"]
            row = next(row for row in rows if row["peer"] == observer.swarm.peer)
            assert (row["role"], row["member"]) == ("observe", False)
            rounds = [row["completed"] for row in rows if row["member"]]
            assert rounds == [b.state()["round"]] * 2  # entries that let members in are not counted


def test_a_round_of_real_nodes_is_computed_again_from_what_they_kept(tmp_path: Path) -> None:
    run = new_run(tmp_path, model="[audit]\nkeep_contributions = 2")
    organiser, b = run.organiser(), run.member("b")
    with ended(organiser, b):
        for _ in range(3):
            done = one_round(organiser, b)[0].round
        theirs = b.folder / "contributions"
        soon(
            lambda: len(list((organiser.folder / "contributions").rglob("*.signed"))) == 4,
            "both have signed the newest two",
        )
        soon(lambda: len(list(theirs.rglob("*.data"))) == 2, "b has kept its own")
        told = atoll(
            organiser.home,
            "audit",
            run.signed.run_id,
            "--recompute",
            str(done),
            "--from",
            str(theirs),
            "--json",
        )
        assert told.status == 0, told
        (found,) = json.loads(told.out)["recomputed"]
        assert (found["same"], found["round"], len(found["contributors"])) == (True, done, 2)
        assert (
            atoll(organiser.home, "audit", run.signed.run_id, "--recompute", str(done)).status == 78
        )
        for file in theirs.rglob("*.data"):
            file.write_bytes(bytes(len(file.read_bytes())))
        told = atoll(
            organiser.home,
            "audit",
            run.signed.run_id,
            "--recompute",
            str(done),
            "--from",
            str(theirs),
        )
        assert (told.status, "has signed" in told.err) == (77, True), told


def test_a_run_with_a_list_lets_in_whom_it_names_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`[join] policy = "allow"`, without the DHT: who is listed gets in with an invite's addresses;
    an invite alone is worth nothing.
    """
    monkeypatch.setenv("ATOLL_NETWORK__DHT", "false")
    listed = load_or_create(find_paths(new_home(tmp_path / "listed")).identity_file).peer
    run = new_run(tmp_path, model=f'[join]\npolicy = "allow"\nallow = ["{listed}"]')
    organiser = run.organiser()
    with ended(organiser):
        member = run.member("listed")
        with ended(member):
            one_round(organiser, member)
            assert organiser.status()["network"]["dht_peers"] == 0
            with pytest.raises(
                NotAdmittedError, match="only the peers that its manifest names"
            ) as caught:
                run.member("stranger")
            assert caught.value.code == "E201"


def test_a_newcomer_of_an_open_run_is_a_member_after_rounds_of_good_work(tmp_path: Path) -> None:
    run = new_run(tmp_path, model='[join]\npolicy = "open"\nprobation = 2')
    organiser = run.organiser()
    new = run.member("b")
    with ended(organiser, new):
        who = new.swarm.peer

        def row() -> dict[str, Any]:
            found = json.loads(atoll(organiser.home, "peers", "--json").out)["peers"]
            return next((each for each in found if each["peer"] == who), {})

        soon(lambda: row().get("probation") == {"good": 0, "of": 2}, "it is on probation")
        until = time.monotonic() + PATIENCE_S
        while who not in organiser.state()["members"]:
            assert time.monotonic() < until, row()
            ticket = new.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0))
            time.sleep(0.3)  # its hashes come before the round is decided
            outcome = organiser.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0)).wait(
                PATIENCE_S
            )
            assert {share.peer for share in outcome.contributors} == {organiser.swarm.peer}
            ticket.wait(PATIENCE_S)
            time.sleep(0.2)
        assert "probation" not in row()
        one_round(organiser, new)


def test_where_bans_need_a_quorum_the_organiser_alone_evicts_nobody(tmp_path: Path) -> None:
    run = new_run(tmp_path, model='[quorum]\nlying = 1\nbans = "quorum"')
    organiser, b, c, d, other = members = [run.organiser(), *map(run.member, "bcde")]
    with ended(*members):
        one_round(*members)
        who = other.swarm.peer
        told = atoll(organiser.home, "ban", who)
        assert "members evict it once 3 of them have banned it" in told.out
        soon(lambda: who in others(organiser), "its own node bans it")
        stranger = "12D3KooWGmMhkEcrdKBj9sqTYGDuiKMv1hDF5vjJoYk1uuheBuBS"
        assert atoll(organiser.home, "ban", stranger).status == 0
        soon(lambda: all(stranger in others(m) for m in (b, c, d)), "the list is everywhere")
        assert all(who not in others(member) for member in (b, c, d))
        one_round(b, c, d, other)
        assert who in b.state()["members"]
        for member in (b, c):
            assert atoll(member.home, "ban", who).status == 0
        one_round(organiser, b, c, d)
        one_round(organiser, b, c, d)
        soon(lambda: who not in d.state()["members"], "three members evict it")
        soon(lambda: who in others(d), "now the organiser's list keeps it out")
