"""Signed announcements "peer P takes part in run R and can be reached at these addresses", and a bounded registry of them.

Anybody may pass an announcement on; nobody can forge or alter one. The larger sequence number wins; one without addresses
says goodbye. What is not renewed expires by the clock of whoever holds it, so that skewed clocks cost little.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple

import msgspec

from ...collectives.errors import RemoteProtocolError
from ...collectives.foreign import PLAIN
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
MAX_PER_RUN = 512
MAX_STRANGE = 16_384
"""Of runs that are not ours, together."""
SWEEP_S = 1.0
"""Between two looks for what is over among all of them."""


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """``sequence`` is the time of signing in milliseconds since 1970, so that a restarted peer goes on from a larger one."""

    run: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=PLAIN)]
    peer: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=PLAIN)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS, pattern=PLAIN)], ...],
        msgspec.Meta(max_length=MAX_ADDRESSES),
    ]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    signature: Annotated[
        bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)
    ]

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


def announce(
    identity: Identity, run: RunId, addresses: Sequence[str], unix_s: float
) -> Announcement:
    """A fresh announcement; without addresses it is a goodbye."""
    kept, sequence = usable(addresses), int(unix_s * 1000)
    signature = identity.sign(DOMAIN, _signed_bytes(run, identity.peer, kept, sequence))
    return Announcement(run, identity.peer, kept, sequence, signature)


class _Known(NamedTuple):
    """An announcement, until when it counts, and who passed it on."""

    news: Announcement
    until: float
    sender: PeerId


class Registry:
    """The announcements a node knows. Sans-IO: ``now`` is monotonic, ``unix_s`` the wall clock, both in seconds.

    Keys cost nothing, and so do announcements signed with them. Where there is no room, who has passed on the most makes some for who has passed on
    less: a flood pushes out itself, and nobody's own announcement.
    """

    def __init__(self, mine: Collection[str] = ()) -> None:
        """``mine``: our own runs, for which there is room whatever others fill the rest with; it may change."""
        self._mine = mine
        self._runs: dict[str, dict[PeerId, _Known]] = {}
        self._strange: dict[
            PeerId, dict[tuple[str, PeerId], None]
        ] = {}  # by sender: what it passed on of runs not ours, oldest first
        self._swept_at = -math.inf

    def accept(self, news: Announcement, sender: PeerId, now: float, unix_s: float) -> bool:
        """Take in an announcement that ``sender`` passed on; True when it says something new.

        Raises RemoteProtocolError when it is not validly signed. One that is too old, or for which there is no room, is ignored.
        """
        peers = self._runs.get(news.run, {})
        known = peers.get(PeerId(news.peer))
        if known is not None and known.news.sequence >= news.sequence:
            return False
        if abs(news.sequence / 1000 - unix_s) > REMEMBER_S:
            return False
        if not verify(
            PeerId(news.peer),
            DOMAIN,
            _signed_bytes(news.run, news.peer, news.addresses, news.sequence),
            news.signature,
        ):
            raise RemoteProtocolError(
                f"announcement of {news.peer} is not signed by it", peer=sender
            )
        if usable(news.addresses) != news.addresses:
            raise RemoteProtocolError(
                f"announcement of {news.peer} holds unusable addresses", peer=sender
            )
        if known is not None:
            self._remove(news.run, PeerId(news.peer))
        elif not (
            self._room_in_run(news.run, sender, now)
            and (news.run in self._mine or self._room_for_strangers(sender, now))
        ):
            return False
        self._runs.setdefault(news.run, {})[PeerId(news.peer)] = _Known(news, now + LIFE_S, sender)
        if news.run not in self._mine:
            self._strange.setdefault(sender, {})[news.run, PeerId(news.peer)] = None
        return True

    def members(self, run: RunId, now: float) -> list[Announcement]:
        """The live announcements of a run, sorted by peer."""
        self._expire(run, now)
        return [
            it.news
            for _, it in sorted(self._runs.get(run, {}).items())
            if it.until >= now and not it.news.leaving
        ]

    def missing(self, run: RunId, known: Sequence[Announcement], now: float) -> list[Announcement]:
        """What somebody who sent ``known`` lacks, goodbyes included."""
        self._expire(run, now)
        theirs = {PeerId(news.peer): news.sequence for news in known}
        live = [(peer, it.news) for peer, it in self._runs.get(run, {}).items() if it.until >= now]
        return [news for peer, news in live if theirs.get(peer, -1) < news.sequence]

    def runs_of(self, peer: PeerId, now: float) -> set[str]:
        """The runs that ``peer`` has announced itself in."""
        found = {run: peers[peer] for run, peers in self._runs.items() if peer in peers}
        return {run for run, it in found.items() if it.until >= now and not it.news.leaving}

    def drop(self, run: RunId) -> None:
        """Forget a run."""
        for peer in list(self._runs.get(run, ())):
            self._remove(run, peer)

    def _remove(self, run: str, peer: PeerId) -> None:
        known = self._runs[run].pop(peer)
        if not self._runs[run]:
            del self._runs[run]
        brought = self._strange.get(known.sender, {})
        brought.pop((run, peer), None)
        if not brought:
            self._strange.pop(known.sender, None)

    def _expire(self, run: str, now: float, remember_s: float = REMEMBER_S) -> None:
        for peer in [
            peer for peer, it in self._runs.get(run, {}).items() if it.until + remember_s < now
        ]:
            self._remove(run, peer)

    def _room_in_run(self, run: str, sender: PeerId, now: float) -> bool:
        if len(self._runs.get(run, {})) >= MAX_PER_RUN:
            self._expire(run, now, 0.0)
        peers = self._runs.get(run, {})
        if len(peers) < MAX_PER_RUN:
            return True
        counts = Counter(known.sender for known in peers.values())
        busiest, count = counts.most_common(1)[0]
        if counts[sender] + 1 >= count:
            return False
        self._remove(run, next(peer for peer, known in peers.items() if known.sender == busiest))
        return True

    def _room_for_strangers(self, sender: PeerId, now: float) -> bool:
        if sum(map(len, self._strange.values())) >= MAX_STRANGE and now - self._swept_at > SWEEP_S:
            self._swept_at = now
            for run in list(self._runs):
                self._expire(run, now, 0.0)
        if sum(map(len, self._strange.values())) < MAX_STRANGE:
            return True
        busiest = max(self._strange, key=lambda other: len(self._strange[other]))
        if len(self._strange.get(sender, ())) + 1 >= len(self._strange[busiest]):
            return False
        self._remove(*next(iter(self._strange[busiest])))
        return True
