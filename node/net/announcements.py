"""Signed announcements "peer P takes part in run R and can be reached at these addresses", and a
bounded registry of them.

Anybody may pass an announcement on; nobody can forge or alter one. It names the run's organiser and
carries the certificate by which P may enter the run; the organiser needs none. Whoever passes one
on need not know the run: an `InviteReader`, which the node gives, checks that certificate,
organiser, run and peer fit together. The registry keeps a place of its own for each organiser that
is named. Who asks for a run names its organiser, too, so that announcements under any other are not
among what it gets. Runs without certificates (open ones, or with a list) have a place that names
nobody. The larger sequence number wins; one without addresses says goodbye. What is not renewed
expires by the clock of whoever holds it, so that skewed clocks cost little.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, NamedTuple

import msgspec

from ...collectives.errors import RemoteProtocolError
from ...collectives.foreign import PLAIN
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import SIGNATURE_BYTES, Identity, verify
from .transport.addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES, usable

DOMAIN = "atoll/announce/2"
MAX_CERTIFICATE_BYTES = 512
LIFE_S = 120.0
RENEW_S = 30.0
MAX_SKEW_S = 300.0
"""Clocks may differ by so much; records further off are refused."""
REMEMBER_S = MAX_SKEW_S + LIFE_S
"""So long after an announcement is over its sequence is remembered: no older one is fresh enough
for anybody then.
"""
MAX_PER_RUN = 512
"""For each organiser that is named."""
MAX_BY_INVITE = MAX_PER_RUN * 3 // 4
MAX_STRANGE = 16_384
"""Of runs that are not ours, together."""
SWEEP_S = 1.0
"""Between two looks for what is over among all of them."""


class AnnouncedRun(NamedTuple):
    """A run and the organiser that its announcements name; "" where they name nobody."""

    run: str
    organiser: str = ""


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """``sequence`` is the time of signing in milliseconds since 1970, so that a restarted peer goes
    on from a larger one.
    """

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
    organiser: Annotated[str, msgspec.Meta(max_length=128, pattern=PLAIN)] = ""
    certificate: Annotated[bytes, msgspec.Meta(max_length=MAX_CERTIFICATE_BYTES)] = b""

    @property
    def place(self) -> AnnouncedRun:
        """Where it is kept, and asked for."""
        return AnnouncedRun(self.run, self.organiser)

    def signed_bytes(self) -> bytes:
        """What its peer signed."""
        return msgspec.msgpack.encode(
            (
                self.run,
                self.peer,
                self.addresses,
                self.sequence,
                self.organiser,
                self.certificate,
            )
        )

    @property
    def key(self) -> tuple[PeerId, int]:
        """What tells two announcements of a run apart."""
        return PeerId(self.peer), self.sequence

    @property
    def leaving(self) -> bool:
        """Whether it says goodbye."""
        return not self.addresses


InviteReader = Callable[[Announcement], bytes | None]
"""Of an announcement with a certificate: the id of the invite that it was made by; None if it is
not a certificate of this organiser for this run and peer."""


def read_no_certificate(news: Announcement) -> None:
    """An `InviteReader` that accepts no certificate, for networks without runs by invite."""


def announce(
    identity: Identity,
    run: RunId,
    addresses: Sequence[str],
    unix_s: float,
    organiser: str = "",
    certificate: bytes = b"",
) -> Announcement:
    """A fresh announcement; without addresses it is a goodbye."""
    news = Announcement(
        run,
        identity.peer,
        usable(addresses),
        int(unix_s * 1000),
        bytes(SIGNATURE_BYTES),
        organiser,
        certificate,
    )
    return msgspec.structs.replace(news, signature=identity.sign(DOMAIN, news.signed_bytes()))


class _Known(NamedTuple):
    """An announcement, until when it counts, who passed it on, and the id of its invite; empty if
    it shows no certificate.
    """

    news: Announcement
    until: float
    sender: PeerId
    invite: bytes


class Registry:
    """The announcements a node knows. Sans-IO: ``now`` is monotonic, ``unix_s`` the wall clock,
    both in seconds.

    Keys cost nothing, and so do announcements signed with them. Where there is no room, who has
    passed on the most makes some for who has passed on less: a flood pushes out itself, and
    nobody's own announcement.
    """

    def __init__(
        self,
        mine: Collection[AnnouncedRun] = (),
        read_invite: InviteReader = read_no_certificate,
    ) -> None:
        """``mine``: our own places, for which there is room whatever others fill the rest with; it
        may change. ``read_invite``: checks certificates.
        """
        self._mine, self._read_invite = mine, read_invite
        self._runs: dict[AnnouncedRun, dict[PeerId, _Known]] = {}
        # By sender: what it passed on of runs not ours, oldest first.
        self._strange: dict[PeerId, dict[tuple[AnnouncedRun, PeerId], None]] = {}
        self._swept_at = -math.inf

    def accept(self, news: Announcement, sender: PeerId, now: float, unix_s: float) -> bool:
        """Take in an announcement that ``sender`` passed on; True when it says something new.

        Raises RemoteProtocolError when it is not validly signed, or its certificate is none for it.
        One that is too old, or for which there is no room, is ignored.
        """
        place = news.place
        peers = self._runs.get(place, {})
        known = peers.get(PeerId(news.peer))
        if known is not None and known.news.sequence >= news.sequence:
            return False
        if abs(news.sequence / 1000 - unix_s) > REMEMBER_S:
            return False
        if not verify(
            PeerId(news.peer),
            DOMAIN,
            news.signed_bytes(),
            news.signature,
        ):
            raise RemoteProtocolError(
                f"announcement of {news.peer} is not signed by it", peer=sender
            )
        invite = self._invite(news)
        if invite is None:
            raise RemoteProtocolError(
                f"announcement of {news.peer} shows no certificate of {news.organiser} for it",
                peer=sender,
            )
        if usable(news.addresses) != news.addresses:
            raise RemoteProtocolError(
                f"announcement of {news.peer} holds unusable addresses", peer=sender
            )
        if known is not None:
            self._remove(place, PeerId(news.peer))
        elif not (
            self._room_in_run(place, invite, sender, now)
            and (place in self._mine or self._room_for_strangers(sender, now))
        ):
            return False
        self._runs.setdefault(place, {})[PeerId(news.peer)] = _Known(
            news, now + LIFE_S, sender, invite
        )
        if place not in self._mine:
            self._strange.setdefault(sender, {})[place, PeerId(news.peer)] = None
        return True

    def members(self, run: RunId, now: float, organiser: str = "") -> list[Announcement]:
        """The live announcements of a run under an organiser, sorted by peer."""
        place = AnnouncedRun(run, organiser)
        self._expire(place, now)
        return [
            it.news
            for _, it in sorted(self._runs.get(place, {}).items())
            if it.until >= now and not it.news.leaving
        ]

    def get(self, place: AnnouncedRun, peer: PeerId, now: float) -> Announcement | None:
        """The newest announcement of a peer there, or its goodbye, while it counts."""
        known = self._runs.get(place, {}).get(peer)
        return known.news if known is not None and known.until >= now else None

    def missing(
        self, run: RunId, known: Sequence[Announcement], now: float, organiser: str = ""
    ) -> list[Announcement]:
        """What somebody who sent ``known`` lacks of a run under an organiser, goodbyes included."""
        place = AnnouncedRun(run, organiser)
        self._expire(place, now)
        theirs = {PeerId(news.peer): news.sequence for news in known}
        live = [
            (peer, it.news) for peer, it in self._runs.get(place, {}).items() if it.until >= now
        ]
        return [news for peer, news in live if theirs.get(peer, -1) < news.sequence]

    def runs_of(self, peer: PeerId, now: float) -> set[str]:
        """The runs that ``peer`` has announced itself in."""
        found = {place: peers[peer] for place, peers in self._runs.items() if peer in peers}
        return {place.run for place, it in found.items() if it.until >= now and not it.news.leaving}

    def drop(self, run: RunId, organiser: str = "") -> None:
        """Forget what is announced in a run under an organiser."""
        place = AnnouncedRun(run, organiser)
        for peer in list(self._runs.get(place, ())):
            self._remove(place, peer)

    def _remove(self, place: AnnouncedRun, peer: PeerId) -> None:
        known = self._runs[place].pop(peer)
        if not self._runs[place]:
            del self._runs[place]
        brought = self._strange.get(known.sender, {})
        brought.pop((place, peer), None)
        if not brought:
            self._strange.pop(known.sender, None)

    def _expire(self, place: AnnouncedRun, now: float, remember_s: float = REMEMBER_S) -> None:
        for peer in [
            peer for peer, it in self._runs.get(place, {}).items() if it.until + remember_s < now
        ]:
            self._remove(place, peer)

    def _invite(self, news: Announcement) -> bytes | None:
        """The id of the invite it came by; empty for the organiser, and where none is named; None
        if what it names does not fit together.
        """
        if news.organiser in ("", news.peer):
            return None if news.certificate else b""
        return self._read_invite(news)

    def _room_in_run(self, place: AnnouncedRun, invite: bytes, sender: PeerId, now: float) -> bool:
        """Of a run's places one invite has `MAX_BY_INVITE`: who holds its seed can name any number
        of peers.
        """
        if len(self._runs.get(place, {})) >= MAX_BY_INVITE:
            self._expire(place, now, 0.0)
        peers = self._runs.get(place, {})
        alike = peers
        if invite and len(peers) >= MAX_BY_INVITE:
            alike = {peer: known for peer, known in peers.items() if known.invite == invite}
        if len(alike) >= MAX_BY_INVITE and alike is not peers:
            peers = alike
        elif len(peers) < MAX_PER_RUN:
            return True
        counts = Counter(known.sender for known in peers.values())
        busiest, count = counts.most_common(1)[0]
        if counts[sender] + 1 >= count:
            return False
        self._remove(place, next(peer for peer, known in peers.items() if known.sender == busiest))
        return True

    def _room_for_strangers(self, sender: PeerId, now: float) -> bool:
        if sum(map(len, self._strange.values())) >= MAX_STRANGE and now - self._swept_at > SWEEP_S:
            self._swept_at = now
            for place in list(self._runs):
                self._expire(place, now, 0.0)
        if sum(map(len, self._strange.values())) < MAX_STRANGE:
            return True
        busiest = max(self._strange, key=lambda other: len(self._strange[other]))
        if len(self._strange.get(sender, ())) + 1 >= len(self._strange[busiest]):
            return False
        self._remove(*next(iter(self._strange[busiest])))
        return True
