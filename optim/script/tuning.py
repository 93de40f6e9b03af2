"""A site's own model in a run, from its anchor: fine-tuning after FedAvg, Reptile or Per-FedAvg.
Nothing of it leaves the site.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...collectives.errors import ConfigError

if TYPE_CHECKING:
    from .attachment import Attachment


def fine_tuned_model(
    attachment: Attachment,
    model: nn.Module,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    batches: Iterable[Any],
    steps: int,
    lr: float,
) -> nn.Module:
    """A copy of ``model`` with the newest anchor's values, after ``steps`` steps of plain SGD on
    ``loss(copy, batch)``, a scalar; batches are taken round and round. `personal.fine_tuned` with a
    module: what a site uses after Reptile or ``per_fedavg``.

    ``model`` is the attached one, whose live values, optimizer and contribution stay as they are.
    Raises ConfigError for less than 0 steps, a rate that is not above 0, no batches; interrupted,
    it leaves nothing behind.
    """
    if steps < 0 or not lr > 0:
        raise ConfigError(
            f"{steps} steps of {lr}",
            key="steps",
            why="Steps are counted from 0, rates are above 0.",
        )
    with attachment.evaluate_anchor():
        own = copy.deepcopy(model)
    own.train()
    optimizer = torch.optim.SGD(
        [parameter for parameter in own.parameters() if parameter.requires_grad], lr=lr
    )
    made = 0
    while made < steps:
        before = made
        for batch in islice(batches, steps - made):
            optimizer.zero_grad()
            loss(own, batch).backward()
            optimizer.step()
            made += 1
        if made == before:
            raise ConfigError(
                f"{made} of {steps} steps are made, and there are no more batches", key="batches"
            )
    return own
