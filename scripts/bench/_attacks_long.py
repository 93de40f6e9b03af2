"""Cells of bench_attacks.py --long: what small, patient attacks come to over hundreds of rounds of
DiLoCo, in one process.

Members take inner steps of SGD on digits of their own, with noise in pixels and one label in five
drawn anew, so that the loss has a floor as that of text has. A round makes of their
pseudo-gradients what the production reducer makes of them, and the production outer step applies
that. Attackers know what honest members send in the same round. A rule is named as in plans; with
``@0.9`` members send running means (worker momentum), and the outer step is plain SGD, since two
momenta on top of each other do not converge; ``@0.9@4`` has it with that learning rate instead of
the preset's.

``climb_R`` knows the held-out digits, too: in every round its members send the honest mean and R
times the honest members' root mean square distance from it, up the gradient of the held-out loss.
``climb_signs`` goes by two standard deviations of each coordinate along that gradient's signs,
which is the most that rules by coordinate let pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from _digits import CLASSES, load
from torch import Tensor, nn

from atoll.collectives.outer_rules import OuterSettings
from atoll.optim import OuterStep
from atoll.optim.federated.simulation.attacks import (
    ATTACKS,
    drift,
    flipped_labels,
    honest_radius,
    optimised_alie,
    optimised_ipm,
)
from atoll.optim.outer.presets import PRESETS
from atoll.security.rules import WorkerMomentum
from atoll.security.rules.centre import Radius, clip_once
from atoll.security.rules.gram import combine, squares
from atoll.security.rules.reducers import find_reducer

INNER_STEPS, BATCH, LR, HIDDEN, PIXELS = 10, 16, 0.03, 32, 64
NOISE, WRONG = 1.0, 0.2  # in standard deviations of all pixels; share of labels drawn anew
MINUS_ONE = torch.tensor(-1.0)
LAST = 10  # a loss is the mean over the anchors of so many rounds: single ones are noisy
DIVERGED = 1e6  # stands for any loss above it, or that is no number
EARLY = 25  # rounds after which the loss is told, too
OUTER = {preset.name: preset.outer for preset in PRESETS}
MISSING, FLIPPED = "missing", "label_flip"
RULES = (
    "mean",
    "median",
    "trimmed_mean",
    "meamed",
    "multi_krum/n1",  # which five members are enough for
    "geometric_median",
    "centred_clip/running",
    "clip_history",
    "caf",
    "nnm+trimmed_mean",
    "nnm+geometric_median",
)
CLIMBING = {f"climb_{radii:g}": radii for radii in (0.9, 2.0, 5.0)} | {"climb_signs": 0.0}
DRIFTING = {f"drift_{radii:g}": radii for radii in (2.0, 5.0)}
SIGNS_Z = 2.0
ATTACKS_LONG = (
    *(MISSING, "drift_0.9", "reverse_0.9", "alie_1.5", "optimised_ipm", FLIPPED),
    *(*DRIFTING, *CLIMBING),
)
BESIDE = {"optimised_alie": optimised_alie, "optimised_ipm": optimised_ipm}
Rule = Callable[[Tensor], Tensor]


def parsed(name: str) -> tuple[str, float, OuterSettings]:
    """The rule, the worker momentum, and the outer step that goes with it."""
    rule, beta, lr = (*name.split("@"), "", "")[:3]
    momentum = float(beta or 0)
    outer = OUTER["worker-momentum" if momentum else "published"]
    return rule, momentum, msgspec.structs.replace(outer, lr=float(lr)) if lr else outer


def rule_of(name: str, f: int, seed: int) -> Rule:
    """Rows (n, d), not modified, to the aggregate (d,), by the reducer that a plan names.
    ``clip_history`` is no reducer: see `History`.
    """
    if name == "clip_history":
        return History(f)
    reducer = find_reducer("mean" if name == "mean" else f"{name}:{f}")
    assert reducer is not None, name
    radius, rng = Radius(), np.random.default_rng(seed)

    def run(rows: Tensor) -> Tensor:
        out = torch.empty(rows.shape[1])
        if reducer.form == "rows":
            reducer.reduce(rows.clone(), [1] * len(rows), out)
        elif reducer.form == "two-phase":
            cids = [rng.bytes(16) for _ in rows]
            weighing = reducer.weigh(reducer.measure(rows), cids, [radius()] * len(rows))
            if weighing.spread is not None:
                radius.add(weighing.spread)
            weighing.reduce(rows.clone(), out)
        else:
            combine(rows, np.full(len(rows), 1 / len(rows)), out)
        return out

    return run


class History:
    """Centred clipping along the history, as published (arXiv 2012.10333): one step from the last
    aggregate. The radius is the median of the rows' median distances in rounds before. It is
    measured here to see whether runs lack it: their rule goes to the fixed point, which forgets its
    start."""

    def __init__(self, f: int) -> None:
        self.f, self.radius, self.last = f, Radius(), torch.zeros(0)

    def __call__(self, rows: Tensor) -> Tensor:
        """The next aggregate."""
        if not self.last.numel():
            self.last = torch.zeros(rows.shape[1])
        norms = squares(rows, self.last)
        now = float(np.sort(np.sqrt(norms))[(len(rows) - 1) // 2])
        weights = clip_once(norms, self.f, radius=self.radius() or now)
        self.radius.add(now)
        self.last = self.last + combine(rows - self.last, weights)
        return self.last


class Members:
    """n members with their digits, and the anchor that they train. ``data``: "iid", or "sorted": by
    label, two neighbouring parts of n to a member. So each has about three labels, and each digit
    is with two members, of which one at least is honest."""

    def __init__(self, n: int, f: int, seed: int, data: str, momentum: float, outer: OuterSettings):
        digits = load()
        mean, deviation = digits.x.mean(), digits.x.std()
        self.n, self.f = n, f
        self.held_out = (digits.test_x - mean) / deviation, digits.test_y
        mixed = torch.randperm(len(digits.y), generator=torch.Generator().manual_seed(seed))
        images, labels = (digits.x[mixed] - mean) / deviation, digits.y[mixed]
        each = len(labels) // n
        order = torch.arange(n * each).view(n, each)
        if data == "sorted":
            order = torch.argsort(labels, stable=True)[: n * each].view(n, each)
            order = torch.cat([order, order.roll(-1, 0)], 1)
            order = order[[*range(0, n, 2), *range(1, n, 2)]]  # the last ones are no neighbours
        self.images, self.labels = images[order], labels[order]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        self.shapes = [value.shape for value in model.parameters()]
        self.anchor = torch.cat([value.detach().flatten() for value in model.parameters()])
        self.step = OuterStep(outer)
        self.state = torch.zeros(self.step.state_numel(self.anchor.numel()))
        self.stream = torch.Generator().manual_seed(seed)
        self.momentum = WorkerMomentum(momentum)

    def rows(self, flipped: bool = False) -> Tensor:
        """What all would send if nobody attacked: float32 (n, d). ``flipped``: the last f learn
        other labels.
        """
        n, each = self.labels.shape
        who, labels = torch.arange(n)[:, None], self.labels
        if flipped:
            hostile = flipped_labels(labels[n - self.f :], CLASSES)
            labels = torch.cat([labels[: n - self.f], hostile])
        own = self.anchor.expand(n, -1).clone()
        first, bias, last, end = parts = self.parts(own)
        rate = LR / BATCH
        for _ in range(INNER_STEPS):
            chosen = torch.randint(each, (n, BATCH), generator=self.stream)
            images, taught = self.images[who, chosen], labels[who, chosen]
            images = images + NOISE * torch.randn(images.shape, generator=self.stream)
            other = torch.randint(CLASSES, taught.shape, generator=self.stream)
            drawn = torch.rand(taught.shape, generator=self.stream) < WRONG
            targets = torch.where(drawn, other, taught)
            hidden, scores = forward(parts, images)
            onto = scores.softmax(2)
            onto.scatter_add_(2, targets[..., None], MINUS_ONE.expand(n, BATCH, 1))
            back = torch.bmm(onto, last) * (hidden > 0)
            last.baddbmm_(onto.mT, hidden, alpha=-rate)
            end.sub_(rate * onto.sum(1))
            first.baddbmm_(back.mT, images, alpha=-rate)
            bias.sub_(rate * back.sum(1))
        return self.momentum(self.anchor - own).clone()

    def parts(self, models: Tensor) -> list[Tensor]:
        """The parameters of n models, float32 (n, d), as views."""
        cut = models.split([shape.numel() for shape in self.shapes], -1)
        return [part.unflatten(-1, shape) for part, shape in zip(cut, self.shapes, strict=True)]

    def apply(self, aggregate: Tensor) -> None:
        """The outer step."""
        new = torch.empty_like(self.anchor)
        self.step.apply(self.anchor, aggregate, self.state, new)
        self.anchor = new

    def gradient(self) -> Tensor:
        """Of the loss on held-out images at the anchor, float32 (d,)."""
        images, labels = self.held_out
        at = self.anchor.clone().requires_grad_()
        first, bias, last, end = self.parts(at)
        scores = nn.functional.relu(images @ first.T + bias) @ last.T + end
        (found,) = torch.autograd.grad(nn.functional.cross_entropy(scores, labels), at)
        return found

    @torch.no_grad()
    def measure(self) -> tuple[float, float]:
        """Of the anchor on held-out images: the expected loss with labels drawn as in training, and
        the accuracy with the true ones.
        """
        images, labels = self.held_out
        scores = forward(self.parts(self.anchor[None]), images[None])[1][0].double()
        targets = (1 - WRONG) * nn.functional.one_hot(labels, CLASSES).double() + WRONG / CLASSES
        right = (scores.argmax(1) == labels).double().mean()
        return float(nn.functional.cross_entropy(scores, targets)), float(right)


def forward(parts: list[Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Of n models: what is hidden, (n, batch, HIDDEN), and scores, (n, batch, CLASSES)."""
    first, bias, last, end = parts
    hidden = torch.baddbmm(bias[:, None], images, first.mT).relu_()
    return hidden, torch.baddbmm(end[:, None], hidden, last.mT)


def climb(honest: Tensor, gradient: Tensor, attack: str) -> Tensor:
    """What is sent up the held-out loss: an anchor goes against what is contributed."""
    if attack == "climb_signs":
        return (honest.mean(0) - SIGNS_Z * honest.std(0) * gradient.sign()).float()
    up = gradient / gradient.norm().clamp_min(1e-30)
    return (honest.mean(0) - CLIMBING[attack] * honest_radius(honest) * up).float()


def cell(
    name: str,
    attack: str,
    data: str,
    seed: int,
    n: int,
    f: int,
    rounds: int,
    watch: Callable[[Tensor], None] = lambda rows: None,
) -> dict[str, Any]:
    """Train once: loss and accuracy at the end, and the loss after EARLY rounds. ``watch`` sees
    what is sent in each round.
    """
    rule, momentum, outer = parsed(name)
    members = Members(n, f, seed, data, momentum, outer)
    aggregated, guess = rule_of(rule, f, seed), rule_of(rule, f, seed)
    early, late = list[float](), list[tuple[float, float]]()
    for round_ in range(1, rounds + 1):
        rows = members.rows(attack == FLIPPED)
        if attack not in ("none", FLIPPED):
            rows = rows[: n - f]
        if attack in BESIDE:
            rows = torch.cat([rows, BESIDE[attack](rows, f, guess).expand(f, -1)])
        elif attack in CLIMBING:
            rows = torch.cat([rows, climb(rows, members.gradient(), attack).expand(f, -1)])
        elif attack in DRIFTING:
            rows = torch.cat([rows, drift(rows, DRIFTING[attack]).expand(f, -1)])
        elif attack in ATTACKS:
            rows = torch.cat([rows, ATTACKS[attack](rows).expand(f, -1)])
        watch(rows)
        members.apply(aggregated(rows))
        if EARLY - LAST < round_ <= EARLY:
            early.append(members.measure()[0])
        if round_ > rounds - LAST:
            late.append(members.measure())
    loss, accuracy = np.mean(late, axis=0).tolist()
    before = float(np.mean(early)) if early else None
    return {
        "loss": loss if loss < DIVERGED else DIVERGED,
        "accuracy": accuracy,
        "loss_early": before if before is None or before < DIVERGED else DIVERGED,
    }
