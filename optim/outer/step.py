"""The outer step of a round: a rule over the whole anchor, running statistics averaged. Pure, on
float32, the same bits on every machine.

See `rules` for why. The ranges in which a step is applied do not change a bit either, where the
rule allows ranges at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from ...collectives.errors import ConfigError
from ...collectives.layout import STEPS, Layout, Role
from ...collectives.outer_rules import (
    MOST_WARMUP,
    PLAIN_MEAN,
    WARMING,
    WITHOUT_MOMENTUM,
    OuterSettings,
)
from .mean_watch import MeanWatch
from .reported import Reported, total
from .rows import ROWS
from .rules import KINDS, Rule, as_float32, make_rule, norm
from .state import BLOCK_ELEMENTS, StateVectors

DTYPES = ("fp32", "bf16")


def warmed(settings: OuterSettings, steps: float) -> tuple[float, float]:
    """lr and momentum of the outer step that follows ``steps`` others: those of the plain mean for
    ``hold`` steps; then they grow linearly, and are the settings' own after ``warmup`` more.

    >>> from atoll.collectives.outer_rules import OuterSettings
    >>> settings = OuterSettings("nesterov", lr=0.5, momentum=0.5, warmup=3)
    >>> [warmed(settings, steps) for steps in range(5)]
    [(0.875, 0.125), (0.75, 0.25), (0.625, 0.375), (0.5, 0.5), (0.5, 0.5)]
    >>> settings = OuterSettings("nesterov", lr=0.5, momentum=0.5, warmup=1, hold=2)
    >>> [warmed(settings, steps) for steps in range(5)]
    [(1.0, 0.0), (1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.5, 0.5)]
    """
    after = steps - settings.hold
    part = (after + 1) / (settings.warmup + 1) if after >= 0 else 0.0
    if part >= 1:
        return settings.lr, settings.momentum
    return 1 + (settings.lr - 1) * part, settings.momentum * part


def _counted(settings: OuterSettings) -> int:
    """How many steps are counted: until lr and momentum are the settings' own, and rounds have
    their full length.
    """
    return max(settings.hold + settings.warmup, settings.short)


class OuterStep:
    """The outer step of a run, as every member computes it with the same bits: the rule of
    ``settings`` (`rules`) on the anchor, with the mean of the contributions as its gradient.
    Where the settings say so, the mean is stretched first, a governor watches it, and one that is
    too long is clipped.

    >>> import torch
    >>> from atoll.collectives.outer_rules import OuterSettings
    >>> step = OuterStep(OuterSettings(kind="nesterov", lr=0.5, momentum=0.5))
    >>> anchor, mean, after = torch.ones(3), torch.full((3,), 0.2), torch.empty(3)
    >>> state = torch.zeros(step.state_numel(3))
    >>> step.apply(anchor, mean, state, after)
    >>> after                                   # 1 - 0.5 * (0.2 + 0.5 * 0.2)
    tensor([0.8500, 0.8500, 0.8500])

    Ranges of running statistics (see `Layout`) take ``θ ← θ - g`` whatever the rule: they are
    averaged, since momentum would carry a variance past zero. A variance is held at or above zero,
    which a lossy codec could miss. Where a mean number of steps travels beside the model, as one of
    them, the mean is multiplied by what that becomes (`layout.STEPS`). Sums take ``θ ← θ - W·g``, W
    being the weight of all that were counted: each contributes minus its change over its own
    weight.

    **State** is one float32 vector of `state_numel` elements, zero at first: the rule's vectors one
    after another, then what is kept a tensor or a round. A rule without any still has one vector,
    which nothing reads or writes: so every state has room for momentum. With ``momentum_dtype``
    "bf16" momenta take half the room (`state`). With ``hold``, ``warmup`` or ``short`` the last
    element counts the steps taken, up to the sum of the first two or to the third.

    A step holds scratch and is used by one thread at a time.
    """

    def __init__(self, settings: OuterSettings, layout: Layout | None = None) -> None:
        """Raises ConfigError for values no rule takes. Without a layout all elements are
        parameters, of one tensor.
        """
        check_outer(settings)
        self.settings = settings
        self._rule = make_rule(settings)
        watched = settings.governor or settings.stretch or settings.clip_norm is not None
        self._watch: MeanWatch = (
            ROWS.load("governor", "Governing", key="outer")(settings) if watched else MeanWatch()
        )
        self._lr = as_float32(settings.lr)
        self._special = statistics_ranges(layout) if layout is not None else ()
        tensors = layout.tensors if layout is not None else ()
        # where the mean number of steps is by which a mean of steps is multiplied (FedNova)
        self._steps = next((spec.offset for spec in tensors if spec.name == STEPS), None)
        self._tensors = (
            [spec for spec in layout.tensors if spec.role == "parameter" and spec.numel]
            if layout is not None
            else []
        )
        self._scratch = tuple(
            torch.empty(BLOCK_ELEMENTS, dtype=torch.float32, device="cpu") for _ in range(2)
        )
        self._halves = self._rule.momenta if settings.momentum_dtype == "bf16" else 0
        self._widened = tuple(
            torch.empty(BLOCK_ELEMENTS, dtype=torch.float32, device="cpu")
            for _ in range(self._halves)
        )

    @property
    def needs_momentum(self) -> bool:
        """Whether a state vector is read and written."""
        return self._rule.vectors > 0 or self.whole

    def plain_since(self, state: Tensor, numel: int) -> int:
        """The log entry from which on the plain mean is taken, as the state says; 0: it is not."""
        return self._watch.plain_since(self._watched(state, numel))

    def _watched(self, state: Tensor, numel: int) -> Tensor:
        """The watch's numbers."""
        start = self._vectors(numel).length
        return state[start : start + self._watch.numbers]

    @property
    def whole(self) -> bool:
        """Whether a step needs all of the mean at once (`apply`), and ranges do not do."""
        return self._rule.whole or self._watch.measures or self._steps is not None

    def state_numel(self, numel: int) -> int:
        """Length of the state of an anchor of ``numel`` elements."""
        tail = (
            self._watch.numbers
            + self._rule.numbers * max(1, len(self._tensors))
            + (_counted(self.settings) > 0)
        )
        return self._vectors(numel).length + tail

    def _vectors(self, numel: int) -> StateVectors:
        return StateVectors(numel, max(1, self._rule.vectors), self._halves)

    def state_bytes(self, numel: int) -> int:
        """Length of anchor and state together, in bytes."""
        return 4 * (numel + self.state_numel(numel))

    def run(
        self,
        anchor_in: Tensor,
        means: Iterable[tuple[int, Tensor]],
        state: Tensor,
        anchor_out: Tensor,
        reported: Reported = (),
        entry: int = 1,
    ) -> None:
        """The step of a round whose mean comes in pieces: (first element, float32 values), which
        cover the vector in order. ``reported``: what its contributors say; ``entry``: its number in
        the log."""
        # Of a short one the pieces are so small that calls outweigh arithmetic.
        if not self.whole and anchor_in.numel() > BLOCK_ELEMENTS:
            for start, mean in means:
                self.apply_range(
                    anchor_in, mean, state, anchor_out, start, start + mean.numel(), reported
                )
            self._count(state)
            return
        mean = torch.empty(anchor_in.numel(), dtype=torch.float32, device="cpu")
        for start, part in means:
            mean[start : start + part.numel()].copy_(part)
        self.apply(anchor_in, mean, state, anchor_out, reported, entry)

    @torch.no_grad()
    def apply(
        self,
        anchor_in: Tensor,
        mean: Tensor,
        state: Tensor | None,
        anchor_out: Tensor,
        reported: Reported = (),
        entry: int = 1,
    ) -> None:
        """One step on whole vectors, all float32, contiguous, on the CPU; see `apply_range` and
        `run`. A ``mean`` to be stretched is scaled in place."""
        numel = anchor_in.numel()
        if not self.whole:
            self.apply_range(anchor_in, mean, state, anchor_out, 0, numel, reported)
            return self._count(state)
        assert state is not None
        if (at := self._steps) is not None:
            self._scale(mean, as_float32(anchor_in[at].item() - mean[at].item()))
        rule, lr = self._present(state)
        tail = self._vectors(numel).length + self._watch.numbers
        if self._watch.measures:
            steps = state[-1].item() if _counted(self.settings) else 0.0
            verdict = self._watch.judge(
                self._watched(state, numel), self._norm(mean), reported, entry, steps
            )
            if verdict.plain:
                rule, lr = make_rule(PLAIN_MEAN), PLAIN_MEAN.lr
            for factor in verdict.scales:
                self._scale(mean, factor)
            lr = as_float32(verdict.rate * lr)
            if verdict.restart:
                self._restart(state, numel)
        if rule.whole:
            return self._apply_tensors(
                anchor_in, mean, state, anchor_out, tail, lr, total(reported)
            )
        self._apply(anchor_in, mean, state, anchor_out, (0, numel), rule, lr, total(reported))
        return self._count(state)

    def _restart(self, state: Tensor, numel: int) -> None:
        momenta = StateVectors(numel, self._rule.momenta, self._halves)
        state[: momenta.length].zero_()

    def apply_range(
        self,
        anchor_in: Tensor,
        mean: Tensor,
        state: Tensor | None,
        anchor_out: Tensor,
        start: int,
        stop: int,
        reported: Reported = (),
    ) -> None:
        """One step on elements [start, stop), where the step is not `whole`.

        ``anchor_in`` (read) and ``anchor_out`` (written) are whole vectors, float32, shape
        (numel,), ``state`` (updated in place; None where the rule has none) has `state_numel`
        elements; ``mean`` (read) holds only the range, shape (stop - start,). ``anchor_out`` is
        another buffer than ``anchor_in``. Each element must be covered exactly once a round; order
        and cuts are free. The step of a warm-up is not counted: `run` and `apply` do that.
        """
        if mean.numel() != stop - start:
            raise ValueError(f"mean of {mean.numel()} elements for a range of {stop - start}")
        if self.needs_momentum and state is None:
            raise ValueError(f"{self.settings.kind} needs a state")
        if self.whole:
            raise ValueError(f"{self.settings.kind} steps on all of the mean at once")
        bounds, weight = (start, stop), total(reported)
        self._apply(anchor_in, mean, state, anchor_out, bounds, *self._present(state), weight)

    def _present(self, state: Tensor | None) -> tuple[Rule, float]:
        """The rule and the lr of the step that is due."""
        if state is None or not _counted(self.settings):
            return self._rule, self._lr
        lr, momentum = warmed(self.settings, state[-1].item())
        now = msgspec.structs.replace(self.settings, momentum=momentum)
        return make_rule(now), as_float32(lr)

    def _count(self, state: Tensor | None) -> None:
        if state is not None and (most := _counted(self.settings)):
            state[-1] = min(state[-1].item() + 1, most)

    @torch.no_grad()
    def _apply(
        self,
        old: Tensor,
        mean: Tensor,
        state: Tensor | None,
        new: Tensor,
        bounds: tuple[int, int],
        rule: Rule,
        lr: float,
        weight: int,
    ) -> None:
        start, stop = bounds
        lie = StateVectors(old.numel(), rule.vectors, self._halves)
        for first, last, role in self._pieces(start, stop):
            for a in range(first, last, BLOCK_ELEMENTS):
                b = min(a + BLOCK_ELEMENTS, last)
                g = mean[a - start : b - start]
                if role == "parameter":
                    vectors = lie.load(state, a, b, self._widened) if state is not None else []
                    rule.step(
                        old[a:b],
                        g,
                        vectors,
                        new[a:b],
                        lr,
                        [each[: b - a] for each in self._scratch],
                    )
                    if state is not None:
                        lie.store(state, a, b, vectors)
                else:
                    _average(old[a:b], g, new[a:b], role, weight)

    def _apply_tensors(
        self,
        old: Tensor,
        mean: Tensor,
        state: Tensor,
        new: Tensor,
        tail: int,
        lr: float,
        weight: int,
    ) -> None:
        for first, last, role in self._special:
            _average(old[first:last], mean[first:last], new[first:last], role, weight)
        rule, numel = self._rule, old.numel()
        lie = StateVectors(numel, rule.vectors, self._halves)
        for index, (first, last) in enumerate(self._whole_tensors(numel)):
            vectors = lie.load(state, first, last)
            numbers = state[tail + rule.numbers * index : tail + rule.numbers * (index + 1)]
            scratch = [
                torch.empty(last - first, dtype=torch.float32, device="cpu") for _ in range(2)
            ]
            rule.step(
                old[first:last], mean[first:last], (*vectors, numbers), new[first:last], lr, scratch
            )
            lie.store(state, first, last, vectors)

    def _whole_tensors(self, numel: int) -> list[tuple[int, int]]:
        return [(spec.offset, spec.offset + spec.numel) for spec in self._tensors] or [(0, numel)]

    def _norm(self, mean: Tensor) -> float:
        """The norm of the parameters' part, tensor by tensor. (`sum` of floats adds otherwise in
        Python 3.12 than before.)
        """
        norms = [norm(mean[first:last]) for first, last in self._whole_tensors(mean.numel())]
        return math.sqrt(math.fsum(each * each for each in norms))

    def _scale(self, mean: Tensor, factor: float) -> None:
        """Scale the parameters' part."""
        for first, last, role in self._pieces(0, mean.numel()):
            if role == "parameter":
                mean[first:last].mul_(factor)

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, Role]]:
        """[start, stop) cut where the role changes."""
        pieces: list[tuple[int, int, Role]] = []
        at = start
        for first, last, role in self._special:
            if last <= at or first >= stop:
                continue
            if first > at:
                pieces.append((at, first, "parameter"))
            pieces.append((max(first, at), min(last, stop), role))
            at = min(last, stop)
        if at < stop:
            pieces.append((at, stop, "parameter"))
        return pieces


def check_outer(settings: OuterSettings) -> None:
    """Raise ConfigError for values outside lr > 0, 0 <= momentum < 1, 0 <= beta2 < 1, epsilon > 0,
    clip > 0, every >= 1, 0 <= spread <= 1, 0 <= agreement <= 1, and for a warmup of a rule that
    has none.
    """
    positive = {"lr": settings.lr, "epsilon": settings.epsilon, "clip": settings.clip}
    if settings.clip_norm is not None:
        positive["clip_norm"] = settings.clip_norm
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"outer {name} {value} is not a positive number", key=f"$.train.outer.{name}"
            )
    for name, value in {"momentum": settings.momentum, "beta2": settings.beta2}.items():
        if not 0 <= value < 1:
            raise ConfigError(f"outer {name} {value} is not in [0, 1)", key=f"$.train.outer.{name}")
    if not (math.isfinite(settings.weight_decay) and settings.weight_decay >= 0):
        raise ConfigError(
            f"outer weight_decay {settings.weight_decay} is not a number >= 0",
            key="$.train.outer.weight_decay",
        )
    for name, value in {"spread": settings.spread, "agreement": settings.agreement}.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"outer {name} {value} is not in [0, 1]", key=f"$.train.outer.{name}")
    for name, steps in {"warmup": settings.warmup, "hold": settings.hold}.items():
        if not 0 <= steps <= MOST_WARMUP or (steps and settings.kind not in WARMING):
            raise ConfigError(
                f"outer {settings.kind} with a {name} of {steps} steps",
                key=f"$.train.outer.{name}",
                why=f"It begins with the plain mean; up to {MOST_WARMUP:,} steps.",
                hint=f"Leave it out, or take one of: {', '.join(WARMING)}",
            )
    if settings.every < 1:
        raise ConfigError(
            f"outer every {settings.every} is not a number of steps", key="$.train.outer.every"
        )
    if settings.kind not in KINDS:
        raise ConfigError(
            f"no outer optimizer {settings.kind!r}",
            key="$.train.outer.optimizer",
            hint=f"one of: {', '.join(KINDS)}",
        )
    if settings.momentum_dtype not in DTYPES:
        raise ConfigError(
            f"outer momentum_dtype {settings.momentum_dtype!r}",
            key="$.train.outer.momentum_dtype",
            hint=f"one of: {', '.join(DTYPES)}",
        )
    if settings.momentum_dtype != "fp32" and settings.kind in WITHOUT_MOMENTUM:
        raise ConfigError(
            f"outer {settings.kind} has no momentum to keep in {settings.momentum_dtype}",
            key="$.train.outer.momentum_dtype",
            hint="Leave it out.",
        )


def _average(old: Tensor, g: Tensor, new: Tensor, role: Role, weight: int) -> None:
    torch.sub(old, g * as_float32(weight) if role == "sum" else g, out=new)
    if role == "variance":
        new.clamp_(min=0.0)


def statistics_ranges(layout: Layout) -> Sequence[tuple[int, int, Role]]:
    """The ranges of a layout that are not parameters, in order, neighbours of one role joined."""
    ranges: list[tuple[int, int, Role]] = []
    for spec in layout.tensors:
        if spec.role == "parameter" or spec.numel == 0:
            continue
        stop = spec.offset + spec.numel
        if ranges and ranges[-1][1] == spec.offset and ranges[-1][2] == spec.role:
            ranges[-1] = (ranges[-1][0], stop, spec.role)
        else:
            ranges.append((spec.offset, stop, spec.role))
    return tuple(ranges)
