"""Vectors of steps on their way between peers, over lanes: offered by a control message, asked for,
received. What a sender may have under way is bounded."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ....collectives.exchange import BlobProgress
from ....collectives.identifiers import PeerId
from ....security.btard.messages import FLOAT, CommittedVector
from ....security.btard.wire import VectorHeader
from .wire import MOST_SPANS, Offered, Taken, encode

if TYPE_CHECKING:
    from ...session.session import Session

CHUNK_BYTES = 1 << 18
MOST_OFFERS = 1024  # of one peer, that wait for room


class _Coming(NamedTuple):
    sender: PeerId
    offered: Offered
    data: memoryview
    missing: tuple[tuple[int, int], ...]
    asked_at: float


class VectorTransfers:
    """Of one session. ``elements``: of the whole vector; one sender may have as many under way
    here. ``again_s``: after this long without news of a vector it is asked for again."""

    def __init__(self, session: Session, elements: int, again_s: float) -> None:
        self._session, self._elements, self._again_s = session, elements, again_s
        self._given: dict[bytes, int] = {}  # what can be had from here, and of which step it is
        self._coming: dict[bytes, _Coming] = {}
        self._waiting: dict[PeerId, deque[Offered]] = {}

    def offer(self, piece: CommittedVector, to: list[PeerId]) -> None:
        """Let these peers have a vector. float32, 1-d."""
        offered = Offered(
            VectorHeader(piece.step, piece.tag, piece.item, piece.path), len(piece.values)
        )
        session = self._session
        name = offered.name(session.me)
        if name not in self._given:
            self._given[name] = piece.step
            session.ports.content.provide(
                name, memoryview(np.ascontiguousarray(piece.values, FLOAT).tobytes()), CHUNK_BYTES
            )
        for peer in to:
            session.ports.send(peer, encode(offered))

    def on_offered(self, now: float, peer: PeerId, offered: Offered) -> None:
        """A peer has a vector for this one."""
        if offered.elements > 2 * self._elements:
            return
        coming = self._coming.get(offered.name(peer))
        if coming is not None:
            return
        waiting = self._waiting.setdefault(peer, deque())
        if len(waiting) < MOST_OFFERS and offered not in waiting:
            waiting.append(offered)
            self._take(now, peer)

    def _take(self, now: float, peer: PeerId) -> None:
        waiting = self._waiting.get(peer, deque())
        under_way = sum(
            each.offered.elements for each in self._coming.values() if each.sender == peer
        )
        while waiting and (not under_way or under_way + waiting[0].elements <= self._elements):
            offered = waiting.popleft()
            under_way += offered.elements
            name, data = (
                offered.name(peer),
                memoryview(bytearray(FLOAT.itemsize * offered.elements)),
            )
            coming = self._coming[name] = _Coming(
                peer, offered, data, ((0, -(-len(data) // CHUNK_BYTES)),), now
            )
            self._session.ports.content.want(name, data, CHUNK_BYTES, (), (peer,))
            self._ask(name, coming)

    def _ask(self, name: bytes, coming: _Coming) -> None:
        self._session.ports.send(coming.sender, encode(Taken(name, coming.missing[:MOST_SPANS])))

    def on_taken(self, peer: PeerId, taken: Taken) -> None:
        """A peer wants what it was offered."""
        if taken.name in self._given:
            self._session.ports.content.send_blob(peer, taken.name, taken.spans)

    def on_blob(self, now: float, event: BlobProgress) -> tuple[PeerId, CommittedVector] | None:
        """Some of a vector is here. Returns it when all is, and who sent it."""
        coming = self._coming.get(event.name)
        if coming is None:
            return None
        if event.missing:
            self._coming[event.name] = coming._replace(missing=tuple(event.missing), asked_at=now)
            return None
        del self._coming[event.name]
        self._take(now, coming.sender)
        header = coming.offered.header
        return coming.sender, CommittedVector(
            header.step, header.tag, header.item, np.frombuffer(coming.data, FLOAT), header.path
        )

    def takes(self, name: bytes) -> bool:
        """Whether this content is one of the vectors."""
        return name in self._coming

    def tick(self, now: float) -> None:
        """Ask again for what does not come."""
        for name, coming in list(self._coming.items()):
            if now - coming.asked_at > self._again_s:
                self._coming[name] = coming._replace(asked_at=now)
                self._ask(name, coming)

    def forget(self, before: int) -> None:
        """Steps before this one are over."""
        content = self._session.ports.content
        for name in [name for name, step in self._given.items() if step < before]:
            del self._given[name]
            content.withdraw(name)
        for name in [
            name for name, coming in self._coming.items() if coming.offered.header.step < before
        ]:
            del self._coming[name]
            content.unwant(name)
        for waiting in self._waiting.values():
            kept = [each for each in waiting if each.header.step >= before]
            waiting.clear()
            waiting.extend(kept)
