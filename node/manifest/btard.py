"""``[btard]`` of a manifest: members compute vectors from public seeds, and who gives another is
found, proven and removed.
"""

from __future__ import annotations

from ...collectives.seeded import MOST_PEERS
from .manifest import Manifest
from .optional_tables import LEAST_LEFT, LEAST_PEERS
from .refusals import refuse


def check_btard(manifest: Manifest, name: str) -> None:
    """What a run with BTARD must be. Long, since it is a table of refusals. Raises ConfigError."""
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
