"""Where a model's modules hold the tensors that were attached, and which of these places hold
others by now: a parameter that was assigned, or a whole module that was exchanged
(``model.fc = nn.Linear(…)``). Wrapping a module (`torch.compile` of a block, say) moves its places
and no tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from ..model.flat import clean_name, unwrap


@dataclass(slots=True)
class ParameterPlace:
    """One place in a module that holds a watched parameter."""

    name: str
    holder: dict[str, Any]
    key: str
    parameter: Tensor


class ParameterPlaces:
    """All places of some parameters of a model: a shared tensor has several."""

    def __init__(self, model: nn.Module, watched: Collection[int]) -> None:
        """``watched``: the ids of the parameters."""
        inner = unwrap(model)
        self._model = weakref.ref(inner)
        self.all = [
            ParameterPlace(
                f"{prefix}.{key}" if prefix else key, cast("Any", module._parameters), key, each
            )
            for prefix, module in inner.named_modules(remove_duplicate=False)
            if isinstance(cast("Any", module._parameters), dict)  # a ScriptModule's are fixed
            for key, each in module._parameters.items()
            if each is not None and id(each) in watched
        ]
        self._note_modules(inner)

    def _note_modules(self, inner: nn.Module) -> None:
        """Those with parameters, and where their parents hold them."""
        self._modules = [
            (cast("dict[str, Any]", module._modules), key, child)
            for module in inner.modules()
            if isinstance(cast("Any", module._modules), dict)
            for key, child in module._modules.items()
            if child is not None and any(True for _ in child.parameters())
        ]

    def clear(self) -> None:
        """Nothing is looked at any more."""
        self.all, self._modules = [], []

    def moved(self) -> list[tuple[ParameterPlace, Tensor | None]]:
        """The places that hold another tensor than at first, and that one."""
        if any(holder.get(key) is not module for holder, key, module in self._modules):
            self._find_again()
        return [
            (slot, live)
            for slot in self.all
            if (live := slot.holder.get(slot.key)) is not slot.parameter
        ]

    def _find_again(self) -> None:
        """A module was exchanged: look its places up by name."""
        if (inner := self._model()) is None:
            return
        places = {
            clean_name(f"{prefix}.{key}" if prefix else key): (module._parameters, key)
            for prefix, module in inner.named_modules(remove_duplicate=False)
            for key in module._parameters
        }
        for slot in self.all:
            found = places.get(clean_name(slot.name), ({}, slot.key))
            slot.holder, slot.key = cast("dict[str, Any]", found[0]), found[1]
        self._note_modules(inner)
