"""One attempt at a masking, at one member: who has said what, what is missing, what comes next.
Sans I/O and without a clock of its own.

One member leads the attempt: it says whose keys count, then whose shares. That it said the same to
all needs no trust: the sum's operation is named by all that was said (`digest`), so that members
who were told different things do not meet in one sum, and too small a sum is never unmasked.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from ....collectives.errors import RemoteProtocolError
from ....collectives.identifiers import PeerId
from ....collectives.swarm import SecureSettings
from ....security.identity import Identity
from ....security.masking import Binding, Buckets, Client, Memory
from ....security.masking.messages import Deal, Keys, MaskConsent, MaskReveal, Message, check
from .wire import AuthoredMessage, Body, Fixed, Stage, Want

ANSWERS = 32  # messages handed on at once: shares for 256 members are 60 kB each
KINDS: tuple[type[Message], ...] = (Keys, Deal, MaskConsent, MaskReveal)


class MaskingStep(IntEnum):
    """How far an attempt is here."""

    KEYS = 0
    SHARES = 1
    MASKED = 2  # whose vectors meet is known: they are masked and added up
    SUMMED = 3  # it is decided whose vectors are in the sum


class Masking:
    """Passive until `join`: others may begin before this member has a vector."""

    def __init__(self, binding: Binding, leader: PeerId, me: PeerId, config: str) -> None:
        """``config``: name of the configuration that the roster is."""
        self.binding, self.leader, self.me, self.config = binding, leader, me, config
        self.client: Client | None = None
        self.messages: tuple[dict[PeerId, Message], ...] = ({}, {}, {}, {})  # by stage
        self.refused: set[tuple[int, PeerId]] = set()  # (stage, author) of what did not hold
        self.fixed: list[tuple[PeerId, ...]] = []  # whose keys count, then whose shares
        self.passed: set[PeerId] = set()
        self.digest: bytes | None = None  # of all keys and shares that count
        self.survivors: tuple[PeerId, ...] | None = None  # whose vectors are in the sum
        self.out: list[tuple[PeerId | None, Body]] = []  # None: to all others

    @property
    def key(self) -> tuple[int, int]:
        """Which attempt at which round."""
        return self.binding.round, self.binding.attempt

    @property
    def step(self) -> MaskingStep:
        return (
            MaskingStep.SUMMED
            if self.survivors is not None
            else MaskingStep.MASKED
            if self.digest is not None
            else MaskingStep(min(1, len(self.fixed)))
        )

    @property
    def keys(self) -> dict[PeerId, Keys]:
        """Those that count."""
        return {peer: self.messages[0][peer] for peer in self.fixed[0]}  # type: ignore[misc]

    @property
    def deals(self) -> dict[PeerId, Deal]:
        """Those that count."""
        return {peer: self.messages[1][peer] for peer in self.fixed[1]}  # type: ignore[misc]

    def buckets(self, terms: SecureSettings) -> Buckets:
        """Whose vectors are added up together: by all that was said, so the same at all who meet in
        one sum.
        """
        assert self.digest is not None
        if terms.buckets == 1:
            return Buckets.one(self.deals)
        return Buckets.dealt(self.digest, self.fixed[1], terms.buckets, terms.threshold)

    @property
    def takes_part(self) -> bool:
        """Whether this member's vector can be in the sum, as far as it is known."""
        return self.client is not None and all(self.me in peers for peers in self.fixed)

    def join(self, identity: Identity, memory: Memory, rng: random.Random | None) -> None:
        """Take part. Raises SecurityError where an earlier life began this attempt."""
        self.client = Client(self.binding, identity, memory, rng)
        self.say(self.client.keys())

    def say(self, message: Message) -> None:
        """Say something of one's own, to everybody."""
        self.messages[KINDS.index(type(message))][self.me] = message
        self.out.append((None, AuthoredMessage(self.binding.number(self.me), message)))

    # ---- inputs
    def hear(self, sender: PeerId, authored: AuthoredMessage) -> bool:
        """Whether it is news. Raises BadSignatureError, RemoteProtocolError, naming the peer."""
        if authored.number >= len(self.binding.roster):
            raise RemoteProtocolError(
                f"{sender} told what nobody in the roster has said", peer=sender
            )
        author, stage = self.binding.roster[authored.number], KINDS.index(type(authored.message))
        if (stage, author) in self.refused:
            return False
        if author in self.messages[stage]:  # it may not know what came after
            if sender == author and self.me == self.leader:
                self.out += [(author, fixed) for fixed in self.announcements()]
            return False
        check(authored.message, self.binding, author)
        self.messages[stage][author] = authored.message
        self.passed.discard(author)
        return True

    def refuse(self, stage: Stage, author: PeerId) -> None:
        """What a member said does not hold: it is taken out, and nothing else of its is taken, nor
        asked for.
        """
        self.messages[stage].pop(author, None)
        self.refused.add((stage, author))

    def announcements(self) -> list[Fixed]:
        """What the leader has fixed so far."""
        return [
            Fixed(
                0 if stage == 0 else 1, tuple(sorted(self.binding.number(peer) for peer in peers))
            )
            for stage, peers in enumerate(self.fixed)
        ]

    def fix(self, sender: PeerId, fixed: Fixed) -> bool:
        """The leader says whose words count. Whether it is news. Raises RemoteProtocolError where
        it cannot be.
        """
        if sender != self.leader or fixed.stage != len(self.fixed):
            return False
        roster, numbers = self.binding.roster, fixed.numbers
        sane = (
            len(numbers) >= self.binding.threshold
            and list(numbers) == sorted(set(numbers))
            and numbers[-1] < len(roster)
        )
        peers = tuple(roster[number] for number in numbers) if sane else ()
        if not sane or (fixed.stage == 1 and not set(peers) <= set(self.fixed[0])):
            raise RemoteProtocolError(f"{sender} fixed members that cannot be", peer=sender)
        self.fixed.append(peers)
        return True

    def lead(self, silent: Iterable[PeerId], bad: Iterable[PeerId], late: bool) -> bool:
        """As the leader: fix the next set once all that can be expected is here, or it is ``late``
        and enough is. Whether it did.
        """
        stage = len(self.fixed)
        if self.me != self.leader or stage > 1:
            return False
        expected = (
            set(self.fixed[0] if stage else self.binding.roster)
            - set(silent)
            - self.passed
            - set(bad)
        )
        here = self.messages[stage].keys() & set(
            self.fixed[0] if stage else self.binding.roster
        ) - set(bad)
        if len(here) < self.binding.threshold or (expected - here and not late):
            return False
        self.fixed.append(tuple(sorted(here)))
        self.out.append((None, self.announcements()[-1]))
        return True

    # ---- progress
    def advance(self) -> None:
        """Deal shares once it is known whose keys count and they are here; know what is masked once
        the shares are here.
        """
        if self.client is None:
            return
        if (
            len(self.fixed) > 0
            and self.takes_part
            and self.me not in self.messages[1]
            and self.messages[0].keys() >= set(self.fixed[0])
        ):
            self.say(self.client.deal(self.keys))
        if (
            len(self.fixed) > 1
            and self.digest is None
            and self.messages[0].keys() >= set(self.fixed[0])
            and self.messages[1].keys() >= set(self.fixed[1])
        ):
            heard = [
                (self.binding.number(peer), self.messages[0][peer], self.messages[1][peer])
                for peer in self.fixed[1]
            ]
            keys = [(self.binding.number(peer), self.messages[0][peer]) for peer in self.fixed[0]]
            self.digest = hashlib.sha256(
                b"atoll/masked/1\0" + self.binding.digest + msgspec.msgpack.encode((keys, heard))
            ).digest()

    def consents(self) -> dict[PeerId, MaskConsent]:
        """Of survivors, to the set that is decided."""
        survivors = self.survivors or ()
        wanted = tuple(sorted(self.binding.number(peer) for peer in survivors))
        found = {
            peer: message
            for peer, message in self.messages[2].items()
            if peer in survivors and isinstance(message, MaskConsent)
        }
        return {peer: message for peer, message in found.items() if message.survivors == wanted}

    def reveals(self) -> dict[PeerId, MaskReveal]:
        """Shares of survivors."""
        return {
            peer: message
            for peer, message in self.messages[3].items()
            if peer in (self.survivors or ()) and isinstance(message, MaskReveal)
        }

    # ---- repair
    def missing(self) -> tuple[Stage, tuple[int, ...]] | None:
        """What is lacked here of what others have said by now."""
        wanted: tuple[Stage, Iterable[PeerId]] | None = None
        if self.survivors is not None:
            wanted = (
                (3, self.survivors)
                if len(self.consents()) >= self.binding.threshold
                else (2, self.survivors)
            )
        elif (
            self.digest is None
            and self.fixed
            and (self.client is not None or self.me == self.leader)
        ):
            if not self.messages[0].keys() >= set(self.fixed[0]):
                wanted = (0, self.fixed[0])
            elif len(self.fixed) > 1 or self.me == self.leader:
                wanted = (1, self.fixed[-1])
        if wanted is None:
            return None
        numbers = tuple(
            sorted(
                self.binding.number(peer)
                for peer in wanted[1]
                if peer not in self.messages[wanted[0]] and (wanted[0], peer) not in self.refused
            )
        )
        return (wanted[0], numbers) if numbers else None

    def ask(self, helper: PeerId) -> None:
        """Ask for what is missing: its authors, and one who may have it: the leader, who needs all
        of it, or else ``helper``.
        """
        lacked = self.missing()
        if lacked is None:
            return
        stage, numbers = lacked
        if self.me == self.leader or stage > 1:
            self.out += [
                (self.binding.roster[number], Want(stage, (number,))) for number in numbers
            ]
        self.out.append(
            (helper if self.me == self.leader or stage > 1 else self.leader, Want(stage, numbers))
        )

    def answer(self, peer: PeerId, stage: Stage, numbers: Iterable[int]) -> None:
        """Hand on what is here, up to ANSWERS messages: who lacks more asks again."""
        roster = self.binding.roster
        for number in tuple(numbers)[:ANSWERS]:
            if (
                number < len(roster)
                and (message := self.messages[stage].get(roster[number])) is not None
            ):
                self.out.append((peer, AuthoredMessage(number, message)))

    def repeat(self) -> None:
        """Say again what others may not have heard."""
        if self.me == self.leader:
            self.out += [(None, fixed) for fixed in self.announcements()]
        if self.client is None:
            return
        number, stage = self.binding.number(self.me), 0 if not self.fixed else 1
        if len(self.fixed) < 2 and (message := self.messages[stage].get(self.me)) is not None:
            self.out.append((None if stage == 0 else self.leader, AuthoredMessage(number, message)))
