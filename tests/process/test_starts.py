"""Many starts, one swarm: names for addresses, several bootstrap nodes, halves that met different
ones. Real sockets, one trio process.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from atoll.collectives.errors import ConfigError, PeerUnreachableError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.network import PeerNetwork
from atoll.node.net.transport import dnsaddr
from atoll.node.net.transport.addresses import host_and_port, split_peer
from atoll.node.net.transport.host import DIALS_AT_ONCE
from atoll.node.views.alone import entry_text
from atoll.security.identity import Identity

RUN = RunId("run")
BOUND_S = 60


def network(*bootstrap: str, **options: object) -> PeerNetwork:
    listen = ["/ip4/127.0.0.1/tcp/0"]
    return PeerNetwork(
        Identity.generate(),
        **{"listen": listen, "bootstrap": bootstrap, "rng": random.Random(1), **options},
    )  # type: ignore[arg-type]


async def started(
    nursery: trio.Nursery, *bootstrap: str, member: bool = False, **options: object
) -> PeerNetwork:
    node = network(*bootstrap, **options)
    await nursery.start(node.run)
    if member:
        node.announce_run(RUN)
    return node


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.01)


def run(main: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    """The bound is for hangs."""

    async def bounded() -> None:
        with trio.fail_after(BOUND_S):
            async with trio.open_nursery() as nursery:
                await main(nursery)
                nursery.cancel_scope.cancel()

    trio.run(bounded, strict_exception_groups=True)


def known(node: PeerNetwork) -> set[PeerId]:
    return {peer for peer, _ in node.members(RUN)}


def test_a_bootstrap_address_may_be_a_name() -> None:
    async def main(nursery: trio.Nursery) -> None:
        hub = await started(nursery)
        port = host_and_port(split_peer(hub.addresses()[0])[1])[1]
        node = await started(nursery, f"/dns4/localhost/tcp/{port}/p2p/{hub.peer}")
        await wait_for(lambda: node.connected(hub.peer))

    run(main)


def test_a_name_may_stand_for_several_bootstrap_nodes_and_be_unknown_at_first() -> None:
    async def main(nursery: trio.Nursery) -> None:
        hubs = [await started(nursery) for _ in range(2)]
        zone: dict[str, list[str]] = {}
        asked = trio.Event()

        async def texts(host: str) -> Sequence[str]:
            asked.set()
            if host not in zone:
                raise PeerUnreachableError(f"{host} has no TXT record", peer=PeerId(""))
            return zone[host]

        node = await started(nursery, "/dnsaddr/boot.example.org", texts=texts)
        await asked.wait()
        await wait_for(lambda: "/dnsaddr/boot.example.org" in node.status()["bootstrap"])
        zone["_dnsaddr.boot.example.org"] = [
            "v=spf1 -all",
            "dnsaddr=/dnsaddr/a.example.org",
            f"dnsaddr={hubs[1].addresses()[0]}",
        ]
        zone["_dnsaddr.a.example.org"] = [
            f"dnsaddr={hubs[0].addresses()[0]}",
            f"dnsaddr=/ip4/192.0.2.1/udp/1/quic-v1/p2p/{hubs[0].peer}",
        ]
        await wait_for(lambda: all(node.connected(hub.peer) for hub in hubs))
        assert set(node.status()["bootstrap"]) == {hub.peer for hub in hubs}

    run(main)


def test_an_invites_addresses_join_those_that_were_given() -> None:
    async def main(nursery: trio.Nursery) -> None:
        hubs = [await started(nursery) for _ in range(2)]
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer}"
        node = await started(nursery, dead, hubs[0].addresses()[0])
        await wait_for(lambda: node.connected(hubs[0].peer))
        node.add_bootstrap([dead, hubs[1].addresses()[0]])
        await wait_for(lambda: node.connected(hubs[1].peer))

    run(main)


def test_bootstrap_nodes_that_say_nothing_keep_nobody_from_one_that_does() -> None:
    async def main(nursery: trio.Nursery) -> None:
        silent = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        port = silent.socket.getsockname()[1]
        frozen = [Identity.generate().peer for _ in range(DIALS_AT_ONCE + 1)]
        hub = await started(nursery)
        node = await started(nursery, *(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for peer in frozen))
        streams = [await silent.accept() for _ in range(DIALS_AT_ONCE)]  # all turns are taken
        node.add_bootstrap(hub.addresses())
        await wait_for(lambda: node.connected(hub.peer))
        assert {node.status()["bootstrap"][peer] for peer in frozen} == {
            "connecting"
        }  # nobody has given up yet
        for socket in (silent, *streams):
            await socket.aclose()

    run(main)


def test_a_node_in_no_run_is_found_in_the_dht_by_what_it_said_to_the_bootstrap_node() -> None:
    async def main(nursery: trio.Nursery) -> None:
        hub = await started(nursery)
        one, other = [await started(nursery, *hub.addresses()) for _ in range(2)]
        await wait_for(lambda: one.connected(hub.peer) and other.connected(hub.peer))
        await one.dht.refresh()
        assert other.peer not in one.dht.table  # nobody knew where it is
        await other.dht.refresh()
        await wait_for(lambda: one.peer in other.dht.table and other.peer in one.dht.table)

    run(main)


def test_two_halves_that_met_different_bootstrap_nodes_become_one_swarm() -> None:
    async def main(nursery: trio.Nursery) -> None:
        hubs = [await started(nursery) for _ in range(2)]
        halves = [
            [await started(nursery, hub.addresses()[0], member=True) for _ in range(2)]
            for hub in hubs
        ]
        for half in halves:
            await wait_for(
                lambda half=half: all(
                    known(node) | {node.peer} == {other.peer for other in half} for node in half
                )
            )
        newcomer = await started(nursery, *(hub.addresses()[0] for hub in hubs), member=True)
        nodes = [newcomer, *(node for half in halves for node in half)]
        await wait_for(
            lambda: all(
                known(node) | {node.peer} == {other.peer for other in nodes} for node in nodes
            )
        )

    run(main)


def test_one_who_has_met_nobody_goes_on_trying() -> None:
    async def main(nursery: trio.Nursery) -> None:
        identity = Identity.generate()
        first = await started(nursery, member=True)
        address = split_peer(first.addresses()[0])[1]
        alone = await started(
            nursery, f"{address}/p2p/{identity.peer}", member=True
        )  # whoever answers there is another
        assert known(alone) == set()
        await wait_for(
            lambda: (
                identity.peer in alone.status()["bootstrap"]
                and alone.status()["bootstrap"][identity.peer] != "connecting"
            )
        )
        assert not alone.connected(first.peer)
        alone.add_bootstrap(first.addresses())
        await wait_for(lambda: known(alone) == {first.peer})

    run(main)


def test_who_answers_in_place_of_a_bootstrap_node_is_told() -> None:
    async def main(nursery: trio.Nursery) -> None:
        first = await started(nursery)
        web = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]

        async def serve(stream: trio.SocketStream) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                async with stream:
                    await stream.receive_some()
                    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        nursery.start_soon(trio.serve_listeners, serve, [web])
        shut = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        closed = shut.socket.getsockname()[1]
        await shut.aclose()
        stranger, page, nobody = [Identity.generate().peer for _ in range(3)]
        node = await started(
            nursery,
            f"{split_peer(first.addresses()[0])[1]}/p2p/{stranger}",
            f"/ip4/127.0.0.1/tcp/{web.socket.getsockname()[1]}/p2p/{page}",
            f"/ip4/127.0.0.1/tcp/{closed}/p2p/{nobody}",
        )
        says = {
            stranger: "another peer answers",
            page: "what answers is no node",
            nobody: "refused: that machine is there",
        }
        await wait_for(lambda: "connecting" not in node.status()["bootstrap"].values())
        told = node.status()["bootstrap"]
        assert {peer: says[peer] in entry_text(told[peer]) for peer in says} == dict.fromkeys(
            says, True
        ), told

    run(main)


@pytest.mark.parametrize(
    "name",
    [
        "/dnsaddr/",
        "/dnsaddr/-x-",
        "/dnsaddr/a b",
        "/dnsaddr/example.org/p2p/nobody",
        "/dnsaddr/" + "a." * 120,
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not a name for addresses"):
        network(name)


def test_a_strangers_name_leads_to_no_private_host() -> None:
    name = "/dns4/localhost/tcp/4001"
    assert trio.run(dnsaddr.numeric, [name, "/ip4/192.0.2.1/tcp/1"], {name}) == [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/192.0.2.1/tcp/1",
    ]
    assert trio.run(dnsaddr.numeric, [name, "/ip4/192.0.2.1/tcp/1"], set[str]()) == [
        "/ip4/192.0.2.1/tcp/1"
    ]


def test_names_are_followed_a_few_steps_only_and_may_point_at_one_another() -> None:
    async def ring(host: str) -> Sequence[str]:
        asked.append(host)
        number = int(host.split(".")[1].removeprefix("n"))
        return [f"dnsaddr=/dnsaddr/n{number + step}.example.org" for step in (0, 1, 2, 3)]

    async def crowd(host: str) -> Sequence[str]:
        return [f"dnsaddr=/ip4/192.0.2.1/tcp/{port}/p2p/{peer}" for port in range(1, 1000)]

    async def one(host: str) -> Sequence[str]:
        return [
            f"dnsaddr=/ip4/192.0.2.1/tcp/1/p2p/{peer}",
            f"dnsaddr=/ip4/192.0.2.1/tcp/1/p2p/{other}",
        ]

    asked, peer, other = list[str](), Identity.generate().peer, Identity.generate().peer
    assert trio.run(dnsaddr.look_up, "/dnsaddr/n0.example.org", ring) == []
    assert len(asked) == len(set(asked)) <= dnsaddr.MAX_QUESTIONS
    assert len(trio.run(dnsaddr.look_up, "/dnsaddr/n0.example.org", crowd)) == dnsaddr.MAX_FOUND
    assert trio.run(dnsaddr.look_up, f"/dnsaddr/n0.example.org/p2p/{other}", one) == [
        (other, "/ip4/192.0.2.1/tcp/1")
    ]
