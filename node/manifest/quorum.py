"""What decides a round: `[quorum]` of a manifest."""

from __future__ import annotations

from ...collectives.errors import ConfigError
from .manifest import Manifest
from .refusals import refuse


def check_quorum(manifest: Manifest, name: str) -> None:
    """What a run whose log bears members that lie cannot be."""
    star = manifest.mode == "federated" and manifest.federated.topology == "coordinator"
    refused = [
        (manifest.secure is not None, "$.secure", "A member that lies spoils a masked sum unseen."),
        (star, "$.federated.topology", "One member adds up everything."),
    ]
    if manifest.quorum.bans == "quorum" and not manifest.quorum.lying:
        raise ConfigError(
            f'{name}: $.quorum.bans = "quorum" needs $.quorum.lying',
            key="$.quorum.bans",
            why="There a single convener evicts whom it calls silent.",
            hint="Give the number of members that may lie: [quorum] lying = 1",
        )
    if manifest.quorum.lying:
        one = "Leave one of the two out."
        refuse(
            [(wrong, key, why, one) for wrong, key, why in refused],
            manifest,
            name,
            f"$.quorum.lying = {manifest.quorum.lying}",
        )
