"""What decides a round: `[quorum]` of a manifest."""

from __future__ import annotations

from .manifest import Manifest
from .refusals import Row, against


def quorum_rows(manifest: Manifest) -> list[Row]:
    """What a run whose log bears members that lie cannot be."""
    star = manifest.kind == "federated" and manifest.federated.topology == "coordinator"
    lying, rule = manifest.quorum.lying > 0, manifest.robust.parsed
    return [
        Row(
            manifest.quorum.bans == "quorum" and not lying,
            "$.quorum.bans",
            "There a single convener evicts whom it calls silent.",
            "lying = 1 (the number of members that may lie), or leave it out.",
            says='$.quorum.bans = "quorum" needs $.quorum.lying',
        ),
        *against(
            f"$.quorum.lying = {manifest.quorum.lying}",
            [
                (
                    lying and manifest.secure is not None,
                    "$.secure",
                    "A member that lies spoils a masked sum unseen.",
                    "Leave [quorum] out, or leave it out.",
                ),
                (
                    lying and rule is not None and not rule.by_coordinate,
                    "$.robust.rule",
                    "A rule of whole contributions weighs them by what the owner of each part "
                    "says of it, and nobody checks that: one member that lies moves the model.",
                    'rule = "trimmed_mean" and leave before out, or leave [quorum] out.',
                ),
                (
                    lying and star,
                    "$.federated.topology",
                    "One member adds up everything.",
                    "Leave it out, or leave [quorum] out.",
                ),
            ],
        ),
    ]
