#!/usr/bin/env python3
"""Optimizers in a run of two, beside a plain-torch loop that does the same by hand.

Each arm trains a small model for 40 rounds of 5 steps, with one optimizer, in one precision, with
or without overlap: by `attach` in a LocalSwarm; by a loop that knows nothing of atoll, with the
outer step and the adoption of its anchor written out, positions that the optimizer keeps included;
by the same loop without these; and by one machine alone. Members' data differ.

ratio      loss of the swarm's last anchor over the loop's: 1 is wanted, to one percent
naive      the loop whose optimizer's positions are left where they were, over the loop
machine    the swarm's over one machine's, after as many steps on its own data

What an optimizer draws by lot (heavyball rounds so) it draws from numbers of its member's own, the same
in the swarm and in the loops: of unlike lots, losses are by up to 3.5 percent unlike.

An arm that is not within one percent is fine where it was refused or warned about by name, or where
the loop's own loss is not finite (diverges by hand, too). A run
may be interrupted and gone on with:

    scripts/bench/bench_optimizers.py --journal optimizers.jsonl
    scripts/bench/bench_optimizers.py --only Lookahead,LBFGS
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from _bench import emit, progress
from _optimizers import KINDS, Kind, Masters, move_by_hand
from torch import Tensor, nn

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach

Precision = Literal["float32", "masters", "scaler"]
Overlap = Literal["none", "late"]
PRECISIONS: tuple[Precision, ...] = ("float32", "masters", "scaler")
OVERLAPS: tuple[Overlap, ...] = ("none", "late")
ROUNDS, H, MEMBERS, BATCH = 40, 5, 2, 32
LONG_BATCH = 256  # of those that compare gradients of steps
LR, MOMENTUM = 0.9, 0.6  # of the outer step
WITHIN = 0.01
BEGIN_S = 5.0  # in virtual time: both have entered the run
SAID_AT_THE_END = "is finished"


class Script:
    """One member's model, optimizers and data, in plain torch."""

    def __init__(self, kind: Kind, precision: Precision, member: int) -> None:
        self.kind, self.precision = kind, precision
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.shift = 0.4 * (2 * member - 1)
        self.draw = torch.Generator().manual_seed(member)
        self.parameters = list(self.model.parameters())
        if precision == "masters":
            self.model.to(torch.bfloat16)
            made: Any = Masters(self.parameters, kind.make)
        else:
            made = kind.make(self.parameters)
        self.optimizers: list[Any] = made if isinstance(made, list) else [made]
        self.scaler = torch.amp.GradScaler(
            "cpu", 1024, growth_interval=20, enabled=precision == "scaler"
        )
        self.chance = torch.Generator().manual_seed(member).get_state()
        self.steps = self.skipped = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs of shape (size, 8), targets of (size, 1)."""
        size = LONG_BATCH if self.kind.style == "closure" else BATCH
        inputs = torch.randn(size, 8, generator=self.draw) + self.shift
        return inputs, inputs.sin().sum(1, keepdim=True)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Of the live model; in half precision but for the last step."""
        inputs, targets = batch
        if self.precision == "masters":
            inputs = inputs.bfloat16()
        with torch.autocast("cpu", torch.float16, enabled=self.precision == "scaler"):
            outputs = self.model(inputs)
        return (outputs.float() - targets).square().mean()

    def step(self) -> None:
        """One step, with this member's own global random numbers."""
        others = torch.get_rng_state()
        torch.set_rng_state(self.chance)
        self._step()
        self.chance = torch.get_rng_state()
        torch.set_rng_state(others)

    def _step(self) -> None:
        """As the scripts of those who use such an optimizer have it."""
        batch, (first, *_) = self.batch(), self.optimizers

        def backward() -> Tensor:
            self.model.zero_grad()
            loss = self.loss(batch)
            (self.scaler.scale(loss) * (torch.inf if bad else 1.0)).backward()
            return loss

        bad = self.precision == "scaler" and self.steps % 25 == 4
        if self.kind.style != "plain":
            if bad:  # scripts skip such a batch themselves: `scaler.step` takes neither of these
                self.skipped += 1
            elif self.kind.style == "closure":
                first.step(lambda: self._unscaled(backward))
            else:
                self._unscaled(backward)
                first.step(lambda: self._unscaled(backward))
            self.steps += 1
            return
        backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale
        self.steps += 1

    def round(self) -> int:
        """So many steps that H are not skipped. Returns the samples of these."""
        self.skipped, wanted = 0, self.steps + H
        while self.steps < wanted + self.skipped:
            self.step()
        return BATCH * H

    def _unscaled(self, backward: Callable[[], Tensor]) -> Tensor:
        """A backward whose gradients are as long as without a scaler."""
        loss = backward()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.scaler.get_scale())
        return loss

    def values(self) -> Sequence[Tensor]:
        """What is trained: masters where there are any."""
        (first, *_) = self.optimizers
        return first.masters if isinstance(first, Masters) else self.parameters

    @torch.no_grad()
    def put(self, values: Sequence[Tensor], *, positions: bool) -> None:
        """These values into the model; what optimizers remember is moved along, or it is not."""
        moved = dict[Tensor, Tensor]()
        for parameter, value in zip(self.values(), values, strict=True):
            moved[parameter] = value - parameter
            parameter.copy_(value)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Masters):
                optimizer.give_values()
            if positions:
                inner = optimizer.inners if isinstance(optimizer, Masters) else [optimizer]
                for each in inner:
                    move_by_hand(self.kind, each, moved)


def held_out(model: nn.Module) -> float:
    """Loss of the model in float32 on inputs of both members."""
    draw = torch.Generator().manual_seed(12345)
    inputs = torch.randn(4096, 8, generator=draw)
    inputs[::2] += 0.4
    inputs[1::2] -= 0.4
    with torch.no_grad():
        outputs = model(inputs.to(next(model.parameters()).dtype)).float()
        return float((outputs - inputs.sin().sum(1, keepdim=True)).square().mean())


def by_hand(kind: Kind, precision: Precision, overlap: Overlap, *, positions: bool) -> float:
    """The loss of the last anchor, without atoll."""
    scripts = [Script(kind, precision, member) for member in range(MEMBERS)]
    anchor = [value.detach().clone() for value in scripts[0].values()]
    if precision == "masters":  # the run is founded by parameters
        for script in scripts:
            script.put(anchor, positions=False)
    momentum = [torch.zeros_like(value) for value in anchor]
    started = [[value.detach().clone() for value in script.values()] for script in scripts]
    frozen: list[tuple[list[Tensor], int]] = []  # progress that is under way, and its weight

    def outer_step() -> None:
        total = sum(weight for _, weight in frozen)
        for at, (value, m) in enumerate(zip(anchor, momentum, strict=True)):
            g = sum(way[at] * (weight / total) for way, weight in frozen)
            assert isinstance(g, Tensor)
            m.mul_(MOMENTUM).add_(g)
            value.sub_(LR * (g + MOMENTUM * m))

    for round_ in range(ROUNDS + (overlap == "late")):
        weights = [script.round() for script in scripts]
        if overlap == "late":
            if frozen:
                outer_step()
            ways = list[tuple[list[Tensor], int]]()
            for at, script in enumerate(scripts):
                live = [value.detach().clone() for value in script.values()]
                way = [old - new for old, new in zip(started[at], live, strict=True)]
                ways.append((way, weights[at]))
                if round_:
                    now = [value - each for value, each in zip(anchor, way, strict=True)]
                    script.put(now, positions=positions)
                started[at] = [value.detach().clone() for value in script.values()]
            if round_:  # progress is what the newest anchor has not
                ways = [
                    ([a - s for a, s in zip(anchor, started[at], strict=True)], weight)
                    for at, (_, weight) in enumerate(ways)
                ]
            frozen = ways
        else:
            frozen = [
                ([a - v.detach() for a, v in zip(anchor, script.values(), strict=True)], weight)
                for script, weight in zip(scripts, weights, strict=True)
            ]
            outer_step()
            for script in scripts:
                script.put(anchor, positions=positions)
    with torch.no_grad():
        for parameter, value in zip(scripts[0].parameters, anchor, strict=True):
            parameter.copy_(value)
    return held_out(scripts[0].model)


def in_swarm(kind: Kind, precision: Precision, overlap: Overlap) -> tuple[float, int, int]:
    """The loss of the last anchor, counted rounds of member 0, its samples dropped."""

    def script(swarm: Swarm) -> tuple[float, int, int]:
        assert isinstance(swarm, LocalMember)
        mine = Script(kind, precision, swarm.index)
        given = mine.optimizers if len(mine.optimizers) > 1 else mine.optimizers[0]
        sync = attach(mine.model, given, swarm, batch_size=BATCH, clock=swarm.clock)
        swarm.sleep(BEGIN_S - swarm.clock())
        for _ in range(2 * ROUNDS * H):
            if sync.done:
                break
            mine.step()
            swarm.sleep(0.1)
        with sync.evaluate_anchor():
            loss = held_out(mine.model)
        return loss, int(sync.stats["counted"]), int(sync.stats["samples_dropped"])

    settings = RunSettings(
        sync_every=H,
        rounds=ROUNDS,
        codec="fp32",
        overlap=overlap,
        outer=OuterSettings("nesterov", LR, MOMENTUM),
    )
    found = LocalSwarm(MEMBERS, settings=settings, latency_s=0.01).run(script)
    loss, counted, dropped = found[0]
    return loss, counted, dropped


@functools.cache
def alone(kind: Kind, precision: Precision) -> float:
    """One machine's loss."""
    script = Script(kind, precision, 0)
    for _ in range(ROUNDS):
        script.round()
    return held_out(script.model)


class Said(logging.Handler):
    """Warnings of atoll."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if SAID_AT_THE_END not in record.getMessage():
            self.words.append(record.getMessage())


def arm(name: str, precision: Precision, overlap: Overlap) -> dict[str, Any]:
    """One row of the table."""
    kind, began = KINDS[name], time.perf_counter()
    row: dict[str, Any] = {"optimizer": name, "precision": precision, "overlap": overlap}
    try:
        reference = by_hand(kind, precision, overlap, positions=True)
    except ImportError as error:
        return {**row, "verdict": "missing", "said": [str(error)]}
    except Exception as error:  # the make's own, without atoll
        return {
            **row,
            "verdict": "not by hand either",
            "said": [f"{type(error).__name__}: {error}"],
        }
    row["by_hand"] = reference
    row["machine_loss"] = alone(kind, precision)
    if overlap == "none" and (kind.positions is not None or kind.style == "closure"):
        row["naive"] = by_hand(kind, precision, overlap, positions=False) / reference
    said = Said()
    logging.getLogger("atoll").addHandler(said)
    try:
        loss, counted, dropped = in_swarm(kind, precision, overlap)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
        return {**row, "verdict": "refused", "said": [refused], "s": time.perf_counter() - began}
    finally:
        logging.getLogger("atoll").removeHandler(said)
    row |= {"loss": loss, "ratio": loss / reference, "machine": loss / row["machine_loss"]}
    row |= {"counted": counted, "dropped": dropped, "said": said.words}
    same = math.isfinite(loss) and abs(row["ratio"] - 1) <= WITHIN
    row["verdict"] = (
        "same"
        if same
        else "diverges by hand, too"
        if not math.isfinite(reference)
        else "warned"
        if said.words
        else "DIFFERS"
    )
    return {**row, "s": time.perf_counter() - began}


def main() -> None:
    """Run the arms that the journal does not have, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="parts of optimizers' names, by commas")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--overlaps", default=",".join(OVERLAPS))
    parser.add_argument("--journal", type=Path, help="file of finished arms: not run again")
    given = parser.parse_args()
    precisions: list[Precision] = [
        each for each in PRECISIONS if given.precisions.split(",").count(each)
    ]
    overlaps: list[Overlap] = [each for each in OVERLAPS if given.overlaps.split(",").count(each)]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts = given.only.split(",")
    wanted = [name for name in KINDS if any(part in name for part in parts)]
    arms: list[tuple[str, Precision, Overlap]] = [
        (name, precision, overlap)
        for name in wanted
        for precision in precisions
        for overlap in overlaps
    ]
    done = dict[tuple[str, str, str], dict[str, Any]]()
    path: Path | None = given.journal
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            done[row["optimizer"], row["precision"], row["overlap"]] = row
    for each in arms:
        if each not in done:
            done[each] = arm(*each)
            if path is not None:
                with path.open("a", encoding="utf-8") as journal:
                    journal.write(json.dumps(done[each]) + "\n")
        _tell(done[each])
    rows = [done[each] for each in arms]
    emit(
        "bench_optimizers",
        {**vars(given), "journal": str(path), "rounds": ROUNDS, "h": H},
        rows,
        optimizers=len({row["optimizer"] for row in rows if row["verdict"] != "missing"}),
        verdicts=Counter(row["verdict"] for row in rows),
        differs=[_name(row) for row in rows if row["verdict"] == "DIFFERS"],
        seconds=round(sum(row.get("s", 0.0) for row in rows), 1),
    )


def _name(row: dict[str, Any]) -> str:
    return f"{row['optimizer']}, {row['precision']}, {row['overlap']}"


def _tell(row: dict[str, Any]) -> None:
    def figure(key: str) -> str:
        return f"{row[key]:8.4f}" if key in row else " " * 8

    words = " | ".join(row.get("said", ()))[:110]
    progress(
        f"{_name(row):52}{row['verdict']:10} ratio{figure('ratio')} naive{figure('naive')} "
        f"machine{figure('machine')} loss{figure('loss')} {row.get('s', 0):5.1f} s  {words}"
    )


if __name__ == "__main__":
    main()
