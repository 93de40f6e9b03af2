"""What all runs of a node share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from ...collectives.engine import EngineThread
from ...security.identity import Identity
from ..net.network import PeerNetwork
from ..paths import Paths
from .buffers import BufferPool


@dataclass(slots=True)
class NodeContext:
    """One per node process."""

    identity: Identity
    paths: Paths
    network: PeerNetwork
    engine: EngineThread
    nursery: trio.Nursery
    rng: random.Random
    publish: Callable[[dict[str, Any]], None]
    """Tell subscribers of the control socket: a JSON-able event."""
    results: BufferPool
    """Memory that the engine receives results of free-standing operations in; scripts read them there."""
    site: str = ""
    """The label of the place where this node is."""
