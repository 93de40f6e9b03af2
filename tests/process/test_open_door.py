"""All that a stranger is offered before a run has admitted it: transports, security, muxers, stream
protocols. The lists stand here word by word, so a library that offers more fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libp2p.security.secio.transport as secio
import pytest
import trio
from libp2p import new_host
from libp2p.abc import IHost, ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.noise import transport as noise
from libp2p.security.tls.transport import PROTOCOL_ID as TLS_ID
from libp2p.security.tls.transport import TLSTransport
from libp2p.stream_muxer.mplex.mplex import MPLEX_PROTOCOL_ID, Mplex
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr
from process.test_flood import stranger
from process.test_net import network, run

from atoll.collectives.errors import PeerUnreachableError
from atoll.collectives.identifiers import PeerId
from atoll.node.net.network import PeerNetwork
from atoll.node.net.transport.addresses import host_and_port, without_peer

TRANSPORTS = ["TCP"]
SECURITY = ["/noise"]
NOISE = (b"Noise_XX_25519_ChaChaPoly_SHA256", None)
"""The pattern, and the data that it takes in beside the handshake."""
MUXERS = ["/yamux/1.0.0"]
STREAMS = [
    "/atoll/kad/1.0.0",
    "/atoll/lane/1",
    "/atoll/look/1",
    "/atoll/measure/1",
    "/atoll/peers/1",
    "/atoll/public/1",
    "/atoll/topic/1",
    "/ipfs/id/1.0.0",
    "/ipfs/ping/1.0.0",
    "/libp2p/autonat/1.0.0",
    "/libp2p/circuit/relay/0.2.0/hop",
    "/libp2p/circuit/relay/0.2.0/stop",
    "/libp2p/dcutr",
]


def secio_of(pair: KeyPair) -> ISecureTransport:
    return secio.Transport(pair)


OTHERS: dict[str, Callable[[KeyPair], ISecureTransport]] = {
    str(PLAINTEXT_PROTOCOL_ID): InsecureTransport,
    str(secio.ID): secio_of,
    str(TLS_ID): TLSTransport,
}
"""Security that libp2p offers unless it is told otherwise, and a node does not speak."""


def foreign_host(protocol: str, muxer: dict[TProtocol, Any] | None = None) -> IHost:
    """A host of libp2p's that speaks one security protocol."""
    pair = create_new_key_pair()
    speaks = OTHERS.get(
        protocol, lambda pair: noise.Transport(pair, create_noise_key_pair().private_key)
    )
    return new_host(
        key_pair=pair,
        sec_opt={TProtocol(protocol): speaks(pair)},
        muxer_opt=muxer or {TProtocol(YAMUX_ID): Yamux},
    )


async def raw_connection(node: PeerNetwork) -> RawConnection:
    host, port = host_and_port(without_peer(node.addresses()[0]))
    return RawConnection(TrioTCPStream(await trio.open_tcp_stream(host, port)), True)


async def offered(conn: Any) -> list[str]:
    """The answer to multistream's `ls`."""
    reader: ReadWriteCloser = conn
    told = await MultiselectClient().query_multistream_command(
        MultiselectCommunicator(reader), "ls"
    )
    return sorted(name for name in told if name)


def test_all_that_is_offered_before_and_after_authentication() -> None:
    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        swarm: Any = node._host._swarm
        assert [
            type(each).__name__ for each in swarm.transport_manager.get_transports()
        ] == TRANSPORTS
        raw = await raw_connection(node)
        assert await offered(raw) == SECURITY
        await raw.close()

        (transport,) = swarm.upgrader.security_multistream.transports.values()
        assert type(transport) is noise.Transport
        pattern: Any = transport.get_pattern()
        assert (pattern.protocol_name, transport.early_data) == NOISE
        raw, pair = await raw_connection(node), create_new_key_pair()
        await MultiselectClient().select_one_of([noise.PROTOCOL_ID], MultiselectCommunicator(raw))
        secure = await noise.Transport(pair, create_noise_key_pair().private_key).secure_outbound(
            raw, ID.from_base58(node.peer)
        )
        assert await offered(secure) == MUXERS
        await secure.close()

        host = await stranger(nursery, node)
        (connection,) = host._open_connections(node.peer)
        assert await offered(await connection.muxed_conn.open_stream()) == STREAMS

    run(main)


@pytest.mark.parametrize("protocol", OTHERS)
def test_a_stranger_that_speaks_other_security_is_not_let_in(protocol: str) -> None:
    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        caller = foreign_host(protocol)
        async with caller.run([]):
            with pytest.raises(SwarmException):
                await caller.connect(info_from_p2p_addr(Multiaddr(node.addresses()[0])))
            assert caller.get_connected_peers() == []
        assert node._host.peers() == []
        raw = await raw_connection(node)
        told = MultiselectCommunicator(raw)
        await MultiselectClient().handshake(told)
        await told.write(protocol)
        assert await told.read() == "na"
        await raw.close()

    run(main)


@pytest.mark.parametrize("protocol", OTHERS)
def test_who_listens_with_other_security_is_not_dialled_through(protocol: str) -> None:
    """Neither by a dial nor by the probe that tells others whether they can be reached."""

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        listener = foreign_host(protocol)
        async with listener.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            (address,) = listener.get_transport_addrs()
            peer, where = PeerId(str(listener.get_id())), without_peer(str(address))
            with pytest.raises(PeerUnreachableError, match="what answers there is no node"):
                await node._host.connect(peer, [where])
            assert not await node._host.answers(peer, *host_and_port(where))
            assert not node.connected(peer)

    run(main)


def test_who_speaks_noise_gets_in_and_is_dialled() -> None:
    """The control for the tests above: the same host with Noise."""

    async def main(nursery: trio.Nursery) -> None:
        node, host = network(), foreign_host(noise.PROTOCOL_ID)
        await nursery.start(node.run)
        async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            (address,) = host.get_transport_addrs()
            peer, where = PeerId(str(host.get_id())), without_peer(str(address))
            assert await node._host.answers(peer, *host_and_port(where))
            await host.connect(info_from_p2p_addr(Multiaddr(node.addresses()[0])))
            assert await node._host.wait_connected(peer, 10.0)
            await node._host.disconnect(peer)
            await node._host.connect(peer, [where])

    run(main)


def test_who_speaks_another_muxer_is_not_let_in() -> None:
    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        caller = foreign_host(noise.PROTOCOL_ID, {TProtocol(MPLEX_PROTOCOL_ID): Mplex})
        async with caller.run([]):
            with pytest.raises(SwarmException):
                await caller.connect(info_from_p2p_addr(Multiaddr(node.addresses()[0])))
        assert node._host.peers() == []

    run(main)
