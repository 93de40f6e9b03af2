"""What changes a model's function beside its tensors: the scale of an adapter, and the numbers of
its normalisation layers. Two members whose tensors have equal names and shapes, and these not,
would train one anchor and compute two models from it.

Read from modules as they are, by what they have: PEFT need not be there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

EPSILONS = ("eps", "variance_epsilon")  # as torch and transformers name it
NUMBERS = ("momentum", "num_groups")  # of normalisation layers, where they have them
KINDS = ("use_rslora", "use_dora")  # how PEFT scales a layer, or what it does beside it


def traits_of(model: nn.Module) -> dict[str, str]:
    """By the name of a module what there is to compare, as text such as "scaling 0.5 (alpha 8)"."""
    found = dict[str, str]()
    for name, module in model.named_modules():
        if told := _adapter(module) or _normalisation(module):
            found[name] = told
    return found


def _adapter(module: nn.Module) -> str:
    """Of a LoRA layer: by which factor B A is added. Its adapters' names are the members' own."""
    scaling = getattr(module, "scaling", None)
    if not isinstance(scaling, dict) or not hasattr(module, "lora_A"):
        return ""
    alphas = cast("Mapping[str, Any]", getattr(module, "lora_alpha", {}))
    told = list[str]()
    for adapter, value in cast("Mapping[str, Any]", scaling).items():
        kinds = [
            key.removeprefix("use_") for key in KINDS if _is(getattr(module, key, None), adapter)
        ]
        of = [f"alpha {alphas[adapter]:g}"] if adapter in alphas else []
        told.append(f"scaling {value:.6g} ({', '.join([*of, *kinds]) or 'plain'})")
    return "; ".join(sorted(told))


def _is(value: Any, adapter: str) -> bool:
    """A switch of one adapter, or of a layer."""
    return bool(cast("Mapping[str, Any]", value).get(adapter) if isinstance(value, dict) else value)


def _normalisation(module: nn.Module) -> str:
    """Of one: what is added to a variance, how fast running statistics follow, groups."""
    values = vars(module)
    epsilon = next((values[key] for key in EPSILONS if key in values), None)
    if not isinstance(epsilon, float) or not math.isfinite(epsilon):
        return ""
    told = [f"epsilon {epsilon:.6g}"]
    for key in NUMBERS:
        if key in values:
            value = values[key]
            told.append(
                f"{key.removeprefix('num_')} {'cumulative' if value is None else f'{value:.6g}'}"
            )
    return ", ".join(told)
