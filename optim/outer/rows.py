"""Where the parts of outer steps are that some runs ask for: one row each. Nothing else names them
where a step is made.
"""

from __future__ import annotations

from ...collectives.registry import ModeRegistry

ROWS = ModeRegistry(
    {
        "rules": "optim.outer.more_rules",
        "governor": "optim.outer.governing",
    }
)
