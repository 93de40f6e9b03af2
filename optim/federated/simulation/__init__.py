"""Federated runs of any size in virtual time, for researchers: `atoll simulate`. The classes of a
run (`..member`, `..server`, `..compass`) do the work; here are only the clients' data and machines,
and the clock.

    parts = dirichlet(task.labels, 20, 0.1, seed=0)
    devices = fleet(20, [1, 1.5, 2, 4, 5])
    result = simulate(task, parts, devices, Settings("scaffold", rounds=50))

partition    who has which samples: Dirichlet, label shards, sites of given sizes
devices      how long a step takes, when a machine is there, whether it comes back
task         model and samples; one live model that plays every client
attacks      what hostile clients send
study        a run: settings, a client's turn, attacks, the curve
closing      when a round closes, by the rule of nodes
synchronous  rounds that wait for everybody, or as nodes do
arriving     FedAsync, FedBuff, FedFix, FedCompass
sites        models of one's own: fine-tuned, Ditto, by clusters
report       results as tables and curves
"""

from __future__ import annotations

from collections.abc import Sequence

from .arriving import run_arriving
from .devices import Device, Fleet, fleet
from .partition import Indices, dirichlet, label_shards, sized
from .sites import Sites, personalised
from .study import ARRIVING, NAMES, Point, Study, StudyResult, StudySettings
from .synchronous import run_synchronous
from .task import Task

__all__ = [
    "simulate",
    "personalised",
    "StudySettings",
    "Task",
    "StudyResult",
    "Point",
    "Sites",
    "dirichlet",
    "label_shards",
    "sized",
    "fleet",
    "Fleet",
    "Device",
    "NAMES",
]


def simulate(
    task: Task, parts: Sequence[Indices], fleet: Fleet, settings: StudySettings
) -> StudyResult:
    """One run, from the first parameters to its end. Equal arguments give equal results."""
    study = Study(task, parts, fleet, settings)
    return run_arriving(study) if settings.name in ARRIVING else run_synchronous(study)
