"""Somebody outside of a run that is entered by invite, who knows one node's address and speaks the
protocol well: it gets nothing.

Real nodes against a hand-made peer: it announces itself as a member, asks for the run, answers
greetings, opens streams, sends messages. Once with nothing in its hands, once as an ex-member:
banned, under a fresh key, with all certificates that it saw while it was a member.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import trio
from bad_input_kit import Member, Run, ended, new_run, one_round

from atoll.collectives.errors import NetworkError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Envelope, Join, encode
from atoll.node.capability import genuine
from atoll.node.membership_records import Beat
from atoll.node.membership_records import encode as beat
from atoll.node.net.announcements import announce
from atoll.node.net.framing import FrameReader, frame
from atoll.node.net.greeting import PROTOCOL as TOPIC
from atoll.node.net.greeting import VERSION, Answer, Hello, Proof
from atoll.node.net.network import PeerNetwork
from atoll.node.net.rendezvous import PROTOCOL as PEERS
from atoll.node.net.rendezvous import _News
from atoll.node.paths import find_paths
from atoll.node.service.run import ASK_MANIFEST
from atoll.node.session.actions import main_log
from atoll.node.session.session import MEMBERSHIP, ROUND
from atoll.node.standing import load_standing
from atoll.security.identity import Identity, load_or_create

LISTEN = ["/ip4/127.0.0.1/tcp/0"]


@pytest.fixture
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Member, Member]]:
    run = new_run(tmp_path_factory.mktemp("run"))
    organiser, b = run.organiser(), run.member("b")
    with ended(organiser, b):
        one_round(organiser, b)
        yield run, organiser, b


class Stranger:
    """A well-formed peer under a fresh key. ``shown``: certificates that it has seen, and shows in
    turn.
    """

    def __init__(self, run: Run, shown: Sequence[bytes] = ()) -> None:
        self.run, self.identity = run, Identity.generate()
        self.topic, self.organiser = run.signed.run_id, PeerId(run.signed.organiser)
        self.shown = [b"", *shown]
        self.network = PeerNetwork(
            self.identity, listen=LISTEN, bootstrap=[run.address], rng=random.Random(3)
        )
        self.messages = list[bytes]()  # of members, to this peer
        self.greetings = list[bytes]()  # what members showed this peer as openers
        self.answers = list[Answer]()  # what they answered this peer as an opener

    async def work(self) -> None:
        """Everything that may let it in, or lure a member into saying something."""
        async with trio.open_nursery() as nursery:
            self.network.on_message(
                self.topic,
                lambda peer, data: self.messages.append(data),
                greet=lambda peer: self.shown[-1],
                admit=lambda peer, what: self.greetings.append(what) or True,  # type: ignore[func-returns-value]
            )
            await nursery.start(self.network.run)
            with trio.fail_after(30):
                await self.network.connect(self.organiser)
            self.network.announce_run(self.topic)
            for what in self.shown:
                await self.announce(self.organiser, what)
                await self.announce("", b"")
                await self.announce(self.identity.peer, b"")
                await self.open(what)
            for _ in range(10):
                self.ask()
                await trio.sleep(0.2)
            nursery.cancel_scope.cancel()

    def ask(self) -> None:
        """Messages of the run, over the node's own way of sending them."""
        log = Envelope(main_log(self.topic), 1, 0, Join())
        for data in (ASK_MANIFEST, MEMBERSHIP + beat(Beat(answer=True)), ROUND + encode(log)):
            self.network.send(self.topic, self.organiser, data)

    async def announce(self, organiser: str, certificate: bytes) -> None:
        """Say to a member that we take part, and ask who else does; nothing of the run comes back
        that is news to a stranger.
        """
        stream = await self.network._host.open_stream(self.organiser, PEERS)
        here = self.network.addresses()
        news = announce(self.identity, self.topic, here, time.time(), organiser, certificate)
        said = _News(self.topic, (news,), True, organiser)
        await stream.send_all(frame(msgspec.msgpack.encode(said)))
        with trio.move_on_after(0.3):
            await stream.receive_some()
        await stream.aclose()

    async def open(self, what: bytes) -> None:
        """Greet by hand, so that a refusal is no reason to pause."""
        stream = await self.network._host.open_stream(self.organiser, TOPIC)
        reader = FrameReader(stream.receive_some, self.organiser)
        for said in (Hello(VERSION, self.topic), Proof(what)):
            await stream.send_all(frame(msgspec.msgpack.encode(said)))
            with trio.fail_after(10):
                payload = await reader.next()
            assert payload is not None
            self.answers.append(msgspec.msgpack.decode(payload, type=Answer))
        await stream.send_all(
            frame(ASK_MANIFEST)
            + frame(ROUND + encode(Envelope(main_log(self.topic), 1, 0, Join())))
        )
        with trio.move_on_after(0.3):
            await reader.next()
        await stream.aclose()


def got_nothing(stranger: Stranger, organiser: Member, b: Member) -> None:
    """No message, no certificate for its own key, no membership."""
    me = stranger.identity.peer
    assert stranger.messages == []
    assert stranger.greetings == []
    hellos, proofs = stranger.answers[::2], stranger.answers[1::2]
    assert {answer.code for answer in hellos} == {""}
    assert {answer.code for answer in proofs} <= {"E201", "E205"}
    for data in (answer.shown for answer in stranger.answers):
        found = genuine(data)
        assert found is None or found.peer != me
    one_round(organiser, b)
    for member in (organiser, b):
        assert me not in member.state()["members"]
        assert len(member.state()["members"]) == 2


def test_a_stranger_that_knows_an_address_gets_nothing(swarm: tuple[Run, Member, Member]) -> None:
    run, organiser, b = swarm
    stranger = Stranger(run)
    trio.run(stranger.work)
    got_nothing(stranger, organiser, b)


@pytest.mark.slow
def test_an_ex_member_with_the_certificates_of_others_gets_nothing(
    swarm: tuple[Run, Member, Member],
) -> None:
    """It was a member, is banned, comes back under a fresh key, and shows its old certificate and
    that of another member.
    """
    run, organiser, b = swarm
    paths = find_paths(str(run.folder / "b"))
    stolen = load_standing(paths, run.signed.run_id).certificate
    assert genuine(stolen) is not None
    assert load_or_create(paths.identity_file).peer == b.swarm.peer
    stranger = Stranger(run, [stolen])
    trio.run(stranger.work)
    got_nothing(stranger, organiser, b)


FLOOD_A_MINUTE = 500


class Crowd(threading.Thread):
    """Announces peers that do not exist in the run, one after another, until it is stopped; half of
    them as if they were in its certified place.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.stranger, self.there, self.said = Stranger(run), threading.Event(), 0
        self._over = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        trio.run(self._flood)

    def stop(self) -> None:
        """End it."""
        self._over.set()
        self.join(30)

    async def _flood(self) -> None:
        stranger = self.stranger
        async with trio.open_nursery() as nursery:
            await nursery.start(stranger.network.run)
            with trio.fail_after(30):
                await stranger.network.connect(stranger.organiser)
            stream = None
            while not self._over.is_set():
                fake = Identity.generate()
                port = 1024 + self.said % 60_000
                here = [f"/ip4/127.0.0.1/tcp/{port}"]  # nobody listens there
                news = announce(fake, stranger.topic, here, time.time())
                said = _News(stranger.topic, (news,), False, "")
                with contextlib.suppress(NetworkError):
                    if stream is None:
                        stream = await stranger.network._host.open_stream(stranger.organiser, PEERS)
                    await stream.send_all(frame(msgspec.msgpack.encode(said)))
                    self.said += 1
                    if self.said >= 30:
                        self.there.set()
                await trio.sleep(60 / FLOOD_A_MINUTE if self.there.is_set() else 0.01)
            nursery.cancel_scope.cancel()


@pytest.mark.slow
def test_a_join_takes_no_longer_while_strangers_announce_themselves(
    swarm: tuple[Run, Member, Member],
) -> None:
    """The organiser's node is the bootstrap of the invite, and has heard of hundreds who are not
    there.
    """
    run, _, _ = swarm

    def join_s(name: str) -> float:
        began = time.monotonic()
        with ended(run.member(name)):
            return time.monotonic() - began

    before = [join_s(f"before{number}") for number in range(2)]
    crowd = Crowd(run)
    crowd.start()
    try:
        assert crowd.there.wait(60)
        during = [join_s(f"during{number}") for number in range(2)]
    finally:
        crowd.stop()
    print(f"join {before} s, while {crowd.said} were announced {during} s")
    assert crowd.said > 30
    assert min(during) <= 1.5 * max(before) + 1.0
