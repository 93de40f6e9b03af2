"""What decides a round, and what members do that see too few others: `[quorum]` and `[no_quorum]`
of a manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ..collectives.errors import ConfigError
from ..collectives.group import MAX_MEMBERS
from .manifest_refusals import refuse

if TYPE_CHECKING:
    from .manifest import Manifest


class NoQuorumTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[no_quorum]``: what members do that see too few others to decide a round.

    ``pause``: train on and wait. ``branch``: after ``reconfigure_after_s`` those who see one
    another go on together, uncertified, until enough are back.
    """

    policy: Literal["pause", "branch"] = "pause"
    reconfigure_after_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 120.0


class QuorumTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[quorum]``: what decides a round. ``lying``: though so many members do anything at all, the
    log stays one; it takes 3 ``lying`` + 1 members.

    ``bans``, of such a run: the organiser's signed list bans members (``organiser``), or only
    strangers (``quorum``): a member is then evicted once 2 ``lying`` + 1 members have banned it,
    each on its own machine.
    """

    lying: Annotated[int, msgspec.Meta(ge=0, le=(MAX_MEMBERS - 1) // 3)] = 0
    bans: Literal["organiser", "quorum"] = "organiser"


def check_quorum(manifest: Manifest, name: str) -> None:
    """What a run whose log bears members that lie cannot be."""
    star = manifest.mode == "federated" and manifest.federated.topology == "coordinator"
    refused = [
        (
            manifest.no_quorum.policy == "branch",
            "$.no_quorum.policy",
            "A branch is taken over on the word of those few who were on it.",
        ),
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
