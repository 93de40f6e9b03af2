#!/usr/bin/env python3
"""Which outer settings make a swarm from scratch better than each member alone, and how near to one
machine on all samples: a sweep in plain torch, without atoll, that anybody can repeat.

A byte-level GPT is trained on the text that ships with Python. All models of a group (arms × seeds
× members) are one batched model (`_sweep_models.py`). Member k of seed s sees the same batches in
every arm. An arm is written as its outer lr and momentum, and what else differs:

  0.9/0.6    each member makes H steps; the mean g of anchor - weights goes through Nesterov:
             m = μ·m + g, anchor = anchor - lr·(g + μ·m) (DiLoCo, arXiv 2311.08105); members take
             the anchor and keep their optimizers' states. 1/0 is the plain mean (local SGD, arXiv
             1805.09767)
  grow=c     a round that begins at step t has t/c steps, at least 1 and at most H: c·(1 + ln H)
             exchanges until rounds have H (cf. arXiv 2310.14423)
  stages=a:n rounds of n steps before step a (stages=100:1 is post-local SGD, arXiv 1808.07217)
  sync=W     W steps on the members' mean gradient first
  hold=n, warm=n, fade=x   n rounds of the plain mean first; then n rounds in which lr and μ grow
             linearly; lr and μ return to the plain mean in the last share x of the run
  int8       a scale a block of 256 values; members' contributions once, and the mean once
  one machine, alone   the mean gradient at every step; no exchange at all

Inner optimizer: AdamW, or Muon for the blocks' matrices (MuLoCo, arXiv 2505.23725), with warm-up
and cosine; its rate is the best of one machine in a group named tune. Products are in bfloat16 on a
GPU. --out FILE gets a JSON line for each arm and seed as soon as its group is over:

  losses     held-out nats a byte of the anchor after so many steps, at ends of rounds; alone: of
             each member
  ratio      the last to one machine's. to_alone: the largest to the best member alone at the same
             step, from the tenth exchange on. rise: the largest to the loss before it
  exchanges  rounds and synchronous steps. bytes: sent in all, a parameter and member, gradients as
             float32

  sweep_outer.py --out FILE --device cuda --minutes 8      all that fits, most wanted first
  sweep_outer.py --out FILE --size 1m --k 4 --h 20 --steps 500 --arms '1/0;1/0 grow=10;0.9/0.6'
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _sweep_models import SIZES, Models, corpus, initial, prepare, say, seconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CODEC_BYTES = {"fp32": 4.0, "int8": 1 + 4 / 256}
NEVER = 1 << 30
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Arm:
    """When members average, and by which outer values."""

    name: str
    h: int
    lr: float = 1.0
    momentum: float = 0.0
    stages: tuple[tuple[int, int], ...] = ()  # (before step, steps of a round)
    grow: int = 0
    sync: int = 0
    hold: int = 0
    warm: int = 0
    fade: float = 0.0
    codec: str = "fp32"

    @staticmethod
    def of(text: str, h: int) -> Arm:
        """The arm so written, with H."""
        values, *more = text.split()
        lr, momentum = map(float, values.split("/"))
        fields: dict[str, Any] = {"lr": lr, "momentum": momentum}
        for key, _, value in (each.partition("=") for each in more):
            if key == "int8":
                fields["codec"] = key
            elif key == "stages":
                stages = (part.split(":") for part in value.split(","))
                fields[key] = tuple((int(before), int(steps)) for before, steps in stages)
            else:
                fields[key] = float(value) if key == "fade" else int(value)
        return Arm(text, h, **fields)

    def ends(self, steps: int) -> list[int]:
        """The steps after which a round ends. Multiples of H and the last step are among them."""
        ends, now = list[int](), self.sync
        while now < steps and self.h < NEVER:
            length = next((n for before, n in self.stages if now < before), self.h)
            if self.grow:
                length = min(max(now // self.grow, 1), self.h)
            now = min(now + length, (now // self.h + 1) * self.h, steps)
            ends.append(now)
        return ends

    def outer(self, index: int, at: float) -> tuple[float, float]:
        """Outer lr and momentum of a round, counted from 0, that ends at this share of the run."""
        part = min(1.0, max(0.0, (index - self.hold + 1) / (self.warm + 1)))
        part *= min(1.0, (1 - at) / self.fade) if self.fade else 1.0
        return 1 + (self.lr - 1) * part, self.momentum * part


ONE, ALONE = Arm("one machine", NEVER, sync=NEVER), Arm("alone", NEVER)

FEW = (
    "1/0; 1/0 grow=5; 1/0 grow=10; 1/0 sync=100; 0.9/0.6; 0.9/0.6 warm=20; "
    "0.9/0.6 grow=5 hold=20 warm=20 fade=0.3; 1/0 grow=5 int8"
)
MOST = (
    f"{FEW}; 0.7/0.9; 0.7/0.5; 0.9/0.6 sync=100; 1/0 grow=20; 1/0.3 grow=5; "
    "1/0 stages=100:5,200:10; 1.2/0 grow=5"
)
ALL = (
    f"{MOST}; 1/0.3; 1.2/0; 1/0 sync=50; 1/0 stages=100:1; 0.9/0.6 grow=5; 0.9/0.6 warm=20 fade=0.3; "
    "0.7/0.9 hold=10 warm=40 fade=0.3; 1/0 int8; 0.9/0.6 int8"
)
LONG = (
    "1/0; 1/0 grow=5; 0.9/0.6; 0.9/0.6 grow=5 hold=20 warm=20 fade=0.3; 0.7/0.9; "
    "0.7/0.9 hold=10 warm=40 fade=0.3"
)
LARGE = "1/0; 1/0 grow=5; 0.9/0.6; 0.9/0.6 grow=5 hold=20 warm=20 fade=0.3"
SMALL = (
    "1/0 grow=20; 1/0 grow=40; 0.9/0.6 grow=10 hold=51 warm=10; 0.9/0.7 grow=10 hold=51 warm=10; "
    "0.9/0.6 grow=20 hold=99 warm=0; 0.9/0.6 grow=20 hold=45 warm=40; "
    "0.9/0.6 grow=20 hold=40 warm=40; 0.9/0.6 grow=20 hold=25 warm=30; "
    "0.9/0.75 grow=20 hold=40 warm=40; 0.9/0.6 grow=10 hold=20 warm=20"
)
MUON = f"{FEW}; 0.7/0.6; 1/0.3 grow=5"


@dataclass(frozen=True)
class Group:
    """Arms that are trained at once. ``rates``: multiples of the first inner rate, to choose from;
    without them the chosen one is taken.
    """

    size: str
    k: int
    hs: tuple[int, ...]
    steps: int
    texts: str  # of arms
    seeds: tuple[int, ...] = (0,)
    optimizer: str = "adamw"
    rates: tuple[float, ...] = ()
    text: int = 0  # bytes; 0: the size's. Long runs would learn a short text by heart

    @property
    def arms(self) -> list[Arm]:
        """With the two to compare with, which are first."""
        texts = [text.strip() for text in self.texts.split(";") if text.strip()]
        return [ONE, ALONE, *(Arm.of(text, h) for h in self.hs for text in texts)]

    def __str__(self) -> str:
        kind, hs = "tune" if self.rates else self.optimizer, ",".join(map(str, self.hs))
        return f"{self.size} {kind} K={self.k} H={hs} steps={self.steps} seeds={self.seeds}"


def groups() -> list[Group]:
    """All, most wanted first; --list says how long they take."""
    four = (0.5, 1.0, 2.0, 4.0)
    return [
        Group("1m", 4, (20,), 700, LARGE, rates=four),
        Group("1m", 4, (20,), 1000, ALL, (0, 1)),
        Group("10m", 4, (20,), 500, "1/0; 0.9/0.6", rates=four),
        Group("10m", 4, (20,), 500, MOST),
        Group("1m", 2, (20,), 1000, ALL, (0, 1)),
        Group("1m", 4, (50,), 1000, ALL, (0, 1)),
        Group("10m", 2, (20, 50), 500, FEW, (0, 1)),
        Group("50m", 4, (20,), 250, "", rates=(0.5, 1.0, 2.0)),
        Group("50m", 4, (20,), 500, LARGE + "; 1/0 sync=100; 1/0 grow=10 int8"),
        Group("1m", 4, (10,), 1000, ALL, (0, 1)),
        Group("135m", 2, (20,), 400, LARGE),
        Group("1m", 8, (10, 20, 50), 1000, FEW),
        Group("1m", 4, (100,), 1000, ALL, (0, 1)),
        Group("1m", 4, (20,), 700, "1/0", (0,), "muon", (1.0, 3.0, 9.0, 27.0)),
        Group("1m", 4, (20, 50), 1000, MUON, (0, 1), "muon"),
        Group("1m", 2, (10, 50, 100), 1000, FEW, (0, 1)),
        Group("10m", 4, (20, 50), 500, FEW, (1,)),
        Group("1m", 4, (20, 50), 3000, LONG, text=8_000_000),
        Group("10m", 4, (20,), 500, "1/0", (0,), "muon", (1.0, 4.0, 16.0)),
        Group("10m", 4, (20,), 500, MUON, (0,), "muon"),
        Group("50m", 4, (50,), 500, LARGE),
        Group("1m", 4, (20,), 8000, LONG, text=8_000_000),
        Group("1m", 4, (20,), 300, FEW, (0, 1)),
        Group("42k", 4, (20,), 500, SMALL, (10, 11)),
        Group("42k", 4, (10, 50, 100), 500, "1/0 grow=20; 0.9/0.6 grow=20 hold=40 warm=40", (10,)),
        Group("42k", 2, (20,), 500, f"{SMALL}; 0.9/0.4 grow=20 hold=40 warm=40", (10,)),
        Group("tiny", 2, (10,), 100, "1/0", rates=(1.0, 2.0)),
        Group("tiny", 2, (10,), 200, f"{FEW}; 1/0 stages=100:5"),
    ]


# The outer optimizer


def quantise(x: Tensor) -> Tensor:
    """int8 and back: each block of 256 values has the scale absmax / 127. (…, multiple of 256)."""
    blocks = x.view(*x.shape[:-1], -1, 256)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return ((blocks / scale).round() * scale).view_as(x)


def outer_step(
    anchor: Tensor, members: Tensor, momentum: Tensor, lr: float, mu: float, codec: str
) -> Tensor:
    """The next anchor, (values,), from members' weights (k, values); changes the momentum."""
    deltas = anchor - members
    if codec == "int8":
        mean = quantise(quantise(deltas).mean(0))
    else:
        mean = deltas.mean(0)
    momentum.mul_(mu).add_(mean)
    return anchor - lr * (mean + mu * momentum)


class Play:
    """One arm with one seed and inner rate: its rows of the models, its anchor and momentum."""

    def __init__(
        self, arm: Arm, seed: int, rate: float, muon: float, first: int, group: Group
    ) -> None:
        self.arm, self.seed, self.rate, self.muon, self.group = arm, seed, rate, muon, group
        self.rows = range(first, first + group.k)
        self.ends = {end: index for index, end in enumerate(arm.ends(group.steps))}
        self.anchor = self.momentum = torch.empty(0)
        self.losses = dict[int, Any]()

    @torch.no_grad()
    def after(self, step: int, models: Models) -> None:
        """Begin the first round after so many steps, or average if one ends there."""
        if step not in self.ends and step != self.arm.sync:
            return
        here = slice(self.rows.start, self.rows.stop)
        if step == self.arm.sync and self.ends:
            self.anchor = models.master[here.start].clone()
            self.momentum = torch.zeros_like(self.anchor)
        elif step in self.ends:
            lr, mu = self.arm.outer(self.ends[step], step / self.group.steps)
            members = models.master[here]
            self.anchor = outer_step(self.anchor, members, self.momentum, lr, mu, self.arm.codec)
            members.copy_(self.anchor)
            models.working[here].copy_(self.anchor)

    def measured(self, step: int) -> bool:
        """Whether all members have the anchor, or never will."""
        return not self.ends or step <= self.arm.sync or step in self.ends

    def exchanges(self, step: int) -> int:
        """Synchronous steps and rounds until then."""
        return min(self.arm.sync, step) + sum(end <= step for end in self.ends)

    @property
    def key(self) -> tuple[Any, ...]:
        """By which it is known in the file: `key_of` of its `line`."""
        group, h = self.group, self.arm.h if self.ends else None
        return (self.arm.name, group.size, group.optimizer, group.k, h, group.steps, self.seed,
                self.muon or self.rate, bool(group.rates))  # fmt: skip

    def line(self, one: dict[int, float], alone: dict[int, list[float]]) -> dict[str, Any]:
        """What the file says of it. ``one``, ``alone``: losses to compare with."""
        values = [min(loss) if isinstance(loss, list) else loss for loss in self.losses.values()]
        exchanges, sync = self.exchanges(self.group.steps), min(self.arm.sync, self.group.steps)
        sent = 4 * sync + CODEC_BYTES[self.arm.codec] * len(self.ends)
        ratios = [
            loss / min(alone[step])
            for step, loss in zip(self.losses, values, strict=True)
            if self.exchanges(step) >= 10
        ]
        return {
            **dict(zip(KEYS, self.key, strict=True)),
            "ratio": round(values[-1] / one[self.group.steps], 4),
            "to_alone": round(max(ratios), 4) if ratios else None,
            "rise": round(max((b / a for a, b in pairwise(values)), default=1.0), 4),
            "exchanges": exchanges,
            "bytes": round(sent * 2 * (self.group.k - 1) / self.group.k, 2),
            "losses": self.losses,
        }


KEYS = ("arm", "size", "optimizer", "k", "h", "steps", "seed", "inner", "tune")


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Of a line of the file."""
    return tuple(line[key] for key in KEYS)


# Groups


def evaluations(group: Group) -> set[int]:
    """Steps after which to evaluate: for each H the ends of its first rounds, and about twenty."""
    found = {group.steps}
    for h in group.hs:
        found |= {h * n for n in range(1, 6)}
        found |= set(range(0, group.steps, h * -(-group.steps // (20 * h))))
    return {step for step in found if 0 < step <= group.steps}


def plays_of(
    group: Group, arms: Iterable[Arm], seeds: Iterable[int], rates: list[tuple[float, float]]
) -> list[Play]:
    """Those with synchronous steps first, as `Models` wants it."""
    grid = [
        (arm, seed, rate, muon)
        for arm in sorted(arms, key=lambda arm: -arm.sync)
        for seed in seeds
        for rate, muon in rates
    ]
    return [Play(*each, n * group.k, group) for n, each in enumerate(grid)]


def train(
    group: Group, plays: list[Play], options: argparse.Namespace, left_s: float
) -> dict[str, Any] | None:
    """Fill in the losses; None where that would take longer than ``left_s`` seconds."""
    size, k, began = SIZES[group.size], group.k, time.monotonic()
    text, held_out = corpus(group.text or size.text)
    seeds = sorted({play.seed for play in plays})
    streams = [
        torch.randint(
            len(text) - size.context,
            (group.steps, size.batch),
            generator=torch.Generator().manual_seed(1_000_003 * (seed + 1) + member),
        )
        for seed in seeds
        for member in range(k)
    ]
    models = Models(
        size,
        k,
        group.steps,
        sync=[play.arm.sync for play in plays],
        owners=[seeds.index(play.seed) * k + member for play in plays for member in range(k)],
        rates=[play.rate for play in plays for _ in range(k)],
        muon=[play.muon for play in plays for _ in range(k)],
        text=text,
        starts=torch.stack(streams),
        device=options.device,
        half=options.device.startswith("cuda"),
    )
    first = torch.stack([initial(size, seed) for seed in seeds]).to(options.device)
    models.start(first, models.owners // k)
    step, how = prepare(models, options.graph)
    step_s = seconds(step, models)
    told = {"models": len(plays) * k, "how": how, "step_ms": round(1e3 * step_s, 2)}
    say(f"{group}: {told}, {1.2 * group.steps * step_s:.0f} s of {left_s:.0f}")
    if 1.2 * group.steps * step_s > left_s:
        return None
    models.start(first, models.owners // k)
    fixed = torch.randint(
        len(held_out) - size.context, (size.windows, 1), generator=torch.Generator().manual_seed(9)
    )
    windows = held_out[fixed + torch.arange(size.context + 1)].long().to(options.device)
    at = evaluations(group)
    for now in range(group.steps + 1):
        if now:
            step()
        for play in plays:
            play.after(now, models)
        if now in at:
            record([play for play in plays if play.measured(now)], now, models, windows)
    return {**told, "seconds": round(time.monotonic() - began, 1)}


def record(plays: list[Play], now: int, models: Models, windows: Tensor) -> None:
    """Evaluate anchors; of those that never average, each member."""
    rows = [list(play.rows) if play.arm is ALONE else [play.rows.start] for play in plays]
    found = iter(models.evaluate([row for each in rows for row in each], windows))
    for play, each in zip(plays, rows, strict=True):
        losses = [round(next(found), 5) for _ in each]
        play.losses[now] = losses if play.arm is ALONE else losses[0]


def models_at_once(group: Group, device: str) -> int:
    """As many as there is memory for: 28 bytes a parameter, and activations."""
    if not device.startswith("cuda"):
        return 1 << 20
    size, free = SIZES[group.size], 0.88 * torch.cuda.mem_get_info()[0]
    return int(free / (28 * size.numel + size.tokens * (44 * size.width * size.layers + 4096)))


def best_rate(lines: list[dict[str, Any]], size: str, optimizer: str) -> float | None:
    """The inner rate with which one machine came lowest, if that was tried."""
    tried = {
        line["inner"]: list(line["losses"].values())[-1]
        for line in lines
        if line["tune"] and key_of(line)[:3] == (ONE.name, size, optimizer)
    }
    return min(tried, key=lambda rate: tried[rate]) if tried else None


def rates_of(group: Group, lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Peak rates of AdamW and of Muon (0: there is none) to train with."""
    adam = best_rate(lines, group.size, "adamw") or SIZES[group.size].lr
    if group.optimizer == "adamw":
        tried = [SIZES[group.size].lr * factor for factor in group.rates]
        return [(rate, 0.0) for rate in tried or [adam]]
    muon = best_rate(lines, group.size, "muon") or 4 * adam
    return [(adam, rate) for rate in [adam * factor for factor in group.rates] or [muon]]


def play_group(
    group: Group,
    lines: list[dict[str, Any]],
    options: argparse.Namespace,
    left: Callable[[], float],
) -> bool:
    """Train what the file lacks of a group, in parts where memory asks for it; whether all was."""
    rates, held = rates_of(group, lines), {key_of(line) for line in lines}
    all_plays = plays_of(group, group.arms, group.seeds, rates)
    missing = {(play.arm, play.seed) for play in all_plays if play.key not in held}
    room = max(3, models_at_once(group, options.device) // group.k // len(rates))
    together, whole = max(1, room // len(group.arms)), True
    for at in range(0, len(group.seeds), together):
        seeds = group.seeds[at : at + together]
        arms = [a for a in group.arms if any((a, seed) in missing for seed in seeds)]
        wanted, part = [a for a in arms if a not in (ONE, ALONE)], max(1, room // len(seeds) - 2)
        for start in range(0, max(len(wanted), bool(arms)), part):
            plays = plays_of(group, [ONE, ALONE, *wanted[start : start + part]], seeds, rates)
            told = train(group, plays, options, left()) if left() > 10 else None
            gc.collect()  # a graph keeps its memory until then
            if told is None:
                whole = False
                continue
            beside = {(play.arm, play.seed, play.rate, play.muon): play.losses for play in plays}
            for play in plays:
                one, alone = (beside[arm, play.seed, play.rate, play.muon] for arm in (ONE, ALONE))
                if play.key not in held:
                    held.add(play.key)
                    lines.append({**play.line(one, alone), "group": told})
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
    return whole


def table(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """By setting and arm: mean ratio to one machine, largest to alone, exchanges; best first."""
    found = dict[str, dict[str, list[dict[str, Any]]]]()
    for line in lines:
        if line["h"] and not line["tune"]:
            setting = " ".join(f"{key}={line[key]}" for key in KEYS[1:6])
            found.setdefault(setting, {}).setdefault(line["arm"], []).append(line)
    rows = {
        setting: {
            arm: [
                round(sum(line["ratio"] for line in each) / len(each), 4),
                max(line["to_alone"] or 0 for line in each),
                each[0]["exchanges"],
            ]
            for arm, each in arms.items()
        }
        for setting, arms in found.items()
    }
    return {
        setting: dict(sorted(arms.items(), key=lambda item: item[1][0]))
        for setting, arms in rows.items()
    }


def numbers(text: str) -> tuple[int, ...]:
    """Of an option such as 10,20."""
    return tuple(map(int, text.split(",")))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("sweep.jsonl"), help="lines are appended to this file")
    add("--resume", action="store_true", help="leave out what that file holds")
    add("--minutes", type=float, default=1e9, help="groups that do not fit are left out")
    add("--list", action="store_true", help="print the groups, and about how long one H100 takes")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--graph", choices=("auto", "on", "off"), default="auto", help="capture steps on CUDA")
    add(
        "--size", default="1m,10m,50m,135m", help="groups of these sizes only; 42k, tiny: for a CPU"
    )
    add("--optimizer", choices=("adamw", "muon"), help="groups with it only")
    add("--k", type=numbers, help="groups of so many members only, such as 2,4")
    add("--h", type=numbers, help="inner steps of a round, in place of the groups'")
    add("--steps", type=int, help="in place of the groups'")
    add("--seeds", type=numbers, help="in place of the groups'")
    add("--arms", help="these in place of the groups', separated by semicolons")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Group]:
    """The groups that the command line leaves, each once."""
    wanted = [
        group
        for group in groups()
        if group.size in options.size.split(",")
        and not (options.k and group.k not in options.k)
        and options.optimizer in (None, group.optimizer)
    ]
    changed = [
        replace(
            group,
            hs=options.h or group.hs,
            steps=options.steps or group.steps,
            seeds=options.seeds or group.seeds,
            texts=options.arms or group.texts,
        )
        for group in wanted
    ]
    return list(dict.fromkeys(changed))


def about_s(group: Group) -> float:
    """Seconds on an H100: products at 300 TFLOP/s, and memory at 2.7 TB/s for the optimizer (52
    bytes a parameter) and activations (240 bytes a token, value of the width, and layer).
    """
    size, count = SIZES[group.size], len(group.arms) * len(group.seeds) * group.k
    moved = 52 * size.numel + size.tokens * (240 * size.width * size.layers + 10_000)
    step_s = (
        count * max(1, len(group.rates)) * (6 * size.numel * size.tokens / 300e12 + moved / 2.7e12)
    )
    return 3 + 1.15 * group.steps * max(step_s, 0.003)


def main() -> int:
    """Exit code: 0, or 1 where a group failed."""
    options, began, failed, left_out = parse(), time.monotonic(), 0, list[str]()
    wanted, total_s = chosen(options), 0.0
    if options.list:
        for group in wanted:
            total_s += about_s(group)
            print(
                f"{about_s(group):5.0f} s, {total_s:5.0f} so far: {group}, {len(group.arms)} arms"
            )
        return 0
    text = options.out.read_text() if options.resume and options.out.exists() else ""
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    for group in wanted:
        try:
            with sdpa_kernel(ATTENTION):
                whole = play_group(
                    group, lines, options, lambda: began + 60 * options.minutes - time.monotonic()
                )
            left_out += [] if whole else [str(group)]
        except Exception as error:  # out of memory, say: what follows may fit
            say(f"{group} failed:\n{''.join(traceback.format_exception(error, limit=-3))}")
            failed = 1
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    took = round(time.monotonic() - began)
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    print(json.dumps({"bench": "sweep_outer", "device": device, "torch": torch.__version__,
                      "seconds": took, "left_out": left_out, "ratios": table(lines)}))  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.exit(main())
