"""What leads back to an earlier anchor is not contributed, and honest work never does."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import pytest
import torch
from seeds import seeds
from torch import Tensor, nn

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import SoloSwarm, attach
from atoll.optim.model.flat import FlatVector
from atoll.optim.rounds.way_back import HABIT, RUN, WayBack

H = 10


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


class Backtracking(torch.optim.AdamW):
    """Goes back to weights that it keeps, inside of its step: nobody else changes the model."""

    back_at: tuple[int, ...] = ()
    first: list[Tensor]
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        if not self.steps:
            self.first = [parameter.detach().clone() for parameter in parameters]
        self.steps += 1
        super().step()
        if self.steps in self.back_at:
            for parameter, kept in zip(parameters, self.first, strict=True):
                parameter.copy_(kept)


def target(inputs: Tensor) -> Tensor:
    return inputs.sin().sum(1, keepdim=True)


def held_out(model: nn.Module) -> float:
    inputs = torch.randn(2048, 8, generator=torch.Generator().manual_seed(12345))
    with torch.no_grad():
        return float((model(inputs) - target(inputs)).square().mean())


def play(back_at: tuple[int, ...], rounds: int, *, meant: str = "") -> tuple[list[float], int]:
    """Held-out losses of the anchors that member 1 sees, and samples that member 0 dropped."""

    def script(swarm: Swarm) -> tuple[list[float], int]:
        assert isinstance(swarm, LocalMember)
        model = net()
        optimizer = Backtracking(model.parameters(), lr=4e-3, weight_decay=0)
        optimizer.back_at = back_at if swarm.index == 0 else ()
        sync = attach(model, optimizer, swarm, batch_size=32, clock=swarm.clock)
        rng = torch.Generator().manual_seed(swarm.index)
        losses, seen = list[float](), 0
        while not sync.done:
            inputs = torch.randn(32, 8, generator=rng)
            optimizer.zero_grad()
            (model(inputs) - target(inputs)).square().mean().backward()
            optimizer.step()
            if meant and optimizer.steps in optimizer.back_at:
                sync.moved(meant)
            swarm.sleep(0.1)
            if sync.round != seen:
                seen = sync.round
                with sync.evaluate_anchor():
                    losses.append(held_out(model))
        return losses, int(sync.stats["samples_dropped"])

    settings = RunSettings(
        sync_every=H, rounds=rounds, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6)
    )
    members = LocalSwarm(2, settings=settings, latency_s=0.01).run(script)
    return members[1][0], members[0][1]


def test_old_weights_put_in_by_the_optimizer_itself_are_dropped_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    losses, dropped = play((155,), 20)
    assert dropped == 32 * H
    assert max(losses[14:]) < 1.2 * losses[13]
    (said,) = (r.message for r in caplog.records if "not contributed" in r.message)
    assert "they lead back to the anchor of round 0" in said
    assert 'attachment.moved("why")' in said
    meant, dropped = play((155,), 20, meant="from the beginning")
    assert dropped == 0
    assert max(meant[14:]) > 1.5 * meant[13]  # a long step back for all, as was wished


def test_a_script_that_goes_back_now_and_then_is_let_be() -> None:
    model = net()
    optimizer = Backtracking(model.parameters(), lr=1e-2, weight_decay=0)
    optimizer.back_at = tuple(range(55, 255, 50))
    swarm = SoloSwarm(RunSettings(sync_every=H, codec="fp32"))
    sync = attach(model, optimizer, swarm, batch_size=32)
    for _ in range(300):
        inputs = torch.randn(32, 8)
        optimizer.zero_grad()
        (model(inputs) - target(inputs)).square().mean().backward()
        optimizer.step()
    assert len(optimizer.back_at) == HABIT + 1
    assert sync.stats["samples_dropped"] == HABIT * H * 32


class Swinging(torch.optim.Optimizer):
    """To and fro between two points, as long a step as ever: TRAC's tuner does (Muppidi et al.
    2024). What comes to an earlier anchor so is no old weights that were put in.
    """

    rounds, steps = 12, 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        draw = torch.Generator().manual_seed(1)
        self.way = [torch.randn(p.shape, generator=draw) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        there = (self.steps // H) % (2 * self.rounds) < self.rounds
        self.steps += 1
        for parameter, way in zip(self.param_groups[0]["params"], self.way, strict=True):
            parameter.add_(way, alpha=0.01 if there else -0.01)


def test_who_comes_back_by_steps_as_long_as_ever_is_let_be() -> None:
    model = net()
    optimizer = Swinging(model.parameters())
    settings = RunSettings(sync_every=H, codec="fp32", outer=OuterSettings("sgd", 1.0))
    sync = attach(model, optimizer, SoloSwarm(settings), batch_size=32)
    for _ in range(4 * Swinging.rounds * H):
        optimizer.zero_grad()
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
    assert sync.stats["samples_dropped"] == 0
    assert sync.round == 4 * Swinging.rounds


# ---- honest work


@dataclass
class Setting:
    """One run of small models, drawn from a seed."""

    rng: Random

    def __post_init__(self) -> None:
        pick = self.rng.choice
        self.members = pick((2, 3))
        self.every, self.rounds = pick(((5, 24), (10, 16), (20, 12)))
        self.batch = pick((2, 8, 32))
        self.optimizer = pick(("adamw", "sgd", "momentum", "rmsprop"))
        self.rate = pick(("constant", "warm-up", "cosine", "restarts", "drop", "rise"))
        self.outer = pick(
            (
                OuterSettings("sgd", 1.0),
                OuterSettings("nesterov", 0.9, 0.6, warmup=20),
                OuterSettings("nesterov", 0.9, 0.6),
                OuterSettings("nesterov", 0.7, 0.9),
            )
        )
        self.overlap: Literal["none", "late", "eager"] = pick(("none", "none", "late", "eager"))
        self.codec = pick(("fp32", "int8", "int4"))
        # A spike would end plain gradient descent for good.
        spike = "spike" if self.optimizer in ("adamw", "rmsprop") else ""
        self.odd = pick(("", "", "frozen", spike, "other data"))

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=3e-3)
        if self.optimizer == "rmsprop":
            return torch.optim.RMSprop(model.parameters(), lr=1e-3)
        if self.optimizer == "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
        return torch.optim.SGD(model.parameters(), lr=0.03)

    def factor(self, step: int) -> float:
        share = step / (self.every * self.rounds)

        def falling(at: float) -> float:
            return 0.5 * (1 + math.cos(math.pi * at)) + 0.01

        return {
            "constant": 1.0,
            "warm-up": min(1.0, 5 * share + 0.01),
            "cosine": falling(min(share, 1.0)),
            "restarts": falling(4 * share % 1),
            "drop": 1.0 if share < 0.5 else 0.1,
            "rise": 0.02 if share < 0.5 else 1.0,
        }[self.rate]


def train(setting: Setting, seed: int) -> list[tuple[int, int]]:
    """By member: rounds that its model has, and samples that it dropped."""
    half = setting.every * setting.rounds // 2

    def script(swarm: Swarm) -> tuple[int, int]:
        assert isinstance(swarm, LocalMember)
        model = net(seed)
        optimizer = setting.make(model)
        rates = [group["lr"] for group in optimizer.param_groups]
        sync = attach(model, optimizer, swarm, batch_size=setting.batch, clock=swarm.clock)
        rng, step = torch.Generator().manual_seed(100 * seed + swarm.index), 0
        while not sync.done and step < 3 * setting.every * setting.rounds:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * setting.factor(step)
            inputs = torch.randn(setting.batch, 8, generator=rng)
            others = setting.odd == "other data" and half <= step < half + 2 * setting.every
            loss = (model(inputs) - target(-inputs if others else inputs)).square().mean()
            optimizer.zero_grad()
            (loss * 1000 if setting.odd == "spike" and step == half else loss).backward()
            if setting.odd == "frozen" and step >= half:
                for parameter in model[0].parameters():
                    parameter.grad = None
            optimizer.step()
            step += 1
            swarm.sleep(0.1)
        return sync.round, int(sync.stats["samples_dropped"])

    settings = RunSettings(
        sync_every=setting.every,
        rounds=setting.rounds,
        codec=setting.codec,
        outer=setting.outer,
        overlap=setting.overlap,
    )
    return LocalSwarm(setting.members, settings=settings, latency_s=0.01).run(script)


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_no_honest_work_is_dropped(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting(Random(seed))
    caplog.set_level(logging.WARNING)
    members = train(setting, seed)
    assert all(rounds == setting.rounds for rounds, _ in members)
    back = [r.message for r in caplog.records if "lead back" in r.message]
    assert not back, (setting, back)


# ---- the watch itself


class Anchor:
    """An anchor of these values."""

    def __init__(self, round_: int, values: Tensor) -> None:
        self.round, self.values = round_, values
        self.samples, self.lag, self.steps, self.digest = 0, 0.0, 0, ""
        self.numel = values.numel()

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        destination.copy_(self.values[start : start + destination.numel()])

    def release(self) -> None: ...


def watched(numel: int = 5000) -> tuple[nn.Linear, WayBack, list[Tensor]]:
    """A model of so many parameters and the watch of six anchors, each a random step further."""
    model = nn.Linear(numel, 1, bias=False)
    watch = WayBack(FlatVector(model), Random(1))
    rng, anchors = torch.Generator().manual_seed(0), [torch.zeros(numel)]
    for round_ in range(6):
        watch.add(Anchor(round_, anchors[-1]))
        anchors.append(anchors[-1] + torch.randn(numel, generator=rng))
    return model, watch, anchors[:-1]


def put(model: nn.Linear, values: Tensor) -> None:
    with torch.no_grad():
        model.weight.copy_(values.view(1, -1))


@pytest.mark.parametrize("numel", [64, 2048, 5000, 2048 + RUN, 1_000_003])
def test_an_earlier_anchor_is_known_in_a_sample(numel: int) -> None:
    model, watch, anchors = watched(numel)
    work = 0.3 * torch.randn(numel)
    for round_ in (0, 1, 2):
        put(model, anchors[round_] + work)
        assert watch.leads_to() == round_
    for honest in (anchors[5], anchors[5] + work, anchors[5] + 100 * work, anchors[4] + work):
        put(model, honest)
        assert watch.leads_to() is None


def test_one_step_as_long_as_all_of_the_anchors_way_is_no_way_back() -> None:
    """A rate that rises fifty times, or other data: it ends near an earlier anchor by its length
    alone, far from what was ever trained from one.
    """
    model, watch, anchors = watched()
    for honest in (0.01, 0.02):
        put(model, anchors[5] + honest * torch.randn(5000))
        assert watch.leads_to() is None
    put(model, anchors[0] + 0.3 * torch.randn(5000))
    assert watch.leads_to() is None
    model, watch, anchors = watched()
    put(model, anchors[5] + 0.02 * torch.randn(5000))
    assert watch.leads_to() is None
    put(model, anchors[0] + 0.03 * torch.randn(5000))
    assert watch.leads_to() == 0


def test_few_elements_that_go_back_are_no_way_back() -> None:
    model, watch, anchors = watched(20)
    found = anchors[5].clone()
    found[:4] = anchors[2][:4]
    put(model, found)
    assert watch.leads_to() is None


def test_who_leaves_where_others_led_the_anchor_is_no_way_back() -> None:
    model, watch, anchors = watched()
    watch.add(Anchor(6, anchors[5] + 40 * torch.randn(5000)))
    put(model, anchors[5])
    assert watch.leads_to() is None


def test_the_first_anchor_and_the_newest_are_kept() -> None:
    model, watch, anchors = watched(100)
    last = anchors[-1]
    for round_ in range(6, 400):
        last = last + torch.ones(100)
        watch.add(Anchor(round_, last))
    put(model, anchors[0])
    assert watch.leads_to() == 0
    put(model, last - 20)
    assert watch.leads_to() in range(378, 382)


def test_the_sample_is_of_the_live_elements_whatever_their_layout() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4).to(torch.bfloat16))
    with torch.no_grad():
        model[0].weight = nn.Parameter(torch.arange(15.0).view(3, 5).t())
    flat = FlatVector(model)
    whole = torch.empty(flat.numel)
    flat.write_to(whole)
    assert torch.equal(flat.sample([0], flat.numel), whole)
    assert torch.equal(
        flat.sample([1, 9, 20], 4), torch.cat([whole[at : at + 4] for at in (1, 9, 20)])
    )
