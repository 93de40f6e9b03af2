"""The inner optimizer: one over all that is trained, or one a parameter that steps in backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ....collectives.errors import ConfigError
from ...manifest.tables import InnerTable
from ..models.libraries import refuse_without_bitsandbytes


def trained_parameters(model: Any) -> list[Tensor]:
    """What requires a gradient. Raises ConfigError where nothing does."""
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise ConfigError(
            "no parameter of the model is trained",
            key="model",
            why="All of them are frozen.",
            hint='method = "full", or adapters: method = "lora"',
        )
    return trained


def make_optimizer(trained: Sequence[Tensor], inner: InnerTable) -> torch.optim.Optimizer:
    """Over these parameters; those of one dimension (norms, biases) do not decay. Raises
    ConfigError where bitsandbytes is asked for and not installed.
    """
    if inner.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=inner.lr)
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": inner.weight_decay},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": inner.lr, "betas": (inner.beta1, inner.beta2)}
    if inner.optimizer == "adamw8bit":
        refuse_without_bitsandbytes("", inner.optimizer)
        make: Any = import_module("bitsandbytes.optim").AdamW8bit
        return make(groups, **settings)
    kinds = {each.device.type for each in trained}
    return torch.optim.AdamW(groups, fused=kinds <= {"cpu", "cuda"}, **settings)


class BackwardOptimizer:
    """An optimizer a parameter, which steps as soon as the parameter's gradient is whole, and lets
    go of it: the gradients are never there together. A weight that is used twice steps once.

    ``live`` False: gradients are let go of, and nothing steps.
    """

    def __init__(self, trained: Sequence[Tensor], inner: InnerTable) -> None:
        self.live = True
        self._optimizers = [make_optimizer([each], inner) for each in trained]
        for parameter, optimizer in zip(trained, self._optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(self._step, optimizer))

    def _step(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        if self.live:
            optimizer.step()
        parameter.grad = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all of them, to set their learning rate."""
        return [group for each in self._optimizers for group in each.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Of all of them."""
        return {"each": [each.state_dict() for each in self._optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned, of a model with as many parameters."""
        for each, saved in zip(self._optimizers, state["each"], strict=True):
            each.load_state_dict(saved)
