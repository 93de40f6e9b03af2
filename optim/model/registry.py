"""Where the modes are that a script's side, or a study, asks for: one row each. Nothing else on the
script's side names them.

Importing this loads no torch.
"""

from __future__ import annotations

from ...collectives.registry import ModeRegistry

MODES = ModeRegistry(
    {
        "adapters": "optim.modes.adapters",
        "arrivals": "optim.modes.arriving",
        "arrivals.groups": "optim.modes.grouped",
        "arrivals.compass": "collectives.modes.arrivals.compass",
        "gradients": "optim.modes.gradients",
        "federated": "optim.modes.site",
        "federated.sums": "optim.federated.site",
        "clusters": "optim.modes.clusters",
        "rules": "security.rules.aggregate",
    }
)
