"""Peers outside of a run that is entered by invite, who know one node's address and speak the
protocol well: one that tries all that may let it in, and one that announces a crowd.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import msgspec
import trio
from bad_input_kit import Member, Run, one_round

from atoll.collectives.errors import NetworkError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Envelope, Join, encode
from atoll.node.composing.announced import read_invite
from atoll.node.net.announcements import announce
from atoll.node.net.greeting import PROTOCOL as TOPIC
from atoll.node.net.greeting import VERSION, GreetingAnswer, GreetingHello, Proof
from atoll.node.net.network import PeerNetwork
from atoll.node.net.rendezvous import PROTOCOL as PEERS
from atoll.node.net.rendezvous import _News
from atoll.node.net.transport.framing import FrameReader, frame
from atoll.node.run.capability import genuine
from atoll.node.run.membership_records import Beat
from atoll.node.run.membership_records import encode as beat
from atoll.node.service.run import ASK_MANIFEST
from atoll.node.session.actions import main_log
from atoll.node.session.session import MEMBERSHIP, ROUND
from atoll.security.identity import Identity

LISTEN = ["/ip4/127.0.0.1/tcp/0"]
FLOOD_A_MINUTE = 500


class Stranger:
    """A well-formed peer under a fresh key. ``shown``: certificates that it has seen, and shows in
    turn.
    """

    def __init__(self, run: Run, shown: Sequence[bytes] = ()) -> None:
        self.run, self.identity = run, Identity.generate()
        self.topic, self.organiser = run.signed.run_id, PeerId(run.signed.organiser)
        self.shown = [b"", *shown]
        self.network = PeerNetwork(
            self.identity,
            listen=LISTEN,
            bootstrap=[run.address],
            rng=random.Random(3),
            read_invite=read_invite,
        )
        self.messages = list[bytes]()  # of members, to this peer
        self.greetings = list[bytes]()  # what members showed this peer as openers
        self.answers = list[GreetingAnswer]()  # what they answered this peer as an opener

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
        for said in (GreetingHello(VERSION, self.topic), Proof(what)):
            await stream.send_all(frame(msgspec.msgpack.encode(said)))
            with trio.fail_after(10):
                payload = await reader.next()
            assert payload is not None
            self.answers.append(msgspec.msgpack.decode(payload, type=GreetingAnswer))
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


class Crowd(threading.Thread):
    """Announces peers that do not exist in the run, FLOOD_A_MINUTE, until it is stopped.
    ``certified``: as members with a certificate, which they do not have; else as whoever has none.
    """

    def __init__(self, run: Run, *, certified: bool = False) -> None:
        super().__init__(daemon=True)
        self.stranger, self.there, self.said = Stranger(run), threading.Event(), 0
        self.organiser = self.stranger.organiser if certified else ""
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
                news = announce(fake, stranger.topic, here, time.time(), self.organiser)
                said = _News(stranger.topic, (news,), False, self.organiser)
                try:
                    if stream is None:
                        stream = await stranger.network._host.open_stream(stranger.organiser, PEERS)
                    await stream.send_all(frame(msgspec.msgpack.encode(said)))
                except NetworkError:  # who says what is untrue is hung up on; it calls again
                    stream = None
                    await trio.sleep(0.5)
                    continue
                self.said += 1
                if self.said >= 30:
                    self.there.set()
                await trio.sleep(60 / FLOOD_A_MINUTE if self.there.is_set() else 0.01)
            nursery.cancel_scope.cancel()
