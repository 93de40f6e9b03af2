"""``kind = "seeded"``: members compute vectors from public seeds, and who gives another is found,
proven and removed (BTARD).
"""

from __future__ import annotations

from ...collectives.seeded import MOST_PEERS
from .hints import PEER
from .manifest import Manifest
from .optional_tables import LEAST_LEFT, LEAST_PEERS
from .refusals import Row, against


def btard_rows(manifest: Manifest) -> list[Row]:
    """What a run with BTARD must be."""
    if manifest.btard is None:
        return []
    join = manifest.join
    peers = ", ".join(f'"{PEER}"' for _ in range(LEAST_PEERS))
    return against(
        "[btard]",
        [
            (
                join.policy != "allow" or not LEAST_PEERS <= len(set(join.allow)) <= MOST_PEERS,
                "$.join.allow",
                f"The {LEAST_PEERS} to {MOST_PEERS} peers of such a run are those that its "
                "manifest names: anybody can check who was removed. Of fewer, the first that is "
                f"removed would leave less than {LEAST_LEFT}. Each prints her peer id with atoll "
                "id.",
                f'policy = "allow" and allow = [{peers}], or leave [btard] out and kind = "swarm"',
            ),
            (
                not manifest.model.entry.startswith("local:"),
                "$.model.entry",
                "What follows from a seed is for each member's script to say.",
                'entry = "local:mine"',
            ),
            (
                manifest.btard.intervals == 1,
                "$.btard.intervals",
                "One interval is all of the work, which is looked at without states, too.",
                "intervals = 4, or leave it out.",
            ),
        ],
    )
