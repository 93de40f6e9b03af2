"""Recertify: on the organiser's word that some members will never vote again, their round goes on
without their votes. Sans I/O.

Never automatic where anybody is silent: the silent may be a live majority. The organiser seals the
open round at every node that it knows outside the removed, and waits for all of them. A sealed
member votes no more in this round, counts no votes, and listens to nobody removed; it answers what
it has accepted, and asks until it has the entry. The organiser then signs one entry: the one
accepted under the highest ballot, unchanged; where none is, an entry without contributors. Its
signature, over the removed members, too, stands for
the votes of a quorum. A node that is further answers with what was decided, and the seal begins
anew there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from .. import messages as m
from ..errors import RemoteProtocolError
from ..group import Certified, Config, Entry, Member, Vote
from ..identifiers import PeerId
from ..round.certificate import recertified_payload, seal_payload, sealed_payload
from ..round.journal import SealRecord
from ..round.seals import RoundSeal, gone

if TYPE_CHECKING:
    from ..round.machine import RoundMachine


class Sealing(RoundSeal):
    """The seal of the open round at one member; at the organiser also what it collects. Volatile
    but for the journal's record.
    """

    def __init__(self, view: RoundMachine) -> None:
        super().__init__(view)
        self.answers: dict[PeerId, m.Sealed] = {}

    # ---- views
    @property
    def record(self) -> SealRecord:
        """What the journal knows of seals."""
        return self.view.journal.sealed or SealRecord(-1, b"", ())

    @property
    def active(self) -> bool:
        """Whether the open round is sealed here: this member votes no more in it."""
        record = self.view.journal.sealed
        return record is not None and (record.round, record.base) == (
            self.view.round,
            self.view.base,
        )

    @property
    def leading(self) -> bool:
        """Whether the organiser asked for it here, and it is not done."""
        return self.record.asked

    def shuns(self, who: Member) -> bool:
        """Whether nothing that this member says counts any more."""
        record = self.view.journal.sealed
        ahead = record is not None and record.round >= self.view.round
        return super().shuns(who) or (record is not None and ahead and gone(who, record.removed))

    def awaited(self) -> set[PeerId]:
        """Whose answers the organiser still waits for."""
        return {peer for peer in self._nodes() if peer not in self.answers}

    def _nodes(self) -> set[PeerId]:
        """Every known node outside the removed, this one included, and whoever lives on after a
        life that was removed.
        """
        me, ended = self.view.me.peer, self.view.ended
        without = {member.peer for member in self.record.removed if not ended(member)} - {me}
        return {
            peer
            for peer in (*self.view.others, me, *self.view.actions.nodes())
            if peer not in without
        }

    # ---- the organiser
    def ask(self, removed: Collection[Member]) -> None:
        """The organiser's word: these will never vote again. Raises StorageError."""
        record = self.record
        everybody = tuple(sorted({*removed, *(record.removed if record.asked else ())}))
        # It is signed: what is asked for now begins with the next entry.
        stands = self.active and record.signed is not None
        at, signed = (record.round, record.signed) if stands else (-1, None)
        self.view.journal.seal(SealRecord(at, record.base, everybody, True, signed))
        self.answers = {}

    def tick(self, now: float) -> bool:
        """Call about every ``pull_s``. Whether the open round is sealed."""
        if self.leading:
            self._lead(now)
        elif self.active and self.view.organiser is not None:
            self.view.catching_up.fetch(now, self.view.organiser)
        return self.active

    def _lead(self, now: float) -> None:
        view = self.view
        if self.active and self.record.signed is not None:
            return self._learn(now, self.record.signed)
        if ended := {who for who in view.config if view.ended(who)} - set(self.record.removed):
            # An entry may have let in a life of a lost peer that nobody here knew of when it was
            # given up.
            self.ask(ended)
        record = self.record
        if view.quorum([member for member in view.config if member not in record.removed]):
            if not set(record.removed) & set(view.config):
                view.journal.seal(msgspec.structs.replace(record, asked=False))
            return None  # the others decide again, and evict who is still in it
        if view.stateless or view.root is None:
            return None
        self._seal(view.round, view.base, record.removed)
        if view.open.decided:  # somebody was further
            return None
        self.answers[view.me.peer] = self._answer(view.round, view.base)
        awaited = self.awaited()
        seal = self._message()
        for peer in sorted(
            {*awaited, *(member.peer for member in record.removed)}
        ):  # whoever is wrongly held for dead is told to be silent
            view.tell(peer, seal)
        if not awaited:
            self._complete(now)
        return None

    def _message(self) -> m.Seal:
        view, removed = self.view, self.record.removed
        return m.Seal(
            view.base,
            removed,
            view.actions.sign(seal_payload(view.run, view.log, view.round, view.base, removed)),
        )

    def on_sealed(self, who: Member, body: m.Sealed) -> None:
        """An answer. Raises RemoteProtocolError when it is not its sender's, or of no use."""
        view = self.view
        if not (self.leading and self.active) or body.removed != self.record.removed:
            return
        earlier = [member for member in view.config if member.peer == who.peer and member != who]
        if any(member not in self.record.removed for member in earlier):
            return  # it lost what it voted for: the organiser must remove the life that did
        if not view.actions.verify(
            who.peer, self._payload(view.round, view.base, body), body.signature
        ):
            raise RemoteProtocolError("answer to a seal is not signed by its sender", peer=who.peer)
        if body.accepted is not None and (
            who not in view.config or not view.entry_fits(body.accepted.entry)
        ):
            raise RemoteProtocolError("answer to a seal names another round", peer=who.peer)
        self.answers[who.peer] = body

    def choice(self) -> Entry:
        """What the answers leave to be signed."""
        view, removed = self.view, self.record.removed
        accepted = [answer.accepted for answer in self.answers.values() if answer.accepted]
        if accepted:
            return max(accepted, key=lambda a: a.ballot).entry
        survivors = tuple(
            sorted({view.me, *(member for member in view.config if member not in removed)})
        )
        assert view.root is not None
        shape = view.shape
        return Entry(
            view.log,
            view.round,
            view.base,
            view.root,
            (),
            (),
            (),
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            shape.reducer,
            survivors,
            tally=view.journal.entries.tally.hash,
        )

    def _complete(self, now: float) -> None:
        view, record = self.view, self.record
        entry = self.choice()
        if not view.has_bytes(entry):
            return view.actions.fetch_result(entry, self._holders(entry))
        view.actions.keep(entry)
        signature = view.actions.sign(
            recertified_payload(view.run, view.log, view.round, entry.hash(), record.removed)
        )
        certified = Certified(entry, (Vote(view.me, 0, signature),), record.removed)
        # One signature an entry: before anybody sees it.
        view.journal.seal(msgspec.structs.replace(record, signed=certified))
        return self._learn(now, certified)

    def _holders(self, entry: Entry) -> list[PeerId]:
        return [
            peer
            for peer, answer in self.answers.items()
            if answer.accepted is not None
            and answer.accepted.entry == entry
            and peer != self.view.me.peer
        ]

    def _learn(self, now: float, certified: Certified) -> None:
        view = self.view
        view.drop_ahead(0)
        view.learn(now, certified)

    # ---- everybody
    def on_seal(self, now: float, who: Member, round_: int, body: m.Seal) -> None:
        """The organiser seals its open round, which may be a later one than ours: then we have not
        voted in it, and never shall.

        Raises RemoteProtocolError, StorageError.
        """
        view = self.view
        payload = seal_payload(view.run, view.log, round_, body.base, body.removed)
        if who.peer != view.organiser or not view.actions.verify(who.peer, payload, body.signature):
            raise RemoteProtocolError("a seal is not the organiser's", peer=who.peer)
        present = round_ == view.round
        if (
            view.me.peer == view.organiser
            or self.record.round > round_
            or (present and (view.open.applying or body.base != view.base))
        ):
            return
        self._seal(round_, body.base, body.removed)
        if not present:
            view.catching_up.fetch(now, who.peer)
        if not gone(view.me, body.removed):
            view.actions.send(who.peer, view.log, round_, self._answer(round_, body.base))

    def _seal(self, round_: int, base: bytes, removed: Config) -> None:
        """Persist it, then forget what the removed may have decided."""
        view, record = self.view, self.record
        if (record.round, record.base, record.removed) == (round_, base, removed):
            return
        view.journal.seal(SealRecord(round_, base, removed, record.asked))
        view.drop_ahead(round_)
        if round_ == view.round:
            view.void_votes()

    def _answer(self, round_: int, base: bytes) -> m.Sealed:
        view = self.view
        present = round_ == view.round
        accepted = view.journal.accepted if present else None
        if accepted is not None:
            view.remember(accepted[1])  # its bytes may be asked for
        body = m.Sealed(self.record.removed, m.Accepted1(*accepted) if accepted else None, b"")
        return msgspec.structs.replace(
            body, signature=view.actions.sign(self._payload(round_, base, body))
        )

    def _payload(self, round_: int, base: bytes, body: m.Sealed) -> bytes:
        return sealed_payload(self.view.run, self.view.log, round_, base, body)
