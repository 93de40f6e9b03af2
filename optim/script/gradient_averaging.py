"""Synchronous training on one large batch, as one torch.optim.Optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...collectives.errors import ConfigError
from ...collectives.outcomes import Outcome
from ...collectives.script_swarm import Swarm
from .attachment import Attachment, attach
from .checks import check_alone


class GradientAveraging(Optimizer):
    """`step` adds the gradients to this round's; when the swarm has its batch, the run's outer
    optimizer steps on their mean.

        opt = GradientAveraging(model.parameters(), swarm=swarm, model=model)
        for x, y in loader:
            opt.zero_grad()
            criterion(model(x), y).backward()
            opt.attachment.samples(len(x))
            opt.step()                          # adds; the step that fills the batch applies it

    The same results as one large batch, whoever brought which part of it and whoever came or went
    (hivemind.Optimizer's job, and that of DeDLOC, arXiv 2106.10207). How large the batch is, and
    which optimizer, says the manifest: ``[train] target_samples``, ``[train.outer]``. Tell
    `Attachment.samples` of each step's: gradients at the parameters are taken for means over them.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        swarm: Swarm,
        model: nn.Module,
        on_round: Callable[[Outcome], None] | None = None,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``params`` are all parameters of ``model`` that require a gradient. Raises ConfigError
        for others, for options of theirs, when the run's method is another one, or for what
        `attach` refuses."""
        check_alone(model, type(self).__name__)
        super().__init__(params, {})  # type: ignore[arg-type]
        _check_groups(self.param_groups, model)
        if swarm.settings.method != "gradient_averaging":
            raise ConfigError(
                (
                    f"the run's method is {swarm.settings.method!r}, GradientAveraging "
                    "is 'gradient_averaging'"
                ),
                key="$.train.method",
                why="The run's signed manifest sets it for all members alike.",
                hint="Use attach(model, optimizer, swarm), which follows the manifest.",
            )
        self._attachment = attach(model, None, swarm, on_round=on_round, strict=strict, clock=clock)

    @property
    def attachment(self) -> Attachment:
        """The membership: samples, stats, done, log, evaluate_anchor, and the state to save."""
        return self._attachment

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Add the gradients; returns what ``closure`` returns, which makes them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._attachment.step()
        return loss


def _check_groups(groups: list[dict[str, Any]], model: nn.Module) -> None:
    """Raise ConfigError where the groups would say something else than what the run's outer
    optimizer does.
    """
    given = {
        id(parameter)
        for group in groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    if stray := given ^ {
        id(parameter) for parameter in model.parameters() if parameter.requires_grad
    }:
        raise ConfigError(
            f"{len(stray)} parameters are in one of params and the model only",
            key="params",
            why="A run steps on its whole model.",
            hint=(
                "GradientAveraging(model.parameters(), swarm=swarm, model=model), and freeze "
                "what is not to be trained."
            ),
        )
    if options := sorted(
        {name for group in groups for name in group if name not in ("params", "param_names")}
    ):
        raise ConfigError(
            f"parameter groups with {', '.join(options)} of their own",
            key="params",
            why="The outer optimizer is the run's: its manifest sets it, for all parameters alike.",
            hint="Leave them out; see [train.outer] of the manifest.",
        )
