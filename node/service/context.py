"""What all runs of a node share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from ...collectives.engine import EngineThread
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import Identity
from ..home.hours import Hours
from ..home.paths import Paths
from ..net.network import PeerNetwork
from ..run.events import RunEvent
from ..run.verdicts import VerdictChange
from .buffers import BufferPool
from .judging import Notifier
from .lanes import LaneKeeper


@dataclass(slots=True)
class NodeContext:
    """One per node process."""

    identity: Identity
    paths: Paths
    network: PeerNetwork
    engine: EngineThread
    nursery: trio.Nursery
    rng: random.Random
    publish: Callable[[RunEvent], None]
    """Tell subscribers of the control socket."""
    results: BufferPool
    """Memory that the engine receives results of free-standing operations in; scripts read them
    there.
    """
    site: str = ""
    """The label of the place where this node is."""
    notifier: Notifier | None = None
    """Who is told of verdicts; None: nobody."""
    hours: Hours | None = None
    """When scripts of this node may train; None: always."""
    share_models: bool = True
    """Hand bases of runs on to members that lack them."""
    lanes_per_peer: int = 1
    """No more than these: what the run allows that allows most."""
    lanes: LaneKeeper = field(init=False)

    def __post_init__(self) -> None:
        """Lanes are kept by this node's network and engine."""
        self.lanes = LaneKeeper(
            lambda peer: self.network.ensure_lane(
                peer, min(self.engine.first_lanes, self.lanes_per_peer)
            ),
            self._let_go,
        )

    def notify(self, run_id: RunId, name: str, changes: Sequence[VerdictChange]) -> None:
        """Verdicts on a run came or went."""
        if self.notifier is not None and changes:
            self.notifier.tell(run_id, name, changes)

    def lanes_wanted(self, peer: PeerId, count: int) -> None:
        """So many lanes to a peer are best: if any are kept, and as far as runs allow it."""
        if self.lanes.keeps(peer):
            count = min(count, self.lanes_per_peer)
            self.network.ensure_lane(peer, count)
            self.network.release_lane(peer, count)
            self.engine.drop_lane(peer, count)

    def _let_go(self, peer: PeerId) -> None:
        self.network.release_lane(peer)
        self.engine.drop_lane(peer)
