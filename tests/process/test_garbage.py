"""Garbage and oversized frames to every port of a node: by strangers, by libp2p peers, by an
admitted member, and over the control socket.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest
import trio
from bad_input_kit import Member, Run, ended, new_run, one_round
from seeds import RARE

from atoll.collectives import messages as m
from atoll.collectives.errors import SwarmClosedError
from atoll.collectives.group import Certified, Entry, Part, Plan
from atoll.collectives.group import Member as Member_
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.node.client.link import Link
from atoll.node.composing.announced import read_invite
from atoll.node.control import protocol as p
from atoll.node.joining import NodeClient
from atoll.node.net import lanes, streams
from atoll.node.net.dht.node import PROTOCOL as KAD
from atoll.node.net.network import PeerNetwork
from atoll.node.net.rendezvous import PROTOCOL as RENDEZVOUS
from atoll.node.net.transport.lane_sockets import MAGIC
from atoll.node.run.invite import parse_invite
from atoll.node.session.actions import main_log
from atoll.security.identity import Identity

pytestmark = [*RARE]

RNG = random.Random(7)
NOISE = [
    b"",
    b"\n",
    RNG.randbytes(1),
    RNG.randbytes(100),
    RNG.randbytes(5000),
    b"\xff" * 300_000,
    bytes(300_000),
    b"\x13/multistream/1.0.0\n" + RNG.randbytes(2000),
    b"\x13/multistream/1.0.0\n\x07/noise\n" + struct.pack(">H", 65_535) + RNG.randbytes(65_535),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    MAGIC + RNG.randbytes(48),
    MAGIC + bytes(48) + RNG.randbytes(10_000),
    MAGIC,
    struct.pack(">I", 0xFFFFFFFF) + RNG.randbytes(1000),
    struct.pack(">I", (1 << 20) + 1) + RNG.randbytes(1000),
    struct.pack(">I", 100) + RNG.randbytes(100),
    struct.pack(">I", 5) + b"cut",
    struct.pack(">I", 0) * 1000,
]
PROTOCOLS = [
    streams.PROTOCOL,
    lanes.PROTOCOL,
    KAD,
    RENDEZVOUS,
    "/ipfs/ping/1.0.0",
    "/ipfs/id/1.0.0",
]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Member, Member]]:
    """Two members."""
    run = new_run(tmp_path_factory.mktemp("run"))
    with ended(a := run.organiser()), ended(b := run.member("b")):
        one_round(a, b)
        yield run, a, b


@pytest.fixture(autouse=True)
def unharmed(swarm: tuple[Run, Member, Member]) -> Iterator[None]:
    """After each test the same two nodes commit a round over both, to the same anchor; no traceback
    was written.
    """
    _, a, b = swarm
    pids = (a.pid, b.pid)
    yield
    one_round(a, b)
    assert a.anchor() == b.anchor()
    assert (a.pid, b.pid) == pids
    for member in (a, b):
        assert member.swarm.reattached == 0
        assert member.state()["phase"] == "running"
        assert "Traceback" not in member.log(), member.log()


def ports(member: Member) -> list[int]:
    """All TCP ports its node listens on."""
    found = psutil.Process(member.pid).net_connections(kind="tcp")
    return sorted(
        {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}
    )


def throw(kind: int, address: object, data: bytes) -> None:
    """Connect, send, read what comes within a moment, close."""
    with socket.socket(kind, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
        sock.settimeout(0.3)
        sock.connect(address)  # type: ignore[arg-type]
        sock.sendall(data)
        sock.recv(65_536)


def test_strangers_on_every_tcp_port(swarm: tuple[Run, Member, Member]) -> None:
    for member in swarm[1:]:
        listening = ports(member)
        assert len(listening) == 2  # libp2p and lanes
        for port in listening:
            for data in NOISE:
                throw(socket.AF_INET, ("127.0.0.1", port), data)


def test_a_crowd_that_says_nothing(swarm: tuple[Run, Member, Member]) -> None:
    _, a, b = swarm
    crowd: list[socket.socket] = []
    try:
        for port in ports(a):
            for _ in range(150):
                crowd.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        one_round(a, b)
    finally:
        for sock in crowd:
            sock.close()


def test_the_control_socket(swarm: tuple[Run, Member, Member]) -> None:
    _, a, _ = swarm
    path = str(a.paths.control_socket)
    hello = p.frame(p.Hello(1, (p.VERSION,), os.getpid()))
    for data in NOISE:
        throw(socket.AF_UNIX, path, data)
        throw(socket.AF_UNIX, path, hello + data)
    idle = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(20)]
    for sock in idle:
        sock.connect(path)
    assert a.state()["phase"] == "running"
    for sock in idle:
        sock.close()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (msgspec.msgpack.encode({"type": "hello", "id": 1, "versions": [99], "pid": 1}), "E140"),
        (msgspec.msgpack.encode({"type": "hello", "id": 1, "versions": [], "pid": 1}), "E141"),
        (msgspec.msgpack.encode({"type": "status", "id": 1}), "E142"),
        (msgspec.msgpack.encode({"type": "nonsense", "id": 1}), "E141"),
        (msgspec.msgpack.encode([[[[]]]] * 1000), "E141"),
        (b"\x91" * 100_000, "E141"),
        (b"\xc1", "E141"),
    ],
)
def test_a_first_message_that_is_wrong_is_answered_with_its_code(
    swarm: tuple[Run, Member, Member], body: bytes, code: str
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect(str(swarm[1].paths.control_socket))
        sock.sendall(struct.pack(">I", len(body)) + body)
        answers, frames = [], p.answer_frames()
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(65_536):
                answers += frames.feed(data)
    assert isinstance(answers[-1], p.Failure)
    assert answers[-1].code == code


def test_requests_with_absurd_values(swarm: tuple[Run, Member, Member]) -> None:
    _, a, _ = swarm
    link = Link.connect(a.paths.control_socket)
    try:
        for make in (
            lambda id_: p.JoinRun(id_, p.JoinRequest(invite="atoll2:" + "a" * 5000)),
            lambda id_: p.JoinRun(id_, p.JoinRequest(manifest=b"\xff" * 1000)),
            lambda id_: p.JoinRun(id_, p.JoinRequest()),
            lambda id_: p.FindRun(id_, "\0" * 200),
            lambda id_: p.Lease(id_),
            lambda id_: p.Contribute(id_, bytes(16), 1),
            lambda id_: p.ReduceStart(id_, "x"),
            lambda id_: p.Leave(id_, "no such run"),
        ):
            call = link.submit(make)
            assert link.wait_for(lambda call=call: call.done, 30)
            assert call.error is not None
            assert call.error.code[0] == "E"
            assert call.refused
    finally:
        link.close()


class Stranger:
    """A libp2p node of this test's own, which breaks rules; with an invite it is admitted first."""

    def __init__(self, run: Run, victim: Member, invite: str = "") -> None:
        self.run, self.victim = run, victim
        identity = Identity.generate()
        while identity.peer > victim.swarm.peer:  # the smaller peer offers the lane
            identity = Identity.generate()
        self.certificate = (
            parse_invite(invite, now_s=time.time()).certify(identity, time.time()).encode()
            if invite
            else b""
        )
        self.network = PeerNetwork(
            identity,
            listen=["/ip4/127.0.0.1/tcp/0"],
            bootstrap=[run.address],
            rng=random.Random(3),
            read_invite=read_invite,
        )
        self.topic = run.signed.run_id

    async def greet(self) -> bytes:
        """Nothing else to do than to wait for the connection; returns the victim's peer id."""
        with trio.fail_after(30):
            while not self.network.connected(PeerId(self.victim.swarm.peer)):
                await trio.sleep(0.05)
        return self.victim.swarm.peer.encode()

    async def pour(self, protocol: str, data: bytes) -> None:
        """One stream of a protocol, filled with ``data``."""
        with contextlib.suppress(Exception), trio.move_on_after(2):
            stream = await self.network._host.open_stream(PeerId(self.victim.swarm.peer), protocol)
            await stream.send_all(data)
            with trio.move_on_after(0.1):
                await stream.receive_some()
            await stream.aclose()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_libp2p_peer_on_every_protocol(swarm: tuple[Run, Member, Member], protocol: str) -> None:
    run, a, _ = swarm
    stranger = Stranger(run, a)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(stranger.network.run)
            await stranger.greet()
            for data in NOISE:
                await stranger.pour(protocol, data)
            nursery.cancel_scope.cancel()

    trio.run(main)
    if protocol.startswith("/atoll/"):
        assert a.status()["network"]["faults"][stranger.network.peer] > 0


def absurd(run: str) -> list[bytes]:
    """Well-formed messages of the round protocol that no honest member would send."""
    main, much, some = main_log(run), 1 << 40, bytes(32)
    layout = make_layout([("w", (3,))])
    entry = Entry(main, much, some, some, (), (), (), 1, 1, "fp32", "mean", (Member_("x", much),))
    bodies: list[m.Body] = [
        m.Fetch(),
        m.AskState(),
        m.Gone(some),
        m.Prepare(much),
        m.Ready(some, bytes(16), 0, True),
        m.Ready(some, bytes(16), much, False),
        m.Promise(much, m.Accepted1(much, entry), None),
        m.Accept(much, entry),
        m.Accepted(much, some, b""),
        m.Accepted(0, some, bytes(64)),
        m.Catch((Certified(entry, ()),), much, much),
        m.Catch((), 0, much),
        m.Get(some, ()),
        m.Get(some, ((0, much),)),
        m.Get(some, ((5, 2),)),
        m.Seal(some, (Member_("x", much),), b""),
        m.Sealed((Member_("x", much),), m.Accepted1(much, entry), bytes(64)),
        m.Need(some, ((0, much),)),
        m.Missing(some, ((bytes(16), ((0, much),)),)),
        m.Offer(some, bytes(33), None),
        m.Offer(some, b"", layout),
        m.PlanMessage(Plan(main, 1, 0, 0, some, (), (Part(0, 0, "x"),), much, 1, "fp32", "mean")),
        m.PlanMessage(Plan(main, 1, 0, 0, some, (), (), 0, 0, "none", "none")),
    ]
    logs = [
        main,
        "",
        "main/",
        "op/",
        "op/x",
        "op/////",
        "op/-1/int8/mean/any/a/b",
        f"op/{much * much}/int8/mean/any/a/b",
        "op/10/none/mean/any/a/b",
        "op/10/fp32/mean/any/a/b/c",
        "op/10/bits/gather/all/a/b",
        "op/2/bits/wrap64/any/a/b",
    ]
    return [
        b"R" + m.encode(m.Envelope(log, round_, much, body))
        for log in logs
        for round_ in (0, 1, 2, much)
        for body in bodies
    ]


def test_an_admitted_peer_in_the_topic_and_on_its_lane(swarm: tuple[Run, Member, Member]) -> None:
    run, a, _ = swarm
    messages = [
        b"M",
        b"R",
        b"C",
        b"?",
        b"M" + RNG.randbytes(500),
        b"R" + RNG.randbytes(500),
        b"C" + RNG.randbytes(500),
        b"R" + b"\x91" * 9000,
    ]
    messages += absurd(run.signed.run_id)
    messages += [
        RNG.choice((b"M", b"R")) + RNG.randbytes(RNG.randrange(1, 300)) for _ in range(200)
    ]

    async def main() -> None:
        stranger = Stranger(run, a, run.invite())
        network, victim = stranger.network, PeerId(a.swarm.peer)
        got: list[socket.socket] = []
        network.on_lane = lambda peer, sock, *_: got.append(sock)
        async with trio.open_nursery() as nursery:
            await nursery.start(network.run)
            network.on_message(
                stranger.topic,
                lambda peer, data: None,
                greet=lambda peer: stranger.certificate,
                admit=lambda peer, greeting: True,
            )
            await stranger.greet()
            for index, data in enumerate(messages):
                network.send(stranger.topic, victim, data)
                if index % 100 == 0:
                    await trio.sleep(0.2)  # more than the queue holds
                if index == 2:
                    network.ensure_lane(victim)
                    with trio.move_on_after(20):
                        while not got:
                            await trio.sleep(0.05)
            assert got, "no lane"
            for data in NOISE:
                with contextlib.suppress(OSError):
                    got[-1].send(data)
                await wired(network, stranger.topic, victim)
                wire = network._streams._outboxes[victim, stranger.topic].wire
                assert wire is not None
                with contextlib.suppress(OSError):
                    wire._socket.send(data or b"\0")
            with trio.fail_after(60):
                while network.status()["messages_sent"] < len(
                    messages
                ):  # those that a wire lost with it are counted, too
                    await trio.sleep(0.05)
            await trio.sleep(0.5)  # for them to be read
            nursery.cancel_scope.cancel()
        for sock in got:
            sock.close()

    with NodeClient.connect(a.paths) as client:
        found = threading.Event()
        listener = threading.Thread(target=look_for, args=(client, "peer.misbehaved", found))
        listener.start()
        trio.run(main)
        assert found.wait(30)
    listener.join(30)


async def wired(network: PeerNetwork, topic: str, victim: PeerId) -> None:
    """Talk until it goes over a wire."""
    with trio.fail_after(60):
        while network._streams._outboxes[victim, topic].wire is None:
            network.send(topic, victim, b"R")
            await trio.sleep(0.01)


def look_for(client: NodeClient, kind: str, found: threading.Event) -> None:
    """Wait for an event of the node."""
    with contextlib.suppress(SwarmClosedError):
        for event in client.events():
            if event["event"] == kind:
                found.set()
