"""LocalSwarm, under the name that scripts import: `simulation.local_swarm` has it."""

from __future__ import annotations

from .simulation.local_swarm import LIMIT_S, LocalSwarm, Script

__all__ = ["LIMIT_S", "LocalSwarm", "Script"]
