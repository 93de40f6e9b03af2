"""Optimizers of a swarm: what a training script holds, and what the node does to the anchor. Knows
the Swarm protocol, no network.

Rooms, lowest first. A method is made of five pieces, each in a place of its own: inner steps
(`rounds/schedule`), contribution (`model/pseudograd`), combination (the node's weighted mean),
outer step (`outer/`), reconciliation (`model/reconcile`).

    outer/   the outer step on the anchor, with the same bits everywhere; presets
    planning/   from step time, rates and round trips to a run's settings
    federated/   federated methods as small pieces on this frame, for real runs and for simulations
                 in virtual time
    solo     the swarm of one, for scripts without a node and for tests
    model/   the model as one float32 vector: what it contributes, what it becomes after a commit
    data/    whose turn each sample is
    rounds/  when a round ends; live parameters between two anchors
    modes/   what some runs ask of a script: replicas of federated runs, arrivals, adapters
    ranks/   a peer of several processes: DDP and FSDP2 ranks, each with its slices
    script/  attach(), and the same as one torch.optim.Optimizer
    integrations/   attach() inside the training loops of transformers and Lightning
    lab/     functions of papers, for scripts of one's own: no run imports them

Importing this package loads torch only when a name of it is used.
"""

# The stub beside this file has the names that this one loads when they are used.
# pyright: reportUnsupportedDunderAll=false

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "attach",
    "Attachment",
    "DiLoCo",
    "LocalSGD",
    "GradientAveraging",
    "OuterStep",
    "SoloSwarm",
    "outer_preset",
    "SeededTraining",
    "steps_left",
]
__all__ += ["AtollCallback", "AtollLightningCallback"]

_HOMES = {
    "attach": "script.attachment",
    "Attachment": "script.attachment",
    "DiLoCo": "script.diloco",
    "LocalSGD": "script.local_sgd",
    "GradientAveraging": "script.gradient_averaging",
    "SeededTraining": "script.seeded",
    "steps_left": "script.schedules",
    "OuterStep": "outer",
    "SoloSwarm": "solo",
    "outer_preset": "outer.presets",
    "AtollCallback": "integrations.trainer",
    "AtollLightningCallback": "integrations.lightning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
