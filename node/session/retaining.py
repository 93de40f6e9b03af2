"""Keeps what is needed to recompute a round: the own contribution as it is encoded, and what each
member has signed of its own (`[audit]`).

A member says by its signature what its contribution is (Retained) while the round is open. So
nobody can hand over another one afterwards, and an owner whose result is not the rule of what was
signed is found out by whoever has the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...collectives import messages as m
from ...collectives.codecs.codec import Chunking
from ...collectives.codecs.encoded import EncodedVector
from ...collectives.digest import chunk_hash, merkle_root
from ...collectives.group import Entry
from ...collectives.identifiers import PeerId
from ..run.proof import twice
from . import events as ev
from .record import Statement, statement_payload
from .watches import Retention

if TYPE_CHECKING:
    from .session import Session

# Contributions of one member to one round: one that was refused is followed by another.
MOST_STATED = 4


class Retaining(Retention):
    """Of one session, whose storage has room for contributions."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # Of the open round and the one before, by member and cid.
        self._stated: dict[tuple[PeerId, bytes], Statement] = {}

    def offered(self, cid: bytes, vector: Tensor | EncodedVector) -> None:
        """The own contribution is frozen for the open round: encode, keep, sign and tell it. Where
        the disk refuses, nothing is told.
        """
        session, machine = self._session, self._session.machine
        files = session.ports.storage.contributions
        if files is None or machine is None or not machine.is_member:
            return
        round_, shape, members = machine.round, machine.shape, list(machine.others)

        def encode() -> tuple[bytes, memoryview] | None:
            chunking = Chunking(shape.codec, shape.numel, shape.chunk_elements)
            room = (
                vector
                if isinstance(vector, EncodedVector)
                else EncodedVector(chunking, memoryview(bytearray(chunking.nbytes)))
            )
            if isinstance(vector, Tensor) and not room.encode(vector):
                return None
            return merkle_root([chunk_hash(view) for view in chunking.views(room.data)]), room.data

        def encoded(now: float, found: tuple[bytes, memoryview] | None) -> None:
            if found is None or machine.round > round_:
                return
            signature = session.ports.sign(
                statement_payload(session.run, session.log, round_, cid, found[0])
            )
            kept = files.keep(
                Statement(session.me, session.log, round_, cid, found[0], signature), found[1]
            )
            for peer in members if kept else ():
                session.actions.tell(peer, round_, m.Retained(cid, found[0], signature))

        session.ports.offload(encode, encoded)

    def heard(self, peer: PeerId, round_: int, retained: m.Retained) -> None:
        """What a member has signed of its contribution."""
        session, machine = self._session, self._session.machine
        if (
            session.ports.storage.contributions is None
            or machine is None
            or not session.in_config(peer)
        ):
            return
        statement = Statement(
            peer, session.log, round_, retained.cid, retained.root, retained.signature
        )
        if round_ == machine.round and sum(who == peer for who, _ in self._stated) < MOST_STATED:
            known = self._stated.setdefault((peer, retained.cid), statement)
            if known.root != retained.root and all(map(self._genuine, (known, statement))):
                first, second = (
                    (each.payload(session.run), each.signature) for each in (known, statement)
                )
                session.ports.emit(ev.Equivocated(peer, twice(peer, first, second).encode()))
        elif 0 < round_ == machine.round - 1:  # the round was faster
            entry = machine.journal.entries[round_].entry
            if any((c.member.peer, c.cid) == (peer, retained.cid) for c in entry.contributors):
                self._keep(statement)

    def decided(self, entry: Entry) -> None:
        """Keep what the contributors of the entry have signed, and nothing of older rounds."""
        files, stated = self._session.ports.storage.contributions, self._stated
        if files is None:
            return
        self._stated = {}
        for contributor in entry.contributors:
            statement = stated.get((contributor.member.peer, contributor.cid))
            if statement is not None and statement.entry == entry.round:
                self._keep(statement)
        files.forget(entry.round, [contributor.member.peer for contributor in entry.contributors])

    def _keep(self, statement: Statement) -> None:
        files = self._session.ports.storage.contributions
        if files is not None and self._genuine(statement):
            files.keep(statement)

    def _genuine(self, statement: Statement) -> bool:
        session = self._session
        return session.ports.verify(
            statement.peer, statement.payload(session.run), statement.signature
        )
