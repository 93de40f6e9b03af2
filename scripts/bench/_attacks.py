"""Cells of bench_attacks.py in one process: a small network trained on digits by n members of which
f attack, a gradient from each a step.

Rules, attacks and worker momentum are atoll's; the optimizer is torch's SGD, which is given what
the rule makes of the members' rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from _digits import CLASSES, load
from torch import Tensor, nn

from atoll.optim.federated.simulation.attacks import (
    ATTACKS,
    flipped_labels,
    optimised_alie,
    optimised_ipm,
)
from atoll.security.rule_names import BY_COORDINATE, BY_GRAM
from atoll.security.rules import WorkerMomentum, aggregate
from atoll.security.rules.centre import Radius
from atoll.security.rules.gram import combine, gram
from atoll.security.rules.numbers import uniform

STEPS, BATCH, LR, BETA, HIDDEN, PIXELS = 300, 16, 0.5, 0.9, 32, 64
RULES = (
    "mean",
    *BY_COORDINATE,
    *BY_GRAM,
    "monna",
    "multi_krum/n1",
    "multi_krum/k2",
    "nnm+trimmed_mean",
    "nnm+median",
    "nnm+krum",
    "arc+nnm+trimmed_mean",
    "bucketing+median",
)
SEVEN = ("sign_flip", "sign_flip_1000", "ipm_0.1", "foe_10", "alie_1.5", "mimic", "label_flip")
BESIDE = {"optimised_alie": optimised_alie, "optimised_ipm": optimised_ipm}
Rule = Callable[[Tensor], Tensor]


def rule_of(name: str, f: int, seed: int) -> Rule:
    """Rows (n, d) to the aggregate (d,), by the name of a rule after steps."""
    *before, rule = name.split("+")
    if rule == "mean":
        return lambda rows: combine(rows, uniform(len(rows), list(range(len(rows)))))
    rng, radius, (called, *told) = random.Random(seed), Radius(), rule.split("/")

    def run(rows: Tensor) -> Tensor:
        known = radius() if rule == "centred_clip" else None
        options: dict[str, float] = {"radius": known} if known is not None else {}
        if "n1" in told:  # byzfl's count; the default is the paper's n - f - 2
            options["neighbours"] = len(rows) - f - 1
        if "k2" in told:
            options["chosen"] = len(rows) - f - 2
        found = aggregate(rows, called, f, before=before, options=options, rng=rng)
        if rule == "centred_clip" and found.weights is not None:
            radius.saw(gram(rows), found.weights)
        return found.value

    return run


class Members:
    """The honest members' shards, and those of attackers who train on other labels; their
    gradients, with momentum.
    """

    def __init__(self, n: int, f: int, seed: int, data: str) -> None:
        digits, honest = load(), n - f
        mean, deviation = digits.x.mean(), digits.x.std()
        self.held_out = (digits.test_x - mean) / deviation, digits.test_y
        mixed = torch.randperm(len(digits.y), generator=torch.Generator().manual_seed(seed))
        images, labels = (digits.x[mixed] - mean) / deviation, digits.y[mixed]
        each = len(labels) // honest
        order = (
            torch.argsort(labels, stable=True) if data == "sorted" else torch.arange(len(labels))
        )[: honest * each].view(honest, each)
        copied = torch.arange(f) * honest // max(f, 1)  # whose images an attacker has
        self.honest, self.momentum = honest, WorkerMomentum(BETA)
        self.images = torch.cat([images[order], images[order[copied]]])
        self.labels = torch.cat([labels[order], flipped_labels(labels[order[copied]], CLASSES)])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(
                nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
            )
        self.stream = torch.Generator().manual_seed(seed)

    def rows(self) -> tuple[Tensor, Tensor]:
        """What honest members would send in this step, float32 (n - f, d), and those that learn
        other labels, (f, d).
        """
        n, each = self.labels.shape
        chosen, who = (
            torch.randint(each, (n, BATCH), generator=self.stream),
            torch.arange(n)[:, None],
        )
        own = [
            value.detach().expand(n, *value.shape).clone().requires_grad_()
            for value in self.model.parameters()
        ]
        hidden = torch.relu(torch.baddbmm(own[1][:, None], self.images[who, chosen], own[0].mT))
        scores = torch.baddbmm(own[3][:, None], hidden, own[2].mT)
        loss = (
            nn.functional.cross_entropy(
                scores.flatten(0, 1), self.labels[who, chosen].flatten(), reduction="sum"
            )
            / BATCH
        )
        rows = self.momentum(
            torch.cat([part.flatten(1) for part in torch.autograd.grad(loss, own)], 1)
        )
        return rows[: self.honest], rows[self.honest :]

    @torch.no_grad()
    def accuracy(self) -> float:
        """Of the model on held-out images."""
        images, labels = self.held_out
        return float((self.model(images).argmax(1) == labels).double().mean())


def cell(rule: str, attack: str, data: str, seed: int, n: int, f: int) -> dict[str, Any]:
    """Train once; the accuracy at the end. A model that is no number any more has the accuracy of a
    guess.
    """
    members, aggregated, rng = (
        Members(n, f, seed, data),
        rule_of(rule, f, seed),
        rule_of(rule, f, seed),
    )
    parameters = list(members.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR)
    for _ in range(STEPS):
        honest, flipped = members.rows()
        if attack == "none":
            hostile = honest[:0]
        elif attack == "label_flip":
            hostile = flipped
        elif attack in BESIDE:
            hostile = BESIDE[attack](honest, f, rng).expand(f, -1)
        else:
            hostile = ATTACKS[attack](honest).expand(f, -1)
        start, value = 0, aggregated(torch.cat([honest, hostile]))
        for parameter in parameters:
            parameter.grad = value[start : start + parameter.numel()].view_as(parameter).clone()
            start += parameter.numel()
        optimizer.step()
    return {"accuracy": members.accuracy()}
