"""Adapters: which of two factors trains, and how far a mean of factors is from the mean of
products.

An adapter adds B·A to a frozen matrix. Members average A and B, and mean(B)·mean(A) is not
mean(B·A) where members differ in both. They do not where all have the same A (FFA-LoRA, arXiv
2403.12313), or differ in one factor a round (RoLoRA, arXiv 2409.02346): then the mean is that of
the products. Parameters are told by PEFT's names, ``…lora_A…`` and ``…lora_B…``, whoever made them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ...collectives.errors import ConfigError
from ..model.factors import FACTOR

Factor = Literal["A", "B"]


class AdapterTurns:
    """Which factors of a model's adapters train, by the run's mode; the rounds of the log decide.

    "ffa": the A never do. "alternate": the B in rounds from an even anchor, the A in the others. A
    factor at rest requires no gradient and has none, so no torch optimizer moves it.
    """

    def __init__(
        self, model: nn.Module, mode: Literal["plain", "alternate", "ffa"], *, wrapped: bool = False
    ) -> None:
        """``wrapped``: the model is of a job of several ranks, whose wrappers have seen by now what
        requires a gradient. Raises ConfigError."""
        self._mode = mode
        self._factors: dict[Factor, list[nn.Parameter]] = {"A": [], "B": []}
        if mode == "plain":
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (found := FACTOR.search(name)):
                self._factors[cast("Factor", found[2])].append(parameter)
        if not self._factors["B"] or (mode == "alternate" and not self._factors["A"]):
            raise ConfigError(
                f'the run\'s [adapters] mode is "{mode}", and lora_A or lora_B is missing',
                key="model",
                why="Factors are told by PEFT's names of parameters.",
                hint="model = peft.get_peft_model(model, peft.LoraConfig(...)), before attach()",
            )
        if wrapped and self._factors["A"]:
            raise ConfigError(
                f'[adapters] mode = "{mode}" in a job of several ranks',
                key="model",
                why="DDP and FSDP2 fix what is trained when they wrap the model.",
                hint="Freeze all lora_A before wrapping it, with ffa; alternate takes one process.",
            )
        if mode == "ffa":
            self._rest("A")

    def turn(self, round: int) -> None:
        """Training starts from the anchor of so many committed rounds."""
        if self._mode == "alternate":
            self._rest("A" if round % 2 == 0 else "B")

    def release(self) -> None:
        """All train that did at first."""
        for parameter in (*self._factors["A"], *self._factors["B"]):
            parameter.requires_grad_(True)

    def _rest(self, factor: Factor) -> None:
        for name, parameters in self._factors.items():
            for parameter in parameters:
                parameter.requires_grad_(name != factor)
                if name == factor:
                    parameter.grad = None


@torch.no_grad()
def product_bias(members: Sequence[tuple[float, Mapping[str, Tensor]]]) -> float:
    """How far mean(B)·mean(A) is from mean(B·A): the Frobenius norm of the difference over all
    adapters, relative to that of mean(B·A).

    ``members``: the weight of each, and its tensors by name, of which lora_A and lora_B count.
    """
    total = sum(weight for weight, _ in members)
    squared = length = 0.0
    for name in members[0][1]:
        found = FACTOR.search(name)
        if found is None or found[2] != "A":
            continue
        partner = name[: found.start(2)] + "B" + name[found.end(2) :]
        pairs = [
            (
                weight / total,
                tensors[partner].flatten(1).double(),
                tensors[name].flatten(1).double(),
            )
            for weight, tensors in members
        ]
        mean = torch.stack([weight * (b @ a) for weight, b, a in pairs]).sum(0)
        of_means = torch.stack([weight * b for weight, b, _ in pairs]).sum(0) @ torch.stack(
            [weight * a for weight, _, a in pairs]
        ).sum(0)
        squared += float((of_means - mean).square().sum())
        length += float(mean.square().sum())
    return math.sqrt(squared / length) if length else 0.0
