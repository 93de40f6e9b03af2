"""Asks an optimizer's class whether it remembers where the parameters were.

A run writes its anchor into the parameters. An optimizer with slow weights, averaged ones or a copy
in float32 knows nothing of that, and takes it back in its next steps. Looking at those steps does
not tell it: curvature and momentum make others look alike. So the class is built again with its
settings over toy parameters, twice. Both get the same random gradients; one is displaced; both get
the same gradients again. What is gone of the displacement is what the class remembers. State that
lies where the toy's parameters are is a position; it is moved with them in a third pair, which
shows whether that cures it.

Only the toys are stepped. Global random states and torch's global hooks are as before afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import random
import sys
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .optimizer_state import HeldTensor, held_tensors, inner_optimizers, is_optimizer

WARM = 12  # gradients before the displacement, and after it
LONG = 100  # after it, where something lies at a position and nothing was taken back yet
GONE = 0.02  # of the displacement: less is rounding
NEAR = 0.25  # of a parameter's length, for what lies where the parameter is
MOST = 0.9  # of a key's tensors, for the key to hold positions
GROUPS = 8  # unlike ones that toys are made of
SIDES = ((), (8,), (16, 8), (8, 4, 3), (8, 4, 3, 3))  # of a toy, by its number of dimensions
DECAYS = ("weight_decay", "decay", "wd", "l2")
SLOWER = 0.03  # of the rate, for a second look
RATE = 1e-3  # where neither the settings nor the class have one above 0
PLAIN = (bool, int, float, complex, str, bytes, tuple, list, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Of one class with its settings. ``gone``: the share of a displacement that it takes back;
    ``positions``: keys of `held_tensors` that lie where the parameters are; ``masters``: those of
    them that each step makes narrow parameters of, None where it was not asked; ``left``: the share
    that it takes back when positions are moved, too. ``fault``: why it could not be asked, or "".
    """

    gone: float = 0.0
    positions: frozenset[str] = frozenset()
    masters: frozenset[str] | None = None
    left: float = 0.0
    fault: str = ""

    @property
    def harmless(self) -> bool:
        """Whether an adopted anchor stays, when ``positions`` are moved with it."""
        return not self.fault and self.left <= GONE


class NotANumberError(ArithmeticError):
    """A toy's parameters are NaN."""


@torch.inference_mode(mode=False)
@torch.enable_grad()
def probe(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> OptimizerMemory:
    """What ``optimizer``'s class remembers; ``groups`` have its parameters and their settings. The
    optimizer itself is only read.
    """
    devices = {each.device for group in groups for each in group["params"]}
    with _leaving_no_trace(devices):
        try:
            memory = _ask(_builder(optimizer, groups))
            if not memory.harmless:  # steps so long that nothing stays near the parameters?
                slower = _ask(_builder(optimizer, groups, SLOWER))
                memory = slower if slower.harmless and slower.positions else memory
            return memory
        except Exception as error:  # a class of the user's raises what it likes
            line = str(error).strip().partition("\n")[0][:200]
            return OptimizerMemory(fault=f"{type(error).__name__}: {line}")


def _ask(build: Callable[[], _Toy]) -> OptimizerMemory:
    pair = _Pair(build)
    positions = pair.still.positions()
    pair.displace(frozenset())
    gone, steps = pair.gone(WARM), WARM
    if gone <= GONE and positions:  # slow weights may come back every fifty steps only
        gone, steps = pair.gone(LONG), WARM + LONG
    if gone <= GONE:
        return OptimizerMemory(gone, masters=frozenset(), left=gone)
    left = _left(build, positions, steps) if positions else gone
    if left > GONE:  # what lies far from the parameters may be moved with them, too
        for key in sorted(pair.still.keys() - positions):
            with contextlib.suppress(NotANumberError):  # a variance was moved below zero
                if (also := _left(build, positions | {key}, steps)) <= GONE:
                    positions, left = positions | {key}, also
                    break
    narrow = any(each.element_size() < 4 for each in pair.still.parameters)
    masters = pair.still.masters(positions) if narrow else None
    return OptimizerMemory(gone, positions, masters, left)


def _left(build: Callable[[], _Toy], positions: frozenset[str], steps: int) -> float:
    """What is gone when these are moved along."""
    pair = _Pair(build)
    pair.displace(positions)
    return pair.gone(steps)


class _Pair:
    """Two toys with one history."""

    def __init__(self, build: Callable[[], _Toy]) -> None:
        self.still, self._moved = build(), build()
        self._delta: list[Tensor] = []
        self._step(WARM)

    def _step(self, steps: int) -> None:
        for _ in range(steps):
            self.still.step()
            self._moved.step()

    def displace(self, positions: frozenset[str]) -> None:
        """Move one of them, with what it holds under these keys."""
        self._delta = self._moved.displace(positions)

    def gone(self, steps: int) -> float:
        """After so many more steps: the share of the displacement that is gone, of the parameters
        of the type that has lost most.
        """
        self._step(steps)
        sums = dict[torch.dtype, tuple[float, float]]()
        for still, moved, delta in zip(
            self.still.parameters, self._moved.parameters, self._delta, strict=True
        ):
            left = float(((moved.double() - still.double()) * delta).sum())
            known = sums.get(still.dtype, (0.0, 0.0))
            sums[still.dtype] = known[0] + left, known[1] + float(delta.square().sum())
        if any(left != left for left, _ in sums.values()):
            raise NotANumberError("its steps on random gradients give NaN")
        return max(abs(1 - left / whole) for left, whole in sums.values())


class _Toy:
    """An optimizer of the class over toy parameters."""

    def __init__(self, optimizer: Any, parameters: list[nn.Parameter]) -> None:
        self._optimizer, self.parameters = optimizer, parameters
        self._draw = torch.Generator().manual_seed(1)
        self._closure = False
        self._steps = 0
        if callable(train := getattr(optimizer, "train", None)):  # schedule-free ones refuse else
            train()

    def step(self) -> None:
        """One more random gradient, the same in each toy."""
        gradients = [self._random(each) for each in self.parameters]

        def closure() -> Tensor:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            return torch.ones((), device=self.parameters[0].device)

        self._steps += 1
        _seed(self._steps, {each.device for each in self.parameters})
        closure()
        if not self._closure:
            try:
                self._optimizer.step()
                return
            except Exception:  # what a class raises that wants a closure
                if self._steps > 1:
                    raise
                self._closure = True
        self._optimizer.step(closure)

    def positions(self) -> frozenset[str]:
        """Keys of what lies where the parameters are."""
        votes = dict[str, list[bool]]()
        for held in self._held():
            parameter = self.parameters[held.index].detach().double()
            far = (held.tensor.double() - parameter).norm()
            votes.setdefault(held.key, []).append(bool(far < NEAR * parameter.norm()))
        return frozenset(key for key, near in votes.items() if sum(near) >= MOST * len(near))

    def keys(self) -> frozenset[str]:
        """Of all that is held."""
        return frozenset(held.key for held in self._held())

    @torch.no_grad()
    def masters(self, positions: frozenset[str]) -> frozenset[str]:
        """Those of these keys whose tensors are rounded to the parameters by each step, wherever
        they were before. To be asked last: it moves all of them apart.
        """
        draw = torch.Generator().manual_seed(4)
        held = [each for each in self._held() if each.key in positions]
        for each in held:
            each.tensor.add_(_like(torch.randn(each.tensor.shape, generator=draw), each.tensor))
        self.step()
        found = dict[int, str]()
        # Where a step is tiny what it begins at rounds alike: state gives way to what is beside it.
        for each in sorted(held, key=lambda each: "state" in each.key.split(".")):
            parameter = self.parameters[each.index]
            if torch.equal(each.tensor.to(parameter.dtype), parameter):
                found.setdefault(each.index, each.key)
        return frozenset(found.values())

    @torch.no_grad()
    def displace(self, positions: frozenset[str]) -> list[Tensor]:
        """Move the parameters, and what is held under these keys by as much. Returns by how much
        they were moved: float64.
        """
        draw, moved = torch.Generator().manual_seed(2), list[Tensor]()
        held = self._held() if positions else []
        for parameter in self.parameters:
            before = parameter.double()
            parameter.add_(_like(torch.randn(parameter.shape, generator=draw), parameter))
            moved.append(parameter.double() - before)
        for each in held:
            if each.key in positions:
                each.tensor.copy_(each.tensor.double() + moved[each.index])
        return moved

    def _held(self) -> list[HeldTensor]:
        return held_tensors(self._optimizer, self.parameters)

    def _random(self, parameter: Tensor) -> Tensor:
        return _like(torch.randn(parameter.shape, generator=self._draw), parameter)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    return value.to(parameter.device, parameter.dtype)


# ---- building the class again


def _builder(
    optimizer: Any, like: Sequence[Mapping[str, Any]], speed: float = 1.0
) -> Callable[[], _Toy]:
    """Makes toys of this optimizer, the first way that works. Raises the first way's error.
    ``speed``: their learning rates, in the optimizer's.
    """
    groups = _unlike_groups(like)
    live = [each for group in like for each in group["params"]]
    known = {held.key for held in held_tensors(optimizer, live)}
    failed: Exception | None = None
    ways = [*itertools.product((False, True), (False, True), (True, False), (False,))]
    for flags, as_class, with_rest, bare in [*ways, (False, False, True, True)]:

        def build(
            flags: bool = flags,
            as_class: bool = as_class,
            rest: bool = with_rest,
            bare: bool = bare,
        ) -> _Toy:
            toys = [_toys(group) for group in groups]
            rebuilt = _Rebuilt(
                groups,
                toys,
                speed,
                live={id(each) for each in live},
                as_class=as_class,
                with_rest=rest,
                with_flags=flags,
            )
            made = rebuilt.without_constructor(optimizer) if bare else rebuilt.make(optimizer)
            _without_decay(made)
            return _Toy(made, [toy for group in toys for toy in group])

        try:
            toy = build()
            toy.step()
            if bare and (more := known - toy.keys()):
                raise LookupError(f"its constructor makes {min(more)}")
        except Exception as error:  # the next way may do
            failed = failed or error
            continue
        return build
    assert failed is not None
    raise failed


def _without_decay(optimizer: Any) -> None:
    """Nor in what it has made inside: decay takes a displacement back, too."""
    for group in getattr(optimizer, "param_groups", ()):
        for name in DECAYS:
            if isinstance(group.get(name), float):
                group[name] = 0.0
    for value in list(vars(optimizer).values()):
        for each in cast("list[Any]", value) if isinstance(value, list) else [value]:
            if each is not optimizer and is_optimizer(each):
                _without_decay(each)


def _unlike_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One of each kind, without parameters of a kind that it has already."""
    found = dict[Any, dict[str, Any]]()
    for group in groups:
        kinds = {
            (each.dim(), each.dtype, each.device): each
            for each in cast("Sequence[Tensor]", group["params"])
        }
        settings = {name: v for name, v in group.items() if isinstance(v, bool | str)}
        found.setdefault(
            (frozenset(kinds), str(sorted(settings.items()))),
            {**group, "params": list(kinds.values())},
        )
    return [group for group in found.values() if group["params"]][:GROUPS]


def _toys(group: Mapping[str, Any]) -> list[nn.Parameter]:
    draw, made = torch.Generator().manual_seed(3), list[nn.Parameter]()
    for like in cast("Sequence[Tensor]", group["params"]):
        sides = SIDES[like.dim()] if like.dim() < len(SIDES) else (2,) * like.dim()
        value = torch.randn(sides, generator=draw)
        made.append(nn.Parameter(value.to(like.device, like.dtype)))
    return made


class _Rebuilt:
    """Optimizers over the same toys: one, and those inside of it."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        toys: Sequence[Sequence[nn.Parameter]],
        speed: float,
        *,
        live: Set[int],
        as_class: bool,
        with_rest: bool,
        with_flags: bool,
    ) -> None:
        """``live``: ids of the real parameters; ``as_class``: an optimizer inside is given as its
        class; ``with_rest``: a constructor that takes any names gets all of the defaults;
        ``with_flags``: groups say of themselves what no argument does, such as ``use_muon``.
        """
        self._groups, self._toys, self._speed = groups, toys, speed
        self._live = live
        self._as_class, self._with_rest, self._with_flags = as_class, with_rest, with_flags

    def make(self, optimizer: Any) -> Any:
        """Another one of its class with its settings, no decay and a constant rate. Raises
        LookupError for an argument that is not known any more, and what the constructor does.
        """
        signature = inspect.signature(type(optimizer).__init__).parameters
        rest = any(each.kind is each.VAR_KEYWORD for each in signature.values())
        defaults = dict(getattr(optimizer, "defaults", {}))
        given = dict[str, Any]()
        names = [
            name
            for name, each in list(signature.items())[1:]
            if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        ]
        taken = set(names) | (set(defaults) if rest else set())
        for name in names:
            if (inside := _inside(optimizer, name)) is not None:
                alone = self._as_class and "params" in names
                given[name] = type(inside) if alone else self.make(inside)
            elif name == names[0]:
                given[name] = self._parameters(taken)
            elif (found := self._setting(optimizer, name)) is not _UNKNOWN:
                given[name] = found
            elif signature[name].default is inspect.Parameter.empty:
                raise LookupError(f"its argument {name} is in none of its settings")
        if rest and self._with_rest:
            given |= {
                name: _sober(name, defaults[name], defaults, self._speed)
                for name in defaults.keys() - given
            }
        return type(optimizer)(**given)

    def without_constructor(self, optimizer: Any) -> Any:
        """Another one of its class, whose constructor takes what is not known any more: its own
        settings around others of the optimizers inside of it, and no state. Raises LookupError
        where an attribute may be more than a setting.
        """
        made = object.__new__(type(optimizer))
        same = dict[int, Any]()  # by the id of the live one
        for inside in _all_inside(optimizer):
            same[id(inside)] = toy = self.make(inside)
            for name in ("param_groups", "state", "defaults"):  # wrappers show them as their own
                same[id(getattr(inside, name, None))] = getattr(toy, name, None)
        same.pop(id(None), None)
        for name, value in vars(optimizer).items():
            vars(made)[name] = self._like(name, value, same)
        return made

    def _like(self, name: str, value: Any, same: Mapping[int, Any]) -> Any:
        if id(value) in same:
            return same[id(value)]
        if isinstance(value, list | tuple) and {id(each) for each in value} == self._live:
            return type(value)(toy for toys in self._toys for toy in toys)
        if "hook" in name and isinstance(value, dict):
            return OrderedDict[int, Any]()
        if name == "state":
            return defaultdict[Any, dict[str, Any]](dict)
        if name == "param_groups":
            return self._parameters({key for group in self._groups for key in group} - {"params"})
        if isinstance(value, list | tuple) and value and all(id(each) in same for each in value):
            return type(value)(same[id(each)] for each in value)
        if not _is_setting(value):
            raise LookupError(f"its attribute {name} is no setting")
        return _sober(name, value, self._groups[0], self._speed)

    def _parameters(self, taken: set[str]) -> list[dict[str, Any]]:
        made = list[dict[str, Any]]()
        for group, toys in zip(self._groups, self._toys, strict=True):
            named = taken & group.keys()
            if self._with_flags:
                named |= {name for name, value in group.items() if isinstance(value, bool)}
            settings = {name: _sober(name, group[name], group, self._speed) for name in named}
            made.append({**settings, "params": list(toys)})
        return made

    def _setting(self, optimizer: Any, name: str) -> Any:
        """In the defaults, the first group, or an attribute, perhaps under a longer name."""
        places = [getattr(optimizer, "defaults", {}), self._groups[0], vars(optimizer)]
        for wanted in (name, f"_{name}"):
            for place in places:
                if wanted in place and _plain(place[wanted]):
                    return _sober(name, place[wanted], self._groups[0], self._speed)
        longer = {
            key: place[key]
            for place in places
            for key in place
            if isinstance(key, str) and key.endswith(f"_{name}") and _plain(place[key])
        }
        if len(longer) != 1:
            return _UNKNOWN
        return _sober(name, next(iter(longer.values())), {}, self._speed)


_UNKNOWN = object()


def _inside(optimizer: Any, name: str) -> Any:
    """The optimizer that the constructor took under this name, if it did."""
    held = inner_optimizers(optimizer)
    for known in (name, f"_{name}"):
        if known in held:
            return held[known]
    likely = any(part in name for part in ("opt", "base", "inner"))
    return next(iter(held.values())) if likely and len(held) == 1 else None


def _all_inside(optimizer: Any) -> list[Any]:
    """Optimizers among the attributes, and in lists among these."""
    found = list[Any]()
    for value in vars(optimizer).values():
        several = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
        found += [each for each in several if is_optimizer(each)]
    return found


def _is_setting(value: Any) -> bool:
    """Nothing that could hold a tensor of the parameters, or step one."""
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        return all(_is_setting(each) for pair in entries.items() for each in pair)
    if isinstance(value, list | tuple | set):
        return all(_is_setting(each) for each in cast("list[Any]", value))
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    return _plain(value)


def _plain(value: Any) -> bool:
    """What a setting is; not a model, nor state."""
    return isinstance(value, (*PLAIN, type, types.FunctionType, types.BuiltinFunctionType)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def _sober(name: str, value: Any, group: Mapping[str, Any], speed: float) -> Any:
    """A setting for a toy: no decay, no warm-up, a rate above 0."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (name in DECAYS or name.endswith("weight_decay") or "warmup" in name):
        return type(value)(0)
    if name == "lr" and (number or isinstance(value, Tensor)):
        rates = (float(value), float(group.get("initial_lr", 0.0)), RATE)
        return speed * next(rate for rate in rates if rate > 0)
    with contextlib.suppress(Exception):
        return copy.deepcopy(value)
    return value


# ---- leaving no trace


def _seed(number: int, devices: set[torch.device]) -> None:
    torch.default_generator.manual_seed(number)
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


@contextmanager
def _leaving_no_trace(devices: set[torch.device]) -> Generator[None]:
    """Global random states, hooks of all optimizers, warnings and standard output."""
    numpy = sys.modules.get("numpy")
    drawn = random.getstate(), None if numpy is None else numpy.random.get_state()
    cuda = [device for device in devices if device.type == "cuda"]
    hooks = list(_global_hooks())
    kept = [dict(each) for each in hooks]
    try:
        with (
            torch.random.fork_rng(cuda),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            for each in hooks:
                each.clear()
            yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)
        random.setstate(drawn[0])
        if numpy is not None:
            numpy.random.set_state(drawn[1])


def _global_hooks() -> Iterator[dict[int, Any]]:
    """Those that torch calls around each step of any optimizer."""
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        if (found := getattr(sys.modules[Optimizer.__module__], name, None)) is not None:
            yield found
