"""Adapters: what lies frozen under them, which of two factors trains, and how far a mean of factors
is from the mean of products.

An adapter adds B·A to a frozen matrix. Members average A and B, and mean(B)·mean(A) is not
mean(B·A) where members differ in both. They do not where all have the same A (FFA-LoRA, arXiv
2403.12313), or differ in one factor a round (RoLoRA, arXiv 2409.02346): then the mean is that of
the products. Parameters are told by PEFT's names, ``…lora_A…`` and ``…lora_B…``, whoever made them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast

import torch
from blake3 import blake3
from torch import Tensor, nn

from ...collectives.errors import ConfigError

CHUNK = 1 << 22  # elements hashed at a time
FACTOR = re.compile(r"(?<![^.])lora_(embedding_)?([AB])(?![^.])")
Factor = Literal["A", "B"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # those whose values float32 holds


# ---- the frozen base


def base_digest(frozen: Sequence[tuple[str, Tensor]], how: Literal["values", "shapes"]) -> bytes:
    """blake3 of frozen parameters, in their order; b"" where there are none.

    "values": names, shapes and values. A value counts and not its type: bfloat16 weights are the
    base that the same weights are in float32. "shapes": names and shapes only, those from before
    packing where a parameter is quantised. Raises ConfigError for values that cannot be read: on
    the meta device, or packed.
    """
    if not frozen:
        return b""
    found = blake3(b"atoll/base/1/" + how.encode(), max_threads=blake3.AUTO)
    for name, tensor in frozen:
        packed = getattr(tensor, "quant_state", None)
        shape = tuple(getattr(packed, "shape", tensor.shape))
        found.update(f"\0{name}\0{[int(dim) for dim in shape]}\0".encode())
        if how == "values":
            if packed is not None or tensor.device.type == "meta":
                raise ConfigError(
                    f"the frozen parameter {name} "
                    + ("is quantised" if packed is not None else "has no values here"),
                    key="$.adapters.base",
                    why="Members compare the values of what is frozen, and these cannot be read.",
                    hint=(
                        'base = "shapes" under [adapters] in the run\'s manifest (another run): '
                        "then names and shapes are compared, and each member sees to its values"
                    ),
                )
            try:
                for data in _bytes_of(tensor.detach()):
                    found.update(data)
            except (RuntimeError, TypeError, ValueError) as error:  # torch cannot read this kind
                raise ConfigError(
                    f"the frozen parameter {name} ({tensor.dtype}, {tensor.layout}) cannot be read:"
                    f" {str(error).strip().partition(chr(10))[0][:300]}",
                    key="$.adapters.base",
                    why="Members compare the values of what is frozen.",
                    hint=(
                        'base = "shapes" under [adapters] in the run\'s manifest (another run): '
                        "then names and shapes are compared, and each member sees to its values"
                    ),
                ) from error
    return found.digest()


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    whole = getattr(tensor, "full_tensor", None)  # a DTensor: all ranks ask for it, in one order
    flat = (tensor if whole is None else cast("Tensor", whole())).reshape(-1)
    for at in range(0, flat.numel(), CHUNK):
        part = flat[at : at + CHUNK].cpu()
        part = part.float() if part.dtype in FLOATS else part.contiguous().view(torch.uint8)
        yield part.contiguous().numpy().data.cast("B")


# ---- two factors


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
