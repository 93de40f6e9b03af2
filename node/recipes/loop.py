"""The recipe's training loop and its evaluation. It knows no network: a run is attached from
outside, by hooks on the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...collectives.swarm import RunSettings
from ...optim import Attachment
from ..manifest.tables import InnerTable
from .data import batch
from .gpt import GPT

EVALUATION_SEED = 9
EVALUATION_BATCHES = 8
EVALUATION_SIZE = 32
WATCHED_SIZE = 64  # windows of an evaluation that is made around adoptions
SMALLEST_SHARE = 0.01  # of the learning rate, at the end of the cosine


def make_optimizer(model: nn.Module, inner: InnerTable) -> torch.optim.Optimizer:
    """The inner optimizer."""
    if inner.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=inner.lr)
    return torch.optim.AdamW(
        model.parameters(),
        lr=inner.lr,
        betas=(inner.beta1, inner.beta2),
        weight_decay=inner.weight_decay,
    )


def lr_at(position: int, inner: InnerTable, own: int | None = None) -> float:
    """Learning rate at ``position`` of the schedule (from 0): linear warm-up, then constant or half
    a cosine down to 1 %.

    ``own``: inner steps that this optimizer has made; its moments are young then, wherever the run
    is, so it warms up by them.

    It never reaches 0: a step that moves nothing is no step, and members beyond the end must still
    be able to contribute.
    """
    warmed = (
        min(1.0, ((position if own is None else own) + 1) / inner.warmup) if inner.warmup else 1.0
    )
    if inner.schedule == "constant" or inner.steps is None:
        return inner.lr * warmed
    cosine = 0.5 * (1 + math.cos(math.pi * min(position, inner.steps) / inner.steps))
    return inner.lr * warmed * max(cosine, SMALLEST_SHARE)


def schedule_position(
    attachment: Attachment, settings: RunSettings, inner: InnerTable, steps: int, since_round: int
) -> int:
    """Where in the learning-rate schedule a member is: a late joiner enters where the run is.
    ``steps``: its own, ``since_round`` those since the anchor last moved.

    With ``samples`` it goes by what all members together have trained on, however many they are.
    """
    if inner.samples is not None and inner.steps is not None:
        return inner.steps * attachment.position // inner.samples
    if settings.sync_every is None:
        return steps
    return settings.lengths.before(attachment.round) + since_round


def train_step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    inner: InnerTable,
    generator: torch.Generator,
    position: int,
    own: int | None = None,
) -> float:
    """One inner step on a random batch of ``tokens`` (uint8, (bytes,)), at the rate of `lr_at`;
    returns its loss.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr_at(position, inner, own)
    inputs, targets = batch(tokens, model.config.context, inner.batch, generator)

    def closure() -> float:  # some methods want the gradient of this batch at other parameters, too
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        if inner.clip:
            nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
        return float(loss.detach())

    return optimizer.step(closure)


def train(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    inner: InnerTable,
    generator: torch.Generator,
    *,
    stop: int,
    on_step: Callable[[int, float], bool] = lambda step, loss: True,
) -> None:
    """``stop`` inner steps without a swarm: what one machine alone makes of the recipe.

    ``on_step`` hears the number of steps done and the loss of the last, and says whether to go on.
    """
    model.train()
    for step in range(stop):
        loss = train_step(model, optimizer, tokens, inner, generator, step)
        if not on_step(step + 1, loss):
            break


@torch.no_grad()
def evaluate(model: GPT, held_out: Tensor) -> float:
    """Mean loss in nats a byte over fixed windows of held-out text (uint8, (bytes,)); the same
    windows on every call.
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    was_training = model.training
    model.eval()
    total = sum(
        float(model.loss(*batch(held_out, model.config.context, EVALUATION_SIZE, generator)))
        for _ in range(EVALUATION_BATCHES)
    )
    model.train(was_training)
    return total / EVALUATION_BATCHES


@torch.no_grad()
def evaluate_briefly(model: GPT, held_out: Tensor) -> float:
    """The same in a quarter of the time, for `attach`'s ``evaluate``: whoever calls it sets
    the model's mode.
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    return float(model.loss(*batch(held_out, model.config.context, WATCHED_SIZE, generator)))
