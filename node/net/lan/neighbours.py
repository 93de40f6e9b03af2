"""Who is on this network, as multicast DNS tells it: when to ask and answer, and what to believe.
Sans-IO; ``now``: seconds, monotonic.

What is heard is a hint, as any address of a stranger: the peer proves its id when it is dialled. So
that nobody can make us dial others, an address counts only if the datagram came from there; how
many peers one host may name, and how many datagrams are read a second, is bounded.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence

from ....collectives.errors import ConfigError
from ....collectives.identifiers import PeerId
from ..transport.addresses import host_and_port, is_direct, join_peer, split_peer
from .mdns import ADDRESS, MARK, answer, question, read

SOON_S = (0.02, 0.12)
"""An answer waits for so long, so that not all come at once (RFC 6762, 6)."""
PAUSE_S = 1.0
"""Between two answers of ours."""
FIRST_S, LONGEST_S = 1.0, 600.0
"""Between questions; each pause is three times the one before."""
AGAIN_S = 30.0
"""A neighbour that was told is told again after so long, if it is heard again: it may not have
answered the first time.
"""
MAX_PEERS, MAX_OF_HOST = 64, 8
LIFE_S = 900.0
MAX_A_SECOND = 50
"""Datagrams that are looked at, those of printers and loudspeakers included."""
NAME_LENGTH = 32


class Neighbours:
    """What one node says and hears on one network."""

    def __init__(self, me: PeerId, rng: random.Random) -> None:
        self._me, self._rng = me, rng
        self._name = "".join(
            rng.choice(string.ascii_lowercase + string.digits) for _ in range(NAME_LENGTH)
        )
        self._addresses: tuple[str, ...] = ()
        self._ask_at = self._answer_at = math.inf
        self._pause_s, self._answered_at = FIRST_S, -math.inf
        self._peers: dict[PeerId, tuple[str, str, float]] = {}  # host, address, when it was told
        self._second, self._read = -math.inf, 0

    def here(self, addresses: Sequence[str], now: float) -> None:
        """We can be dialled at these on this network. If they changed, announce and ask."""
        if tuple(addresses) == self._addresses:
            return
        self._addresses = tuple(addresses)
        self._peers.clear()
        self._pause_s = FIRST_S
        self._ask_at = self._answer_at = now + self._rng.uniform(*SOON_S)
        self._answered_at = -math.inf

    @property
    def due_at(self) -> float:
        """When to call `due`."""
        return min(self._ask_at, self._answer_at)

    def due(self, now: float) -> list[bytes]:
        """Datagrams to send now."""
        out: list[bytes] = []
        if now >= self._ask_at:
            out.append(question())
            self._ask_at = now + self._pause_s * self._rng.uniform(1.0, 1.2)
            self._pause_s = min(3 * self._pause_s, LONGEST_S)
        if now >= self._answer_at:
            out.append(
                answer(self._name, [join_peer(self._me, address) for address in self._addresses])
            )
            self._answer_at, self._answered_at = math.inf, now
        return out

    def spent(self, now: float) -> bool:
        """Whether enough was read in this second: wait before you read more."""
        if now - self._second >= 1.0:
            self._second, self._read = now, 0
        return self._read >= MAX_A_SECOND

    def heard(self, data: bytes, sender: str, now: float) -> list[tuple[PeerId, str]]:
        """The peers, with an address each, that a datagram from the host ``sender`` tells us of and
        that were not told in the last 30 s.
        """
        self._read += 1
        try:
            message = read(data)
        except ValueError:
            return []
        if message.asks and self._addresses:
            soonest = max(now, self._answered_at + PAUSE_S)
            self._answer_at = min(self._answer_at, soonest + self._rng.uniform(*SOON_S))
        found = [
            self._take(text, sender, now)
            for texts in message.texts
            if MARK in texts
            for text in texts
            if text.startswith(ADDRESS)
        ]
        return [neighbour for neighbour in found if neighbour is not None]

    def _take(self, text: str, sender: str, now: float) -> tuple[PeerId, str] | None:
        try:
            peer, address = split_peer(text.removeprefix(ADDRESS))
        except ConfigError:
            return None
        if peer == self._me or not is_direct(address) or host_and_port(address)[0] != sender:
            return None
        known = self._peers.get(peer)
        if known is not None and known[1] == address and now - known[2] < AGAIN_S:
            return None
        self._peers = {
            other: row
            for other, row in self._peers.items()
            if now - row[2] < LIFE_S and other != peer
        }
        if (
            len(self._peers) >= MAX_PEERS
            or sum(host == sender for host, _, _ in self._peers.values()) >= MAX_OF_HOST
        ):
            return None
        self._peers[peer] = sender, address, now
        return peer, address

    def status(self, now: float) -> dict[str, str]:
        """The address of each peer that was heard of lately."""
        return {
            peer: address for peer, (_, address, at) in self._peers.items() if now - at < LIFE_S
        }
