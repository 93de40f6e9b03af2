"""Optimizers of a swarm: what a training script holds, and what the node does to the anchor. Knows the Swarm protocol, no network.

Files, lowest first:

    presets     outer values that are known to work, and their sources
    outer       the outer step on the anchor, with the same bits everywhere
    flat        the model as one float32 vector: parameters and running statistics
    pseudograd  anchor - parameters, into the shared buffer
    reconcile   what live parameters become after a commit
    schedule    when a round ends, what counts as a step, how long a script waits
    events      what attach tells telemetry
    solo        the swarm of one, for scripts without a node and for tests
    checks      what attach refuses, and why
    replica     live parameters between two anchors: freeze, wait, adopt
    state       what a checkpoint of an attachment holds, and resuming from it
    attachment  attach(), the optimizer hook: a script's own loop becomes a member
    diloco      DiLoCo as one torch.optim.Optimizer
    local_sgd   plain averaging, likewise

Importing this package loads torch only when a name of it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attachment import Attachment, attach
    from .diloco import DiLoCo
    from .local_sgd import LocalSGD
    from .outer import OuterStep
    from .presets import outer_preset
    from .solo import SoloSwarm

__all__ = ["attach", "Attachment", "DiLoCo", "LocalSGD", "OuterStep", "SoloSwarm", "outer_preset"]

_HOMES = {
    "attach": "attachment",
    "Attachment": "attachment",
    "DiLoCo": "diloco",
    "LocalSGD": "local_sgd",
    "OuterStep": "outer",
    "SoloSwarm": "solo",
    "outer_preset": "presets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
