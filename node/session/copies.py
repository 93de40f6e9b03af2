"""Results that members make themselves: of rounds whose contributions are copies of one vector,
which each of them has.

Secure rounds and BTARD end with one vector, alike at all who took part, and the log only decides
that it is this one. So its bytes need not come from an owner of parts, who could state others:
whoever has the vector encodes it as the plan or the entry says, and votes for no other bytes of
these contributors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from ...collectives.codecs.codec import Chunking
from ...collectives.codecs.encoded import EncodedVector
from ...collectives.digest import chunk_hash, meaning, part_digest
from ...collectives.errors import StorageError
from ...collectives.group import CID_BYTES, Entry, Plan
from ...collectives.round import KIN_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.identifiers import PeerId
    from .session import Session


class Copies:
    """The vector of the open round at one member, and its bytes in plans and entries."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kin = b""
        self._vector: Tensor | None = None
        # Seen last; its bytes are made once the vector is here.
        self._wanted: Plan | Entry | None = None
        self._making: list[Plan | Entry] = []
        self._made: dict[bytes, tuple[bytes, ...]] = {}  # part digests, by what they mean

    def have(self, kin: bytes, vector: Tensor) -> None:
        """The round's vector, float32 (numel,), which stays as it is; the cids of its copies begin
        with ``kin``.
        """
        self._kin, self._vector = kin, vector
        if self._wanted is not None:
            self.look(self._wanted)

    def forget(self) -> None:
        """The round is decided."""
        self._kin, self._vector, self._wanted = b"", None, None
        self._making.clear()
        self._made.clear()

    def cid(self) -> bytes:
        """This member's copy in the log."""
        own = blake3(self._session.me.encode()).digest(CID_BYTES - KIN_BYTES)
        return self._kin + own

    def are(self, what: Plan | Entry) -> bool:
        """Whether the contributions of a plan or an entry are copies of the vector here."""
        return (
            self._vector is not None
            and bool(what.contributors)
            and all(each.cid[:KIN_BYTES] == self._kin for each in what.contributors)
        )

    def digests(self, what: Plan | Entry) -> tuple[bytes, ...] | None:
        """The part digests of the bytes made for it; None: they are not made, or not yet."""
        return self._made.get(meaning(what))

    def contradict(self, entry: Entry) -> bool | None:
        """Whether an entry has other digests than the vector that is here; None: that is not known
        yet, but will be.
        """
        if not self.are(entry):
            return False
        digests = self.digests(entry)
        if digests is None:
            self.look(entry)
        return None if digests is None else digests != entry.part_digests

    def otherwise(self, plan: Plan, stated: tuple[bytes, ...]) -> set[PeerId]:
        """Owners who stated other parts of a plan's result than those made here; nobody as long as
        none are made.
        """
        own = self.digests(plan) or stated
        return {
            part.owner
            for part, mine, theirs in zip(plan.parts, own, stated, strict=True)
            if mine != theirs
        }

    def look(self, what: Plan | Entry) -> None:
        """Make the bytes of a plan or an entry, if it is of this vector and of the open round; they
        are stored as those of any result.
        """
        self._wanted = what
        session, machine, vector = self._session, self._session.machine, self._vector
        if machine is None or vector is None or what.round != machine.round or not self.are(what):
            return
        if what in self._making:
            return
        self._making.append(what)
        known = self.digests(what) or ()
        there = session.actions.results.get(known)

        def work() -> tuple[tuple[bytes, ...], memoryview] | StorageError:
            if there is not None:  # made for an earlier revision that means the same
                return known, there
            chunking = Chunking(what.codec, what.numel, what.chunk_elements).results
            try:
                data = session.ports.storage.results.allocate(chunking.nbytes)
            except StorageError as error:  # a full disk: the others decide, and it is fetched then
                return error
            EncodedVector(chunking, data).encode(vector)
            hashes = [chunk_hash(view) for view in chunking.views(data)]
            return tuple(
                part_digest(what, part, hashes[part.first : part.stop]) for part in what.parts
            ), data

        def made(now: float, result: tuple[tuple[bytes, ...], memoryview] | StorageError) -> None:
            if what in self._making:
                self._making.remove(what)
            if isinstance(result, StorageError):
                raise result
            digests, data = result
            if machine.round == what.round and not machine.open.applying and self.are(what):
                self._made[meaning(what)] = digests
                session.actions.store(now, what, digests, data)
                session.settle(now)

        session.ports.offload(work, made)
