"""A stranger with a correct libp2p handshake that then minds no limit: a node neither fills its
memory nor shuts anybody else out for it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import Any

import pytest
import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.utils.varint import encode_uvarint
from process.test_net import LISTEN, network, run, wait_for

from atoll.collectives.errors import NetworkError
from atoll.collectives.identifiers import RunId
from atoll.node.net import rendezvous
from atoll.node.net.dht import wire
from atoll.node.net.dht.node import PROTOCOL as KAD
from atoll.node.net.network import PeerNetwork
from atoll.node.net.rendezvous import PROTOCOL as RENDEZVOUS
from atoll.node.net.transport import unread as unread_bytes
from atoll.node.net.transport import workarounds
from atoll.node.net.transport.addresses import host_and_port, without_peer
from atoll.node.net.transport.host import PING, Host
from atoll.security.identity import Identity

FLOOD_BYTES = 40 << 20


async def stranger(
    nursery: trio.Nursery, node: PeerNetwork, identity: Identity | None = None
) -> Host:
    """Connected to ``node``."""
    host = Host(identity or Identity.generate(), LISTEN)
    await nursery.start(host.run, lambda peer, up: None)
    await host.connect(node.peer, [without_peer(address) for address in node.addresses()])
    return host


def unread(node: PeerNetwork, of: Host) -> int:
    """Bytes of a peer that nobody has read."""
    connections: list[Any] = node._host._open_connections(of.peer)
    return sum(
        len(buffer)
        for connection in connections
        for buffer in connection.muxed_conn.stream_buffers.values()
    )


def test_who_sends_beyond_its_window_is_cut_off() -> None:
    """Questions without end, whose answers are never taken: the node stops reading them, and the
    window says that it does.
    """

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        flooder, honest = await stranger(nursery, node), await stranger(nursery, node)
        stream = await flooder.open_stream(node.peer, KAD)
        raw: Any = stream._stream
        question, most = wire.encode(wire.Rpc(wire.FIND_NODE, b"k" * 100)) * 2000, 0
        with trio.move_on_after(20.0):
            for _ in range(FLOOD_BYTES // len(question)):
                raw.muxed_stream.send_window = 1 << 40
                try:
                    await raw.write(question)
                except Exception:
                    break
                most = max(most, unread(node, flooder))
        await wait_for(lambda: not node.connected(flooder.peer))
        assert most < FLOOD_BYTES // 2
        assert await honest.ping(node.peer) > 0

    run(main)


async def leave_unread(node: PeerNetwork, host: Host, nbytes: int = 100_000) -> None:
    """Send something that is not read, unless this host was cut off."""
    had = unread(node, host)
    with contextlib.suppress(NetworkError):
        stream = await host.open_stream(node.peer, "/test/idle")
        await stream.send_all(bytes(nbytes))
    await wait_for(lambda: unread(node, host) >= had + nbytes or not node.connected(host.peer))


def test_who_leaves_too_much_unread_over_all_its_streams_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On each stream it keeps within its window, and on each connection within a small part."""
    monkeypatch.setattr(unread_bytes, "MOST_BYTES", 1 << 20)

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)

        async def idle(stream: Any) -> None:
            await trio.sleep_forever()

        node._host.handle("/test/idle", idle)
        honest = await stranger(nursery, node)
        crowd = [await stranger(nursery, node) for _ in range(4)]
        for _ in range(6):
            for host in crowd:
                await leave_unread(node, host)
                assert sum(unread(node, each) for each in crowd) <= (1 << 20) + 200_000
        assert not all(node.connected(host.peer) for host in crowd)
        assert await honest.ping(node.peer) > 0

    run(main)


def test_streams_beyond_the_limit_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workarounds, "MAX_STREAMS", 8)

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        crowd = await stranger(nursery, node)
        (connection,) = crowd._open_connections(node.peer)
        opened = [await connection.muxed_conn.open_stream() for _ in range(20)]
        await wait_for(lambda: sum(stream.reset_received for stream in opened) == 12)
        for stream in opened:
            await stream.reset()
        assert await crowd.ping(node.peer) > 0  # there is room again, on the same connection

    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_one_machine_does_not_keep_others_out() -> None:
    async def main(nursery: trio.Nursery) -> None:
        node = network(max_connections=8)
        await nursery.start(node.run)
        where = host_and_port(without_peer(node.addresses()[0]))
        idle = [socket.create_connection(where, source_address=("127.0.0.2", 0)) for _ in range(20)]
        try:
            peers = [
                await stranger(nursery, node) for _ in range(4)
            ]  # more than eight of the idle were shown out, or never got in
            for peer in peers:
                assert await peer.ping(node.peer) > 0
        finally:
            for sock in idle:
                sock.close()

    run(main)


def test_a_peer_has_a_few_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workarounds, "OF_ONE_PEER", 2)

    async def main(nursery: trio.Nursery) -> None:
        node, identity = network(), Identity.generate()
        await nursery.start(node.run)
        ends = [await stranger(nursery, node, identity) for _ in range(5)]
        await wait_for(
            lambda: [end.connected(node.peer) for end in ends] == [False, False, False, True, True]
        )
        assert await ends[-1].ping(node.peer) > 0

    run(main)


def test_one_peer_does_not_take_all_places_where_members_are_told() -> None:
    async def main(nursery: trio.Nursery) -> None:
        node, other = network(), network()
        await nursery.start(node.run)
        crowd, run_id = await stranger(nursery, node), RunId("run")
        for _ in range(12):
            with contextlib.suppress(NetworkError):  # refused
                await crowd.open_stream(node.peer, RENDEZVOUS)
        await wait_for(lambda: len(node._rendezvous._exchanges) > 0)
        other.add_bootstrap(node.addresses()[:1])
        other.announce_run(run_id)
        await nursery.start(other.run)
        await wait_for(
            lambda: other.peer in {news.peer for news in node._rendezvous.members(run_id)}
        )
        assert (
            sum(exchange.peer == crowd.peer for exchange in node._rendezvous._exchanges)
            <= rendezvous.STREAMS_PER_PEER
        )

    run(main)


def test_peers_that_do_not_exist_leave_nothing_behind() -> None:
    """Named by the DHT, or by a relay that says that they call."""

    async def main(nursery: trio.Nursery) -> None:
        node, nobody = network(), [Identity.generate().peer for _ in range(4)]
        await nursery.start(node.run)
        for peer in nobody:
            node.reach.puncher.path_changed(peer)
            with pytest.raises(NetworkError):
                await node.dht._channel(peer).call(wire.Rpc(wire.PING))
        assert not node.reach.puncher._driving
        node.dht._tidy()
        assert not node.dht._channels

    run(main)


@pytest.mark.parametrize("length", [2000, 1 << 32, 1 << 46, (1 << 64) - 1])
def test_a_greeting_that_announces_much_is_given_no_memory(length: int) -> None:
    """A machine that sends it is disconnected before any of it is read."""

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        host, port = host_and_port(without_peer(node.addresses()[0]))
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(b"\x13/multistream/1.0.0\n" + encode_uvarint(length) + b"x" * 10)
            with contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass

    run(main)


@pytest.mark.parametrize("length", [1 << 32, (1 << 64) - 1])
def test_a_socket_is_asked_for_little_at_once(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a reader asks for that believes a stranger's length."""
    asked: list[int] = []
    receive = trio.SocketStream.receive_some

    async def receive_some(self: trio.SocketStream, max_bytes: int | None = None) -> bytes:
        asked.append(max_bytes or 0)
        return await receive(self, max_bytes)

    monkeypatch.setattr(trio.SocketStream, "receive_some", receive_some)

    async def main() -> None:
        ours, theirs = trio.socket.socketpair()
        workarounds.read_in_pieces()
        await theirs.send(b"x")
        reader = TrioTCPStream(trio.SocketStream(ours))
        assert await reader.read(length) == b"x"
        theirs.close()
        await reader.close()

    trio.run(main)
    assert asked == [workarounds.READ_BYTES]


def test_an_ordinary_conversation_meets_no_limit() -> None:
    """As much as a window holds, read late."""

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        host = await stranger(nursery, node)
        got = bytearray()

        async def late(stream: Any) -> None:
            await wait_for(lambda: unread(node, host) >= 256 << 10)
            while piece := await stream.receive_some():
                got.extend(piece)

        node._host.handle("/test/late", late)
        stream = await host.open_stream(node.peer, "/test/late")
        await stream.send_all(bytes(8 << 20))
        await stream.finish()
        await wait_for(lambda: len(got) == 8 << 20)
        assert (await host.open_stream(node.peer, PING)).peer == node.peer

    run(main)
