"""PeerNetwork over real sockets: several nodes in one trio process. `trio.fail_after` is a bound
for hangs, not a measurement.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing
from libp2p.network.connection import swarm_connection
from libp2p.stream_muxer.yamux import yamux

from atoll.collectives.errors import (
    ConfigError,
    NetworkError,
    NotAdmittedError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.record_layer import SECRET_BYTES
from atoll.node.net import lanes, outbox, streams
from atoll.node.net.dht.records import run_key
from atoll.node.net.dht.wire import PUT_VALUE, Rpc
from atoll.node.net.greeting import PROTOCOL as TOPIC
from atoll.node.net.greeting import VERSION, GreetingAnswer
from atoll.node.net.network import PeerNetwork
from atoll.node.net.rendezvous import FOREIGN_S
from atoll.node.net.transport import host
from atoll.node.net.transport.addresses import check_port_free, host_and_port, split_peer
from atoll.node.net.transport.framing import FrameReader, frame
from atoll.node.net.transport.host import Host, NotSpokenError
from atoll.node.net.transport.lane_sockets import path_of
from atoll.node.net.transport.peerbook import PeerBook
from atoll.security.identity import Identity

RUN = RunId("run")
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
BOUND_S = 60


def network(
    bootstrap: PeerNetwork | None = None, identity: Identity | None = None, **options: object
) -> PeerNetwork:
    known = bootstrap.addresses()[:1] if bootstrap else []
    return PeerNetwork(
        identity or Identity.generate(),
        **{"listen": LISTEN, "bootstrap": known, "rng": random.Random(1), **options},
    )  # type: ignore[arg-type]


def run(main: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    """Run ``main`` in a nursery that is cancelled when it returns; then no descriptor may be left."""

    async def bounded() -> None:
        with trio.fail_after(BOUND_S):
            async with trio.open_nursery() as nursery:
                await main(nursery)
                nursery.cancel_scope.cancel()

    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    trio.run(bounded, strict_exception_groups=True)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before


@contextmanager
def sole(*kinds: type[BaseException]) -> Iterator[None]:
    """Let a group that holds nothing but one of ``kinds`` out as that error."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, kinds):
            raise error from None
        raise


class Inbox:
    """Collects messages and lets a test wait for them."""

    def __init__(self) -> None:
        self.got: list[tuple[PeerId, bytes]] = []
        self._changed = trio.Event()

    def __call__(self, peer: PeerId, data: bytes) -> None:
        self.got.append((peer, data))
        self._changed.set()

    async def until(self, count: int) -> list[tuple[PeerId, bytes]]:
        while len(self.got) < count:
            self._changed = trio.Event()
            await self._changed.wait()
        return self.got


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.01)


async def known_pair(nursery: trio.Nursery) -> tuple[PeerNetwork, PeerNetwork, Inbox, Inbox]:
    """Two nodes in one topic; a has been admitted by b and b by a."""
    a, inbox_a, inbox_b = network(), Inbox(), Inbox()
    a.on_message(RUN, inbox_a)
    await nursery.start(a.run)
    b = network(a)
    b.on_message(RUN, inbox_b)
    await nursery.start(b.run)
    b.send(RUN, a.peer, b"one")
    await inbox_a.until(1)
    a.send(RUN, b.peer, b"two")
    await inbox_b.until(1)
    return a, b, inbox_a, inbox_b


def test_members_of_a_run_find_each_other_and_talk() -> None:
    async def main(nursery: trio.Nursery) -> None:
        nodes: list[PeerNetwork] = []
        inboxes: list[Inbox] = []
        for _ in range(4):
            node, inbox = network(nodes[0] if nodes else None), Inbox()
            node.on_message(RUN, inbox)
            node.on_member = lambda run, peer, addresses, node=node: node.send(
                run, peer, b"hello from " + node.peer.encode()
            )
            await nursery.start(node.run)
            node.announce_run(RUN)
            nodes.append(node)
            inboxes.append(inbox)
        everybody = {node.peer for node in nodes}
        for node, inbox in zip(nodes, inboxes, strict=True):
            got = await inbox.until(3)
            assert {peer for peer, _ in got} == everybody - {node.peer}
            assert all(data == b"hello from " + peer.encode() for peer, data in got)
            assert {peer for peer, _ in node.members(RUN)} == everybody - {node.peer}
            assert node.status()["faults"] == {}
        nodes[3].withdraw_run(RUN)
        await wait_for(
            lambda: all(nodes[3].peer not in dict(node.members(RUN)) for node in nodes[:3])
        )

    run(main)


def test_the_bootstrap_may_start_last_and_one_may_be_dead(tmp_path: Path) -> None:
    async def main(nursery: trio.Nursery) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        boot = Identity.generate()
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer}"
        addresses = [dead, f"/ip4/127.0.0.1/tcp/{port}/p2p/{boot.peer}"]
        inboxes: list[Inbox] = []
        for _ in range(2):
            node, inbox = network(bootstrap=None), Inbox()
            node = PeerNetwork(Identity.generate(), listen=LISTEN, bootstrap=addresses)
            node.on_message(RUN, inbox)
            node.on_member = lambda run, peer, addresses, node=node: node.send(run, peer, b"hello")
            await nursery.start(node.run)
            node.announce_run(RUN)
            inboxes.append(inbox)
        await trio.sleep(0.5)  # several dials of the bootstrap have failed by now
        hub = PeerNetwork(boot, listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        await nursery.start(hub.run)
        for inbox in inboxes:
            await inbox.until(1)

    run(main)


def test_a_restart_needs_no_bootstrap(tmp_path: Path) -> None:
    async def main(nursery: trio.Nursery) -> None:
        identity, cache = Identity.generate(), tmp_path / "peers.json"
        a, inbox = network(), Inbox()
        a.on_message(RUN, inbox)
        await nursery.start(a.run)
        async with trio.open_nursery() as first_life:
            b = PeerNetwork(identity, listen=LISTEN, bootstrap=a.addresses(), cache=cache)
            b.on_message(RUN, Inbox())
            await first_life.start(b.run)
            b.send(RUN, a.peer, b"first life")
            await inbox.until(1)
            first_life.cancel_scope.cancel()
        again = PeerNetwork(identity, listen=LISTEN, cache=cache)
        await nursery.start(again.run)
        await wait_for(lambda: again.connected(a.peer))

    run(main)


def test_a_new_peer_of_a_run_is_in_the_cache_right_after_it_is_known(tmp_path: Path) -> None:
    """Killed, and back on another port, a node finds it again: nobody else could tell either where
    the other is.
    """

    async def main(nursery: trio.Nursery) -> None:
        cache = tmp_path / "peers.json"
        a = network(cache=cache)
        a.announce_run(RUN)
        await nursery.start(a.run)
        b = network(a)
        b.announce_run(RUN)
        await nursery.start(b.run)

        def on_disk() -> tuple[str, ...]:
            book = PeerBook(a.peer)
            book.load(cache)
            return book.addresses(b.peer)

        await wait_for(lambda: bool(on_disk()))
        assert on_disk() == tuple(split_peer(address)[1] for address in b.addresses())

    run(main)


@pytest.mark.parametrize(
    "address",
    [
        "garbage",
        "/ip4/127.0.0.1/udp/0",
        "/dns4/localhost/tcp/0",
        "/ip4/127.0.0.1/tcp/70000",
        "/ip4/1.2.3/tcp/1",
        "",
    ],
)
def test_what_is_no_address_to_listen_on_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="not an address to listen on") as told:
        network(listen=[*LISTEN, address])
    assert (told.value.key, told.value.exit_code) == ("listen", 78)


@pytest.mark.parametrize(
    "address",
    ["garbage", "/ip4/127.0.0.1/tcp/0", "/ip4/0.0.0.0/tcp/4150", "/ip4/192.0.2.7/udp/4150"],
)
def test_what_nobody_could_dial_is_not_announced(address: str) -> None:
    with pytest.raises(ConfigError, match="not an address to announce") as told:
        network(announce=["/dns4/node.example.org/tcp/4150", address])
    assert (told.value.key, told.value.exit_code) == ("announce", 78)


def test_an_address_of_another_machine_is_not_a_port_that_is_taken() -> None:
    with pytest.raises(ConfigError) as told:
        check_port_free("192.0.2.1", 4150)  # for documentation only: nobody has it
    assert (told.value.code, told.value.exit_code) == ("E101", 73)
    assert "no network interface of this machine has this address" in told.value.why


def test_messages_keep_their_order_and_large_ones_arrive() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, inbox_a, _ = await known_pair(nursery)
        sent = [number.to_bytes(4, "big") * (1 + number % 7) for number in range(500)] + [
            bytes(1 << 20),
            b"end",
        ]
        for data in sent:
            b.send(RUN, a.peer, data)
        assert [data for _, data in (await inbox_a.until(1 + len(sent)))[1:]] == sent
        assert b.status()["messages_dropped"] == 0

    run(main)


async def on_wires(a: PeerNetwork, b: PeerNetwork, inbox_a: Inbox) -> list[bytes]:
    """Let ``b`` talk to ``a`` until it does so on a wire; what it said."""
    sent = list[bytes]()
    while a.peer not in b.status()["wires"]:
        sent.append(b"%d" % len(sent))
        b.send(RUN, a.peer, sent[-1])
        await inbox_a.until(1 + len(sent))
    return sent


def test_a_stream_that_is_used_goes_on_as_a_wire_and_keeps_its_order() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, inbox_a, inbox_b = await known_pair(nursery)
        sent = await on_wires(a, b, inbox_a)
        more = [b"wire %d" % number for number in range(300)] + [bytes(1 << 20), b"end"]
        for data in more:
            b.send(RUN, a.peer, data)
        assert [
            data for _, data in (await inbox_a.until(1 + len(sent) + len(more)))[1:]
        ] == sent + more
        assert a.status()["wires"] == []  # one direction says nothing of the other
        assert len(inbox_b.got) == 1
        assert b.status()["messages_dropped"] == 0
        assert a._streams.admitted(b.peer)
        await b.close_topic(RUN)
        await wait_for(lambda: not a._streams.admitted(b.peer))
        assert not a._routes.listener._expected

    run(main)


@pytest.mark.parametrize("end", ["reset", "garbage", "link"])
def test_a_wire_that_ends_is_replaced(end: str) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, inbox_a, _ = await known_pair(nursery)
        await on_wires(a, b, inbox_a)
        wire = b._streams._outboxes[a.peer, RUN].wire
        assert wire is not None
        if end == "link":
            await b._host.disconnect(a.peer)
        elif end == "garbage":
            wire._socket.send(random.Random(1).randbytes(1000))
        else:
            wire._socket.shutdown(socket.SHUT_RDWR)
        await wait_for(lambda: b._streams._outboxes[a.peer, RUN].wire is not wire)
        inbox_a.got.clear()
        while not any(data == b"again" for _, data in inbox_a.got):
            b.send(RUN, a.peer, b"again")
            await trio.sleep(0.05)
        while b._streams._outboxes[a.peer, RUN].wire is None:
            b.send(RUN, a.peer, b"again")
            await trio.sleep(0.01)
        assert b.status()["faults"] == a.status()["faults"] == {}

    run(main)


@asynccontextmanager
async def heard_until_its_end(
    nursery: trio.Nursery, told: list[object]
) -> AsyncIterator[tuple[PeerNetwork, PeerNetwork, Inbox]]:
    """Two nodes; the second speaks to the first on a wire and notes what it is told of it. At the
    end the first is no more.
    """
    a, inbox_a = network(), Inbox()
    a.on_message(RUN, inbox_a)
    async with trio.open_nursery() as life:
        await life.start(a.run)
        b = network(a)
        b.on_message(RUN, Inbox())
        b.on_link, b.on_gone = lambda peer, up: told.append(up), told.append
        await nursery.start(b.run)
        inbox_a.got.append((b.peer, b""))
        await on_wires(a, b, inbox_a)
        yield a, b, inbox_a
        life.cancel_scope.cancel()


def test_a_process_that_is_no_more_is_told_from_a_link_that_broke() -> None:
    async def main(nursery: trio.Nursery) -> None:
        told = list[object]()
        async with heard_until_its_end(nursery, told) as (a, b, inbox_a):
            await b._host.disconnect(a.peer)
            await wait_for(lambda: a.peer not in b.status()["wires"])
            inbox_a.got = inbox_a.got[:1]
            await on_wires(a, b, inbox_a)
        await wait_for(lambda: a.peer in told)
        assert told[:5] == [True, False, True, False, a.peer]

    run(main)


def test_a_wire_that_is_reset_as_it_is_agreed_on_leaves_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[socket.socket] = []

    async def reset(addresses: Sequence[str], token: bytes, both: bytes) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        assert path_of(ours) == "direct"
        dialled.append(ours)
        return ours

    monkeypatch.setattr(outbox, "dial", reset)

    async def main(nursery: trio.Nursery) -> None:
        a, b, inbox_a, _ = await known_pair(nursery)
        while not dialled:
            b.send(RUN, a.peer, b"more")
            await inbox_a.until(len(inbox_a.got) + 1)
        b.send(RUN, a.peer, b"last")
        await inbox_a.until(len(inbox_a.got) + 1)
        assert inbox_a.got[-1] == (b.peer, b"last")
        assert dialled[0].fileno() == -1

    run(main)


def test_where_nobody_can_be_dialled_the_stream_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[str, ...]] = []

    async def nobody(addresses: Sequence[str], token: bytes, both: bytes) -> None:
        dialled.append(tuple(addresses))

    monkeypatch.setattr(outbox, "dial", nobody)

    async def main(nursery: trio.Nursery) -> None:
        a, b, inbox_a, _ = await known_pair(nursery)
        while not dialled:
            b.send(RUN, a.peer, b"x")
            await trio.sleep(0.01)
        count = len(inbox_a.got)
        for _ in range(20):
            b.send(RUN, a.peer, b"still here")
        await wait_for(lambda: sum(data == b"still here" for _, data in inbox_a.got[count:]) == 20)
        assert b.status()["wires"] == []
        assert len(dialled) == 1

    run(main)


def test_a_full_queue_drops_the_oldest_and_counts() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a = network()
        a.on_message(RUN, Inbox())
        await nursery.start(a.run)
        nowhere = Identity.generate().peer
        for _ in range(outbox.QUEUE_MESSAGES + 10):
            a.send(RUN, nowhere, b"x")
        assert a.status()["messages_dropped"] == 10

    run(main)


@pytest.mark.parametrize(
    ("option", "code"),
    [("version", "E140"), ("false", "E201"), ("error", "E205")],
)
def test_who_is_not_admitted_is_told_why(option: str, code: str) -> None:
    async def main(nursery: trio.Nursery) -> None:
        def admit(peer: PeerId, greeting: bytes) -> bool:
            if option == "error":
                raise NotAdmittedError("your invite expired on Monday", peer=peer, code="E205")
            return greeting == b"token"

        a, inbox, refused = network(), Inbox(), trio.Event()
        a.on_message(RUN, inbox, admit=admit)
        await nursery.start(a.run)
        b = network(a, version=VERSION + (option == "version"))
        b.on_message(RUN, Inbox(), greet=lambda peer: b"wrong")
        said: list[tuple[str, PeerId, str, str]] = []

        def on_refused(topic: str, peer: PeerId, code: str, reason: str) -> None:
            said.append((topic, peer, code, reason))
            refused.set()

        b.on_refused = on_refused
        await nursery.start(b.run)
        b.send(RUN, a.peer, b"secret business")
        await refused.wait()
        assert said[0][:3] == (RUN, a.peer, code)
        assert said[0][3]
        assert inbox.got == []

    run(main)


def test_who_answers_shows_its_standing_first_and_gets_nothing_where_that_is_not_enough() -> None:
    """The opener is shown the other side's standing before it shows its own, or anything else that
    waits.
    """

    async def main(nursery: trio.Nursery) -> None:
        a, inbox, shown, judged = network(), Inbox(), list[bytes](), list[bytes]()

        def admit(peer: PeerId, what: bytes) -> bool:
            shown.append(what)
            return True

        a.on_message(RUN, inbox, greet=lambda peer: b"of a", admit=admit)
        await nursery.start(a.run)
        b, strict = network(a), True

        def accept(peer: PeerId, what: bytes) -> bool:
            judged.append(what)
            if strict:
                raise NotAdmittedError("no standing", peer=peer)
            return True

        refused = list[object]()
        b.on_message(RUN, Inbox(), greet=lambda peer: b"of b", accept=accept)
        b.on_refused = lambda *what: refused.append(what)
        await nursery.start(b.run)
        b.send(RUN, a.peer, b"secret business")
        await wait_for(lambda: judged == [b"of a"] and b.status()["refusals"] == 1)
        assert (shown, inbox.got, refused) == ([], [], [])
        strict = False
        b.forget(a.peer)  # else it would pause
        b.send(RUN, a.peer, b"business")
        assert await inbox.until(1) == [(b.peer, b"business")]
        assert shown == [b"of b"]

    run(main)


class OldHello(msgspec.Struct, frozen=True, array_like=True):
    """Of version 1, whose opener showed a token at once."""

    version: int
    topic: str
    token: bytes
    secret: bytes


class OldAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Of version 1."""

    code: str
    reason: str
    wire: None


def test_nodes_of_the_old_and_the_new_greeting_tell_each_other_so_and_nothing_else() -> None:
    """A hand-made peer of version 1 greets and is greeted: each side hears E140; no certificate,
    record or message is told.
    """

    async def main(nursery: trio.Nursery) -> None:
        a, inbox, shown, recalled = network(), Inbox(), list[object](), list[object]()
        refused, heard = list[tuple[object, ...]](), list[bytes]()
        a.on_message(
            RUN,
            inbox,
            greet=lambda peer: shown.append(peer) or b"certificate",  # type: ignore[func-returns-value]
            admit=lambda peer, what: shown.append(what) or True,  # type: ignore[func-returns-value]
            recall=lambda peer: recalled.append(peer) or b"record",  # type: ignore[func-returns-value]
        )
        a.on_refused = lambda *what: refused.append(what)
        await nursery.start(a.run)
        old = Host(Identity.generate(), LISTEN)

        async def answer(stream: host.PeerStream) -> None:
            reader = FrameReader(stream.receive_some, stream.peer)
            heard.append(await reader.next() or b"")
            why = f"you speak version {VERSION} of the atoll protocol, this peer speaks 1"
            no = msgspec.msgpack.encode(OldAnswer("E140", why, None))
            await stream.send_all(frame(no))
            with contextlib.suppress(RemoteProtocolError, NetworkError):
                heard.append(await reader.next() or b"")
            await stream.aclose()

        old.handle(TOPIC, answer)
        await nursery.start(old.run, lambda peer, up: None)
        await old.connect(a.peer, [split_peer(found)[1] for found in a.addresses()])

        stream = await old.open_stream(a.peer, TOPIC)
        await stream.send_all(frame(msgspec.msgpack.encode(OldHello(1, RUN, b"token", b""))))
        reader = FrameReader(stream.receive_some, a.peer)
        told = msgspec.msgpack.decode(await reader.next() or b"", type=GreetingAnswer)
        assert told == GreetingAnswer(
            "E140", f"you speak version 1 of the atoll protocol, this peer speaks {VERSION}"
        )
        assert await reader.next() is None

        a.send(RUN, old.peer, b"business")
        await wait_for(lambda: bool(refused) and len(heard) == 2)
        version, topic, secret = msgspec.msgpack.decode(heard[0])
        assert (version, topic, heard[1]) == (VERSION, RUN, b"")
        assert len(secret) <= SECRET_BYTES  # half of a wire's key, that no wire was made of
        assert [what[1:3] for what in refused] == [(old.peer, "E140")]
        assert (inbox.got, shown, recalled) == ([], [], [])

    run(main)


def test_a_topic_that_opens_later_is_no_refusal() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, inbox = network(), Inbox()
        await nursery.start(a.run)
        b, refusals = network(a), []
        b.on_message(RUN, Inbox())
        b.on_refused = lambda *what: refusals.append(what)
        await nursery.start(b.run)
        b.send(RUN, a.peer, b"early")
        await wait_for(lambda: a.status()["refusals"] > 0)
        a.on_message(RUN, inbox)
        assert await inbox.until(1) == [(b.peer, b"early")]
        assert refusals == []

    run(main)


def test_a_handler_that_objects_costs_the_stream_and_is_counted() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, _, inbox_b = await known_pair(nursery)

        def object_to(peer: PeerId, data: bytes) -> None:
            if data == b"bad":
                raise RemoteProtocolError("nonsense", peer=peer)
            inbox_b(peer, data)

        a.on_message(RUN, object_to)
        await a.close_topic(RUN)
        a.on_message(RUN, object_to)
        while not a.status()[
            "faults"
        ]:  # the first ones may be lost with the stream that was closed
            b.send(RUN, a.peer, b"bad")
            await trio.sleep(0.05)
        assert set(a.status()["faults"]) == {b.peer}
        while not any(data == b"good" for _, data in inbox_b.got):
            b.send(RUN, a.peer, b"good")
            await trio.sleep(0.05)

    run(main)


def test_links_are_reported_and_come_back() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, events = network(), list[tuple[PeerId, bool]]()
        a.on_link = lambda peer, up: events.append((peer, up))
        await nursery.start(a.run)
        b = Identity.generate()
        for _ in range(2):
            async with trio.open_nursery() as life:
                node = PeerNetwork(b, listen=LISTEN, bootstrap=a.addresses())
                await life.start(node.run)
                await wait_for(lambda: a.connected(b.peer))
                life.cancel_scope.cancel()
            await wait_for(lambda: not a.connected(b.peer))
        assert events == [(b.peer, True), (b.peer, False)] * 2

    run(main)


def test_a_process_that_is_no_more_is_known_while_the_library_still_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rested = trio.Event()

    async def rest(seconds: float) -> None:
        await rested.wait()

    async def main(nursery: trio.Nursery) -> None:
        told = list[object]()
        async with heard_until_its_end(nursery, told) as (a, _, _):
            monkeypatch.setattr(host, "CLOSE_S", 0.2)
            for module in (
                swarm_connection,
                yamux,
            ):  # what ends a connection there sleeps before it tells
                monkeypatch.setattr(
                    module, "trio", SimpleNamespace(**{**vars(trio), "sleep": rest})
                )
        with trio.fail_after(10):  # later it is noticed that nothing answers
            await wait_for(lambda: a.peer in told)
        assert told[:3] == [True, False, a.peer]
        rested.set()

    run(main)


def test_port_taken_is_said_in_plain_words() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a = network()
        await nursery.start(a.run)
        port = host_and_port(split_peer(a.addresses()[0])[1])[1]
        second = network(listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(ConfigError) as caught, sole(ConfigError):
            await nursery.start(second.run)
        assert caught.value.code == "E101"
        assert str(port) in caught.value.message
        lane_port = host_and_port(a._routes.listener.addresses()[0])[1]
        third = network(lane_port=lane_port)
        with pytest.raises(ConfigError, match=str(lane_port)), sole(ConfigError):
            await nursery.start(third.run)

    with sole(ConfigError):
        run(main)


def test_unreachable_peers_are_an_error_that_names_them() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, nobody = network(), Identity.generate().peer
        await nursery.start(a.run)
        with pytest.raises(PeerUnreachableError) as caught:
            await a.connect(nobody)
        a.add_addresses(nobody, ["/ip4/127.0.0.1/tcp/1"])
        with pytest.raises(PeerUnreachableError) as caught:
            await a.connect(nobody)
        assert caught.value.peer == nobody
        other = network()
        await nursery.start(other.run)
        a.add_addresses(nobody, other.addresses())
        with pytest.raises(PeerUnreachableError):  # somebody else answers there
            await a.connect(nobody)

    run(main)


# --- DHT ---


def test_dht_values_and_providers_are_found_by_asking_the_network() -> None:
    async def main(nursery: trio.Nursery) -> None:
        nodes = [network()]
        await nursery.start(nodes[0].run)
        for _ in range(5):
            nodes.append(network(nodes[0]))
            await nursery.start(nodes[-1].run)
        await wait_for(lambda: len(nodes[0].dht.table) == 5)
        writer, reader = nodes[1], nodes[5]
        assert await writer.dht.put("status", b"one") >= 1
        assert await reader.dht.get(writer.peer, "status") == b"one"
        await trio.sleep(0.002)  # the sequence is the time in milliseconds
        assert await writer.dht.put("status", b"two") >= 1
        assert await reader.dht.get(writer.peer, "status") == b"two"
        assert await reader.dht.get(writer.peer, "nothing") is None
        assert await nodes[2].dht.provide(run_key(RUN)) >= 1
        assert await nodes[3].dht.provide(run_key(RUN)) >= 1
        found = dict(await reader.dht.find_providers(run_key(RUN)))
        assert set(found) == {nodes[2].peer, nodes[3].peer}
        assert all(addresses for addresses in found.values())

    run(main)


def test_dht_refuses_what_the_owner_did_not_sign() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a = network()
        await nursery.start(a.run)
        b = network(a)
        await nursery.start(b.run)
        await wait_for(lambda: b.connected(a.peer))
        key = f"/atoll/{a.peer}/status".encode()
        with pytest.raises(Exception, match="did not answer"):
            await b.dht._channel(a.peer).call(Rpc(PUT_VALUE, key, b"forged"))
        assert a.status()["faults"][b.peer] >= 1
        assert a.dht.engine.server.values.get(key, 0.0) is None

    run(main)


def test_who_speaks_another_protocol_is_asked_once() -> None:
    async def main(nursery: trio.Nursery) -> None:
        node, stranger = network(), Host(Identity.generate(), LISTEN)
        node.announce_run(RUN)
        await nursery.start(node.run)
        await nursery.start(stranger.run, lambda peer, up: None)
        at = [split_peer(address)[1] for address in node.addresses()]
        await stranger.connect(node.peer, at)
        await wait_for(lambda: stranger.peer in node.dht.table)
        told: list[PeerUnreachableError] = []
        while not told or not isinstance(told[-1], NotSpokenError):
            await stranger.connect(node.peer, at)  # a process that is held up may have lost it
            with pytest.raises(
                PeerUnreachableError, match=r"opened no /nobody/1|not conn"
            ) as caught:
                await stranger.open_stream(node.peer, "/nobody/1")
            told.append(caught.value)
        await node.dht.refresh()
        assert stranger.peer not in node.dht.table
        paused = node._rendezvous._pauses
        await wait_for(lambda: stranger.peer in paused and paused[stranger.peer].max_s == FOREIGN_S)

    run(main)


# --- lanes ---


class Lane:
    """What on_lane hands over."""

    def __init__(self) -> None:
        self.all: list[tuple[PeerId, socket.socket, bytes, bytes, bool, str, int, bool]] = []

    def __call__(self, *lane: object) -> None:
        self.all.append(lane)  # type: ignore[arg-type]

    def close(self) -> None:
        for lane in self.all:
            lane[1].close()


async def check_lane(a: Lane, b: Lane, size: int = 300_000) -> None:
    """Secrets match crosswise, exactly one side drove, and bytes flow both ways."""
    _, socket_a, mine_a, theirs_a, drove_a, path_a, index_a, plain_a = a.all[-1]
    _, socket_b, mine_b, theirs_b, drove_b, path_b, index_b, plain_b = b.all[-1]
    assert (index_a, plain_a) == (index_b, plain_b)
    assert (mine_a, theirs_a) == (theirs_b, mine_b)
    assert len(mine_a) == len(theirs_a) == 32
    assert mine_a != theirs_a
    assert drove_a is not drove_b
    assert path_a == path_b
    assert not socket_a.getblocking()
    for source, target in ((socket_a, socket_b), (socket_b, socket_a)):
        data = random.Random(size).randbytes(size)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all, source, data)
            received = b""
            while len(received) < size:
                received += await receive_some(target)
        assert received == data


async def send_all(sock: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def receive_some(sock: socket.socket) -> bytes:
    while True:
        try:
            return sock.recv(65536)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)


@pytest.mark.parametrize("path", ["direct", "reverse", "bridge"])
def test_lanes_by_every_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, _, _ = await known_pair(nursery)
        lane_a, lane_b = Lane(), Lane()
        a.on_lane, b.on_lane = lane_a, lane_b
        driver, other = (a, b) if a.peer < b.peer else (b, a)
        if path != "direct":
            monkeypatch.setattr(other._routes.listener, "_announce", ["/ip4/127.0.0.1/tcp/1"])
        if path == "bridge":
            monkeypatch.setattr(driver._routes.listener, "_announce", ["/ip4/127.0.0.1/tcp/1"])
        a.ensure_lane(b.peer)
        b.ensure_lane(a.peer)
        await wait_for(lambda: bool(lane_a.all and lane_b.all))
        await check_lane(lane_a, lane_b)
        assert lane_a.all[0][5] == ("stream" if path == "bridge" else "lan")
        assert a.status()["lanes"] == {b.peer: lane_a.all[0][5]}
        lane_a.close()
        lane_b.close()

    run(main)


@pytest.mark.parametrize("driver_wants", [True, False])
def test_one_side_that_wants_a_lane_is_enough(driver_wants: bool) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, _, _ = await known_pair(nursery)
        lane_a, lane_b = Lane(), Lane()
        a.on_lane, b.on_lane = lane_a, lane_b
        wanting, other = (a, b) if (a.peer < b.peer) is driver_wants else (b, a)
        wanting.ensure_lane(other.peer)
        await wait_for(lambda: bool(lane_a.all and lane_b.all))
        await check_lane(lane_a, lane_b)
        other.ensure_lane(wanting.peer)  # it is there: nothing is to be made
        assert other._lanes._wanted[wanting.peer, 0].up
        other.lane_lost(wanting.peer)
        await wait_for(lambda: len(lane_a.all) == len(lane_b.all) == 2)
        lane_a.close()
        lane_b.close()

    run(main)


class Patient(random.Random):
    """Whoever waits by it, waits for ever."""

    def uniform(self, a: float, b: float) -> float:
        return 1e6


def test_who_was_away_for_long_and_arrives_is_talked_to_at_once() -> None:
    """Tries have become rare meanwhile: here there never is another one, but for the arrival."""

    async def main(nursery: trio.Nursery) -> None:
        identities = sorted(
            (Identity.generate() for _ in range(2)), key=lambda identity: identity.peer
        )
        a, (b, inbox) = (
            network(identity=identities[0], rng=Patient()),
            (network(identity=identities[1]), Inbox()),
        )
        lane_a, lane_b = Lane(), Lane()
        a.on_lane, b.on_lane = lane_a, lane_b
        a.on_message(RUN, Inbox())
        b.on_message(RUN, inbox)
        await nursery.start(a.run)
        a.send(RUN, b.peer, b"hello")
        a.ensure_lane(b.peer)  # the smaller one offers it
        await trio.testing.wait_all_tasks_blocked()  # there is no address: both tries have failed
        b.add_addresses(a.peer, a.addresses())
        await nursery.start(b.run)
        b.send(RUN, a.peer, b"here I am")
        assert await inbox.until(1) == [(a.peer, b"hello")]
        await wait_for(lambda: bool(lane_a.all and lane_b.all))
        await check_lane(lane_a, lane_b, 1000)
        lane_a.close()
        lane_b.close()

    run(main)


@pytest.mark.parametrize("bridged", [False, True])
def test_a_lost_lane_is_made_again(bridged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, _, _ = await known_pair(nursery)
        lane_a, lane_b = Lane(), Lane()
        a.on_lane, b.on_lane = lane_a, lane_b
        if bridged:
            for node in (a, b):
                monkeypatch.setattr(node._routes.listener, "_announce", ["/ip4/127.0.0.1/tcp/1"])
        a.ensure_lane(b.peer)
        b.ensure_lane(a.peer)
        await wait_for(lambda: bool(lane_a.all and lane_b.all))
        for node, other, lane, far in ((a, b, lane_a, lane_b), (b, a, lane_b, lane_a)):
            count = len(lane.all), len(far.all)
            lane.all[-1][1].close()
            assert await receive_some(far.all[-1][1]) == b""
            node.lane_lost(other.peer)  # only one side notices
            await wait_for(
                lambda lane=lane, far=far, count=count: (
                    len(lane.all) > count[0] and len(far.all) > count[1]
                )
            )
            await check_lane(lane_a, lane_b, 1000)
        lane_a.close()
        lane_b.close()

    run(main)


@pytest.mark.parametrize("learns", ["driver", "other"])
def test_a_lane_over_the_stream_becomes_direct_once_something_has_changed(
    learns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, _, _ = await known_pair(nursery)
        lane_a, lane_b = Lane(), Lane()
        a.on_lane, b.on_lane = lane_a, lane_b
        driver, other = (a, b) if a.peer < b.peer else (b, a)
        for node in (a, b):
            monkeypatch.setattr(node._routes.listener, "_announce", ["/ip4/127.0.0.1/tcp/1"])
        a.ensure_lane(b.peer)
        b.ensure_lane(a.peer)
        await wait_for(lambda: bool(lane_a.all and lane_b.all))
        assert lane_a.all[0][5] == "stream"
        monkeypatch.undo()
        (driver if learns == "driver" else other).reach.turned()
        await wait_for(lambda: len(lane_a.all) == len(lane_b.all) == 2)
        assert lane_a.all[1][5] == "lan"
        await check_lane(lane_a, lane_b)
        assert [a.status()["lanes"][b.peer], b.status()["lanes"][a.peer]] == ["lan", "lan"]
        lane_a.close()
        lane_b.close()

    run(main)


def test_several_lanes_to_one_peer_are_made_and_made_again_each_by_itself() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, _, _ = await known_pair(nursery)
        lane_a, lane_b = Lane(), Lane()
        a.on_lane, b.on_lane = lane_a, lane_b
        for one, other in ((a, b), (b, a)):
            one.ensure_lane(other.peer, 3)
        await wait_for(lambda: len(lane_a.all) == len(lane_b.all) == 3)
        assert {lane[6] for lane in lane_a.all} == {lane[6] for lane in lane_b.all} == {0, 1, 2}
        assert len({lane[2] for lane in lane_a.all}) == 3, "secrets of its own for each"
        for one, other in ((a, b), (b, a)):
            one.lane_lost(other.peer, 1)
        await wait_for(lambda: len(lane_a.all) > 3 and len(lane_b.all) > 3)
        assert lane_a.all[-1][6] == lane_b.all[-1][6] == 1
        await check_lane(lane_a, lane_b, 1000)
        a.release_lane(b.peer, 1)
        b.release_lane(a.peer, 1)
        for index in (0, 1, 2):
            a.lane_lost(b.peer, index)
            b.lane_lost(a.peer, index)
        await wait_for(lambda: len(lane_a.all) > 4 and len(lane_b.all) > 4)
        assert lane_a.all[-1][6] == lane_b.all[-1][6] == 0, "the only one that is still wanted"
        lane_a.close()
        lane_b.close()

    run(main)


@pytest.mark.parametrize("willing", ["both", "driver", "other", "nobody"])
def test_a_lane_is_plain_only_where_both_sides_allow_it(willing: str) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, _, _ = await known_pair(nursery)
        lane_a, lane_b = Lane(), Lane()
        a.on_lane, b.on_lane = lane_a, lane_b
        driver, other = (a, b) if a.peer < b.peer else (b, a)
        driver.allow_plain_lanes(lambda peer: willing in ("both", "driver"))
        other.allow_plain_lanes(lambda peer: willing in ("both", "other"))
        driver.ensure_lane(other.peer)
        await wait_for(lambda: bool(lane_a.all and lane_b.all))
        assert lane_a.all[-1][7] is lane_b.all[-1][7] is (willing == "both")
        lane_a.close()
        lane_b.close()

    run(main)


def test_a_stranger_gets_no_lane() -> None:
    async def main(nursery: trio.Nursery) -> None:
        a = network()
        await nursery.start(a.run)
        b = network(a)
        await nursery.start(b.run)
        lane = Lane()
        a.on_lane, b.on_lane = lane, lane
        driver, other = (a, b) if a.peer < b.peer else (b, a)
        await wait_for(lambda: a.connected(b.peer) and b.connected(a.peer))
        with pytest.raises(NotAdmittedError):
            await driver._lanes._offer(other.peer, 0)
        assert lane.all == []

    run(main)


# --- hostile bytes ---


async def throw_at(port: int, data: bytes) -> None:
    """Send bytes to a port and wait until it hangs up or a moment has passed."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        try:
            await stream.send_all(data)
            with trio.move_on_after(0.3):
                while await stream.receive_some():
                    pass
        except trio.BrokenResourceError:
            pass


HOSTILE = [
    b"",
    b"\x00" * 10,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 100_000,
    b"\x13/multistream/1.0.0\n" + b"\xff" * 5000,
    b"atoll/1\n" + bytes(48),
]
FRAMES = [
    b"\xff" * 64,
    (1 << 21).to_bytes(4, "big"),
    b"\x00\x00\x00\x05hello",
    b"\x00\x00\x10\x00" + b"\xc1" * 4096,
    b"\xff\xff\xff\x7f",
]


def test_garbage_on_every_port_hurts_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, inbox_a, _ = await known_pair(nursery)
        ports = [
            host_and_port(split_peer(a.addresses()[0])[1])[1],
            host_and_port(a._routes.listener.addresses()[0])[1],
        ]
        noise = [*HOSTILE, *(random.Random(seed).randbytes(2000) for seed in range(4))]
        async with trio.open_nursery() as throwers:
            for port in ports:
                for data in noise:
                    throwers.start_soon(throw_at, port, data)
        b.send(RUN, a.peer, b"still there")
        assert (await inbox_a.until(2))[-1] == (b.peer, b"still there")
        lane_a, lane_b = Lane(), Lane()
        a.on_lane, b.on_lane = lane_a, lane_b
        a.ensure_lane(b.peer)
        await wait_for(lambda: bool(lane_a.all and lane_b.all))
        await check_lane(lane_a, lane_b, 1000)
        lane_a.close()
        lane_b.close()

    run(main)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "protocol", [streams.PROTOCOL, lanes.PROTOCOL, "/atoll/peers/1", "/atoll/kad/1.0.0"]
)
def test_garbage_on_every_protocol_is_counted_and_shuts_out(
    protocol: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, inbox_a, _ = await known_pair(nursery)
        hostile = network(a)
        await nursery.start(hostile.run)
        await wait_for(lambda: hostile.connected(a.peer))
        for number in range(40):
            try:
                stream = await hostile._host.open_stream(a.peer, protocol)
            except PeerUnreachableError:
                assert a._faults.shut_out(hostile.peer, trio.current_time())
                break
            try:
                await stream.send_all(FRAMES[number % len(FRAMES)])
            except Exception:  # it has hung up already
                pass
            with trio.move_on_after(0.2):
                while await stream.receive_some():
                    pass
            await stream.aclose()
        await wait_for(lambda: a.status()["faults"].get(hostile.peer, 0) >= 8)
        assert set(a.status()["faults"]) == {hostile.peer}
        b.send(RUN, a.peer, b"still there")
        assert (await inbox_a.until(2))[-1] == (b.peer, b"still there")

    run(main)
    assert capfd.readouterr().err == ""


def test_an_ended_node_leaves_nothing_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    async def main(nursery: trio.Nursery) -> None:
        a, b, _, _ = await known_pair(nursery)
        lane = Lane()
        a.on_lane = b.on_lane = lane
        a.ensure_lane(b.peer)
        await wait_for(lambda: len(lane.all) == 2)
        lane.close()

    run(main)
    assert capfd.readouterr().err == ""


def test_without_the_dht_members_meet_by_the_bootstrap_and_nobody_asks_them() -> None:
    """A node with `dht` off speaks no word of it, keeps nothing for others and asks nobody; its run
    works.
    """

    async def main(nursery: trio.Nursery) -> None:
        hub, inboxes = network(dht=False), [Inbox(), Inbox()]
        await nursery.start(hub.run)
        members = [network(hub, dht=False) for _ in range(2)]
        for member, inbox in zip(members, inboxes, strict=True):
            member.on_message(RUN, inbox)
            await nursery.start(member.run)
            member.announce_run(RUN)
        for member, other in (members, members[::-1]):
            await wait_for(
                lambda member=member, other=other: (
                    [peer for peer, _ in member.members(RUN)] == [other.peer]
                )
            )
        members[0].send(RUN, members[1].peer, b"hello")
        assert await inboxes[1].until(1) == [(members[0].peer, b"hello")]
        asker = network(hub)
        await nursery.start(asker.run)
        await wait_for(lambda: asker.connected(hub.peer))
        assert await asker.dht.provide(run_key(RUN)) == 0  # nobody notes it
        with pytest.raises(NotSpokenError):
            await asker._host.open_stream(hub.peer, "/atoll/kad/1.0.0")
        assert {node.status()["dht_peers"] for node in (hub, *members)} == {0}

    run(main)
