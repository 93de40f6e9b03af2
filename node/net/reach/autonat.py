"""AutoNAT (libp2p protocol ``/libp2p/autonat/1.0.0``): asking a public peer to dial us back, and
doing that for others.

The server dials from a fresh port, so that no mapping of ours lets it in that would not let anybody
in, and only the address from which the asker's connection comes: it cannot be made to dial anybody
else. We ask about one address at a time, so that each has a verdict of its own.

py-libp2p 0.8.1's server (host/autonat/autonat.py:396) "connects" to a peer that is connected
already, and so calls every address reachable.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from ....collectives.errors import NetworkError, PeerUnreachableError, RemoteProtocolError
from ....collectives.foreign import quoted
from ....collectives.identifiers import PeerId
from ....security.identity import decode_base58
from ..transport.addresses import host_and_port, is_direct, is_internet
from ..transport.allowance import Allowance
from ..transport.faults import Faults
from ..transport.host import Host
from ..transport.packed import pack, unpack
from ..transport.peer_stream import PeerStream
from . import protobuf
from .protobuf import decode, number, octets

PROTOCOL = "/libp2p/autonat/1.0.0"
IDENTIFY = "/ipfs/id/1.0.0"
DIAL, RESPONSE = 0, 1
OK, DIAL_ERROR, DIAL_REFUSED, BAD_REQUEST = 0, 100, 101, 200
ASK_S = 12.0
PER_MACHINE, PER_MACHINE_S = 8, 8 / 60
"""Askings of a machine that are answered at once, and a second from then on."""
AT_ONCE = 4
MAX_ASKED = 4
"""Addresses of a request that are looked at."""


def may_try(asked: Sequence[str], from_host: str) -> list[str]:
    """The addresses that a server dials for an asker whose connection comes from ``from_host``: the
    asker's own, and none in a house.
    """
    found = [
        address for address in dict.fromkeys(asked) if is_direct(address) and is_internet(address)
    ]
    return [address for address in found if host_and_port(address)[0] == from_host][:MAX_ASKED]


class AutoNat:
    """Both sides. Used from the trio thread only."""

    def __init__(self, host: Host, faults: Faults) -> None:
        self._host, self._faults = host, faults
        self._allowance = Allowance(PER_MACHINE, PER_MACHINE_S)
        self._busy = trio.CapacityLimiter(AT_ONCE)
        self.served = 0
        host.handle(PROTOCOL, self._serve)

    async def observe(self, server: PeerId) -> str:
        """At which address ``server`` sees us; "" when it does not say. By the identify protocol.
        Raises NetworkError, also after 12 s, and RemoteProtocolError."""
        with trio.move_on_after(ASK_S):
            stream = await self._host.open_stream(server, IDENTIFY)
            try:
                return next(iter(unpack([octets(await protobuf.receive(stream), 4)])), "")
            except ValueError as error:
                raise RemoteProtocolError(
                    f"malformed identify: {quoted(error)}", peer=server
                ) from None
            finally:
                await stream.aclose()
        raise PeerUnreachableError(f"{server} does not say where it sees us", peer=server)

    async def ask(self, server: PeerId, address: str) -> bool | None:
        """Whether ``server`` gets to us at ``address``; None when it does not try. Raises
        NetworkError, RemoteProtocolError.
        """
        me = protobuf.encode({1: decode_base58(self._host.peer), 2: pack([address])})
        with trio.move_on_after(ASK_S):
            stream = await self._host.open_stream(server, PROTOCOL)
            try:
                await protobuf.send(stream, {1: DIAL, 2: protobuf.encode({1: me})})
                found = decode(octets(await protobuf.receive(stream), 3))
                status = number(found, 1, BAD_REQUEST)
            except ValueError as error:
                raise RemoteProtocolError(
                    f"malformed answer: {quoted(error)}", peer=server
                ) from None
            finally:
                await stream.aclose()
            return {OK: True, DIAL_ERROR: False}.get(status)
        return None

    async def _serve(self, stream: PeerStream) -> None:
        peer, remote = stream.peer, stream.remote
        if self._faults.shut_out(peer, trio.current_time()):
            return
        try:
            with trio.fail_after(ASK_S):
                request = await protobuf.receive(stream)
                status, address = await self._try(stream, remote[0] if remote else "", request)
                response = protobuf.encode({1: status, **({3: pack([address])} if address else {})})
                await protobuf.send(stream, {1: RESPONSE, 3: response})
                await stream.finish()
                await stream.receive_some()
        except RemoteProtocolError:
            self._faults.count(peer, trio.current_time())
        except (NetworkError, trio.TooSlowError):
            pass

    async def _try(
        self, stream: PeerStream, from_host: str, request: protobuf.Fields
    ) -> tuple[int, str]:
        peer = stream.peer
        try:
            info = decode(octets(decode(octets(request, 2)), 1))
            asked = unpack(info.get(2, []), 2 * MAX_ASKED)
            mine = octets(info, 1) == decode_base58(peer) and number(request, 1) == DIAL
        except ValueError:
            mine, asked = False, ()
        if not mine:
            return BAD_REQUEST, ""
        addresses = may_try(asked, from_host)
        if not addresses or not self._allowance.allows(stream.machine, trio.current_time()):
            return DIAL_REFUSED, ""
        async with self._busy:
            self.served += 1
            for address in addresses:
                if await self._host.answers(peer, *host_and_port(address)):
                    return OK, address
        return DIAL_ERROR, ""
