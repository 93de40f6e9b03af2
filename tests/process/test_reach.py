"""Relays over real sockets on one machine: nodes in one trio process. Peers that could be dialled
pretend that they cannot.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Awaitable, Callable

import pytest
import trio

from atoll.collectives.errors import NetworkError, PeerLostError, PeerUnreachableError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.network import PeerNetwork
from atoll.node.net.reach import circuit, protobuf, punch
from atoll.node.net.reach.ledger import RelayLimits
from atoll.node.net.reach.reach import ReachSettings
from atoll.security.identity import Identity

RUN = RunId("run")
BOUND_S = 60


def run(main: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(BOUND_S):
            async with trio.open_nursery() as nursery:
                await main(nursery)
                nursery.cancel_scope.cancel()

    trio.run(bounded, strict_exception_groups=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.01)


async def start(
    nursery: trio.Nursery,
    relay: PeerNetwork | None = None,
    *,
    announce: bool = False,
    limits: RelayLimits | None = None,
) -> PeerNetwork:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
    node = PeerNetwork(
        Identity.generate(),
        listen=[address],
        bootstrap=relay.addresses() if relay else [],
        announce=[address] if announce else [],
        rng=random.Random(1),
        reach=ReachSettings(relay=limits or RelayLimits(open_to_all=True), port_mapping=False),
    )
    await nursery.start(node.run)
    if relay is not None:
        await until(lambda: node.connected(relay.peer))
    return node


async def place(node: PeerNetwork, relay: PeerNetwork) -> list[str]:
    """The circuits at which ``node`` can be called through ``relay``."""
    node.reach.manager.observed(
        "11.1.0.1", "/ip4/11.0.0.7/tcp/4001", trio.current_time()
    )  # it seems to be behind a NAT
    assert await node.reach.circuits.reserve(relay.peer)
    return node.reach.circuits.addresses()


def test_a_peer_is_reached_through_a_relay_and_two_circuits_end_by_themselves() -> None:
    async def main(nursery: trio.Nursery) -> None:
        relay = await start(nursery, announce=True)
        hidden, one, other = [await start(nursery, relay) for _ in range(3)]
        got = list[tuple[PeerId, bytes]]()
        hidden.on_message(RUN, lambda peer, data: got.append((peer, data)))
        circuits = await place(hidden, relay)
        for caller in (one, other):
            caller.on_message(RUN, lambda peer, data: None)
            caller.add_addresses(
                hidden.peer, [f"{address}/p2p/{hidden.peer}" for address in circuits]
            )
            await caller.connect(hidden.peer)
            caller.send(RUN, hidden.peer, b"hello")
        await until(lambda: {peer for peer, _ in got} == {one.peer, other.peer})
        assert {one.path(hidden.peer), hidden.path(one.peer), hidden.path(other.peer)} == {"relay"}
        assert relay.reach.status()["relaying"]["circuits"] == 2
        await one._host.close_relayed(hidden.peer)
        await until(lambda: relay.reach.relay.ledger.open == 1)
        other.send(RUN, hidden.peer, b"still here")
        await until(lambda: (other.peer, b"still here") in got)
        assert hidden.path(other.peer) == "relay"

    run(main)


def test_who_called_through_a_relay_dials_once_nothing_else_connects_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The circuit stands beside a direct connection that breaks later; then the direct one comes
    back, and the circuit goes.
    """
    monkeypatch.setattr(punch, "AGAIN_FIRST_S", 0.05)
    monkeypatch.setattr(punch, "SETTLE_S", BOUND_S)

    async def main(nursery: trio.Nursery) -> None:
        relay = await start(nursery, announce=True)
        hidden, caller = [await start(nursery, relay) for _ in range(2)]
        listening = hidden.addresses()
        circuits = await place(hidden, relay)
        caller.add_addresses(hidden.peer, listening)
        await caller.connect(hidden.peer)
        await caller.reach.circuits.dial(relay.peer, circuits[0].split("/p2p/")[0], hidden.peer)
        await until(lambda: hidden._host.called(caller.peer))
        assert caller.path(hidden.peer) == "lan"
        direct = [
            one
            for one in hidden._host._open_connections(caller.peer)
            if hidden._host.dialler.ends(one)
        ]
        monkeypatch.setattr(punch, "SETTLE_S", 0.05)
        await direct[0].close()
        await until(lambda: {caller.path(hidden.peer), hidden.path(caller.peer)} == {"lan"})
        await until(lambda: relay.reach.relay.ledger.open == 0)
        assert {caller.path(hidden.peer), hidden.path(caller.peer)} == {"lan"}

    run(main)


def test_a_bootstrap_that_called_through_a_relay_is_dialled_where_the_user_said() -> None:
    """Also by a node that would dial no such address that a peer named."""

    async def main(nursery: trio.Nursery) -> None:
        relay = await start(nursery, announce=True)
        bootstrap = await start(nursery, relay)
        hidden = await start(nursery, relay)
        hidden.add_bootstrap(bootstrap.addresses())
        await until(lambda: hidden.connected(bootstrap.peer))
        circuits = await place(hidden, relay)
        await bootstrap.reach.circuits.dial(relay.peer, circuits[0].split("/p2p/")[0], hidden.peer)
        await until(lambda: hidden._host.called(bootstrap.peer))
        direct = [
            one
            for one in bootstrap._host._open_connections(hidden.peer)
            if bootstrap._host.dialler.ends(one)
        ]
        await direct[0].close()
        await until(lambda: {bootstrap.path(hidden.peer), hidden.path(bootstrap.peer)} == {"lan"})

    run(main)


def test_a_place_is_kept_though_the_relay_saw_the_last_connection_go() -> None:
    """It saw that before the next one came, the hidden peer after."""

    async def main(nursery: trio.Nursery) -> None:
        relay = await start(nursery, announce=True)
        hidden = await start(nursery, relay)
        await place(hidden, relay)
        relay.reach.relay.link_changed(hidden.peer, False)
        assert not relay.reach.relay.ledger.reserved()
        assert await hidden._host.dial_direct(
            relay.peer, [address.split("/p2p/")[0] for address in relay.addresses()], BOUND_S
        )
        await until(lambda: list(relay.reach.relay.ledger.reserved()) == [hidden.peer])

    run(main)


def test_a_question_that_could_not_be_asked_does_not_count_as_asked() -> None:
    async def main(nursery: trio.Nursery) -> None:
        server = await start(nursery)
        asker, here = await start(nursery, server), "/ip4/11.0.0.7/tcp/4001"
        asker.reach.manager.observed("11.1.0.1", here, trio.current_time())
        await asker.reach._consult(
            Identity.generate().peer, "11.0.0.1"
        )  # its connection has just broken
        await asker.reach._consult(server.peer, "11.0.0.2")
        assert set(asker.reach._asked) == {("11.0.0.2", here)}

    run(main)


def test_a_circuit_ends_when_it_has_carried_its_bytes() -> None:
    async def main(nursery: trio.Nursery) -> None:
        relay = await start(
            nursery, announce=True, limits=RelayLimits(open_to_all=True, circuit_bytes=20_000)
        )
        hidden, caller = [await start(nursery, relay) for _ in range(2)]
        hidden.on_message(RUN, lambda peer, data: None)
        caller.on_message(RUN, lambda peer, data: None)
        caller.add_addresses(hidden.peer, await place(hidden, relay))
        await caller.connect(hidden.peer)
        caller.send(RUN, hidden.peer, bytes(100_000))
        await until(lambda: relay.reach.relay.ledger.open == 0)
        assert relay.reach.relay.ledger.carried <= 20_000

    run(main)


def test_strangers_get_no_place_and_no_circuit() -> None:
    async def main(nursery: trio.Nursery) -> None:
        relay = await start(nursery, announce=True, limits=RelayLimits())
        member, friend, stranger = [await start(nursery, relay) for _ in range(3)]
        for node in (member, friend):
            node.on_message(RUN, lambda peer, data: None)
            node.announce_run(RUN)
        await until(lambda: len(relay._rendezvous.registry.members(RUN, trio.current_time())) == 2)
        circuits = await place(member, relay)
        assert not await stranger.reach.circuits.reserve(relay.peer)
        assert stranger.reach.circuits.refused == {
            relay.peer: "relays only for peers of runs it knows"
        }
        with pytest.raises(PeerUnreachableError, match="relays only for peers of runs it knows"):
            await stranger.reach.circuits.dial(
                relay.peer, circuits[0].split("/p2p/")[0], member.peer
            )
        await friend.reach.circuits.dial(relay.peer, circuits[0].split("/p2p/")[0], member.peer)
        assert friend.path(member.peer) == "relay"
        with pytest.raises(NetworkError, match="holds no reservation"):
            await friend.reach.circuits.dial(
                relay.peer, circuits[0].split("/p2p/")[0], stranger.peer
            )

    run(main)


def test_who_keeps_no_place_is_not_called_and_nonsense_is_counted() -> None:
    async def main(nursery: trio.Nursery) -> None:
        node = await start(nursery)
        caller = await start(nursery, node)
        stream = await caller._host.open_stream(node.peer, circuit.STOP)
        await protobuf.send(stream, {1: circuit.STOP_CONNECT, 2: circuit.peer_field(caller.peer)})
        assert circuit.status_in(await protobuf.receive(stream), 4) == circuit.PERMISSION_DENIED
        stream = await caller._host.open_stream(node.peer, circuit.HOP)
        await stream.send_all(b"\xff\xff\xff\xff\xff\xff\xff")
        await until(lambda: node.status()["faults"] == {caller.peer: 1})
        await stream.aclose()

    run(main)


def test_a_server_dials_nobodys_private_address() -> None:
    async def main(nursery: trio.Nursery) -> None:
        server = await start(nursery)
        asker = await start(nursery, server)
        assert await asker.reach.autonat.ask(server.peer, "/ip4/127.0.0.1/tcp/1") is None
        assert server.reach.autonat.served == 0
        assert (await asker.ping(server.peer)) > 0

    run(main)


def test_clocks_are_compared_and_bytes_measured_with_members_only() -> None:
    async def main(nursery: trio.Nursery) -> None:
        public = await start(nursery, announce=True)
        member, stranger = [await start(nursery, public) for _ in range(2)]
        public.measuring.clock = lambda: time.time() - 94.0
        for peer, (ahead, within) in (await member.clocks([public.peer, stranger.peer])).items():
            assert peer == public.peer  # the other is not connected
            assert abs(ahead - 94.0) <= within < 3.0
        member.on_message(RUN, lambda peer, data: None)
        member.announce_run(RUN)
        await until(lambda: len(public._rendezvous.registry.members(RUN, trio.current_time())) == 1)
        up, down = await member.measuring.bandwidth_to(public.peer)
        assert min(up, down) > 0
        with pytest.raises(PeerLostError, match="members of its runs only"):
            await stranger.measuring.bandwidth_to(public.peer)

    run(main)
