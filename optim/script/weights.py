"""Who changed the weights: a sample of the live parameters, looked at before and after each step.

What a round contributes is anchor - live, whoever made the live values so. A checkpoint that is
loaded in the middle of a run, or an average that a callback leaves in the model, would go out as
progress. So the parameters are compared with what the optimizer's last step left. Version counters
and addresses do not decide that: ``.data``, raw pointers and Lightning's averages raise none, and a
value that is put back raises them. A sample of the values does, with `SAMPLED` elements a tensor,
drawn anew each round.

An interval lies between two steps. Its change is added up where the parameters are; the device is
waited for at boundaries only. `recurrence` tells a habit of the script from an event.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..model.flat import clean_name, unwrap
from .recurrence import SEVERAL, Recurrence
from .slots import ParameterPlaces

SAMPLED = 16  # elements of each tensor
LEAST = 1e-3  # of a step: a shorter change is the rounding of one that was taken back
MANY = 64  # sampled elements that shrink alike by no chance
HALF = 0.5  # of the weights' own length: a clamp or a decay takes away less
FLOAT32 = 1e-6  # of the weights' length: no more than rounding, but in types of two bytes
BETWEEN = 1.05  # of the distance between two points, for the way over a third that is between them
NAMED = 3  # tensors in a message
ORDINARY_ROUNDS, UNUSUAL = 8, 3.0
"""Rounds by whose longest steps it is known how long these are, and times the median of them."""
TAKEN, TAKEN_BY_HAND = 0.3, 0.8
"""Of what an anchor has moved the weights by, taken back between the steps of a round, or by the
first step that is made by hand; in `SEVERAL` rounds running the script keeps other weights.
"""

MEANT = (
    'Where it is meant, declare it beside the change: attachment.moved("why"); else load weights '
    "before attach(), and put averaged weights into a copy of the model"
)
REPLACED = (
    "the model holds other tensors than those that were attached ({names}): "
    "load_state_dict(assign=True), a conversion or an assignment replaced them, and the optimizer "
    "does not step the new ones. Copy into the parameters (load_state_dict without assign), or "
    "detach, make the optimizer anew and attach again"
)
STILL = "the model still holds other tensors than those that were attached ({names})"
STRAY = (
    "the optimizer steps tensors that are not the model's and no longer has {names}. Make the "
    "optimizer from model.parameters() of the attached model and attach again"
)
TAKEN_BACK = (
    "{how} {share:.0%} of each anchor that was adopted in {rounds} rounds running: the script has "
    "slow, averaged or master weights of its own that do not move with it, so it does not train "
    "the run's model. Move them: attach(..., on_adopted=f) calls f(moved) after each anchor, and "
    "moved[parameter] is by how much that parameter was moved"
)
BETWEEN_STEPS = "what the script does to the weights between two steps takes back"
FIRST_STEP = "the first step after it, made by hand, takes back"
EVENT = "the weights were changed {when} and not by the optimizer, {far}, in {names}. " + MEANT


class WeightSlots:
    """Which tensors a model had in which places when it was attached, and which of them its
    optimizers step.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], included: Collection[str] = ()
    ) -> None:
        self.parameters: dict[str, Tensor] = {}  # each once, under its first name
        known: dict[int, str] = {}
        for prefix, module in unwrap(model).named_modules(remove_duplicate=False):
            for key, parameter in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if parameter is None or not (
                    parameter.requires_grad or clean_name(name) in included
                ):
                    continue
                if id(parameter) not in known:
                    known[id(parameter)] = name
                    self.parameters[name] = parameter
        self._slots = ParameterPlaces(model, known)
        self._optimizers = optimizers
        self._told = list[str]()  # names of what was replaced, once they were told
        stepped = self._stepped()
        self._owned = {key: name for key, name in known.items() if key in stepped}

    def _stepped(self) -> set[int]:
        return {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def fault(self) -> str:
        """What is no longer so, with cause and cure; "" where nothing is."""
        replaced = [
            slot.name for slot, _ in self._slots.moved() if not _is_dtensor(slot.parameter)
        ]  # FSDP2 itself exchanges a DTensor for what it gathers
        if replaced:
            told, self._told = self._told, replaced
            return (STILL if told == replaced else REPLACED).format(names=named(replaced))
        stepped = self._stepped()
        gone = [name for key, name in self._owned.items() if key not in stepped]
        return STRAY.format(names=named(gone)) if gone and stepped - self._owned.keys() else ""


@dataclass(slots=True)
class _SampledGroup:
    """Views of the sampled elements of the parameters on one device, of one type."""

    names: list[str] = field(default_factory=list[str])
    views: list[Tensor] = field(default_factory=list[Tensor])

    def gather(self) -> Tensor:
        return torch.cat(self.views).float()


class WeightSample:
    """Views of some elements of each parameter, to be gathered by one call a device and type."""

    def __init__(self, parameters: dict[str, Tensor], rng: Random) -> None:
        self._parameters, self._rng = parameters, rng
        self._plain = [p for p in parameters.values() if type(p) in (Tensor, nn.Parameter)]
        self._offsets: dict[str, float] = {}
        self.groups: list[_SampledGroup] = []
        self._where: list[int] = []
        self.draw()

    def draw(self) -> None:
        """Other elements, so that none stays unseen for ever."""
        self._offsets = {name: self._rng.random() for name in self._parameters}
        self._make_views()

    def moved(self) -> bool:
        """Whether a parameter has other memory than when the views were made; they are made again:
        old ones would show what was there before.
        """
        if self._addresses() == self._where:
            return False
        self._make_views()
        return True

    def gather(self) -> list[Tensor]:
        """The sampled elements as they are now, float32, one tensor a group."""
        return [group.gather() for group in self.groups]

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._plain]

    def _make_views(self) -> None:
        groups: dict[tuple[torch.device, torch.dtype], _SampledGroup] = {}
        for name, parameter in self._parameters.items():
            view = _view(parameter, self._offsets[name])
            if view is not None:
                group = groups.setdefault((view.device, view.dtype), _SampledGroup())
                group.names.append(name)
                group.views.append(view)
        self.groups = list(groups.values())
        self._where = self._addresses()


def _view(parameter: Tensor, at: float) -> Tensor | None:
    """Up to `SAMPLED` elements as a view of one dimension, None where a tensor has no memory of its
    own to look at. ``at``: where it begins, in [0, 1).
    """
    live = parameter.detach()
    if _is_dtensor(live):
        live = cast("Any", live).to_local()
    if type(live) not in (Tensor, nn.Parameter) or not live.numel():
        return None
    if not live.is_contiguous():
        while live.dim() > 1:
            live = live[int(at * live.shape[0])]
        return live[:SAMPLED]
    count = min(SAMPLED, live.numel())
    stride = live.numel() // count
    first = int(at * (live.numel() - stride * (count - 1)))
    return live.view(-1)[first::stride][:count]


class _Sums:
    """What became of one group's sample since the round began, on its device."""

    def __init__(self, start: Tensor) -> None:
        self.start, self.mark, self.before = start, start, start
        self.changed = torch.zeros_like(start)  # sum of all changes between steps
        self.intervals = start.new_zeros(64, 4)
        self.steps = start.new_zeros(())  # sum of squared lengths of steps
        self.longest = start.new_zeros(())  # of them

    def look(self, now: Tensor, index: int) -> None:
        """Before a step: squares of the change since the mark, of what grew by it, and of the
        distances to the anchor after and before it.
        """
        if index == len(self.intervals):
            self.intervals = torch.cat((self.intervals, torch.zeros_like(self.intervals)))
        change = now - self.mark
        self.changed += change
        grown = (now.abs() - self.mark.abs()).clamp_min_(0)
        parts = torch.stack((change, grown, now - self.start, self.mark - self.start))
        self.intervals[index] += parts.square_().sum(1)
        self.before = now

    def stepped(self, now: Tensor) -> None:
        step = now - self.before
        length = torch.dot(step, step)
        self.steps += length
        torch.maximum(self.longest, length, out=self.longest)
        self.mark = now

    def to(self, device: torch.device) -> None:
        """The parameters went to another device."""
        for name in ("start", "mark", "before", "changed", "intervals", "steps", "longest"):
            setattr(self, name, getattr(self, name).to(device))

    def written(self, before: Tensor, now: Tensor) -> None:
        """The attachment itself wrote the parameters in the middle of a round."""
        self.start = self.start + (now - before)
        self.mark = now


class _Adopted:
    """How much of each adopted anchor is taken back at once, in the sampled elements: weights that
    the script keeps beside the model, and puts into it again, do not know of the anchor.
    """

    def __init__(self) -> None:
        self._now = list[Tensor]()
        self._back = list[Tensor]()  # from the anchor to where the weights were
        self._far = 0.0  # length of that, squared
        self._shares = deque[float](maxlen=SEVERAL)
        self._told = False
        self.waits = False  # for the first step by hand

    def begin(self, before: list[Tensor], now: list[Tensor]) -> None:
        """An anchor was written over ``before``; nothing where these are none, or others."""
        alike = [each.shape for each in before] == [each.shape for each in now]
        self._back = [old - new for old, new in zip(before, now, strict=True)] if alike else []
        self._now = now
        self._far = sum(float(each.square().sum()) for each in self._back)
        self.waits = self._far > 0 and not self._told

    def between(self, changed: Sequence[Tensor], *, shrunk: bool, step: float) -> str:
        """By the sum of all ``changed`` between steps since. What only shrinks values, as a clamp
        does, holds an anchor to the bounds that all scripts of the run have.
        """
        if not self._far > (2 * step) ** 2 or len(changed) != len(self._back):
            return ""
        return self._note(0.0 if shrunk else self._share(changed), TAKEN, BETWEEN_STEPS)

    def first_step(self, now: list[Tensor]) -> str:
        """By a step, which is shorter than half of that way: then none takes it back by chance."""
        alike = [each.shape for each in now] == [each.shape for each in self._now]
        if not alike or all(map(torch.equal, now, self._now)):
            return ""
        self.waits = False
        way = [new - old for new, old in zip(now, self._now, strict=True)]
        left = [each - back for each, back in zip(way, self._back, strict=True)]
        near = sum(float(each.square().sum()) for each in left) <= HALF**2 * self._far
        return self._note(self._share(way) if near else 0.0, TAKEN_BY_HAND, FIRST_STEP)

    def _share(self, way: Sequence[Tensor]) -> float:
        along = sum(float((each * back).sum()) for each, back in zip(way, self._back, strict=True))
        return along / self._far

    def _note(self, share: float, least: float, how: str) -> str:
        self._shares.append(share)
        if self._told or len(self._shares) < SEVERAL or not min(self._shares) >= least:
            return ""
        self._told = True
        share = sum(self._shares) / SEVERAL
        return TAKEN_BACK.format(how=how, share=share, rounds=SEVERAL)


@dataclass(frozen=True, slots=True)
class WeightChange:
    """What happened to the weights in a round, besides steps. ``reason``: why the round is not to
    be contributed, "" where it may be; ``habit``: what the script does that it may.
    """

    reason: str = ""
    habit: str = ""
    taken_back: str = ""
    ordinary: bool = False
    steps_long: float = 0.0
    step: int = 0


class WeightWatch:
    """The parameters of one attachment between steps. `before_step` and `after_step` surround every
    step of every optimizer; `close` ends a round and says what it found, `begin` starts one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        rng: Random | None = None,
        *,
        included: Collection[str] = (),
    ) -> None:
        """``included``: names of parameters that are watched though they are frozen now."""
        self._slots = WeightSlots(model, optimizers, included)
        self._sample = WeightSample(self._slots.parameters, rng or Random(0))
        self._recurrence = Recurrence()
        self._watched = bool(optimizers)  # by hand no one knows when a step is made
        self._adopted = _Adopted()
        self._longest = deque[float](maxlen=ORDINARY_ROUNDS)  # step of each of the newest rounds
        self._sums: list[_Sums] = []
        self._index = 0  # of the interval under way
        self._step = 0.0  # length of a step on the sample, in the newest round that had one
        self._meant = ""
        self.begin()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def begin(self) -> None:
        """A round begins: what is there now is right. Other elements are looked at."""
        self._sample.draw()
        self._begin([])

    def _begin(self, before: list[Tensor]) -> None:
        """``before``: the sample before the attachment wrote the parameters, where it did."""
        self._sample.moved()
        now = self._sample.gather()
        if self._watched:
            self._sums = [_Sums(each) for each in now]
        self._adopted.begin(before, now)
        self._index, self._meant = 0, ""

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def before_step(self) -> None:
        """A step is about to be made."""
        if self._watched:
            self._look()
            self._index += 1

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def after_step(self) -> None:
        """A step was made."""
        if self._watched:
            for sums, now in zip(self._sums, self._sample.gather(), strict=True):
                sums.stepped(now)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def by_hand(self) -> str:
        """A script that steps by hand has perhaps made a step: what to say of the first one after
        an adoption, "" for nothing.
        """
        if self._watched or not self._adopted.waits:
            return ""
        self._sample.moved()
        return self._adopted.first_step(self._sample.gather())

    def meant(self, why: str) -> None:
        """What changes between steps until the round ends is on purpose."""
        self._meant = why

    @contextmanager
    def writing(self, *, ends: bool) -> Generator[None]:
        """The attachment writes the parameters, which is no change. ``ends``: at the end of a
        round; another begins.
        """
        before = list[Tensor]()
        with torch.inference_mode(mode=False), torch.no_grad():
            if ends:
                self._sample.draw()
                before = self._sample.gather()
            elif self._watched:
                self._look()
                before = self._sample.gather()
        try:
            yield
        finally:
            with torch.inference_mode(mode=False), torch.no_grad():
                if ends:
                    self._begin(before)
                elif self._watched:
                    self._fit()
                    now = self._sample.gather()
                    for sums, old, new in zip(self._sums, before, now, strict=True):
                        sums.written(old, new)

    def _fit(self) -> None:
        """Views of the memory that parameters have now, and sums on its device. Where parameters
        fall into other groups than before, nothing of the round before is known.
        """
        before = [group.names for group in self._sample.groups]
        if not self._sample.moved():
            return
        groups = self._sample.groups
        if [group.names for group in groups] == before:
            for sums, group in zip(self._sums, groups, strict=True):
                sums.to(group.views[0].device)
        else:
            self._sums = [_Sums(now) for now in self._sample.gather()]
            self._index = 0

    def _look(self) -> None:
        self._fit()
        for sums, now in zip(self._sums, self._sample.gather(), strict=True):
            sums.look(now, self._index)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def close(self, step: int) -> WeightChange:
        """A round ends after inner step ``step``: what happened in it. Waits for the device."""
        if not self._watched:
            return WeightChange()
        self._look()
        if fault := self._slots.fault():
            return WeightChange(fault, step=step)
        lengths, harmless = self._measured()
        if not lengths:
            return WeightChange()
        kind, at = self._recurrence.judge(lengths, harmless)
        taken = ""
        if kind != "event" and not self._meant:
            grown = [math.sqrt(float(sums.intervals[:, 1].sum())) for sums in self._sums]
            changed = [sums.changed for sums in self._sums]
            taken = self._adopted.between(changed, shrunk=sum(grown) == 0, step=self._step)
        ordinary = self._ordinary()
        if kind == "none":
            return WeightChange(taken_back=taken, ordinary=ordinary)
        # the last interval that is counted lies after the newest step, or ends with it
        when = max(0, step - (self._index - at))
        names = named(self._changed())
        if kind == "habit" or self._meant:
            why = f' ("{self._meant}")' if self._meant else ""
            return WeightChange(
                habit=f"{names}{why}",
                taken_back=taken,
                steps_long=lengths[at],
                step=when,
            )
        place = f"after step {when}" if when else "before the first step"
        far = f"by {lengths[at]:.3g} times the length of a step"
        return WeightChange(
            EVENT.format(when=place, far=far, names=names), steps_long=lengths[at], step=when
        )

    def _ordinary(self) -> bool:
        longest = math.sqrt(sum(float(sums.longest) for sums in self._sums))
        usual = median(self._longest) if len(self._longest) == ORDINARY_ROUNDS else 0.0
        if longest > 0:
            self._longest.append(longest)
        return 0 < longest <= UNUSUAL * usual

    def _measured(self) -> tuple[list[float], list[bool]]:
        """By interval: the length of its change in steps, 0.0 for none, and whether it is harmless:
        it shrinks what there is, as a clamp does, or takes back a part of the way since the anchor.
        """
        if not self._sums:
            return [], []
        count = self._index + 1
        table = sum(sums.intervals[:count].double().cpu() for sums in self._sums)
        rows = cast("Tensor", table).sqrt().tolist()
        weights = math.sqrt(sum(float(sums.mark.double().square().sum()) for sums in self._sums))
        steps = sum(float(sums.steps) for sums in self._sums)
        if self._index and steps > 0:
            self._step = math.sqrt(steps / self._index)
        fine = all(
            view.dtype not in (torch.bfloat16, torch.float16)
            for group in self._sample.groups
            for view in group.views[:1]
        )
        least = max(LEAST * self._step, FLOAT32 * weights if fine else 0.0, 1e-30)
        many = sum(sums.mark.numel() for sums in self._sums) >= MANY
        lengths, harmless = list[float](), list[bool]()
        for changed, grown, after, before in rows:
            lengths.append(changed / self._step if self._step else changed)
            shrunk = many and grown <= LEAST * changed and changed <= HALF * weights
            harmless.append(shrunk or after + changed <= BETWEEN * before)
            if not changed > least:  # NaN, too: what is not finite has a reason of its own
                lengths[-1] = 0.0
        if lengths[-1] == 0.0:  # the interval under way goes on after the round
            lengths.pop()
            harmless.pop()
        return lengths, harmless

    def _changed(self) -> list[str]:
        """The names of what was changed, most changed ones first."""
        found = dict[str, float]()
        for sums, group in zip(self._sums, self._sample.groups, strict=True):
            parts = sums.changed.cpu().split([view.numel() for view in group.views])
            found.update(
                (name, float(part.norm())) for name, part in zip(group.names, parts, strict=True)
            )
        return sorted((name for name in found if found[name] > 0), key=lambda name: -found[name])


def named(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has loaded it
    return module is not None and isinstance(tensor, module.DTensor)
