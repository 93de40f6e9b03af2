"""What a run is, seen before this machine has anything to do with it: nothing is stored, announced,
or joined.

`at_addresses` connects to the addresses that an invite names and nowhere else. `among_strangers`
looks for other members, in the DHT and at bootstrap nodes, and announces nothing either. Both use a
key of the moment (`net.look`), no files, and no running node. Blocking.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from ...collectives.errors import (
    AtollError,
    ConfigError,
    NetworkError,
    NotAdmittedError,
    VersionMismatchError,
)
from ...collectives.foreign import escaped, quoted
from ...collectives.identifiers import PeerId
from ...security.identity import Identity
from ..manifest import SignedManifest, decode_signed
from ..net import look
from ..net.measuring import Measuring
from ..net.network import PeerNetwork
from ..net.reach.circuits import Circuits
from ..net.reach.reach import ReachSettings
from ..net.transport import dnsaddr
from ..net.transport.addresses import split_circuit, split_peer
from ..net.transport.faults import Faults
from ..net.transport.host import Host, NotSpokenError
from ..run.capability import check_bearer
from ..run.invite import Invite
from .announced import read_invite

LISTEN = ("/ip4/127.0.0.1/tcp/0",)  # nobody is told, and nobody calls us
ADDRESSES_S = 15.0
STRANGERS_S = 20.0
SEARCH_AGAIN_S = 1.0
MOST_ASKED = 32
AT_ONCE = 4

LookAt = Callable[[PeerId, look.Look], Awaitable[look.LookAnswer]]
ClockOf = Callable[[PeerId], Awaitable[tuple[float, float]]]


@dataclass(slots=True)
class Seen:
    """What came of it. ``refusal``: a member's, where nobody showed the manifest. ``answered``:
    whether any node of ours was met. ``ahead_s``: by how much this machine's clock is ahead of
    each of those that do not show it. ``tried``: peer or name → how that ended."""

    signed: SignedManifest | None = None
    answered: bool = False
    ahead_s: dict[str, float] = field(default_factory=dict[str, float])
    refusal: AtollError | None = None
    tried: dict[str, str] = field(default_factory=dict[str, str])


def at_addresses(invite: Invite, own: Identity | None) -> Seen:
    """Ask the peers at the invite's addresses. ``own``: this machine's key if it has one; it is
    shown only where the invite is for it.

    Raises NotAdmittedError where the invite is for another peer."""
    return trio.run(_Preview(invite, own).at_addresses)


def among_strangers(
    invite: Invite, own: Identity | None, bootstrap: Sequence[str], *, dht: bool
) -> Seen:
    """Ask whoever bootstrap nodes and the DHT name as members. Raises as `at_addresses`."""
    return trio.run(_Preview(invite, own).among_strangers, tuple(bootstrap), dht)


class _Preview:
    """One look at one run."""

    def __init__(self, invite: Invite, own: Identity | None) -> None:
        self._invite, self._moment = invite, Identity.generate()
        self._holder = own if invite.capability.peer is not None else None
        who = self._holder or self._moment
        check_bearer(invite.capability, who.peer)
        self._certificate = invite.certify(who, time.time()).encode()
        self._seen = Seen()

    async def at_addresses(self) -> Seen:
        host = Host(self._moment, LISTEN)
        # sets what connects through the relays that the invite names; takes no place at any
        Circuits(
            host,
            Faults(),
            random.Random(),
            wanted=lambda: False,
            candidates=list[PeerId],
            changed=lambda: None,
        )
        with trio.move_on_after(ADDRESSES_S):
            async with trio.open_nursery() as nursery:
                await nursery.start(host.run, lambda peer, up: None)
                named = await self._named()
                given = {address for addresses in named.values() for address in addresses}

                async def look_at(peer: PeerId, shown: look.Look) -> look.LookAnswer:
                    await host.connect(peer, await dnsaddr.numeric(named[peer], given))
                    return await look.ask(host, peer, shown)

                clock_of = Measuring(host, lambda peer: False).clock_of
                await self._ask_all(look_at, clock_of, list(named))
                nursery.cancel_scope.cancel()
        return self._seen

    async def _named(self) -> dict[PeerId, list[str]]:
        """The peers that the invite names, with their addresses; relays before those who are called
        through them.
        """
        found, behind = dict[PeerId, list[str]](), dict[PeerId, list[str]]()
        for address in self._invite.bootstrap:
            try:
                ends = (
                    await dnsaddr.look_up(address)
                    if address.startswith(dnsaddr.PREFIX)
                    else [split_peer(address)]
                )
            except NetworkError as error:
                self._seen.tried[address] = escaped(error.message)
                continue
            for peer, where in ends:
                hop = split_circuit(where)
                if hop is not None:  # (relay, its address): it may be a member itself
                    found.setdefault(hop[0], []).append(hop[1])
                (found if hop is None else behind).setdefault(peer, []).append(where)
        for peer, addresses in behind.items():
            found.setdefault(peer, []).extend(addresses)
        return found

    async def among_strangers(self, bootstrap: tuple[str, ...], dht: bool) -> Seen:
        network = PeerNetwork(
            self._moment,
            listen=LISTEN,
            bootstrap=(*self._invite.bootstrap, *bootstrap),
            reach=ReachSettings(port_mapping=False),
            dht=dht,
            read_invite=read_invite,
        )
        asked = set[PeerId]()
        with trio.move_on_after(STRANGERS_S):
            async with trio.open_nursery() as nursery:
                await nursery.start(network.run)
                while self._seen.signed is None and len(asked) < MOST_ASKED:
                    found = await network.find_strangers(
                        self._invite.run_id, self._invite.organiser
                    )
                    fresh = [peer for peer, _ in found if peer not in asked][:MOST_ASKED]
                    for peer, addresses in found:
                        network.add_addresses(peer, addresses)
                    asked.update(fresh)
                    await self._ask_all(network.look_at, network.measuring.clock_of, fresh)
                    await trio.sleep(SEARCH_AGAIN_S)
                nursery.cancel_scope.cancel()
        return self._seen

    async def _ask_all(self, look_at: LookAt, clock_of: ClockOf, peers: Sequence[PeerId]) -> None:
        """Ask each, a few at a time, until one has shown the manifest."""
        limit = trio.CapacityLimiter(AT_ONCE)
        async with trio.open_nursery() as nursery:

            async def one(peer: PeerId) -> None:
                async with limit:
                    await self._ask(look_at, clock_of, peer)
                if self._seen.signed is not None:
                    nursery.cancel_scope.cancel()

            for peer in peers:
                nursery.start_soon(one, peer)

    async def _ask(self, look_at: LookAt, clock_of: ClockOf, peer: PeerId) -> None:
        run, moment = self._invite.run_id, self._moment.peer
        try:
            shown = look.look_of(run, self._certificate, moment, peer, self._holder)
            answer = await look_at(peer, shown)
            self._seen.answered = True
            if answer.code in (look.NOT_HERE, look.BUSY):
                self._seen.tried[peer] = quoted(answer.reason)
                with suppress(AtollError):
                    self._seen.ahead_s[peer] = (await clock_of(peer))[0]
            elif answer.code:
                self._seen.refusal = NotAdmittedError(
                    (
                        f"{peer[-8:]}, at an address of the invite, does not show the run: "
                        f"{quoted(answer.reason)}"
                    ),
                    peer=peer,
                    why="The invite may be too old, used up, revoked, or not of this run's.",
                    hint="Ask a member for a new one: atoll invite new",
                )
            else:
                self._take(answer.manifest)
        except NotSpokenError:
            self._seen.tried[peer] = "speaks another version of atoll, or none"
        except VersionMismatchError as error:  # the run's own manifest: no other will come
            self._seen.refusal = error
        except AtollError as error:
            self._seen.tried[peer] = escaped(error.message)

    def _take(self, data: bytes) -> None:
        """Raises AtollError unless it is the manifest that the invite names, whole and signed."""
        signed = decode_signed(data)
        if (signed.run_id, signed.organiser) != (self._invite.run_id, self._invite.organiser):
            raise ConfigError("it shows another manifest than this run's")
        signed.open()
        self._seen.signed = signed
