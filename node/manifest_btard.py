"""``[btard]`` of a manifest: members compute vectors from public seeds, and who gives another is
found, proven and removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from ..collectives.codec_names import MASKED_CODEC
from ..collectives.identifiers import PeerId
from ..collectives.seeded import MOST_PEERS, BtardSettings
from .manifest_refusals import refuse

if TYPE_CHECKING:
    from .manifest import Manifest

LEAST_LEFT = 3  # as `security.btard.AttemptSettings.least`: with fewer nothing goes on
LEAST_PEERS = LEAST_LEFT + 1  # so that one of them may be removed
MOST_INTERVALS = 63  # whose states' hashes one message holds
Times = Annotated[float, msgspec.Meta(ge=0.1, le=86_400)]


def liars_borne(peers: int) -> int:
    """How many of so many peers may lie without ending the run: fewer than half, and three that do
    not must be left.
    """
    return max(0, min((peers - 1) // 2, peers - LEAST_LEFT))


class BtardTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[btard]``: as `security.btard.AttemptSettings`. The peers are those that ``[join] allow``
    names, fewer than half of which may do anything. Up to `liars_borne` of them cannot end the run,
    nor have one removed that does not lie.

    ``radius``: about the distance of one peer's vector from the mean of all, in the first step.
    ``validators``: how many peers of a step look into another's last vector instead of computing
    one. ``tolerance``: relative difference between two machines' vectors of one seed above which
    one of them lied. ``timeout_s``: a peer that owes a message for more than twice as long is
    removed; ``compute_s``: where a vector is computed. ``intervals``: into how many parts a peer's
    work is cut, whose states it commits to: a validator computes one of them again; 0: the whole
    work.
    """

    radius: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    validators: Annotated[int, msgspec.Meta(ge=1, le=MOST_PEERS // 2)] = 1
    tolerance: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-2
    timeout_s: Times = 10.0
    compute_s: Times = 120.0
    intervals: Annotated[int, msgspec.Meta(ge=0, le=MOST_INTERVALS)] = 0

    def settings(self, manifest: Manifest) -> dict[str, object]:
        """Fields of RunSettings that follow: vectors are the log's word by word."""
        peers = tuple(sorted(PeerId(peer) for peer in manifest.join.allow))
        terms = BtardSettings(
            peers,
            self.radius,
            self.validators,
            self.tolerance,
            self.timeout_s,
            self.compute_s,
            self.intervals,
        )
        return {
            "codec": MASKED_CODEC,
            "reducer": "copy",
            "outer": manifest.train.outer.settings(),
            "btard": terms,
        }


def check_btard(manifest: Manifest, name: str) -> None:
    """What a run with BTARD must be. Raises ConfigError."""
    if manifest.btard is None:
        return
    exchange, train, join = manifest.exchange, manifest.train, manifest.join
    plain = type(exchange)()
    one = "A step has one vector of each peer, whole, which follows from its seed."
    refused = [
        (
            join.policy != "allow" or not LEAST_PEERS <= len(set(join.allow)) <= MOST_PEERS,
            "$.join.allow",
            f"The {LEAST_PEERS} to {MOST_PEERS} peers of such a run are those that its manifest "
            "names: anybody can check who was removed. Of fewer, the first that is removed would "
            f"leave less than {LEAST_LEFT}.",
            'policy = "allow", and the peer ids of all: each prints hers with atoll id',
        ),
        (
            not manifest.model.entry.startswith("local:"),
            "$.model.entry",
            "What follows from a seed is for each member's script to say.",
            'entry = "local:NAME"',
        ),
        (
            manifest.btard.intervals == 1,
            "$.btard.intervals",
            "One interval is all of the work, which is looked at without states, too.",
            "intervals = 4, or leave it out.",
        ),
        (
            exchange != plain,
            "$.exchange",
            "Vectors travel as they are, part by part.",
            "Leave it out.",
        ),
        (
            manifest.robust.rule != "mean",
            "$.robust.rule",
            "BTARD has a rule of its own, centred clipping.",
            "Leave [robust] out.",
        ),
        (
            manifest.mode != "swarm" or manifest.secure is not None,
            "$.mode",
            "Vectors are public, as the data are.",
            "Leave it out.",
        ),
        (
            manifest.no_quorum.policy == "branch",
            "$.no_quorum.policy",
            "A branch of few could have no honest majority.",
            'policy = "pause"',
        ),
        (
            train.overlap != "none",
            "$.train.overlap",
            "A vector is one of the newest anchor.",
            'overlap = "none"',
        ),
        (train.target_samples is not None, "$.train.target_samples", one, "Leave it out."),
        (train.inner.samples is not None, "$.train.inner.samples", one, "Leave it out."),
        (train.share is not None, "$.train.share", one, "Leave it out."),
        (
            train.outer.governor,
            "$.train.outer.governor",
            "It follows what single members say of their loss.",
            "Leave it out.",
        ),
        (
            train.outer.stretch,
            "$.train.outer.stretch",
            "It follows the lengths that members claim.",
            "Leave it out.",
        ),
        (
            manifest.audit.keep_contributions > 0,
            "$.audit.keep_contributions",
            "What the log is given is the aggregate.",
            "Leave it out.",
        ),
    ]
    refuse(refused, manifest, name, "[btard]")
