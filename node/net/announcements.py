"""Signed announcements "peer P takes part in run R and can be reached at these addresses", and a bounded registry of them.

Anybody may pass an announcement on; nobody can forge or alter one. The larger sequence number wins; one without addresses
says goodbye. What is not renewed expires by the clock of whoever holds it, so that skewed clocks cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ...collectives.errors import RemoteProtocolError
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import SIGNATURE_BYTES, Identity, verify
from .addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES, usable

DOMAIN = "atoll/announce/1"
LIFE_S = 120.0
RENEW_S = 30.0
MAX_SKEW_S = 300.0
"""Clocks may differ by so much; records further off are refused."""
REMEMBER_S = MAX_SKEW_S + LIFE_S
"""So long after an announcement is over its sequence is remembered: no older one is fresh enough for anybody then."""
MAX_RUNS = 1024
MAX_PER_RUN = 512


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """``sequence`` is the time of signing in milliseconds since 1970, so that a restarted peer goes on from a larger one."""

    run: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    peer: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    addresses: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)], ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    @property
    def key(self) -> tuple[PeerId, int]:
        """What tells two announcements of a run apart."""
        return PeerId(self.peer), self.sequence

    @property
    def leaving(self) -> bool:
        """Whether it says goodbye."""
        return not self.addresses


def _signed_bytes(run: str, peer: str, addresses: Sequence[str], sequence: int) -> bytes:
    return msgspec.msgpack.encode((run, peer, tuple(addresses), sequence))


def announce(identity: Identity, run: RunId, addresses: Sequence[str], unix_s: float) -> Announcement:
    """A fresh announcement; without addresses it is a goodbye."""
    kept, sequence = usable(addresses), int(unix_s * 1000)
    signature = identity.sign(DOMAIN, _signed_bytes(run, identity.peer, kept, sequence))
    return Announcement(run, identity.peer, kept, sequence, signature)


class Registry:
    """The announcements a node knows. Sans-IO: ``now`` is monotonic, ``unix_s`` the wall clock, both in seconds."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[PeerId, tuple[Announcement, float]]] = {}

    def accept(self, news: Announcement, sender: PeerId, now: float, unix_s: float) -> bool:
        """Take in an announcement that ``sender`` passed on; True when it says something new.

        Raises RemoteProtocolError when it is not validly signed. One that is too old, or for which there is no room, is ignored.
        """
        peers = self._runs.get(news.run, {})
        known = peers.get(PeerId(news.peer))
        if known is not None and known[0].sequence >= news.sequence:
            return False
        if abs(news.sequence / 1000 - unix_s) > REMEMBER_S:
            return False
        if not verify(PeerId(news.peer), DOMAIN, _signed_bytes(news.run, news.peer, news.addresses, news.sequence), news.signature):
            raise RemoteProtocolError(f"announcement of {news.peer} is not signed by it", peer=sender)
        if usable(news.addresses) != news.addresses:
            raise RemoteProtocolError(f"announcement of {news.peer} holds unusable addresses", peer=sender)
        if known is None and not self._make_room(news.run, now):
            return False
        self._runs.setdefault(news.run, {})[PeerId(news.peer)] = (news, now + LIFE_S)
        return True

    def members(self, run: RunId, now: float) -> list[Announcement]:
        """The live announcements of a run, sorted by peer."""
        self._expire(run, now)
        return [news for _, (news, until) in sorted(self._runs.get(run, {}).items()) if until >= now and not news.leaving]

    def missing(self, run: RunId, known: Sequence[Announcement], now: float) -> list[Announcement]:
        """What somebody who sent ``known`` lacks, goodbyes included."""
        self._expire(run, now)
        theirs = {PeerId(news.peer): news.sequence for news in known}
        live = [(peer, news) for peer, (news, until) in self._runs.get(run, {}).items() if until >= now]
        return [news for peer, news in live if theirs.get(peer, -1) < news.sequence]

    def runs_of(self, peer: PeerId, now: float) -> set[str]:
        """The runs that ``peer`` has announced itself in."""
        found = {run: peers[peer] for run, peers in self._runs.items() if peer in peers}
        return {run for run, (news, until) in found.items() if until >= now and not news.leaving}

    def drop(self, run: RunId) -> None:
        """Forget a run."""
        self._runs.pop(run, None)

    def _expire(self, run: str, now: float, remember_s: float = REMEMBER_S) -> None:
        peers = self._runs.get(run)
        if peers is None:
            return
        for peer in [peer for peer, (_, until) in peers.items() if until + remember_s < now]:
            del peers[peer]
        if not peers:
            del self._runs[run]

    def _make_room(self, run: str, now: float) -> bool:
        if len(self._runs.get(run, {})) >= MAX_PER_RUN:
            self._expire(run, now, 0.0)
        if run not in self._runs and len(self._runs) >= MAX_RUNS:
            for other in list(self._runs):
                self._expire(other, now, 0.0)
        if run not in self._runs:
            return len(self._runs) < MAX_RUNS
        return len(self._runs[run]) < MAX_PER_RUN
