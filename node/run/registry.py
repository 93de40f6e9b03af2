"""Where the modes are that a node asks for: one row each. Nothing else in a node names them."""

from __future__ import annotations

from ...collectives.registry import ModeRegistry

MODES = ModeRegistry(
    {
        "byzantine": "collectives.modes.byzantine.model",
        "byzantine.evidence": "node.modes.byzantine",
        "arrivals": "collectives.modes.arrivals.policy",
        "relays": "collectives.modes.relays",
        "sealing": "collectives.modes.sealing",
        "sealing.recertifying": "node.modes.recertifying",
        "operations": "node.modes.operations.operations",
        "secure": "node.modes.secure.rounds",
        "secure.evidence": "node.modes.secure.evidence",
        "secure.simulated": "node.modes.secure.simulated",
        "secure.vectors": "node.modes.secure.vectors",
        "secure.ring": "security.masking.ring",
        "privacy.budget": "security.privacy.budget",
        "btard": "node.modes.btard.rounds",
        "btard.evidence": "node.modes.btard.evidence",
        "rules": "security.rules.reducers",
        "rules.distances": "node.modes.distances",
        "rules.leaning": "node.modes.leaning",
        "clusters": "node.modes.splitting",
        "large": "node.run.hearsay",
    }
)
