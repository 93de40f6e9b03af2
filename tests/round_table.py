"""Several members of one run in one process, without a network: each is a complete Swarm; tests
decide who is counted, or all are.

Members may live in threads of their own. With ``auto`` a round commits when every member has
contributed; without, when the test calls `decide`. A member whose node is "lost" raises
SwarmClosedError from everything until it is "found" and opened again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from atoll.collectives.codecs.vanished import vanished_share
from atoll.collectives.errors import (
    LocalProtocolError,
    ModelMismatchError,
    NotEnoughPeersError,
    SwarmClosedError,
)
from atoll.collectives.group import Evaluated, Member, Reading
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.layout import Layout, differences
from atoll.collectives.outcomes import Outcome, Share, Tally
from atoll.collectives.script_swarm import Call, PeerView
from atoll.collectives.swarm import RunSettings
from atoll.optim.data.shard import Shard
from atoll.optim.outer.readings import reading_of
from atoll.optim.solo import AnchorLease, AnchorStore


class Offer:
    """A frozen contribution; a Pending."""

    def __init__(
        self, table: RoundTable, peer: PeerId, vector: Tensor, samples: int, reading: Reading
    ) -> None:
        self.table, self.peer, self.vector, self.samples, self.reading = (
            table,
            peer,
            vector,
            samples,
            reading,
        )
        self.outcome: Outcome | None = None
        self.orphaned = False  # the node that held it is gone and the next one knows nothing of it

    def done(self) -> bool:
        return self.outcome is not None

    def wait(self, timeout_s: float | None = None) -> Outcome:
        with self.table.changed:
            self.table.check(self.peer)
            self.table.changed.wait_for(
                lambda: self.outcome is not None or self.orphaned or self.peer in self.table.lost,
                timeout_s,
            )
            self.table.check(self.peer)
            if self.orphaned:
                raise SwarmClosedError("nothing is known of this contribution")
            if self.outcome is not None:
                return self.outcome
            store = self.table.store
            return Outcome("open", store.round + 1 if store is not None else 1, reason="undecided")


class RoundTable:
    """The run. ``member(peer)`` is what the script of one member holds."""

    def __init__(self, peers: Sequence[str], settings: RunSettings, *, auto: bool = True) -> None:
        self.peers = [PeerId(peer) for peer in peers]
        self.settings, self.auto = settings, auto
        self.changed = threading.Condition()
        self.store: AnchorStore | None = None
        self.offers: dict[PeerId, Offer] = {}
        self.lost: set[PeerId] = set()
        self.opened: set[PeerId] = set()
        self.decided: list[tuple[Share, ...]] = []
        self.counted: list[Offer] = []

    def member(self, peer: str) -> TableSwarm:
        return TableSwarm(self, PeerId(peer))

    def check(self, peer: PeerId) -> None:
        if peer in self.lost:
            raise SwarmClosedError(f"the node of {peer} is gone")

    def lose(self, peer: str, *, offer_too: bool = True) -> None:
        """The node dies; with ``offer_too`` its frozen contribution dies undecided."""
        with self.changed:
            self.lost.add(PeerId(peer))
            self.opened.discard(PeerId(peer))
            if offer_too and PeerId(peer) in self.offers:
                self.offers.pop(PeerId(peer)).orphaned = True
            self.changed.notify_all()

    def find(self, peer: str) -> None:
        """The node is back."""
        with self.changed:
            self.lost.discard(PeerId(peer))

    def decide(self, include: Sequence[str]) -> None:
        """Commit a round over the frozen contributions of these peers; everybody else's is not
        counted.
        """
        with self.changed:
            assert self.store is not None
            chosen = [self.offers[PeerId(peer)] for peer in include]
            total = float(sum(offer.samples for offer in chosen))
            mean = torch.zeros(self.store.layout.numel)
            for offer in chosen:
                mean.add_(offer.vector.mul(float(offer.samples)))
            self.store.commit(
                mean.div_(total), [(offer.samples, offer.reading) for offer in chosen]
            )
            shares = tuple(Share(offer.peer, offer.samples) for offer in chosen)
            self.decided.append(shares)
            self.counted += chosen
            for offer in self.offers.values():
                offer.outcome = Outcome(
                    "committed",
                    self.store.round,
                    shares,
                    counted=offer in chosen,
                    bytes_sent=7,
                    elapsed_s=0.5,
                )
            self.offers.clear()
            self.changed.notify_all()


class TableSwarm:
    """One member's Swarm."""

    def __init__(self, table: RoundTable, peer: PeerId) -> None:
        self.table, self.peer, self.run_id, self.settings = (
            table,
            peer,
            RunId("table"),
            table.settings,
        )
        self.reported: dict[str, float] = {}

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> AnchorLease:
        with self.table.changed:
            self.table.check(self.peer)
            if self.table.store is None:
                self.table.store = AnchorStore(layout, self.settings, initial)
            elif self.table.store.layout != layout:
                raise ModelMismatchError("\n".join(differences(layout, self.table.store.layout)))
            self.table.opened.add(self.peer)
            return self.table.store.lease()

    def anchor(self) -> AnchorLease:
        with self.table.changed:
            return self._store().lease()

    closing = 0
    paused = ""
    model_folder = None

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> Offer:
        with self.table.changed:
            store = self._store()
            if samples < 1:
                raise LocalProtocolError("no samples")
            if self.peer in self.table.offers:
                raise LocalProtocolError("a contribution is undecided")
            vector = torch.empty(store.layout.numel)
            write(vector)
            reading = reading_of(vector, store.layout, self.settings.effective_outer, loss, lag)
            offer = self.table.offers[self.peer] = Offer(
                self.table, self.peer, vector, samples, reading
            )
            if self.table.auto and len(self.table.offers) == len(self.table.peers):
                self.table.decide(self.table.peers)
            return offer

    def buffer(self, numel: int) -> Tensor:
        return torch.zeros(numel)

    def vanished(self, flat: Tensor, codec: str) -> float:
        return vanished_share(flat, codec)

    def operate(self, call: Call, source: Tensor) -> NoReturn:
        raise NotEnoughPeersError("the table has no free-standing operations")

    def all_reduce(self, flat: Tensor, *, op_id: str, **options: Any) -> NoReturn:
        raise NotEnoughPeersError("the table has no free-standing operations")

    def members(self) -> Sequence[PeerView]:
        with self.table.changed:
            store = self._store()
            return [
                PeerView(peer, store.round, peer not in self.table.lost)
                for peer in self.table.peers
            ]

    def tallies(self, first: int) -> Sequence[Tally]:
        with self.table.changed:
            self._store()
            members = tuple(Member(peer, 0) for peer in sorted(self.table.peers))
            decided = [
                (),
                *(
                    tuple((Member(share.peer, 0), share.samples) for share in shares)
                    for shares in self.table.decided
                ),
            ]
            return [Tally(entry, entry, shares, members) for entry, shares in enumerate(decided)][
                first:
            ]

    def shard(self, loader: Any) -> Shard:
        return Shard(self, loader)

    def report(self, metrics: Mapping[str, float]) -> None:
        self.reported.update(metrics)

    def leave(self) -> None:
        self.table.peers.remove(self.peer)

    def close(self) -> None:
        self.table.lose(self.peer)

    def _store(self) -> AnchorStore:
        self.table.check(self.peer)
        if self.table.store is None or self.peer not in self.table.opened:
            raise LocalProtocolError("open() comes first")
        return self.table.store
