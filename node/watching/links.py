"""What a node says of its connections when somebody asks: paths, round trips, rates, clocks,
bandwidth. JSON-able.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from ...collectives.engine import EngineThread
from ...collectives.errors import ConfigError, PeerUnreachableError
from ...collectives.identifiers import PeerId
from ...security.identity import is_peer_id
from ..net.network import PeerNetwork
from .rates import STEP_S, Rates

PINGED = 32
"""Members whose round-trip time is measured when `atoll peers` asks."""
CLOCKS = 8
"""Peers that are asked for the time."""


class Links:
    """One per node."""

    def __init__(self, network: PeerNetwork, engine: EngineThread) -> None:
        self._network, self._engine = network, engine
        self._rates = Rates()

    async def run(self) -> None:
        """Until cancelled: counts, so that rates are known when somebody asks."""
        while True:
            self._sample()
            await trio.sleep(STEP_S)

    async def of(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """``rows`` of members, each with how it is connected: path of messages, round trip, bytes a
        second; None where not known.
        """
        times = await self._network.round_trips(
            [row["peer"] for row in rows if not row["you"]][:PINGED]
        )
        self._sample()
        found: list[dict[str, Any]] = []
        for row in rows:
            peer = row["peer"]
            up, down = self._rates.of(peer) or (None, None)
            link = {
                "link": self._network.path(peer),
                "rtt_ms": times.get(peer),
                "up_bytes_per_s": up,
                "down_bytes_per_s": down,
            }
            found.append({**row, **link})
        return found

    async def ping(self, peer: str) -> dict[str, Any]:
        """Answer `protocol.Ping`."""
        peer = _peer_id(peer)
        if peer == self._network.peer:
            raise ConfigError("that is this node itself", hint="Others: atoll peers")
        try:
            rtt_s = await self._network.ping(peer)
        except PeerUnreachableError as error:
            error.why, error.hint = self._unreached(peer)
            raise
        return {
            "peer": peer,
            "path": self._network.path(peer),
            "rtt_ms": round(rtt_s * 1000, 2),
            "address": self._network.address_of(peer),
        }

    def _unreached(self, peer: PeerId) -> tuple[str, str]:
        """Why a peer probably cannot be reached, and what to do."""
        if not self._network.peers():
            return "This node is connected to nobody.", "What was tried: atoll netcheck"
        if not self._network.book.addresses(peer):
            why = (
                "Nobody has told this node an address of it: it is off, or in no "
                "run that this node is in."
            )
            return (
                why,
                (
                    "Who is there: atoll peers      Whether that node is connected, its user "
                    "sees by: atoll netcheck"
                ),
            )
        why = (
            "It is off, its addresses changed, or a firewall is in between. If it is behind a "
            "NAT: no relay leads to it."
        )
        return why, "On its side, then on this one: atoll netcheck"

    async def check(self, bandwidth: str = "") -> dict[str, Any]:
        """Answer `protocol.Check`."""
        clocks = await self._network.clocks(self._network.peers()[:CLOCKS])
        rows = [
            {"peer": peer, "ahead_s": round(ahead, 3), "within_s": round(within, 3)}
            for peer, (ahead, within) in sorted(clocks.items())
        ]
        return {"clock": rows, "bandwidth": await self._bandwidth(bandwidth) if bandwidth else None}

    async def _bandwidth(self, named: str) -> dict[str, Any]:
        peer = _peer_id(named)
        await self._network.connect(peer)
        up, down = await self._network.measuring.bandwidth_to(peer)
        return {
            "peer": peer,
            "path": self._network.path(peer),
            "up_bytes_per_s": up,
            "down_bytes_per_s": down,
        }

    def _sample(self) -> None:
        lanes = self._engine.stats()
        self._rates.sample(
            trio.current_time(),
            {peer: (lane.bytes_sent, lane.bytes_received) for peer, lane in lanes.items()},
        )


def _peer_id(named: str) -> PeerId:
    if not is_peer_id(named):
        raise ConfigError(f"not a peer id: {named[:80]!r}", hint="Names and ids: atoll peers")
    return PeerId(named)
