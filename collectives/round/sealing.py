"""Recertify: on the organiser's word that some members will never vote again, their round goes on
without their votes. Sans I/O.

Never automatic where anybody is silent: the silent may be a live majority. The organiser seals the
open round at every node that it knows outside the removed, and waits for all of them. A sealed
member votes no more in this round, counts no votes, and listens to nobody removed; it answers what
it has accepted and where its branch stands, and asks until it has the entry. The organiser then
signs one entry: the one accepted under the highest ballot, unchanged; where none is, the best
branch, or an entry without contributors. Its signature, over the removed members, too, stands for
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
from .certificate import recertified_payload, seal_payload, sealed_payload
from .journal import SealRecord
from .merging import adoption, adopts, best_tip, tip_entry

if TYPE_CHECKING:
    from .machine import RoundMachine


class Sealing:
    """The seal of the open round at one member; at the organiser also what it collects. Volatile
    but for the journal's record.
    """

    def __init__(self, machine: RoundMachine) -> None:
        self.machine = machine
        self.answers: dict[PeerId, m.Sealed] = {}
        self.entry: Entry | None = None  # to be signed once its bytes are here

    # ---- views
    @property
    def record(self) -> SealRecord:
        """What the journal knows of seals."""
        return self.machine.journal.sealed or SealRecord(-1, b"", ())

    @property
    def active(self) -> bool:
        """Whether the open round is sealed here: this member votes no more in it."""
        record = self.machine.journal.sealed
        return record is not None and (record.round, record.base) == (
            self.machine.round,
            self.machine.base,
        )

    @property
    def leading(self) -> bool:
        """Whether the organiser asked for it here, and it is not done."""
        return self.record.asked

    def shuns(self, who: Member) -> bool:
        """Whether nothing that this member says counts any more."""
        record = self.machine.journal.sealed
        ahead = record is not None and record.round >= self.machine.round
        removed = self.machine.removed
        return bool(removed and gone(who, removed)) or (
            record is not None and ahead and gone(who, record.removed)
        )

    def awaited(self) -> set[PeerId]:
        """Whose answers the organiser still waits for."""
        return {peer for peer in self._nodes() if peer not in self.answers}

    def _nodes(self) -> set[PeerId]:
        """Every known node outside the removed, this one included."""
        me = self.machine.me.peer
        without = {member.peer for member in self.record.removed} - {
            me
        }  # an earlier life of this node may be among them
        return {
            peer
            for peer in (*self.machine.others, me, *self.machine.actions.nodes())
            if peer not in without
        }

    # ---- the organiser
    def ask(self, removed: Collection[Member]) -> None:
        """The organiser's word: these will never vote again. Raises StorageError."""
        record = self.record
        everybody = tuple(sorted({*removed, *(record.removed if record.asked else ())}))
        stands = (
            self.active and record.signed is not None
        )  # it is signed: what is asked for now begins with the next entry
        at, signed = (record.round, record.signed) if stands else (-1, None)
        self.machine.journal.seal(SealRecord(at, record.base, everybody, True, signed))
        self.answers, self.entry = {}, None

    def tick(self, now: float) -> bool:
        """Call about every ``pull_s``. Whether the open round is sealed."""
        if self.leading:
            self._lead(now)
        elif self.active and self.machine.organiser is not None:
            self.machine.catching.fetch(now, self.machine.organiser)
        return self.active

    def _lead(self, now: float) -> None:
        machine = self.machine
        if self.active and self.record.signed is not None:
            return self._learn(now, self.record.signed)
        if ended := {who for who in machine.config if machine.ended(who)} - set(
            self.record.removed
        ):
            self.ask(
                ended
                # an entry may have let in a life of a lost peer that nobody here knew of when it was
                # given up
            )
        record = self.record
        if machine.quorum([member for member in machine.config if member not in record.removed]):
            if not set(record.removed) & set(machine.config):
                machine.journal.seal(msgspec.structs.replace(record, asked=False))
            return None  # the others decide again, and evict who is still in it
        if machine.stateless or machine.root is None:
            return None
        self._seal(machine.round, machine.base, record.removed)
        if machine.open.decided:  # somebody was further
            return None
        self.answers[machine.me.peer] = self._answer(machine.round, machine.base)
        awaited = self.awaited()
        seal = self._message()
        for peer in sorted(
            {*awaited, *(member.peer for member in record.removed)}
        ):  # whoever is wrongly held for dead is told to be silent
            machine.tell(peer, seal)
        if not awaited:
            self._complete(now)
        return None

    def _message(self) -> m.Seal:
        machine, removed = self.machine, self.record.removed
        return m.Seal(
            machine.base,
            removed,
            machine.actions.sign(
                seal_payload(machine.run, machine.log, machine.round, machine.base, removed)
            ),
        )

    def on_sealed(self, who: Member, body: m.Sealed) -> None:
        """An answer. Raises RemoteProtocolError when it is not its sender's, or of no use."""
        machine = self.machine
        if not (self.leading and self.active) or body.removed != self.record.removed:
            return
        if who not in machine.config and any(member.peer == who.peer for member in machine.config):
            return  # it lost what it voted for: the organiser must remove the life that did
        if not machine.actions.verify(
            who.peer, self._payload(machine.round, machine.base, body), body.signature
        ):
            raise RemoteProtocolError("answer to a seal is not signed by its sender", peer=who.peer)
        tip = body.tip
        formed = tip is None or (
            tip.base == machine.base
            and adopts(tip_entry(machine.log, machine.round, tip, machine.shape), machine.shape)
        )
        stranger = who not in machine.config and (body.accepted is not None or tip is not None)
        if (
            not formed
            or stranger
            or (body.accepted is not None and not machine.entry_fits(body.accepted.entry))
        ):
            raise RemoteProtocolError("answer to a seal names another round", peer=who.peer)
        self.answers[who.peer] = body

    def choice(self) -> Entry:
        """What the answers leave to be signed."""
        machine, removed = self.machine, self.record.removed
        accepted = [answer.accepted for answer in self.answers.values() if answer.accepted]
        if accepted:
            return max(accepted, key=lambda a: a.ballot).entry
        survivors = tuple(
            sorted({machine.me, *(member for member in machine.config if member not in removed)})
        )
        tip = best_tip(self.answers.values(), machine.base)
        if tip is not None:
            return adoption(machine, tip, survivors)
        assert machine.root is not None
        shape = machine.shape
        return Entry(
            machine.log,
            machine.round,
            machine.base,
            machine.root,
            (),
            (),
            (),
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            shape.reducer,
            survivors,
            tally=machine.journal.entries.tally.hash,
        )

    def _complete(self, now: float) -> None:
        machine, record = self.machine, self.record
        entry = self.entry = self.choice()
        if not machine.has_bytes(entry):
            return machine.actions.fetch_result(entry, self._holders(entry))
        machine.actions.keep(entry)
        signature = machine.actions.sign(
            recertified_payload(
                machine.run, machine.log, machine.round, entry.hash(), record.removed
            )
        )
        certified = Certified(entry, (Vote(machine.me, 0, signature),), record.removed)
        machine.journal.seal(
            msgspec.structs.replace(record, signed=certified)
        )  # one signature an entry: before anybody sees it
        return self._learn(now, certified)

    def _holders(self, entry: Entry) -> list[PeerId]:
        def holds(answer: m.Sealed) -> bool:
            voted, tip = answer.accepted, answer.tip
            return (voted is not None and voted.entry == entry) or (
                tip is not None and entry.part_digests == (tip.digest,)
            )

        return [
            peer
            for peer, answer in self.answers.items()
            if holds(answer) and peer != self.machine.me.peer
        ]

    def _learn(self, now: float, certified: Certified) -> None:
        machine = self.machine
        machine.ahead = []
        machine.learn(now, certified)

    # ---- everybody
    def on_seal(self, now: float, who: Member, round_: int, body: m.Seal) -> None:
        """The organiser seals its open round, which may be a later one than ours: then we have not
        voted in it, and never shall.

        Raises RemoteProtocolError, StorageError.
        """
        machine = self.machine
        payload = seal_payload(machine.run, machine.log, round_, body.base, body.removed)
        if who.peer != machine.organiser or not machine.actions.verify(
            who.peer, payload, body.signature
        ):
            raise RemoteProtocolError("a seal is not the organiser's", peer=who.peer)
        present = round_ == machine.round
        if (
            machine.me.peer == machine.organiser
            or self.record.round > round_
            or (present and (machine.open.applying or body.base != machine.base))
        ):
            return
        self._seal(round_, body.base, body.removed)
        if not present:
            machine.catching.fetch(now, who.peer)
        if not gone(machine.me, body.removed):
            machine.actions.send(who.peer, machine.log, round_, self._answer(round_, body.base))

    def _seal(self, round_: int, base: bytes, removed: Config) -> None:
        """Persist it, then forget what the removed may have decided."""
        machine, record = self.machine, self.record
        if (record.round, record.base, record.removed) == (round_, base, removed):
            return
        machine.journal.seal(SealRecord(round_, base, removed, record.asked))
        machine.ahead = [certified for certified in machine.ahead if certified.entry.round < round_]
        if round_ == machine.round:
            machine.open.decided = machine.open.pending = None
            machine.open.votes.clear()
            machine.convening.stop()

    def _answer(self, round_: int, base: bytes) -> m.Sealed:
        machine = self.machine
        present = round_ == machine.round
        accepted, tip = (
            (machine.journal.accepted, machine.actions.tip()) if present else (None, None)
        )
        if accepted is not None:
            machine.open.known[accepted[1].hash()] = accepted[1]  # its bytes may be asked for
        body = m.Sealed(self.record.removed, m.Accepted1(*accepted) if accepted else None, tip, b"")
        return msgspec.structs.replace(
            body, signature=machine.actions.sign(self._payload(round_, base, body))
        )

    def _payload(self, round_: int, base: bytes, body: m.Sealed) -> bytes:
        return sealed_payload(self.machine.run, self.machine.log, round_, base, body)


def gone(who: Member, removed: Collection[Member]) -> bool:
    """Whether this life of a peer was removed, or a later one."""
    return any(
        member.peer == who.peer and member.incarnation >= who.incarnation for member in removed
    )
