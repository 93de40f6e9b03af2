"""What each site gets of a federated run: the accuracy of one model for all, and of a model of its
own, on samples of its own that train nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ....collectives.errors import ConfigError
from ...model.registry import MODES
from ..personal import ditto, fine_tuned
from .devices import Fleet
from .partition import Indices
from .study import ARRIVING, Study, StudySettings
from .synchronous import run_synchronous
from .task import Task

How = Literal["tuned", "ditto", "clusters"]
HELD_EVERY = 5  # of a site's samples, one is not trained on
TUNING = 1 << 30  # as the number of a turn: no round has it, so its batches are others


@dataclass(frozen=True, slots=True)
class Sites:
    """Accuracy at every site: of one model for all, and of its own. ``cluster``: whose model it
    started from; all 0 without clusters.
    """

    one_for_all: tuple[float, ...]
    own: tuple[float, ...]
    cluster: tuple[int, ...]


def personalised(
    task: Task,
    parts: Sequence[Indices],
    fleet: Fleet,
    settings: StudySettings,
    how: How,
    *,
    tune: int = 20,
    pull: float = 0.1,
    warm: float = 0.2,
) -> Sites:
    """A run of one model, and of models of one's own: ``tuned`` (the last anchor and ``tune``
    steps: Reptile, with a server_lr below 1), ``ditto`` (``pull`` to the anchor), or ``clusters``
    (when two clusterings in a row agree, and after the share ``warm`` of the rounds at most, a run
    of each cluster; then ``tuned``).

    The method must be synchronous, and its rounds counted. Raises ConfigError else.
    """
    if settings.rounds is None or settings.name in ARRIVING:
        raise ConfigError("models of one's own need synchronous rounds, and how many", key="rounds")
    rng = np.random.default_rng(settings.seed)
    mixed = [rng.permutation(part) for part in parts]
    held, training = (
        [part[::HELD_EVERY] for part in mixed],
        [np.delete(part, np.s_[::HELD_EVERY]) for part in mixed],
    )
    if min(map(len, training)) < 1:
        raise ConfigError(
            "a site without samples to train on", key="clients", hint="Fewer clients: --clients N"
        )
    study = Study(task, training, fleet, settings)
    models = _ditto(study, settings, pull) if how == "ditto" else []
    if not models:
        run_synchronous(study)
    anchor = study.server.anchor
    found = [0] * study.clients
    if how == "clusters":
        found, models = _clustered(
            task, training, fleet, settings, max(1, round(warm * settings.rounds))
        )
    if how != "ditto":
        starts = models or [anchor] * study.clients
        models = [
            fine_tuned(start, study.gradient(client, TUNING), tune, settings.knobs.lr)
            for client, start in enumerate(starts)
        ]

    def measured(model: Tensor, client: int) -> float:
        rows = torch.from_numpy(held[client])
        return study.learner.measure(model, task.x[rows], task.y[rows])[0]

    return Sites(
        tuple(measured(anchor, client) for client in range(study.clients)),
        tuple(measured(model, client) for client, model in enumerate(models)),
        tuple(found),
    )


def _ditto(study: Study, settings: StudySettings, pull: float) -> list[Tensor]:
    """Personal models, which make as many steps after a round as the client made in it."""
    own = [study.server.anchor.clone() for _ in range(study.clients)]

    def after_round() -> None:
        for client, model in enumerate(own):
            gradient = study.gradient(client, study.server.version)
            own[client] = ditto(
                model,
                study.server.anchor,
                gradient,
                study.steps_of(client),
                settings.knobs.lr,
                pull,
            )

    run_synchronous(study, after_round)
    return own


def _clustered(
    task: Task, parts: Sequence[Indices], fleet: Fleet, settings: StudySettings, warm: int
) -> tuple[list[int], list[Tensor]]:
    """Each site's cluster and its last anchor: as many rounds in all as a run of one model."""
    assert settings.rounds is not None
    first, found = Study(task, parts, fleet, settings), list[int]()
    served = first.server.served()
    for rounds in range(1, warm + 1):
        first.settings = replace(settings, rounds=rounds, measure=warm)
        run_synchronous(first)
        served, before = first.server.served(), found
        deltas = torch.stack([first.probe(client, served) for client in range(first.clients)])
        clusters, same_names = (
            MODES.load("clusters", name, key="--personal clusters")
            for name in ("clusters", "same_names")
        )
        found = clusters(deltas) if not before else same_names(before, clusters(deltas))
        if found == before:
            break
    models: dict[int, Tensor] = {}
    for name in set(found) if first.server.version < settings.rounds else ():
        members = [client for client, cluster in enumerate(found) if cluster == name]
        own = replace(fleet, devices=tuple(fleet.devices[client] for client in members))
        rest = replace(
            settings,
            rounds=settings.rounds - first.server.version,
            measure=settings.rounds,
            asked=None,
            hostile=0,
            attack=None,
        )
        study = Study(task, [parts[client] for client in members], own, rest, served.anchor)
        run_synchronous(study)
        models[name] = study.server.anchor
    return found, [models.get(name, served.anchor) for name in found]
