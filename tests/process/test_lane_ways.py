"""Ways of lanes that need no routers: being observed, meeting at a port, and a relay that serves
members of a run and nobody else.
"""

from __future__ import annotations

import random
import socket

import pytest
import trio
from process.test_net import RUN, known_pair, network, run, wait_for

from atoll.collectives.errors import PeerLostError, PeerUnreachableError
from atoll.collectives.identifiers import PeerId
from atoll.node.net import network as networks
from atoll.node.net.lane_routes import ERRANDS, ERRANDS_PER_S, through_relay
from atoll.node.net.lane_talk import Dialled, LaneOffer, LaneTalk, Reverse, Take, Terms
from atoll.node.net.lanes import PROTOCOL
from atoll.node.net.network import DIALS, DIALS_PER_S, PeerNetwork
from atoll.node.net.through import meeting
from atoll.node.net.through.meeting import Spot
from atoll.node.net.through.observing import MAX_HELD_OF_ONE
from atoll.node.net.through.punch import Punch
from atoll.node.net.through.relaying import show
from atoll.node.net.through.vouchers import Limits
from atoll.node.net.transport import lane_sockets
from atoll.node.net.transport.lane_sockets import LATE_S, MAX_PENDING, dial
from atoll.security.identity import Identity

HERE = "127.0.0.1"
TOKEN, SECRETS = bytes(range(16)), bytes(64)
MINE, THEIRS = b"m" * 32, b"t" * 32


async def members(nursery: trio.Nursery) -> list[PeerNetwork]:
    """Three, of one run, all known to the first."""
    nodes: list[PeerNetwork] = []
    for _ in range(3):
        nodes.append(network(nodes[0] if nodes else None))
        await nursery.start(nodes[-1].run)
        nodes[-1].announce_run(RUN)
    await wait_for(lambda: len(nodes[0].members(RUN)) == 2)
    return nodes


def terms(*, initiator: bool) -> Terms:
    """What both ends have settled."""
    return Terms(
        MINE if initiator else THEIRS, THEIRS if initiator else MINE, initiator, TOKEN, 0, False
    )


async def circuit_of(
    relay: PeerNetwork, one: PeerNetwork, other: PeerNetwork
) -> tuple[socket.socket, socket.socket, bytes]:
    """Both ends of a lane from ``one`` to ``other`` over ``relay``, and the voucher that ``one``
    showed.
    """
    mine, theirs, _ = await one._helpers.circuit(relay.peer, RUN, other.peer)
    ends: dict[bool, socket.socket | None] = {}

    async def end(initiator: bool, voucher: bytes) -> None:
        ends[initiator] = await through_relay(
            relay._routes.addresses(), voucher, terms(initiator=initiator)
        )

    async with trio.open_nursery() as both:
        both.start_soon(end, True, mine)
        both.start_soon(end, False, theirs)
    near, far = ends[True], ends[False]
    assert near is not None
    assert far is not None
    return near, far, mine


def test_two_members_have_a_lane_over_a_third_until_one_ends_it() -> None:
    async def main(nursery: trio.Nursery) -> None:
        relay, one, other = await members(nursery)
        near, far, mine = await circuit_of(relay, one, other)
        assert relay.status()["relayed"]["circuits"] == 1
        with (
            trio.socket.from_stdlib_socket(near) as sender,
            trio.socket.from_stdlib_socket(far) as receiver,
        ):
            await sender.send(b"through")
            assert await receiver.recv(64) == b"through"
        await wait_for(lambda: relay.status()["relayed"]["circuits"] == 0)
        assert relay.status()["relayed"]["bytes"] > len(b"through")
        with pytest.raises(ConnectionError):
            await show(relay._routes.addresses(), mine)  # once

    run(main)


def test_a_relay_serves_nobody_but_members_of_a_run_it_knows() -> None:
    async def main(nursery: trio.Nursery) -> None:
        relay, one, other = await members(nursery)
        stranger = network(relay)
        await nursery.start(stranger.run)
        await stranger.connect(relay.peer)
        for asker, what, whom in (
            (one, "another-run", other.peer),
            (one, RUN, stranger.peer),
            (one, RUN, one.peer),
            (stranger, RUN, one.peer),
        ):
            with pytest.raises(PeerUnreachableError, match="known members"):
                await asker._helpers.circuit(relay.peer, what, PeerId(whom))
        assert relay.status()["relayed"]["circuits"] == 0
        relay._relay._vouchers.limits = Limits(circuits=1)
        await one._helpers.circuit(relay.peer, RUN, other.peer)
        with pytest.raises(PeerUnreachableError, match="full"):
            await other._helpers.circuit(relay.peer, RUN, one.peer)

    run(main)


def test_a_port_is_seen_by_who_is_asked_and_not_by_too_many_at_once() -> None:
    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        there = (HERE, int(node._routes.addresses()[0].rpartition("/")[2]))
        spots = [Spot(HERE, random.Random(seed)) for seed in range(MAX_HELD_OF_ONE + 1)]
        try:
            for spot in spots[:-1]:
                await spot.observe([there])
                assert spot.seen == [(HERE, spot.port)]
            await spots[-1].observe([there])
            assert spots[-1].seen == []
            assert spots[-1].candidates == ()
        finally:
            for spot in spots:
                spot.close()

    run(main)


@pytest.mark.parametrize("right", [True, False])
def test_two_ports_meet_if_both_sides_know_the_secrets(
    right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not right:
        monkeypatch.setattr(meeting, "PUNCH_S", 0.5)

    async def main(nursery: trio.Nursery) -> None:
        spots = [Spot(HERE, random.Random(seed)) for seed in (1, 2)]
        met: list[socket.socket] = []
        refused: list[str] = []

        async def end(index: int) -> None:
            punch = Punch(
                trio.current_time(), [(HERE, spots[1 - index].port)], 0.0, random.Random(index)
            )
            secrets = SECRETS if right or index else b"x" * 64
            try:
                met.append(
                    await spots[index].meet(
                        PeerId(f"{index}"), punch, TOKEN, secrets, driver=index == 0
                    )
                )
            except PeerUnreachableError as error:
                refused.append(error.message)

        try:
            async with trio.open_nursery() as both:
                both.start_soon(end, 0)
                both.start_soon(end, 1)
            assert len(met) == (2 if right else 0)
            assert len(refused) == (0 if right else 2)
            if right:
                assert met[0].getpeername() == met[1].getsockname()
                assert met[0].send(b"x") == 1
        finally:
            for sock in met:
                sock.close()
            for spot in spots:
                spot.close()

    run(main)


def test_a_silent_crowd_at_the_lane_port_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may wait: who came late finds a place all the same, as soon as the first have been
    silent for a moment.
    """
    monkeypatch.setattr(lane_sockets, "HELLO_S", 60.0)  # nobody leaves by himself

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        listener, peer = node._routes.listener, PeerId("somebody")
        there = (HERE, int(listener.addresses()[0].rpartition("/")[2]))
        crowd: list[trio.SocketStream] = []
        try:
            while len(crowd) < MAX_PENDING + 10:
                crowd.append(await trio.open_tcp_stream(*there))
            await wait_for(lambda: len(listener._pending) == MAX_PENDING)
            await trio.sleep(LATE_S)
            expected = listener.expect(TOKEN, peer, SECRETS)
            found = await dial([f"/ip4/{HERE}/tcp/{there[1]}"], TOKEN, SECRETS)
            assert found is not None
            found.close()
            await expected.arrived.wait()
            listener.forget(TOKEN)
        finally:
            for stream in crowd:
                await stream.aclose()

    run(main)


def test_one_machine_that_takes_all_places_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It dials again as soon as it has lost one: nobody who comes from elsewhere waits for it."""
    monkeypatch.setattr(lane_sockets, "HELLO_S", 60.0)
    monkeypatch.setattr(lane_sockets, "LATE_S", 3600.0)  # nobody is late

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        listener = node._routes.listener
        there = (HERE, int(listener.addresses()[0].rpartition("/")[2]))
        crowd: list[trio.SocketStream] = []
        try:
            while len(crowd) < MAX_PENDING:
                crowd.append(await trio.open_tcp_stream(*there, local_address="127.0.0.9"))
            await wait_for(lambda: len(listener._pending) == MAX_PENDING)
            expected = listener.expect(TOKEN, PeerId("somebody"), SECRETS)
            found = await dial([f"/ip4/{HERE}/tcp/{there[1]}"], TOKEN, SECRETS)
            assert found is not None
            found.close()
            await expected.arrived.wait()
            listener.forget(TOKEN)
        finally:
            for stream in crowd:
                await stream.aclose()

    run(main)


def test_a_machine_that_has_had_its_share_is_not_heard_at_the_lane_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What dialling lanes takes is of what there is for strangers, over all ports."""

    async def main(nursery: trio.Nursery) -> None:
        node = network()
        await nursery.start(node.run)
        listener, share = node._routes.listener, node._host.strangers
        there = (HERE, int(listener.addresses()[0].rpartition("/")[2]))
        taken = list[str]()
        take = share.take

        def noted(machine: str, nbytes: int = 0, seconds: float = 0.0) -> None:
            taken.append(machine)
            take(machine, nbytes, seconds)

        monkeypatch.setattr(share, "take", noted)
        share.take("127.0.0.9", seconds=60.0)
        expected = listener.expect(TOKEN, PeerId("somebody"), SECRETS)
        hello = lane_sockets.MAGIC + TOKEN + lane_sockets.proof(SECRETS, b"dial", TOKEN)
        async with await trio.open_tcp_stream(*there, local_address="127.0.0.9") as stream:
            await stream.send_all(hello)
            with pytest.raises(trio.BrokenResourceError):  # it is hung up on, unheard
                await stream.receive_some(1)
        assert not expected.arrived.is_set()
        found = await dial([f"/ip4/{HERE}/tcp/{there[1]}"], TOKEN, SECRETS)
        assert found is not None
        found.close()
        await expected.arrived.wait()
        listener.forget(TOKEN)
        assert {*taken} == {"127.0.0.9", HERE}

    run(main)


@pytest.mark.parametrize("fixed", [True, False])
def test_lanes_are_announced_where_the_user_said_if_their_port_is_fixed(fixed: bool) -> None:
    """A machine of a cloud, say, whose public address is its router's."""

    async def main(nursery: trio.Nursery) -> None:
        with socket.create_server((HERE, 0)) as probe:
            port = probe.getsockname()[1]
        node = network(announce=["/ip4/11.0.0.7/tcp/4150"], lane_port=port if fixed else 0)
        await nursery.start(node.run)
        assert ("/ip4/11.0.0.7" in node._routes.addresses()[0]) is fixed
        assert not fixed or node._routes.addresses()[0] == f"/ip4/11.0.0.7/tcp/{port}"

    run(main)


@pytest.mark.parametrize("circuit", [False, True])
def test_peers_that_are_said_to_be_at_one_machine_of_the_internet_are_dialled_there_seldom(
    monkeypatch: pytest.MonkeyPatch, circuit: bool
) -> None:
    """As somebody says who has an invite, of peers that do not exist."""
    monkeypatch.setattr(networks, "is_internet", lambda address: "/127.0.0.2/" in address)

    async def main(nursery: trio.Nursery) -> None:
        node, dialled = network(), 0
        await nursery.start(node.run)
        sink = (await trio.open_tcp_listeners(0, host="127.0.0.2"))[0]
        where = f"/ip4/127.0.0.2/tcp/{sink.socket.getsockname()[1]}"

        async def take(stream: trio.SocketStream) -> None:
            nonlocal dialled
            dialled += 1
            await stream.aclose()

        async with trio.open_nursery() as listening:
            listening.start_soon(trio.serve_listeners, take, [sink])
            began = trio.current_time()
            for _ in range(2 * DIALS):
                ghost = Identity.generate().peer
                relay = f"{where}/p2p/{Identity.generate().peer}/p2p-circuit"
                node.book.add(ghost, [relay if circuit else where])
                with pytest.raises(PeerUnreachableError):
                    await node.connect(ghost)
            # A dial counts here when its connection is taken, which may be after connect() failed.
            while dialled < DIALS:
                await trio.sleep(0.01)
            took = trio.current_time() - began
            assert DIALS <= dialled <= DIALS + DIALS_PER_S * took + 1
            listening.cancel_scope.cancel()

    run(main)


def test_peers_that_are_said_to_be_where_a_member_lives_do_not_part_it_from_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection breaks; what may be dialled at its machine was spent on peers that do not
    exist. Where it was met it is dialled still, and at other machines it has no more than others.
    """
    monkeypatch.setattr(networks, "is_internet", lambda address: True)

    async def main(nursery: trio.Nursery) -> None:
        node, friend = network(), network()
        for each in (node, friend):
            await nursery.start(each.run)
        with socket.socket() as closed:
            closed.bind((HERE, 0))
            nobody = f"tcp/{closed.getsockname()[1]}"
        node.add_addresses(friend.peer, friend.addresses())
        await node.connect(friend.peer)
        for _ in range(DIALS):
            for machine in (HERE, "127.0.0.2"):
                ghost = Identity.generate().peer
                node.book.add(ghost, [f"/ip4/{machine}/{nobody}"])
                with pytest.raises(PeerUnreachableError):
                    await node.connect(ghost)
        await node._host.disconnect(friend.peer)
        await wait_for(lambda: not node.connected(friend.peer))
        await node.connect(friend.peer)
        elsewhere = f"/ip4/127.0.0.2/{nobody}"
        assert len(node._spared(friend.peer, [elsewhere] * DIALS)) < DIALS

    run(main)


def test_who_is_admitted_has_us_dial_few_addresses_of_others() -> None:
    """Of a lane it says where it is, and to be dialled there: once it was dialled eight times for
    each word of it, as often as it said so.
    """
    dialled = 0

    async def take(stream: trio.SocketStream) -> None:
        nonlocal dialled
        dialled += 1
        await stream.aclose()

    async def main(nursery: trio.Nursery) -> None:
        a, b, _, _ = await known_pair(nursery)
        liar, node = (a, b) if a.peer < b.peer else (b, a)
        others = [(await trio.open_tcp_listeners(0, host="127.0.0.2"))[0] for _ in range(8)]
        where = tuple(f"/ip4/127.0.0.2/tcp/{it.socket.getsockname()[1]}" for it in others)

        async def offer() -> LaneTalk:
            talk = LaneTalk(await liar._host.open_stream(node.peer, PROTOCOL))
            await talk.say(LaneOffer(TOKEN, MINE, where, 0, False))
            assert isinstance(await talk.hear(), Take)
            await talk.say(Reverse())
            assert await talk.hear() == Dialled(False)
            return talk

        async with trio.open_nursery() as listening:
            listening.start_soon(trio.serve_listeners, take, others)
            began = trio.current_time()
            for _ in range(2 * ERRANDS // len(where)):
                await (await offer()).stream.aclose()
            took = trio.current_time() - began
            assert ERRANDS <= dialled <= ERRANDS + ERRANDS_PER_S * took + 1
            talk = await offer()
            await talk.say(Reverse())
            with pytest.raises(PeerLostError):  # it is proposed once
                await talk.hear()
            listening.cancel_scope.cancel()

    run(main)
