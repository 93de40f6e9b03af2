"""The sum of a batch's clipped gradients in two backward passes, by opacus' ghost clipping (Li et
al. 2021, arXiv 2110.05679): the first finds the norm of each example's gradient without making it,
the second is of the losses times what clips them.

Norms are found in float32; clipped gradients are shorter than the bound by a 1024th, which is more
than the error of a norm. In fewer digits it is not, and a batch's sum, rounded to them, moves by
more than one example's bound: models and activations of half precision are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ....collectives.errors import ConfigError

SHORTER = 1 - 2.0**-10
_HALVES = {torch.float16, torch.bfloat16}


def can_clip() -> bool:
    """Whether opacus is installed."""
    return find_spec("opacus") is not None


def clipped_sum(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    losses: Callable[[], Tensor],
    bound: float,
) -> list[Tensor]:
    """Of each parameter of ``model`` the sum over the batch, zeros where no loss goes. ``losses``:
    one for each example. Their ``grad`` stays as it is.

    Raises ValueError for a gradient that is not finite, ConfigError for what opacus cannot take
    apart.
    """
    if half := {parameter.dtype for parameter in parameters} & _HALVES:
        raise _too_coarse(half.pop())
    kept = [parameter.grad for parameter in parameters]
    try:
        with warnings.catch_warnings(), _whole_digits(model):
            # inputs need no gradient, which torch says at each step
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            return _clipped_sum(model, parameters, losses, bound)
    finally:
        for parameter, before in zip(parameters, kept, strict=True):
            parameter.grad = before


def _clipped_sum(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    losses: Callable[[], Tensor],
    bound: float,
) -> list[Tensor]:
    with _norms_found(model):
        each = losses()
        if each.dim() != 1:
            raise ConfigError(
                f"private examples: losses of shape {[*each.shape]}",
                key="losses",
                why="One number for each example, such as reduction='none' gives.",
            )
        _clear(parameters)
        each.sum().backward(retain_graph=True)
        norms = _norms(parameters, len(each))
    if not bool(norms.isfinite().all()):
        raise ValueError("a vector that is not finite cannot be clipped")
    _clear(parameters)
    (each * (bound / norms.clamp(min=bound) * SHORTER).to(each)).sum().backward()
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in parameters
    ]


@contextmanager
def _whole_digits(model: nn.Module) -> Generator[None]:
    """Refuse a forward that computes in half precision, as under autocast. Raises ConfigError."""

    def look(module: nn.Module, given: object, found: object) -> None:
        del module, given
        if isinstance(found, Tensor) and found.dtype in _HALVES:
            raise _too_coarse(found.dtype)

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _too_coarse(dtype: torch.dtype) -> ConfigError:
    return ConfigError(
        f"private examples: a batch is clipped at once in float32, and this model computes in "
        f"{dtype}",
        key="model",
        why="A sum that is rounded so coarsely moves by more than the bound of one example.",
        hint="model.float() and no autocast; or PrivateExamples.step, one example after another.",
    )


def _clear(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def _norms_found(model: nn.Module) -> Generator[None]:
    """With opacus' hooks in the modules of ``model``; nothing of them is left in it."""
    opacus: Any = import_module("opacus.grad_sample")
    parameters = list(model.parameters())
    try:
        hooks = opacus.GradSampleModuleFastGradientClipping(
            model, loss_reduction="sum", strict=False
        )
    except (RuntimeError, ValueError) as error:  # as where it has hooks already
        raise _unfit(error) from error
    try:
        yield
    except RuntimeError as error:  # as of parameters that two layers share
        raise _unfit(error) from error
    finally:
        hooks.remove_hooks()
        for owner in (*model.modules(), *parameters):
            for name in LEFT:
                vars(owner).pop(name, None)


LEFT = ("activations", "max_batch_len", "grad_sample", "_norm_sample", "_forward_counter")
"""Attributes that opacus puts into modules and parameters."""


def _norms(parameters: Sequence[nn.Parameter], count: int) -> Tensor:
    """Of each example's gradient."""
    squares = torch.zeros(count, dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is None:  # no loss goes there
            continue
        norms: Tensor | None = getattr(parameter, "_norm_sample", None)
        if norms is None or norms.shape != (count,):
            raise _unfit("a parameter is used in a way of which it finds no norms")
        squares += norms.detach().to("cpu", torch.float64) ** 2
    return squares.sqrt()


def _unfit(why: object) -> ConfigError:
    return ConfigError(
        f"private examples: opacus' ghost clipping does not go with this model: {why}",
        key="model",
        hint="PrivateExamples.step, one example after another, goes with any.",
    )
