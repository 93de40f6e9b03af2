"""Tensors of the parameters' shapes that an optimizer keeps beside them: in its state, its groups,
its attributes, and in those of optimizers inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

DEEP = 6  # containers in containers
PADDED = 4096  # elements that a flat tensor for all may have beyond theirs, or a tenth


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """``key``: where it is, by names of attributes and dictionary keys, without the parameter's own
    place; so it is the same in another optimizer of the class. ``index``: the parameter that it is
    of. ``tensor``: of that parameter's shape, the tensor itself or a view of a flat one.
    """

    key: str
    index: int
    tensor: Tensor


def held_tensors(optimizer: Any, parameters: Sequence[Tensor]) -> list[HeldTensor]:
    """Floating-point tensors of the shapes of ``parameters``, which are those of the optimizer's
    groups in their order, each once. Tensors over the parameters' own memory and subclasses of
    Tensor (quantised ones) are left out; DTensors are there for parameters that are DTensors.
    """
    found = _StateSearch(optimizer, parameters)
    found.enter(optimizer, "")
    return found.held


def inner_optimizers(optimizer: Any) -> dict[str, Any]:
    """Optimizers among the attributes of one, by attribute."""
    return {name: value for name, value in vars(optimizer).items() if is_optimizer(value)}


def is_optimizer(value: object) -> bool:
    """Of torch, or made like one."""
    if isinstance(value, type):
        return False
    return isinstance(value, Optimizer) or (
        hasattr(value, "param_groups") and callable(getattr(value, "step", None))
    )


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Of all groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


class _StateSearch:
    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self.held: list[HeldTensor] = []
        self._parameters = parameters
        self._all = range(len(parameters))
        # By the id of a parameter, or of what stands for it in an optimizer inside.
        self._index = {id(parameter): at for at, parameter in enumerate(parameters)}
        self._groups = [
            [self._index[id(each)] for each in group["params"] if id(each) in self._index]
            for group in getattr(optimizer, "param_groups", ())
        ]
        self._memory = {_memory(parameter.detach()) for parameter in parameters}
        self._entered = set[int]()

    def enter(self, holder: Any, path: str) -> None:
        """An optimizer. Its groups come first, since their tensors are the keys of its state."""
        if id(holder) in self._entered:
            return
        self._entered.add(id(holder))
        names = [name for name in vars(holder) if name != "defaults" and "hook" not in name]
        for name in sorted(names, key=lambda name: name != "param_groups"):
            self._visit(vars(holder)[name], f"{path}{name}", None, self._all, 0)

    def _visit(
        self, value: Any, path: str, at: int | None, scope: Sequence[int], depth: int
    ) -> None:
        """``at``: the parameter that the value is of, where that is known; ``scope``: those that it
        may be of.
        """
        if isinstance(value, Tensor):
            self._add(value, path, at, scope)
        elif depth > DEEP:
            return
        elif is_optimizer(value):
            self.enter(value, f"{path}.")
        elif isinstance(value, Mapping):
            entries = cast("Mapping[Any, Any]", value)
            if all(type(key) is int and key < len(entries) for key in entries):  # by number
                self._visit_each(list(entries.values()), path, at, scope, depth)
                return
            for key, each in entries.items():
                known = self._index.get(key if isinstance(key, int) else id(key), at)
                place = path if isinstance(key, Tensor) or known != at else f"{path}.{key}"
                self._visit(each, place, known, scope, depth + 1)
        elif isinstance(value, list | tuple):
            self._visit_each(cast("Sequence[Any]", value), path, at, scope, depth)

    def _visit_each(
        self, values: Sequence[Any], path: str, at: int | None, scope: Sequence[int], depth: int
    ) -> None:
        count = len(values)
        tensors = all(isinstance(each, Tensor) for each in values)
        if at is None and count == len(scope) and (tensors or count != len(self._groups)):
            for index, each in zip(scope, values, strict=True):
                if isinstance(each, Tensor):  # masters in the groups of an optimizer inside
                    self._index.setdefault(id(each), index)
                self._visit(each, path, index, scope, depth + 1)
        elif at is None and count == len(self._groups) and scope is self._all:
            for group, each in zip(self._groups, values, strict=True):
                self._visit(each, path, None, group, depth + 1)
        else:
            for place, each in enumerate(values):
                self._visit(each, f"{path}.{place}", at, scope, depth + 1)

    def _add(self, tensor: Tensor, path: str, at: int | None, scope: Sequence[int]) -> None:
        tensor = tensor.detach()
        if not tensor.is_floating_point() or not tensor.numel() or tensor.is_sparse:
            return
        if at is None and len(scope) == 1 and tensor.shape == self._parameters[scope[0]].shape:
            at = scope[0]
        if at is not None:
            like = self._parameters[at].detach()
            if type(tensor) in (Tensor, type(like)) and tensor.shape == like.shape:
                self._take(path, at, tensor)
            elif (
                type(tensor) is type(like) is Tensor
                and tensor.shape == (like.numel(),)
                and tensor.is_contiguous()
            ):
                self._take(path, at, tensor.view(like.shape))
        elif type(tensor) is Tensor and tensor.dim() == 1 and tensor.is_contiguous() and scope:
            self._cut(path, tensor, scope)

    def _cut(self, path: str, flat: Tensor, scope: Sequence[int]) -> None:
        """One flat tensor for all of the scope, perhaps padded."""
        total = sum(self._parameters[index].numel() for index in scope)
        if not total <= flat.numel() <= total + max(PADDED, total // 10):
            return
        start = 0
        for index in scope:
            like = self._parameters[index]
            self._take(path, index, flat[start : start + like.numel()].view(like.shape))
            start += like.numel()

    def _take(self, path: str, at: int, tensor: Tensor) -> None:
        memory = _memory(tensor)
        if tensor.numel() and memory not in self._memory:
            self._memory.add(memory)
            self.held.append(HeldTensor(path, at, tensor))


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    if hasattr(tensor, "to_local"):
        tensor = cast("Any", tensor).to_local()
    return tensor.device, tensor.data_ptr()
