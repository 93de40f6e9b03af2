"""What a run's node knows of its members: where they are, from their own records, and whether they
are enough to decide a round.
"""

from __future__ import annotations

import os
import platform
import queue
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from bad_input_kit import LAYOUT, NUMEL, Member, Run, atoll, ended, new_run, odd, one_round, soon

from atoll.collectives import messages as m
from atoll.collectives.engine import EngineThread
from atoll.collectives.errors import (
    NetworkError,
    NotAdmittedError,
    PeerUnreachableError,
    RemoteProtocolError,
    SwarmClosedError,
)
from atoll.collectives.exchange import ResultComplete
from atoll.collectives.identifiers import PeerId
from atoll.node.composing.announced import read_invite
from atoll.node.composing.manifests import signed_run
from atoll.node.composing.parts import context_of
from atoll.node.control.protocol import JoinRequest
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient
from atoll.node.manifest import save_run
from atoll.node.net.network import PeerNetwork
from atoll.node.net.transport.addresses import split_peer
from atoll.node.net.transport.faults import LIMIT
from atoll.node.run.doors import right_of
from atoll.node.run.invite import make_invite
from atoll.node.run.membership_records import Beat, Record, Records, encode, sign_record
from atoll.node.service import node
from atoll.node.service.bans import MESSAGE
from atoll.node.service.buffers import BufferPool
from atoll.node.service.facts import peers_of
from atoll.node.service.ports import DOMAIN
from atoll.node.service.run import ASK_MANIFEST, MANIFEST, RunService
from atoll.node.session import events as ev
from atoll.node.session.actions import main_log
from atoll.node.session.session import MEMBERSHIP, ROUND
from atoll.security.identity import Identity

BOUND_S = 60
LISTEN = ("/ip4/127.0.0.1/tcp/0",)


async def bounded(main: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    """Run it with a nursery that ends with it."""
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            await main(nursery)
            nursery.cancel_scope.cancel()


def test_a_member_is_dialled_at_the_addresses_of_its_record_with_no_bootstrap_left(
    tmp_path: Path,
) -> None:
    """No bootstrap, no announcement, no DHT: only the record, as a third member passed it on."""
    run, other = new_run(tmp_path), Identity.generate()
    invite = make_invite(run.signed.run_id, (), run.identity, now_s=time.time())
    certificate = invite.certify(other, time.time()).encode()

    async def main(nursery: trio.Nursery) -> None:
        a, b = (
            PeerNetwork(key, listen=LISTEN, read_invite=read_invite)
            for key in (run.identity, other)
        )
        heard = trio.Event()
        b.on_message(
            run.signed.run_id, lambda peer, data: heard.set(), greet=lambda peer: certificate
        )
        await nursery.start(a.run)
        await nursery.start(b.run)
        engine = EngineThread(a.peer, emit=lambda event: None)
        service = service_of(run, a, engine, nursery)
        nursery.start_soon(service.run)
        await service.known.wait()
        assert service.session is not None
        membership = service.session.membership
        mine = membership.record(a.peer)
        assert mine is not None
        assert [f"{address}/p2p/{a.peer}" for address in mine.addresses] == a.addresses() != []
        with pytest.raises(PeerUnreachableError, match="no address"):
            await a.connect(b.peer)

        here = tuple(split_peer(address)[1] for address in b.addresses())
        record = Record(
            run.signed.run_id,
            b.peer,
            1,
            round((time.time() + 30.0) * 1000),
            here,
            1,
            certificate=certificate,
        )
        passed_on = sign_record(record, lambda data: other.sign(DOMAIN, data))
        membership.learn(trio.current_time(), [passed_on], Identity.generate().peer)
        await heard.wait()  # the session asks whoever it knows for the log
        assert [
            (each.addresses, each.round, each.member) for each in peers_of(service) if not each.you
        ] == [(here, 1, False)]
        service.stop()
        await service.ended.wait()
        engine.stop()

    trio.run(bounded, main)


def service_of(
    run: Run, network: PeerNetwork, engine: EngineThread, nursery: trio.Nursery
) -> RunService:
    """The organiser's run at a node in this process; not running yet."""
    context = context_of(
        run.identity,
        find_paths(run.home),
        network,
        engine,
        nursery,
        random.Random(1),
        lambda event: None,
        BufferPool(),
    )
    return RunService(context, run.signed.run_id, network.peer, signed_run(run.signed), b"")


@asynccontextmanager
async def organisers_node(run: Run, nursery: trio.Nursery) -> AsyncGenerator[RunService]:
    """The organiser's run in this process, once its session is there."""
    network = PeerNetwork(run.identity, listen=LISTEN, read_invite=read_invite)
    await nursery.start(network.run)
    engine = EngineThread(network.peer, emit=lambda event: None)
    service = service_of(run, network, engine, nursery)
    nursery.start_soon(service.run)
    await service.known.wait()
    yield service
    service.stop()
    await service.ended.wait()
    engine.stop()


def test_nobody_keeps_a_newcomer_out_by_a_certificate_that_it_made_for_it(tmp_path: Path) -> None:
    """Who holds the seed of any invite, as one to observe, can certify another's peer id by it, but
    signs no record for that.
    """
    run, newcomer, liar = new_run(tmp_path), Identity.generate(), Identity.generate()
    run_id, now_s = run.signed.run_id, time.time()
    own = make_invite(run_id, (), run.identity, now_s=now_s, uses=1).certify(newcomer, now_s)
    leaked = make_invite(run_id, (), run.identity, now_s=now_s, role="observe")
    made = leaked.certify(newcomer, now_s)

    async def main(nursery: trio.Nursery) -> None:
        async with organisers_node(run, nursery) as service:
            assert service.session is not None
            service.doors.note(newcomer.peer, own.encode())  # by its greeting
            before = service.doors.warrant(newcomer.peer)
            assert before is not None
            expires = round((now_s + 30.0) * 1000)
            forged = sign_record(
                Record(run_id, newcomer.peer, 1, expires, certificate=made.encode()),
                lambda data: liar.sign(DOMAIN, data),
            )
            service.session.on_message(
                trio.current_time(), liar.peer, MEMBERSHIP + encode(Records((forged,)))
            )
            assert service.doors.warrant(newcomer.peer) == before

    trio.run(bounded, main)


def test_the_log_says_what_a_members_invite_is_for(tmp_path: Path) -> None:
    """One that has shown its certificate to another member only, and greets this one without, has
    no other role here.
    """
    run, helper = new_run(tmp_path), Identity.generate()
    run_id, now_s = run.signed.run_id, time.time()
    invite = make_invite(run_id, (), run.identity, now_s=now_s, role="aggregate")
    came = right_of(invite.certify(helper, now_s)).admitted

    async def main(nursery: trio.Nursery) -> None:
        async with organisers_node(run, nursery) as service:
            assert service.session is not None
            assert service.session.membership.roles == {}
            service.on_event(ev.LetIn((came,)))
            assert service.session.membership.roles == {helper.peer: "aggregate"}

    trio.run(bounded, main)


def test_a_member_gets_no_other_role_by_what_was_revoked_or_has_expired(tmp_path: Path) -> None:
    """A member is at home, whatever it shows; what it shows counts only while it would let in
    somebody.
    """
    run, helper = new_run(tmp_path), Identity.generate()
    run_id, now_s = run.signed.run_id, time.time()
    came, train, late = (
        make_invite(run_id, (), run.identity, now_s=now_s, role=role)
        for role in ("aggregate", "train", "train")
    )
    past = make_invite(run_id, (), run.identity, now_s=1_000_000.0).certify(helper, 1_000_000.0)

    async def main(nursery: trio.Nursery) -> None:
        async with organisers_node(run, nursery) as service:
            service.gate._members = service._members = lambda: [helper.peer]  # type: ignore[method-assign]
            assert service._admit(helper.peer, came.certify(helper, now_s).encode())
            service.banning.lists.revoke(train.capability.id, run.identity)
            for shown in (train.certify(helper, now_s), past):
                assert service._admit(helper.peer, shown.encode())
                assert service.roles == {helper.peer: "aggregate"}
            assert service._admit(helper.peer, late.certify(helper, now_s).encode())
            assert service.roles == {}

    trio.run(bounded, main)


def test_an_invite_for_one_lets_go_of_whom_it_let_in_here_once_the_log_has_another(
    tmp_path: Path,
) -> None:
    run, (won, lost) = new_run(tmp_path), (Identity.generate(), Identity.generate())
    run_id, now_s = run.signed.run_id, time.time()
    invite = make_invite(run_id, (), run.identity, now_s=now_s, uses=1)
    entered = right_of(invite.certify(won, now_s)).admitted

    async def main(nursery: trio.Nursery) -> None:
        async with organisers_node(run, nursery) as service:
            session = service.session
            assert session is not None
            session.found(trio.current_time(), LAYOUT, torch.zeros(NUMEL))
            assert session.machine is not None
            assert service._admit(lost.peer, invite.certify(lost, now_s).encode())
            entries = session.machine.journal.entries
            entries.tally = entries.tally.after([entered]) or entries.tally
            service.on_event(ev.LetIn((entered,)))
            assert set(service.entrants.known) == {won.peer}
            with pytest.raises(NotAdmittedError, match="has let in 1 already"):
                service._admit(lost.peer, invite.certify(lost, now_s).encode())

    trio.run(bounded, main)


def test_what_a_node_tells_names_neither_machine_nor_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a member gets from a node whose script has founded the run and contributes:
    manifest, records, log, heartbeats.
    """
    machine, user = (
        "the-name-of-this-machine",
        "the-name-of-its-user",
    )  # longer than what signatures hold by chance
    uname = os.uname_result((os.uname().sysname, machine, *os.uname()[2:]))
    monkeypatch.setattr(os, "uname", lambda: uname)
    for module, name in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
        monkeypatch.setattr(module, name, lambda *_: machine)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, user)
    monkeypatch.setenv("HOSTNAME", machine)
    run, other = new_run(tmp_path), Identity.generate()
    invite = make_invite(run.signed.run_id, (), run.identity, now_s=time.time())
    certificate = invite.certify(other, time.time()).encode()
    told = list[bytes]()

    async def main(nursery: trio.Nursery) -> None:
        a, b = (
            PeerNetwork(key, listen=LISTEN, read_invite=read_invite)
            for key in (run.identity, other)
        )
        await nursery.start(a.run)
        await nursery.start(b.run)
        kinds, enough = set[bytes](), trio.Event()

        def hear(peer: PeerId, data: bytes) -> None:
            told.append(data)
            kinds.add(data[:1])
            if {MANIFEST, MEMBERSHIP, ROUND} <= kinds and any(b"beat" in each for each in told):
                enough.set()

        b.on_message(run.signed.run_id, hear, greet=lambda peer: certificate)
        with EngineThread(a.peer, emit=lambda event: None) as engine:
            service = service_of(run, a, engine, nursery)
            nursery.start_soon(service.run)
            await service.known.wait()
            service.driven.found(trio.current_time(), LAYOUT, torch.zeros(NUMEL))
            b.add_addresses(a.peer, tuple(split_peer(address)[1] for address in a.addresses()))
            b.send(run.signed.run_id, a.peer, ASK_MANIFEST)
            b.send(run.signed.run_id, a.peer, MEMBERSHIP + encode(Beat(True)))
            b.send(
                run.signed.run_id,
                a.peer,
                ROUND + m.encode(m.Envelope(main_log(run.signed.run_id), 0, 0, m.Fetch())),
            )
            await enough.wait()
            service.stop()
            await service.ended.wait()

    trio.run(bounded, main)
    named = [machine, user, str(tmp_path), str(Path.home()) + "/"]
    assert [(name, data) for name in named for data in told if name.encode() in data] == []


def test_what_the_engine_tells_after_the_end_of_a_run_reaches_nobody(tmp_path: Path) -> None:
    """The bytes of a round complete while the run is being closed: its convener would propose, and
    vote in a journal that is closed.
    """
    run = new_run(tmp_path)

    async def main(nursery: trio.Nursery) -> None:
        network = PeerNetwork(run.identity, listen=LISTEN, read_invite=read_invite)
        told = queue.SimpleQueue[object]()
        await nursery.start(network.run)
        with EngineThread(network.peer, emit=told.put) as engine:
            service = service_of(run, network, engine, nursery)
            nursery.start_soon(service.run)
            await service.known.wait()
            now = trio.current_time()
            service.driven.found(now, LAYOUT, torch.zeros(NUMEL))
            service.driven.attach(now, LAYOUT)
            service.driven.sessions[0].contribute(now, bytes(16), 1, torch.ones(NUMEL))
            while not isinstance(event := await trio.to_thread.run_sync(told.get), ResultComplete):
                pass
            service.stop()
            await service.ended.wait()
            votes = find_paths(run.home).state_dirs(run.signed.run_id, 1)[0] / "journal" / "entries"
            before = votes.read_bytes()  # the genesis, and no vote
            service.on_exchange(event)
            service.on_link(PeerId("other"), True)
            service.on_gone(PeerId("other"))
            assert service.error is None
            assert votes.read_bytes() == before
            assert not service.decidable
            with pytest.raises(SwarmClosedError, match="ended its part"):
                _ = service.driven

    trio.run(bounded, main)


def test_everybody_who_waits_for_a_run_that_nobody_knows_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The invite's bearer gives up; another client, that has only named the run, must not wait on."""
    run, me = new_run(tmp_path), Identity.generate()
    monkeypatch.setattr(node, "MANIFEST_PATIENCE_S", 0.5)
    told = list[str]()

    async def main(nursery: trio.Nursery) -> None:
        network = PeerNetwork(me, listen=LISTEN, read_invite=read_invite)
        paths = find_paths(tmp_path / "other")
        paths.ensure()
        await nursery.start(network.run)
        with EngineThread(network.peer, emit=lambda event: None) as engine:
            context = context_of(
                me,
                paths,
                network,
                engine,
                nursery,
                random.Random(1),
                lambda event: None,
                BufferPool(),
            )
            service = node.Node(context, private=False, parent_pid=0)

            async def wait(enter: Callable[[], Awaitable[object]]) -> None:
                with pytest.raises(NetworkError) as refused:
                    await enter()
                told.append(refused.value.code)

            async with trio.open_nursery() as waiting:
                request = JoinRequest(run.invite(), b"")
                waiting.start_soon(
                    wait, lambda: service.join(request, lambda stage, done, total: None)
                )
                while not service.by_id:
                    await trio.lowlevel.checkpoint()
                waiting.start_soon(wait, lambda: service.find_run(run.signed.run_id))

    trio.run(bounded, main)
    assert told == ["E110", "E110"]


@pytest.mark.slow
def test_nodes_say_where_members_are_and_when_too_few_are_there(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    a = run.organiser()
    with ended(a):
        b = run.member("b")
        with ended(b):
            c = run.member("c")
            with ended(c):
                one_round(a, b, c)

                def rows() -> dict[str, dict[str, Any]]:
                    with NodeClient.connect(c.paths) as client:
                        return {row["peer"]: row for row in client.peers("")}

                everybody = {
                    m.swarm.peer: [split_peer(x)[1] for x in m.status()["network"]["addresses"]]
                    for m in (a, b, c)
                }
                soon(
                    lambda: {peer: row["addresses"] for peer, row in rows().items()} == everybody,
                    "all addresses are known",
                )
                assert [peer for peer, row in rows().items() if row["organiser"]] == [a.swarm.peer]
                held = {"reachable": 3, "members": 3, "needed": 2, "held": True}
                soon(lambda: c.state()["quorum"] == held, "all are reachable")
                lack = "no quorum: 1 of 3 members reachable; the open round waits for 2"
                stopped = (a.pid, b.pid)
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                try:
                    soon(
                        lambda: c.state()["quorum"] == {**held, "reachable": 1, "held": False},
                        "two are missed",
                    )
                    assert lack in atoll(c.home, "status").out
                    assert atoll(c.home, "peers").out.splitlines()[-1] == lack
                finally:
                    for pid in stopped:
                        os.kill(pid, signal.SIGCONT)
                soon(lambda: c.state()["quorum"] == held, "they are back")
                one_round(a, b, c)


@pytest.mark.slow
def test_a_script_that_leaves_without_a_quorum_is_not_held(tmp_path: Path) -> None:
    """Its node would wait for a decision for an hour; this test would not."""
    run = new_run(tmp_path)
    a, b = run.organiser(), run.member("b", command=odd("patient"))
    try:
        one_round(a, b)
        os.kill(a.pid, signal.SIGSTOP)
        try:
            pending = b.swarm.contribute(samples=1, write=lambda out: out.fill_(1.0))
            b.swarm.leave()  # the node sees within a second that it waits in vain
            assert b.swarm.connected
            assert not pending.done()
            b.end()
        finally:
            os.kill(a.pid, signal.SIGCONT)
    finally:
        a.swarm.close()
        b.swarm.close()


@pytest.mark.slow
def test_a_run_that_was_founded_twice_says_so_at_both_nodes(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    paths, marker = find_paths(run.home), find_paths(run.home).founded_file(run.signed.run_id)
    with ended(a := run.organiser()), ended(b := run.member("b")):
        one_round(a, b)
        assert marker.exists()
    shutil.rmtree(paths.state_dir)
    marker.unlink()  # with it the organiser would wait for another member
    save_run(paths, run.signed)
    with ended(a := run.organiser()), ended(b := run.member("b")):
        for member, other in ((a, b), (b, a)):
            soon(lambda m=member: "E305" in m.codes(), "both have heard of it")
            told = (
                f"{other.swarm.peer[-8:]} is on another history of this run; it was founded twice"
            )
            assert member.state()["trouble"]["message"] == told
            assert "other history" in atoll(member.home, "peers").out
            assert member.log().count(told) == 1
        one_round(a)  # alone it was before, and is now
        assert a.state()["trouble"]["code"] == "E305"


@contextmanager
def killed(*members: Member) -> Iterator[None]:
    """Their nodes die at the end, and do not leave."""
    try:
        yield
    finally:
        for member in members:
            os.kill(member.pid, signal.SIGKILL)
            member.swarm.close()


@pytest.mark.slow
def test_an_old_copy_of_a_home_that_decides_alone_is_named_at_both_nodes(tmp_path: Path) -> None:
    """The copy is from before anybody else was let in, and nobody else is there when it starts. Its
    owner gives its history up as the message says.
    """
    run = new_run(tmp_path)
    paths = find_paths(run.home)
    with ended(a := run.organiser()):
        one_round(a)
    shutil.copytree(paths.state_dir, tmp_path / "copy")
    a, b, c = run.organiser(), run.member("b"), run.member("c")
    with killed(a, b, c):
        one_round(a, b, c)
        one_round(a, b, c)
    shutil.rmtree(paths.state_dir)
    shutil.copytree(tmp_path / "copy", paths.state_dir)
    with killed(a := run.organiser()):
        one_round(a)
        with killed(b := run.member("b"), c := run.member("c")):
            for member in (a, b, c):
                soon(lambda m=member: "E305" in m.codes(), "all have heard of it")
            mine, theirs = (
                re.findall(
                    r"entry (\d+) is (\w+) here and (\w+) there",
                    member.state()["trouble"]["message"],
                )
                for member in (a, b)
            )
            assert mine == [(at, here, there) for at, there, here in theirs] != []
            one_round(b, c)  # two of three are a quorum
    shutil.rmtree(paths.state_dir / "runs")
    save_run(paths, run.signed)
    with ended(b := run.member("b")), ended(c := run.member("c")), ended(a := run.organiser()):
        one_round(a, b, c)
        assert a.state()["trouble"] is None


@pytest.mark.slow
def test_in_a_large_configuration_lanes_are_opened_on_demand_and_let_go(tmp_path: Path) -> None:
    """What is large is made small here: no lane is kept that is not in use."""
    run, few = new_run(tmp_path), odd("lanes")
    with (
        ended(a := run.organiser(command=few)),
        ended(b := run.member("b", command=few)),
        ended(c := run.member("c", command=few)),
    ):
        members = [a, b, c]
        for _ in range(2):
            one_round(*members)
            soon(
                lambda: not any(member.status()["network"]["lanes"] for member in members),
                "idle lanes are let go of",
            )
        with ended(d := run.member("d", command=few)):
            assert d.anchor() == a.anchor()
            one_round(*members, d)


def test_rounds_do_not_wait_for_who_sends_lists_of_bans_that_are_none(tmp_path: Path) -> None:
    """The network shuts it out for a minute; the session's budgets must know that, too, or each
    round waits its grace for a member that is not heard.
    """
    run, other = new_run(tmp_path), Identity.generate()

    async def main(nursery: trio.Nursery) -> None:
        network = PeerNetwork(run.identity, listen=LISTEN, read_invite=read_invite)
        await nursery.start(network.run)
        engine = EngineThread(network.peer, emit=lambda event: None)
        service = service_of(run, network, engine, nursery)
        nursery.start_soon(service.run)
        await service.known.wait()
        sent = 0
        while not service.budgets.deaf_to(trio.current_time(), other.peer):
            with pytest.raises(RemoteProtocolError):
                service._on_message(other.peer, MESSAGE + b"no list")
            sent += 1
            assert sent <= LIMIT
        assert sent == LIMIT
        service.stop()
        await service.ended.wait()
        engine.stop()

    trio.run(bounded, main)
