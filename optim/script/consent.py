"""Adoption with the optimizer's consent: the life of what an optimizer remembers of positions.

A round's end writes the anchor into the parameters. Most optimizers do not care where these are;
some have kept it, and take the anchor back:

* Slow or averaged weights and start points (Lookahead, schedule-free, MADGRAD) are **positions**.
  `probe` finds them when the model is attached, on toys of the optimizer's class. Whenever an
  anchor is adopted the live ones, found by the same keys, are moved by as much as the parameters.
* A wider tensor that rounds to a parameter bit for bit is its **master**: each step makes the
  parameter of it. Masters are looked for at each boundary, in the live state. Contributions are
  read from them and the anchor is written into them unrounded (`FlatVector.masters`), so what a
  bfloat16 parameter would round off is lost in neither direction. One that a step has made of a
  parameter began at the anchor rounded; what rounding took is added when it is first seen.
* LBFGS keeps no position, but takes the difference of two gradients for that of its last step. So
  the jump Δ is added to that step: its ``state["d"]`` gets Δ/t.
* What cannot be asked, or is not cured by this, is named once, when it is attached. The script's
  own way is ``attach(..., on_adopted=f)``. With it nothing of any optimizer's state is touched.

State is never cleared: that costs more than what it would mend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..model.flat import FlatVector, unwrap
from ..model.reconcile import complete
from ..rounds.replica import Replica
from .optimizer_state import HeldTensor, held_tensors, parameters_of
from .probe import MOST, OptimizerMemory, probe

logger = logging.getLogger("atoll")

OnAdopted = Callable[[Mapping[Tensor, Tensor]], None]

WAY = (
    "Pass attach(..., on_adopted=f): f(moved) is called after each anchor, moved[parameter] is by "
    "how much that parameter was moved, and f moves as much what the optimizer keeps of it"
)
TAKES_BACK = (
    "{name} remembers where the parameters were: of each anchor that a round adopts its next steps "
    "take back {gone:.0%}, and where it keeps them was not found. " + WAY
)
NOT_ASKED = (
    "whether {name} remembers where the parameters were, and takes adopted anchors back, is not "
    "known: it could not be built again over small tensors ({fault}). If it keeps slow, averaged "
    "or master weights: " + WAY + ". If it keeps none, on_adopted=lambda moved: None ends this "
    "warning"
)
WRAPPED_LBFGS = (
    "{name} steps by an LBFGS inside of it, which will take each adopted anchor for its own last "
    "step: attach the LBFGS itself. Or: " + WAY
)
MOVED = "%s keeps positions (%s): they are moved along when the model adopts an anchor"


@dataclass(frozen=True, slots=True)
class _Master:
    """``wide`` is the master of the parameter ``narrow``. ``key``: where, in which optimizer."""

    key: tuple[int, str]
    narrow: Tensor
    wide: Tensor


@dataclass(frozen=True, slots=True)
class _Remembering:
    """An attached optimizer, its parameters, the keys of its positions, and which of these are
    masters of narrow parameters, where that is known.
    """

    optimizer: Any
    parameters: list[Tensor]
    positions: frozenset[str]
    masters: frozenset[str] | None

    def held(self) -> list[HeldTensor]:
        return held_tensors(self.optimizer, self.parameters)

    def may_be_master(self, key: str) -> bool:
        """A start point or slow weights may round to the parameter, too."""
        return self.masters is None or key in self.masters

    @property
    def moves(self) -> bool:
        return bool(self.positions) or isinstance(self.optimizer, LBFGS)


class Consent:
    """Of the optimizers of one attachment."""

    def __init__(
        self,
        model: nn.Module,
        flat: FlatVector,
        outermost: Sequence[Any],
        optimizers: Sequence[Optimizer],
        on_adopted: OnAdopted | None,
    ) -> None:
        """``outermost``: the objects (`checks.outermost`) whose classes are probed, each around one
        of ``optimizers``, or that itself.
        """
        self._flat, self._on_adopted = flat, on_adopted
        self._optimizers = list[_Remembering]()
        if on_adopted is None:
            self._optimizers = [
                _remembering(each, inner) for each, inner in zip(outermost, optimizers, strict=True)
            ]
        self._known = frozenset[tuple[int, str]]()  # keys of masters, at the newest boundary
        self._complete = frozenset[int]()  # ids of parameters whose master has the anchor unrounded
        self._watched: list[Tensor] = (
            [each for each in unwrap(model).parameters() if each.requires_grad]
            if on_adopted is not None
            else [p for each in self._optimizers if each.moves for p in each.parameters]
        )

    @contextmanager
    def adopting(self, replicas: Iterable[Replica] = ()) -> Generator[None]:
        """Inside, anchors are written into the parameters and contributions are read from them.
        ``replicas``: those whose anchor new masters began at, rounded; none when the run is entered
        or a checkpoint is loaded, whose masters have what rounding takes.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            masters, twins, lapsed = self._masters()
            self._flat.masters.update({id(each.narrow): each.wide for each in masters})
            ids = frozenset(self._flat.masters)
            if fresh := ids - self._complete:
                for replica in replicas:
                    complete(replica.flat, replica.base, fresh)
            before = [each.detach().clone() for each in self._watched]
            wide = {each.narrow: (each.wide, each.wide.detach().clone()) for each in masters}
        try:
            yield
        finally:
            self._flat.masters.clear()
            self._complete = ids
            with torch.inference_mode(mode=False), torch.no_grad():
                for each in lapsed:
                    each.wide.copy_(each.narrow)
                written = {each.wide.data_ptr() for each in (*masters, *lapsed)}
                self._move(before, wide, twins, written)

    def _masters(self) -> tuple[list[_Master], list[_Master], list[_Master]]:
        """Masters; what rounds to a parameter beside its master, such as slow weights just now; and
        what was a master, or should be by its key, and differs from its parameter, such as where
        the script has loaded weights into the model: it is to be set to the parameter. Zeros say
        nothing of a key.
        """
        live = {id(each) for each in self._flat.tensors}
        candidates = [
            _Master((index, held.key), parameter, held.tensor)
            for index, each in enumerate(self._optimizers)
            for held in each.held()
            if id(parameter := each.parameters[held.index]) in live
            and type(held.tensor) is Tensor
            and held.tensor.element_size() > parameter.element_size()
            and each.may_be_master(held.key)
        ]
        equal, telling = _compare(candidates)
        votes = dict[tuple[int, str], list[bool]]()
        for each, same, tells in zip(candidates, equal, telling, strict=True):
            if tells:
                votes.setdefault(each.key, []).append(same)
        keys = {key for key, same in votes.items() if sum(same) >= MOST * len(same)}
        masters, twins, lapsed = list[_Master](), list[_Master](), list[_Master]()
        taken = set[int]()
        for each, same in zip(candidates, equal, strict=True):
            if same and each.key in keys:
                (twins if id(each.narrow) in taken else masters).append(each)
                taken.add(id(each.narrow))
            elif each.key in keys | self._known:
                lapsed.append(each)
        self._known = frozenset(keys)
        return masters, twins, lapsed

    def _move(
        self,
        before: Sequence[Tensor],
        wide: Mapping[Tensor, tuple[Tensor, Tensor]],
        twins: Sequence[_Master],
        but: set[int],
    ) -> None:
        """Positions by as much as the parameters were moved, those at these addresses excepted.
        ``wide``: masters by parameter, and what they were: what is beside them moves unrounded.
        """
        moved = {
            parameter: _at_least_float(parameter.detach()) - _at_least_float(old)
            for parameter, old in zip(self._watched, before, strict=True)
        }
        unrounded = (at - old for at, old in wide.values())  # less than a narrow one can show
        if not _any_moved([*moved.values(), *unrounded]):
            return
        for each in self._optimizers:
            if isinstance(each.optimizer, LBFGS):
                _add_to_last_step(each.optimizer, moved)
            elif each.positions:
                for held in each.held():
                    if held.key in each.positions and _address(held.tensor) not in but:
                        parameter = each.parameters[held.index]
                        at, delta = parameter.detach(), moved[parameter]
                        if parameter in wide:
                            at, old = wide[parameter]
                            delta = at - old
                        _shift(held.tensor, delta, at)
                        but.add(_address(held.tensor))
        for each in twins:
            if _address(each.wide) not in but:
                master, old = wide[each.narrow]
                _shift(each.wide, master - old, master)
        if self._on_adopted is not None:
            self._on_adopted(moved)


def _has_lbfgs_inside(optimizer: Any) -> bool:
    """Among its attributes, or in a list, tuple or mapping of them."""
    parts = list[Any]()
    for value in vars(optimizer).values():
        if isinstance(value, list | tuple):
            parts += cast("Sequence[Any]", value)
        elif isinstance(value, dict):
            parts += cast("dict[Any, Any]", value).values()
        else:
            parts.append(value)
    return any(isinstance(each, LBFGS) for each in parts)


def _remembering(optimizer: Any, inner: Optimizer) -> _Remembering:
    """Ask its class, and name what is not cured. ``inner`` has the model's parameters."""
    memory = _memory_of(optimizer, inner)
    name = type(optimizer).__name__
    if _has_lbfgs_inside(optimizer):
        logger.warning("%s", WRAPPED_LBFGS.format(name=name))
    elif memory.fault:
        logger.warning("%s", NOT_ASKED.format(name=name, fault=memory.fault))
    elif not memory.harmless:
        logger.warning("%s", TAKES_BACK.format(name=name, gone=memory.left))
    elif memory.positions:
        logger.info(MOVED, name, ", ".join(sorted(memory.positions)))
    return _Remembering(optimizer, parameters_of(inner), memory.positions, memory.masters)


def _memory_of(optimizer: Any, inner: Optimizer) -> OptimizerMemory:
    """Torch's own optimizers are known to remember nothing, LBFGS by its own rule."""
    if type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, LBFGS):
        return OptimizerMemory()
    return probe(optimizer, inner.param_groups)


def _compare(candidates: Sequence[_Master]) -> tuple[list[bool], list[bool]]:
    """Of each: whether it rounds to its parameter bit for bit, and whether any of that is not zero.
    Each device is waited for once.
    """
    found = dict[torch.device, list[tuple[int, Tensor]]]()
    for at, each in enumerate(candidates):
        narrow = each.narrow.detach()
        rounded = each.wide.to(narrow.device, narrow.dtype)
        same = (rounded == narrow) | ((rounded != rounded) & (narrow != narrow))
        flags = torch.stack((same.all(), narrow.any()))
        found.setdefault(narrow.device, []).append((at, flags))
    equal, telling = [False] * len(candidates), [False] * len(candidates)
    for flagged in found.values():
        table = torch.stack([flags for _, flags in flagged]).tolist()
        for (at, _), (same, tells) in zip(flagged, table, strict=True):
            equal[at], telling[at] = same, tells
    return equal, telling


def _at_least_float(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _any_moved(moved: Iterable[Tensor]) -> bool:
    by_device = dict[torch.device, list[Tensor]]()
    for each in moved:
        local = cast("Any", each).to_local() if hasattr(each, "to_local") else each
        by_device.setdefault(local.device, []).append(local.any())
    return any(bool(torch.stack(flags).any()) for flags in by_device.values())


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if type(tensor) is Tensor else 0


def _shift(position: Tensor, delta: Tensor, at: Tensor) -> None:
    """Where either was not finite, the position is ``at`` from now on: where the parameter is."""
    there = position + delta.to(position.device)
    at = at.to(position.device)
    position.copy_(torch.where(torch.isfinite(there), there, at))


def _add_to_last_step(optimizer: LBFGS, moved: Mapping[Tensor, Tensor]) -> None:
    """LBFGS takes ``d·t`` for the way between its last two gradients."""
    parameters = parameters_of(optimizer)
    state = optimizer.state.get(parameters[0], {})
    if (step := state.get("d")) is None:
        return
    jump = torch.cat([moved[each].reshape(-1).to(step) for each in parameters])
    if not float(state["t"]):  # its line search has found no way
        step.zero_()
        state["t"] = 1.0
    step.add_(jump / float(state["t"]))
