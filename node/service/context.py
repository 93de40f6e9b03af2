"""What all runs of a node share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from ...collectives.engine import EngineThread
from ...collectives.identifiers import PeerId, RunId
from ...collectives.swarm import RunSettings
from ...security.identity import Identity
from ..home.hours import Hours
from ..home.paths import Paths
from ..run.events import RunEvent
from ..session import Session
from ..session.modes import Modes
from .buffers import BufferPool
from .lanes import LaneKeeper
from .outside import (
    Diagnosis,
    EvidenceCheck,
    LaneLinks,
    Manifests,
    ModelFiles,
    PeerPlaces,
    RunWatch,
    SignedRun,
    Topics,
)

if TYPE_CHECKING:
    from .ports import RunPorts
    from .run import RunService


@dataclass(frozen=True, slots=True)
class RunParts:
    """What is made for each run, by those who know what a run may ask for."""

    modes: Callable[[RunSettings, Identity], Modes]
    watch: Callable[[RunService], RunWatch]
    model_files: Callable[[SignedRun, RunPorts], ModelFiles | None]
    """Of the pretrained model that the run starts from; None where it has none."""
    files_kind: bytes
    """The first byte of a message about them."""
    recertify: Callable[[Sequence[Session], float, Sequence[PeerId]], None]
    """Give up these members, by their organiser's word. Raises ConfigError where the mode is not
    registered.
    """
    proofs: EvidenceCheck
    show_manifest: Callable[[RunId, Callable[[PeerId, bytes], bytes]], Callable[[], None]]
    """From now on ``show(who, certificate)`` answers whoever thinks about joining a run, until what
    is returned is called.
    """


@dataclass(slots=True)
class NodeContext:
    """One per node process."""

    identity: Identity
    paths: Paths
    network: Topics
    peers: PeerPlaces
    links: LaneLinks
    engine: EngineThread
    nursery: trio.Nursery
    rng: random.Random
    publish: Callable[[RunEvent], None]
    """Tell subscribers of the control socket."""
    results: BufferPool
    """Memory that the engine receives results of free-standing operations in; scripts read them
    there.
    """
    manifests: Manifests
    parts: RunParts
    diagnosis: Diagnosis
    site: str = ""
    """The label of the place where this node is."""
    hours: Hours | None = None
    """When scripts of this node may train; None: always."""
    lanes_per_peer: int = 1
    """No more than these: what the run allows that allows most."""
    lanes: LaneKeeper = field(init=False)

    def __post_init__(self) -> None:
        """Lanes are kept by this node's network and engine."""
        self.lanes = LaneKeeper(
            lambda peer: self.links.ensure_lane(
                peer, min(self.engine.first_lanes, self.lanes_per_peer)
            ),
            self._let_go,
        )

    def lanes_wanted(self, peer: PeerId, count: int) -> None:
        """So many lanes to a peer are best: if any are kept, and as far as runs allow it."""
        if self.lanes.keeps(peer):
            count = min(count, self.lanes_per_peer)
            self.links.ensure_lane(peer, count)
            self.links.release_lane(peer, count)
            self.engine.drop_lane(peer, count)

    def _let_go(self, peer: PeerId) -> None:
        self.links.release_lane(peer, 0)
        self.engine.drop_lane(peer)
