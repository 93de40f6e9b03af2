"""All that is served to strangers draws on one budget, whatever the protocol, fair between
machines; members and chosen peers draw nothing. Real hosts; machines are addresses of 127.0.0.0/8.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio
from process.test_flood import stranger
from process.test_net import network, run, wait_for
from process.test_open_door import STREAMS

from atoll.collectives.errors import NetworkError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.dht import wire
from atoll.node.net.dht.node import PROTOCOL as KAD
from atoll.node.net.network import PeerNetwork
from atoll.node.net.reach import autonat
from atoll.node.net.transport import strangers
from atoll.node.net.transport.host import Host, PeerStream


class Counted:
    """What a node's share for strangers was asked for."""

    def __init__(self, node: PeerNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes, self.seconds, self.streams = 0, 0.0, 0
        share = node._host.strangers
        take, enter = share.take, share.streams.enter

        def count(machine: str, nbytes: int = 0, seconds: float = 0.0) -> None:
            self.nbytes += nbytes
            self.seconds += seconds
            take(machine, nbytes, seconds)

        def count_stream(who: Any, host: str) -> Any:
            self.streams += 1
            return enter(who, host)

        monkeypatch.setattr(share, "take", count)
        monkeypatch.setattr(share.streams, "enter", count_stream)


@pytest.mark.parametrize("protocol", STREAMS)
def test_every_protocol_draws_on_it(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        host = await stranger(nursery, node)
        counted = Counted(node, monkeypatch)
        with contextlib.suppress(NetworkError):  # it may be refused at once
            stream = await host.open_stream(node.peer, protocol)
            await stream.send_all(bytes(20_000))
        await wait_for(lambda: counted.nbytes > 0 and counted.streams == 1)
        assert counted.seconds > 0

    run(main)


def test_who_is_admitted_or_named_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(nursery: trio.Nursery) -> None:
        node, member = network(), network()
        heard: list[bytes] = []
        for each in (node, member):
            each.on_message(
                RunId("run"),
                lambda peer, data: heard.append(data),
                lambda peer: b"",
                lambda *_: True,
            )
            await nursery.start(each.run)
        member.add_bootstrap(node.addresses()[:1])
        await member.connect(node.peer)
        member.send(RunId("run"), node.peer, b"first")
        await wait_for(lambda: heard == [b"first"])
        assert node._streams.admitted(member.peer)
        counted = Counted(node, monkeypatch)
        for _ in range(3):
            assert await member.ping(node.peer) > 0
        assert (counted.nbytes, counted.streams) == (0, 0)
        named = Counted(member, monkeypatch)
        assert member.named(node.peer)
        assert await node.ping(member.peer) > 0
        assert (named.nbytes, named.streams) == (0, 0)

    run(main)


async def machines(
    nursery: trio.Nursery, node: PeerNetwork, monkeypatch: pytest.MonkeyPatch, *names: str
) -> list[Host]:
    """Strangers whose connections the node believes to come from these machines."""
    of: dict[PeerId, str] = {}
    monkeypatch.setattr(PeerStream, "machine", property(lambda stream: of[stream.peer]))
    hosts = list[Host]()
    for name in names:
        host = await stranger(nursery, node)
        of[host.peer] = name
        connections: list[Any] = node._host._open_connections(host.peer)
        for connection in connections:
            connection.muxed_conn.machine = name
        hosts.append(host)
    return hosts


@pytest.mark.slow
def test_a_machine_beyond_its_share_rests_and_another_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under ten keys it asks as fast as it can. What is answered is bounded by the rate, keys give
    it nothing, and another machine waits for none of it.
    """
    monkeypatch.setattr(strangers, "SECONDS_AT_ONCE", 0.2)
    monkeypatch.setattr(strangers, "SECONDS_PER_S", 0.1)

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        question = wire.encode(wire.Rpc(wire.FIND_NODE, b"k" * 32))
        answered = 0

        async def ask_without_end(host: Host) -> None:
            nonlocal answered
            with contextlib.suppress(NetworkError):
                stream = await host.open_stream(node.peer, KAD)
                reader = wire.MessageReader(stream.receive_some, node.peer)
                while True:
                    await stream.send_all(question)
                    if await reader.next() is None:
                        return
                    answered += 1

        hosts = await machines(nursery, node, monkeypatch, *["greedy"] * 10, "modest")
        share = node._host.strangers
        for host in hosts[:10]:
            nursery.start_soon(ask_without_end, host)
        await wait_for(lambda: share.rest_s("greedy") > 0.5)
        began, before = trio.current_time(), answered
        while trio.current_time() - began < 3.0:
            assert await hosts[10].ping(node.peer) < 1.0
            # its own questions may cost it a moment on a busy machine; the other's cost it none
            assert share.rest_s("modest") < 0.2
            await trio.sleep(0.1)
        took = trio.current_time() - began
        # a question and its answer are two frames
        assert answered - before <= 10 + took * 0.1 / (2 * strangers.FRAME_S)

    run(main)


def test_streams_of_one_machine_make_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MOST_STREAMS", 16)

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        hosts = await machines(nursery, node, monkeypatch, *["greedy"] * 3, "modest")
        for host in hosts[:3]:
            for protocol in ("/atoll/look/1", "/atoll/topic/1", KAD):
                for _ in range(3):
                    with contextlib.suppress(NetworkError):
                        await host.open_stream(node.peer, protocol)
        share = node._host.strangers.streams
        await wait_for(lambda: list(share._inside.values()) == ["greedy"] * 16)
        assert await hosts[3].ping(node.peer) > 0
        await hosts[3].open_stream(node.peer, "/atoll/look/1")
        await wait_for(lambda: sorted(share._inside.values()) == ["greedy"] * 15 + ["modest"])

    run(main)


def test_dialling_back_is_rationed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By machine: further keys give it nothing, and take nothing from another one."""
    monkeypatch.setattr(autonat, "may_try", lambda asked, from_host: asked)

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        of: dict[PeerId, str] = {}
        monkeypatch.setattr(PeerStream, "machine", property(lambda stream: of[stream.peer]))
        found: dict[str, list[bool | None]] = {"greedy": [], "modest": []}
        for name in ["greedy"] * 4 + ["modest"]:
            asker = network()
            of[asker.peer] = name
            await nursery.start(asker.run)
            await asker._host.connect(node.peer, node._host.addresses())
            where = asker._host.addresses()[0]
            for _ in range(3):
                found[name].append(await asker.reach.autonat.ask(node.peer, where))
        most = autonat.PER_MACHINE
        assert found == {"greedy": [True] * most + [None] * (12 - most), "modest": [True] * 3}

    run(main)


@pytest.mark.slow
def test_the_time_of_day_is_told_whatever_others_ask() -> None:
    """It was answered 120 times a minute over all, 12 times a key: ten keys took it all."""

    async def main(nursery: trio.Nursery) -> None:
        node, honest = network(), network()
        await nursery.start(node.run)
        for _ in range(10):
            host = await stranger(nursery, node)
            for _ in range(13):
                stream = await host.open_stream(node.peer, "/atoll/measure/1")
                await stream.send_all(b"c")
                await stream.receive_some(8)
                await stream.aclose()
        honest.add_bootstrap(node.addresses()[:1])
        await nursery.start(honest.run)
        await honest.connect(node.peer)
        (ahead, error) = (await honest.clocks([node.peer]))[node.peer]
        assert abs(ahead) <= error + 0.01

    run(main)


def test_all_who_wait_for_strangers_speak_tcp() -> None:
    """A handshake of TCP proves the address before anything of a stranger is kept; there is no
    socket that takes a datagram from who has not proved his."""
    import psutil

    async def main(nursery: trio.Nursery) -> None:
        before = {each.fd for each in psutil.Process().net_connections("inet")}
        node = network(lan_discovery=True)
        await nursery.start(node.run)
        found = [each for each in psutil.Process().net_connections("inet") if each.fd not in before]
        assert {each.type.name for each in found if not each.raddr} == {"SOCK_STREAM"}
        assert len([each for each in found if each.status == "LISTEN"]) == 2  # libp2p and lanes

    run(main)
