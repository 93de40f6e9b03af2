"""Whatever way a lie about somebody's addresses comes, a node that has met the internet sends
nothing to its own machine or to another house.

One trio process; the victim believes that it has met a peer of the internet. The trap is a listener
on this machine.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from process.test_net import wait_for
from process.test_open_proxy import at, trap
from process.test_reach import run, start

from atoll.collectives.errors import PeerUnreachableError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.net.announcements import announce
from atoll.node.net.dht.records import run_key
from atoll.node.net.network import PeerNetwork
from atoll.security.identity import Identity

__all__ = ["trap"]  # the fixture
RUN = RunId("run")
Way = Callable[[PeerNetwork, PeerNetwork, Identity, list[str]], Awaitable[None]]


async def by_an_announcement(
    victim: PeerNetwork, liar: PeerNetwork, name: Identity, lies: list[str]
) -> None:
    """A member of the run, signed by its own key."""
    liar._rendezvous._take(announce(name, RUN, lies, time.time()), liar.peer)


async def by_the_dht(
    victim: PeerNetwork, liar: PeerNetwork, name: Identity, lies: list[str]
) -> None:
    """Named by the liar as a provider, and as whoever is nearer."""
    liar.book.add(name.peer, lies)
    liar.dht.engine.server.providers.add(run_key(RUN), name.peer, trio.current_time())
    assert name.peer in dict(await victim.dht.find_providers(run_key(RUN)))


async def by_a_record(
    victim: PeerNetwork, liar: PeerNetwork, name: Identity, lies: list[str]
) -> None:
    """As the membership hands on what a member's record says."""
    victim.add_addresses(name.peer, lies)


async def by_its_own_word(
    victim: PeerNetwork, liar: PeerNetwork, name: Identity, lies: list[str]
) -> None:
    """What a peer says of itself in its first request to the DHT."""
    liar._host.advertised = lambda: lies
    liar.dht._channels.clear()
    await liar.dht.refresh()


@pytest.mark.parametrize("way", [by_an_announcement, by_the_dht, by_a_record, by_its_own_word])
def test_a_lie_makes_nobody_dial(way: Way, trap: socket.socket) -> None:
    async def main(nursery: trio.Nursery) -> None:
        victim = await start(nursery, announce=True)
        victim.on_message(RUN, lambda peer, data: None)
        victim.announce_run(RUN)
        victim.reach.manager.observed("11.1.0.1", "/ip4/11.0.0.7/tcp/4001", trio.current_time())
        assert victim.reach.manager.online
        async with trio.open_nursery() as theirs:
            liar = await start(theirs, victim)
            liar.announce_run(RUN)
            await wait_for(lambda: liar.peer in dict(victim.members(RUN)))
            name = Identity.generate()
            told = liar.peer if way is by_its_own_word else name.peer
            await way(victim, liar, name, [at(trap), "/ip4/192.168.77.2/tcp/22"])
            await wait_for(lambda: at(trap) in victim.book.addresses(told))
            theirs.cancel_scope.cancel()
        await wait_for(lambda: not victim.connected(liar.peer))
        with pytest.raises(PeerUnreachableError, match="no address of"):
            await victim.connect(PeerId(told))
        victim.send(RUN, PeerId(told), b"hello")
        victim.ensure_lane(PeerId(told))
        await victim.dht.refresh()
        await trio.testing.wait_all_tasks_blocked(0.05)

    run(main)
