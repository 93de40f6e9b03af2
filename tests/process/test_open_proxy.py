"""A node is nobody's way to somewhere else: whoever tries to use a relay, a dial-back or a port as
an open proxy gets nowhere.

The traps are listeners on this machine: to them nothing may come.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator

import pytest
import trio
from process.test_lane_ways import circuit_of, members
from process.test_net import RUN, wait_for
from process.test_net import run as run_nodes
from process.test_reach import place, run, start

from atoll.collectives.errors import PeerUnreachableError
from atoll.node.net.network import PeerNetwork
from atoll.node.net.reach import circuit, protobuf
from atoll.node.net.through.relaying import show
from atoll.node.net.through.vouchers import VOUCHER_BYTES, Limits
from atoll.node.net.transport.addresses import host_and_port, split_peer
from atoll.node.net.transport.dialling import Dialler
from atoll.security.identity import Identity, decode_base58


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A listener to which nobody may come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server
        with pytest.raises(BlockingIOError):
            server.accept()


def at(trap: socket.socket) -> str:
    """The trap's address."""
    return f"/ip4/127.0.0.1/tcp/{trap.getsockname()[1]}"


async def asked(
    caller: PeerNetwork,
    relay: PeerNetwork,
    message: dict[int, protobuf.Value | list[protobuf.Value]],
) -> int:
    """The status with which a relay answers a message of HOP."""
    stream = await caller._host.open_stream(relay.peer, circuit.HOP)
    await protobuf.send(stream, message)
    status = circuit.status_in(await protobuf.receive(stream), 5)
    await stream.aclose()
    return status


@pytest.mark.slow
@pytest.mark.rota(7)
def test_the_words_of_other_proxies_lead_nowhere(trap: socket.socket) -> None:
    port = trap.getsockname()[1]
    words = [
        f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode(),
        f"GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode(),
        b"\x05\x01\x00"
        + b"\x05\x01\x00\x01\x7f\x00\x00\x01"
        + port.to_bytes(2, "big"),  # SOCKS 5: no authentication, CONNECT
        b"\x04\x01" + port.to_bytes(2, "big") + b"\x7f\x00\x00\x01\x00",  # SOCKS 4
    ]

    async def say(door: int, said: bytes) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", door) as stream:
            await stream.send_all(said)
            heard = b""
            try:
                while piece := await stream.receive_some():
                    heard += piece
            except trio.BrokenResourceError:  # it hung up before it had read all
                pass
            assert heard in (b"", b"\x13/multistream/1.0.0\n")

    async def main(nursery: trio.Nursery) -> None:
        node = await start(nursery, announce=True)
        doors = [
            host_and_port(split_peer(node.addresses()[0])[1])[1],
            host_and_port(node._routes.addresses()[0])[1],
        ]
        async with trio.open_nursery() as visitors:  # some are heard out until their time is over
            for door, said in itertools.product(doors, words):
                visitors.start_soon(say, door, said)

    run(main)


def test_a_relay_dials_no_address_that_it_is_told(trap: socket.socket) -> None:
    """Not where a caller says that a peer is, nor where a peer with a place says that it is."""

    async def main(nursery: trio.Nursery) -> None:
        relay = await start(nursery, announce=True)
        caller = await start(nursery, relay)
        absent = Identity.generate().peer
        lie = protobuf.encode({1: decode_base58(absent), 2: circuit.pack([at(trap)])})
        assert (
            await asked(caller, relay, {1: circuit.HOP_CONNECT, 2: lie}) == circuit.NO_RESERVATION
        )
        assert (
            await asked(caller, relay, {1: circuit.HOP_RESERVE, 2: lie}) == circuit.OK
        )  # for itself
        async with trio.open_nursery() as theirs:
            placed = await start(theirs, relay)
            await place(placed, relay)
            relay.add_addresses(placed.peer, [at(trap)])
            theirs.cancel_scope.cancel()
        await wait_for(lambda: not relay.connected(placed.peer))
        assert (
            await asked(caller, relay, {1: circuit.HOP_CONNECT, 2: circuit.peer_field(placed.peer)})
            == circuit.NO_RESERVATION
        )

    run(main)


def test_circuits_are_not_strung_together() -> None:
    """Who comes over a circuit gets neither a place nor another circuit."""

    async def main(nursery: trio.Nursery) -> None:
        relay = await start(nursery, announce=True)
        hidden, caller, third = [await start(nursery, relay) for _ in range(3)]
        caller.add_addresses(hidden.peer, await place(hidden, relay))
        await caller.connect(hidden.peer)
        assert caller.path(hidden.peer) == "relay"
        assert await asked(caller, hidden, {1: circuit.HOP_RESERVE}) == circuit.PERMISSION_DENIED
        assert (
            await asked(caller, hidden, {1: circuit.HOP_CONNECT, 2: circuit.peer_field(third.peer)})
            == circuit.UNEXPECTED
        )

    run(main)


def test_who_is_asked_to_dial_back_dials_the_asker_only(
    trap: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even at an address that it takes for one of the internet's: a peer id that is not the
    asker's, and hosts that are not its own, are refused.
    """
    dialled = list[tuple[str, int]]()

    async def probe(self: Dialler, host: str, port: int, target: object) -> bool:
        dialled.append((host, port))
        return False

    monkeypatch.setattr(Dialler, "probe", probe)

    async def main(nursery: trio.Nursery) -> None:
        server = await start(nursery, announce=True)
        asker = await start(nursery, server)
        for address in (
            at(trap),
            "/ip4/11.1.2.3/tcp/22",
            "/ip4/169.254.169.254/tcp/80",
            "/ip6/::1/tcp/22",
        ):
            assert await asker.reach.autonat.ask(server.peer, address) is None
        assert server.reach.autonat.served == 0

    run(main)
    assert dialled == []


def test_a_circuit_of_lanes_is_cut_when_its_voucher_is_used_up() -> None:
    allowed = 200_000

    async def main(nursery: trio.Nursery) -> None:
        relay, one, other = await members(nursery)
        relay._relay._vouchers.limits = Limits(bytes_each=allowed)
        near, far, mine = await circuit_of(relay, one, other)
        got = 0
        with (
            trio.socket.from_stdlib_socket(near) as sender,
            trio.socket.from_stdlib_socket(far) as receiver,
        ):

            async def send() -> None:
                with contextlib.suppress(OSError):  # it is cut
                    while True:
                        await sender.send(bytes(65_536))

            async with trio.open_nursery() as both:
                both.start_soon(send)
                try:
                    while piece := await receiver.recv(65_536):
                        got += len(piece)
                except ConnectionResetError:
                    pass
        assert 0 < got <= allowed + (1 << 18)  # a piece that is under way when the limit is reached
        await wait_for(lambda: relay.status()["relayed"]["circuits"] == 0)
        assert got <= relay.status()["relayed"]["bytes"] <= allowed + (1 << 18)
        with pytest.raises(ConnectionError):
            await show(relay._routes.addresses(), mine)  # and nothing more is to be had for it

    run_nodes(main)


def test_a_voucher_that_the_relay_did_not_issue_opens_nothing() -> None:
    async def main(nursery: trio.Nursery) -> None:
        relay, one, other = await members(nursery)
        mine, _, _ = await one._helpers.circuit(relay.peer, RUN, other.peer)
        elsewhere, _, _ = await relay._helpers.circuit(other.peer, RUN, one.peer)
        for forged in (
            bytes(VOUCHER_BYTES),
            elsewhere,
            mine[:-1] + bytes([mine[-1] ^ 1]),
            bytes([mine[0] ^ 1]) + mine[1:],
        ):
            with pytest.raises(ConnectionError):
                await show(relay._routes.addresses(), forged)
        with pytest.raises(PeerUnreachableError, match="known members"):
            await one._helpers.circuit(relay.peer, "no-such-run", other.peer)
        assert relay.status()["relayed"]["bytes"] == 0

    run_nodes(main)
