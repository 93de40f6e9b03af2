"""Rows for settings that ask for a mode which this installation does not have."""

from __future__ import annotations

from collections.abc import Callable

from ...collectives.registry import ModeRegistry, describe_absent
from ...optim.model.registry import MODES as OF_SCRIPTS
from ..run.registry import MODES
from .manifest import Manifest, arrivals_of
from .refusals import Row

ASKS: tuple[tuple[ModeRegistry, str, str, str, Callable[[Manifest], bool]], ...] = (
    (MODES, "byzantine", "$.quorum.lying", "Leave it out.", lambda m: m.quorum.lying > 0),
    (
        MODES,
        "arrivals",
        "$.exchange.arrivals",
        "Leave it out.",
        lambda m: m.kind != "federated" and arrivals_of(m) is not None,
    ),
    (
        OF_SCRIPTS,
        "arrivals",
        "$.federated.method",
        'method = "fedavg"',
        lambda m: m.kind == "federated" and arrivals_of(m) is not None,
    ),
    (OF_SCRIPTS, "federated", "$.kind", 'kind = "swarm"', lambda m: m.kind == "federated"),
    (MODES, "secure", "$.secure", "Leave [secure] out.", lambda m: m.secure is not None),
    (
        MODES,
        "privacy.budget",
        "$.privacy",
        "Leave [privacy] out.",
        lambda m: m.privacy is not None,
    ),
    (MODES, "btard", "$.btard", "Leave [btard] out.", lambda m: m.btard is not None),
    (MODES, "rules", "$.robust.rule", "Leave it out.", lambda m: m.robust.rule != "mean"),
    (
        OF_SCRIPTS,
        "adapters",
        "$.adapters.mode",
        "Leave it out.",
        lambda m: m.adapters.mode != "plain",
    ),
    (
        OF_SCRIPTS,
        "gradients",
        "$.train.method",
        "Leave it out.",
        lambda m: m.train.method == "gradient_averaging",
    ),
)
"""By mode: the setting that asks for it, and what to write instead."""


def registered_rows(manifest: Manifest) -> list[Row]:
    """Modes that the manifest asks for and that are not registered here."""
    return [
        Row(
            asks(manifest),
            key,
            "The setting asks for it.",
            hint,
            says=describe_absent(name),
        )
        for registry, name, key, hint, asks in ASKS
        if name not in registry
    ]
