"""What a member of a large run knows of those that it does not beat to: what its partners say they
hear, and what it asks for itself. Sans-IO.

Each beat of a partner says which of *its* partners it has heard lately, with its own ears. Any
other member is a partner of exactly two of one's own (`PartnerMesh.between`), and is taken for
alive

* for `TRUST_BEATS` √n beats after one heard it last oneself, where both say so;
* for twice ``detect_s``, where one does: the other may have died.

So two liars that stand between two members keep one, dead, alive for the other for a bounded time,
and a single liar for twice ``detect_s``. Nobody is suspected by what is said: whom partners do not
vouch for is asked itself, and suspected when it does not answer. So a liar that withholds its word
costs a question now and then, and kills nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...collectives.errors import RemoteProtocolError
from ...collectives.identifiers import PeerId
from . import membership_records as wire
from .hearing import Hearing
from .partners import PartnerMesh
from .partners import mesh_of as mesh_of

LONG_AGO = float("-inf")
FRESH = 0.4  # of detect_s: who was heard within it is vouched for
ANSWER = 0.3  # of detect_s: so long a question waits before silence is an answer
ALONE = 2.0  # times detect_s: so long one partner's word is enough
TRUST_BEATS = 8.0  # times √n beats: so long two partners' word is
LATE_BEATS = 1.5  # a word that is so much later than it is fresh is asked after

Asked = dict[PeerId, tuple[float, float]]
"""When a peer that has not been heard since was asked first, and last."""


class _Word:
    """What one partner says: when it said so last, and when it last vouched for those that it no
    longer vouches for.
    """

    __slots__ = ("at", "before", "bits")

    def __init__(self) -> None:
        self.at, self.bits = LONG_AGO, 0
        self.before: dict[int, float] = {}

    def says(self, now: float, bits: int) -> None:
        for bit in _ones(self.bits & ~bits):
            self.before[bit] = self.at
        self.at, self.bits = now, bits

    def last(self, bit: int) -> float:
        return self.at if self.bits >> bit & 1 else self.before.get(bit, LONG_AGO)


class Hearsay(Hearing):
    """Of one mesh. ``heard``: when each peer was heard last; ``since``: since when it is watched;
    both are their owner's, and read here. ``beat_s``, ``detect_s``: seconds. ``asked``: of members,
    ``beaten``: since when each is beaten to; both of earlier meshes.
    """

    def __init__(
        self,
        me: PeerId,
        mesh: PartnerMesh,
        heard: Mapping[PeerId, float],
        since: Mapping[PeerId, float],
        *,
        beat_s: float,
        detect_s: float,
        asked: Asked,
        beaten: Mapping[PeerId, float],
    ) -> None:
        self.mesh, self.partners = mesh, mesh.partners(me)
        self.asked, self.beaten = asked, {peer: beaten[peer] for peer in self.partners}
        self._me, self._heard, self._since = me, heard, since
        self._beat_s, self._detect_s = beat_s, detect_s
        self._trust_s = TRUST_BEATS * math.sqrt(len(mesh.peers)) * beat_s
        self._ask_after_s = FRESH * detect_s + LATE_BEATS * beat_s
        inner = {me, *self.partners}
        self._others = [peer for peer in mesh.peers if peer not in inner]
        self._next = 0  # of these, whose turn it is to be asked
        self._words = {peer: _Word() for peer in self.partners}
        self._charge = {
            peer: sum(1 << bit for each, bit in mesh.bits(peer).items() if each not in inner)
            for peer in self.partners
        }

    # ---- what is known
    def last(self, now: float, peer: PeerId) -> float:
        """When ``peer`` was alive for sure, if its two partners tell the truth; `LONG_AGO` for a
        partner of one's own, and where their word does not count.
        """
        if peer in self._words or peer not in self.mesh or peer == self._me:
            return LONG_AGO
        unheard_s = now - self._direct(peer)
        if unheard_s > self._trust_s:
            return LONG_AGO
        one, other = self.mesh.between(self._me, peer)
        words = self._last_of(one, peer), self._last_of(other, peer)
        enough = max(words) if unheard_s <= ALONE * self._detect_s else min(words)
        return enough - FRESH * self._detect_s

    def unanswered(self, now: float, peer: PeerId, last: float) -> bool:
        """Whether it has been asked, by beats or by a question, since its ``last`` sign of life,
        and had time to answer.
        """
        if peer in self._words:
            return now - self.beaten[peer] >= ANSWER * self._detect_s
        first, _ = self.asked.get(peer, (now, now))
        return now - first >= ANSWER * self._detect_s and last < first

    def _direct(self, peer: PeerId) -> float:
        return max(self._heard.get(peer, LONG_AGO), self._since.get(peer, LONG_AGO))

    def _last_of(self, partner: PeerId, peer: PeerId) -> float:
        return self._words[partner].last(self.mesh.bits(partner)[peer])

    # ---- inputs
    def said(self, now: float, partner: PeerId, mesh: bytes, bits: bytes) -> None:
        """A partner beats. Raises RemoteProtocolError for bits that are not its partners'."""
        word = self._words.get(partner)
        if word is None or mesh != self.mesh.name:
            return  # of another configuration: a beat, and no more
        count, number = len(self.mesh.partners(partner)), int.from_bytes(bits, "little")
        if len(bits) != _nbytes(count) or number >> count:
            raise RemoteProtocolError(
                f"a beat of {len(bits)} bytes says what {count} partners are", peer=partner
            )
        word.says(now, number)

    def paused(self, until: float, pause_s: float) -> None:
        """This process stood still for so long: nobody was silent meanwhile."""
        for word in self._words.values():
            if word.at <= until:
                word.at += pause_s
            word.before = {bit: at + pause_s for bit, at in word.before.items()}
        self.asked = {
            peer: (first + pause_s, last + pause_s) for peer, (first, last) in self.asked.items()
        }

    # ---- what is to be sent
    def beat(self, now: float) -> wire.HeardBeat:
        """What goes to each partner."""
        since, number = now - FRESH * self._detect_s, 0
        for bit, peer in enumerate(self.partners):
            if self._heard.get(peer, LONG_AGO) >= since:
                number |= 1 << bit
        return wire.HeardBeat(
            self.mesh.name, number.to_bytes(_nbytes(len(self.partners)), "little")
        )

    def questions(self, now: float, seen: Mapping[PeerId, float]) -> list[PeerId]:
        """Whom to ask now: those that partners do not vouch for, and in turn everybody else.
        ``seen``: when each was last vouched for by other means.
        """
        found = [peer for peer in self._doubtful(now) if self._asks(now, peer, seen)]
        turns = math.ceil(len(self._others) * self._beat_s / (self._trust_s / 2))
        for _ in range(turns):
            peer = self._others[self._next % len(self._others)]
            self._next += 1
            unheard_s = now - self._direct(peer)
            if unheard_s > self._trust_s / 2 and self._may_ask(now, peer, self.last(now, peer)):
                found.append(peer)
        for peer in found:
            first, _ = self.asked.get(peer, (now, now))
            self.asked[peer] = first, now
        return list(dict.fromkeys(found))

    def silent(self, now: float) -> list[PeerId]:
        """Whom to ask for through others: partners that are silent, and those whose question of
        this moment is not their first.
        """
        since = now - FRESH * self._detect_s
        return [
            *(peer for peer in self.partners if self._direct(peer) < since),
            *(peer for peer, (first, last) in self.asked.items() if first < since and last == now),
        ]

    def _doubtful(self, now: float) -> list[PeerId]:
        """For whom a partner does not vouch, or no more."""
        late, found = now - self._ask_after_s, dict[PeerId, None]()
        for partner, word in self._words.items():
            lacking = self._charge[partner] & ~(word.bits if word.at >= late else 0)
            if lacking:
                named = self.mesh.partners(partner)
                found.update((named[bit], None) for bit in _ones(lacking))
        return list(found)

    def _asks(self, now: float, peer: PeerId, seen: Mapping[PeerId, float]) -> bool:
        last = max(self._direct(peer), seen.get(peer, LONG_AGO))
        if now - last <= self._ask_after_s:
            return False
        last = max(last, self.last(now, peer))
        return now - last > self._ask_after_s and self._may_ask(now, peer, last)

    def _may_ask(self, now: float, peer: PeerId, last: float) -> bool:
        """Who has not answered for long is asked now and then."""
        first, asked = self.asked.get(peer, (now, LONG_AGO))
        if max(last, self._heard.get(peer, LONG_AGO)) >= first:  # this is another question
            self.asked.pop(peer, None)
            return True
        return now - first <= self._detect_s or now - asked >= ALONE * self._detect_s


def _nbytes(bits: int) -> int:
    return (bits + 7) // 8


def _ones(number: int) -> list[int]:
    found = list[int]()
    while number:
        low = number & -number
        found.append(low.bit_length() - 1)
        number ^= low
    return found
