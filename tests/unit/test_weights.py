"""Who changed the weights: what was not trained is not contributed, and what a script does all the
time is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import cast

import msgspec
import pytest
import torch
from torch import Tensor, nn

from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import Attachment, SoloSwarm, attach
from atoll.optim.script.recurrence import Recurrence
from atoll.optim.script.weights import WeightWatch

H = 10
SETTINGS = RunSettings(
    sync_every=H, rounds=8, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6)
)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


class Script:
    """A loop on random batches. `run` makes steps; ``after`` is called between two of them."""

    def __init__(self, settings: RunSettings = SETTINGS, **options: object) -> None:
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0)
        self.swarm = SoloSwarm(settings)
        self.sync: Attachment = attach(self.model, self.optimizer, self.swarm, batch_size=32)
        self.rng = torch.Generator().manual_seed(1)
        self.step = 0

    def run(self, steps: int, after: Callable[[int], None] = lambda step: None) -> None:
        for _ in range(steps):
            inputs = torch.randn(32, 8, generator=self.rng)
            self.optimizer.zero_grad()
            (self.model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            after(self.step)

    @property
    def middle(self) -> nn.Linear:
        found = self.model[2]
        assert isinstance(found, nn.Linear)
        return found

    @property
    def dropped(self) -> int:
        return self.sync.stats["samples_dropped"]

    def anchor(self) -> Tensor:
        view = self.swarm.anchor()
        out = torch.empty(view.numel)
        view.copy_into(out)
        view.release()
        return out


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "not contributed" in r.message]


# ---- events


def by_state_dict(model: nn.Module, old: dict[str, Tensor]) -> None:
    model.load_state_dict(old)


def by_data(model: nn.Module, old: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(old[name])


def by_other_memory(model: nn.Module, old: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = old[name].clone()


def by_swap(model: nn.Module, old: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(old[name].clone()))


@pytest.mark.parametrize("load", [by_state_dict, by_data, by_other_memory, by_swap])
def test_earlier_weights_are_left_out_and_named(
    load: Callable[[nn.Module, dict[str, Tensor]], None], caplog: pytest.LogCaptureFixture
) -> None:
    script = Script()
    first = copy.deepcopy(script.model.state_dict())
    script.run(3 * H + 4)
    before = script.anchor()
    load(script.model, first)
    script.run(6)
    assert (script.sync.round, script.dropped) == (3, 32 * H)
    assert torch.equal(script.anchor(), before)
    assert torch.equal(flat(script.model), before)
    (said,) = dropped(caplog)
    assert "work of 320 samples" in said
    assert "changed after step 34 and not by the optimizer" in said
    assert "times the length of a step, in " in said
    assert ".weight" in said
    assert 'attachment.moved("why")' in said
    assert script.swarm.reported["moved"] == 1
    assert script.swarm.reported["moved_step"] == 34
    assert script.swarm.reported["moved_by"] > 3
    script.run(H)
    assert (script.sync.round, script.dropped) == (4, 32 * H)


def test_what_is_meant_is_contributed() -> None:
    script = Script()
    script.run(3 * H + 4)
    with torch.no_grad():
        script.middle.reset_parameters()
    script.sync.moved("a dead layer begins again")
    script.run(6)
    assert (script.sync.round, script.dropped) == (4, 0)
    with torch.no_grad():
        script.middle.reset_parameters()  # meant once
    script.run(H)
    assert (script.sync.round, script.dropped) == (4, 32 * H)


def test_weights_left_in_the_model_at_the_end_are_not_contributed() -> None:
    script = Script()
    average = copy.deepcopy(script.model.state_dict())
    script.run(2 * H + 5)
    before = script.anchor()
    script.model.load_state_dict(average)
    script.sync.sync()
    assert torch.equal(script.anchor(), before)
    assert (script.sync.round, script.dropped) == (2, 32 * 5)


def test_a_change_right_after_a_boundary_is_remembered_until_something_is_due() -> None:
    script = Script()
    first = copy.deepcopy(script.model.state_dict())
    script.run(2 * H)
    script.model.load_state_dict(first)
    assert script.sync.sync() is None  # nothing was trained
    script.run(H)
    assert (script.sync.round, script.dropped) == (2, 32 * H)
    script.run(H)
    assert (script.sync.round, script.dropped) == (3, 32 * H)


# ---- tensors


def test_replaced_tensors_are_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    script.run(2 * H + 3)
    before = script.anchor()
    script.model.load_state_dict(copy.deepcopy(script.model.state_dict()), assign=True)
    script.run(7)
    assert torch.equal(script.anchor(), before)
    assert (script.sync.round, script.dropped) == (2, 32 * H)
    (said,) = dropped(caplog)
    assert "(0.weight, 0.bias, 2.weight and 3 more)" in said
    caplog.clear()
    assert "load_state_dict(assign=True)" in said
    assert "attach again" in said
    assert (script.swarm.reported["moved"], script.swarm.reported["moved_by"]) == (1, 0)
    script.run(H)  # as long as it lasts
    assert (script.sync.round, script.dropped) == (2, 32 * 2 * H)
    assert "the model still holds other tensors" in dropped(caplog)[0]


def test_one_parameter_that_was_assigned_or_untied_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script()
    script.run(3)
    script.middle.bias = nn.Parameter(torch.zeros(32))
    script.run(7)
    assert script.sync.round == 0
    assert "(2.bias)" in dropped(caplog)[0]


def test_a_module_that_was_exchanged_is_named_and_one_that_was_wrapped_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A new head (``model.fc = nn.Linear(…)``) has tensors that no optimizer steps; a block that is
    compiled or wrapped later, or is out for a while, has the old ones.
    """
    script = Script()
    script.run(H)
    script.model[0] = cast("nn.Module", torch.compile(script.model[0], backend="eager"))
    script.model[4] = nn.Sequential(script.model[4])[0]
    script.run(H)
    head, script.model[4] = script.model[4], nn.Identity()
    script.model[4] = head
    script.run(H)
    assert (script.sync.round, script.dropped, dropped(caplog)) == (3, 0, [])
    before = script.anchor()
    script.model[4] = nn.Linear(32, 1)
    script.run(H)
    assert torch.equal(script.anchor(), before)
    assert (script.sync.round, script.dropped) == (3, 32 * H)
    assert "other tensors than those that were attached (4.weight, 4.bias)" in dropped(caplog)[0]


def test_an_optimizer_over_other_tensors_is_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    script.run(H + 2)
    other = net()
    script.optimizer.param_groups[0]["params"] = list(other.parameters())
    script.run(8)
    assert (script.sync.round, script.dropped) == (1, 32 * H)
    assert "no longer has 0.weight, 0.bias, 2.weight and 3 more" in dropped(caplog)[0]


def test_a_group_that_is_taken_out_of_the_optimizer_is_only_frozen() -> None:
    script = Script()
    script.run(H + 2)
    script.optimizer.param_groups[0]["params"] = list(script.model[2:].parameters())
    script.run(2 * H)
    assert (script.sync.round, script.dropped) == (3, 0)


# ---- what scripts do


def clamp(script: Script, step: int) -> None:
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.clamp_(-0.2, 0.2)


def clamp_at_times(script: Script, step: int) -> None:
    if step % 5 == 0:
        clamp(script, step)


def by_rows(script: Script, step: int) -> None:
    with torch.no_grad():
        script.middle.weight.copy_(nn.functional.normalize(script.middle.weight, dim=1))


def decay(script: Script, step: int) -> None:
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.mul_(0.99)


def prune(script: Script, step: int) -> None:
    with torch.no_grad():
        weight = script.middle.weight
        weight.mul_(weight.abs() > 0.02)


def noise(script: Script, step: int) -> None:
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=script.rng))


def evaluate(script: Script, step: int) -> None:
    if step % 7 == 3:
        script.model.eval()
        with script.sync.evaluate_anchor(), torch.no_grad():
            script.model(torch.zeros(1, 8))
        script.model.train()


def perturbed(script: Script, step: int) -> None:
    """SAM by hand: there and back, which is not the same bits."""
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.add_(0.05)
        for parameter in script.model.parameters():
            parameter.sub_(0.05)


def averaged(script: Script, step: int) -> None:
    """Averaged weights in for an evaluation, and out."""
    if step % 6 == 2:
        kept = copy.deepcopy(script.model.state_dict())
        script.model.load_state_dict({name: 0.9 * value for name, value in kept.items()})
        script.model.load_state_dict(kept)


def frozen(script: Script, step: int) -> None:
    if step == 15:
        script.model[0].requires_grad_(False)


class Lookahead:
    """Slow weights by hand, halfway to the fast ones every five steps."""

    every = 5

    def __init__(self) -> None:
        self.slow: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, script: Script, step: int) -> None:
        self.slow = self.slow or [p.detach().clone() for p in net().parameters()]
        if step % self.every == 0:
            for slow, parameter in zip(self.slow, script.model.parameters(), strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


HONEST: list[Callable[[], Callable[[Script, int], None]]] = [
    lambda: clamp,
    lambda: clamp_at_times,
    lambda: by_rows,
    lambda: decay,
    lambda: prune,
    lambda: noise,
    lambda: evaluate,
    lambda: perturbed,
    lambda: averaged,
    lambda: frozen,
    Lookahead,
]


@pytest.mark.parametrize("steps", [1, 3, H, 25])
@pytest.mark.parametrize("make", HONEST)
def test_what_a_script_does_all_the_time_is_its_training(
    make: Callable[[], Callable[[Script, int], None]],
    steps: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if make is Lookahead and steps < Lookahead.every:
        pytest.skip("it puts in what was there before an adoption: see the next test")
    script, change = Script(msgspec.structs.replace(SETTINGS, sync_every=steps)), make()
    script.run(6 * steps, lambda step: change(script, step))
    assert (script.sync.round, script.dropped) == (6, 0)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert ["takes back" in words for words in said] == [True] * (make is Lookahead)


def test_slow_weights_that_undo_adoptions_are_an_event_until_they_recur() -> None:
    """With rounds shorter than its period a Lookahead takes back what it has not seen adopted."""
    script, change = Script(msgspec.structs.replace(SETTINGS, sync_every=3)), Lookahead()
    script.run(18, lambda step: change(script, step))
    assert (script.sync.round, script.dropped) == (4, 2 * 3 * 32)


# ---- loops


def test_of_several_optimizers_each_step_is_its_own() -> None:
    model = net()
    optimizers = [
        torch.optim.SGD(model[:3].parameters(), lr=0.05),
        torch.optim.AdamW(model[3:].parameters(), lr=1e-2),
    ]
    sync = attach(model, optimizers, SoloSwarm(SETTINGS), batch_size=4)
    first = copy.deepcopy(model.state_dict())
    for step in range(1, 3 * H + 1):
        model(torch.randn(4, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 2 * H + 5:
            model.load_state_dict(first)
    assert (sync.round, sync.stats["samples_dropped"]) == (2, 4 * H)


@pytest.mark.parametrize("kind", ["closure", "scaler", "accumulation", "compiled"])
def test_no_kind_of_loop_is_accused(kind: str) -> None:
    model = net()
    optimizer: torch.optim.Optimizer = (
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        if kind == "closure"
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    sync = attach(model, optimizer, SoloSwarm(SETTINGS), batch_size=4)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler")
    trained = torch.compile(model, backend="eager") if kind == "compiled" else model
    step = 0
    while sync.round < 4:
        step += 1
        inputs = torch.randn(4, 8)

        bad = torch.inf if kind == "scaler" and step % 7 == 3 else 1.0

        def loss(inputs: Tensor = inputs, bad: float = bad) -> Tensor:
            optimizer.zero_grad()
            found = trained(inputs).square().mean()
            (scaler.scale(found) * bad).backward()
            return found

        if kind == "closure":
            optimizer.step(loss)
            continue
        loss()
        if kind != "accumulation" or step % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
    assert sync.stats["samples_dropped"] == 0


@pytest.mark.parametrize("overlap", ["none", "late", "eager"])
@pytest.mark.parametrize("change", [False, True])
def test_members_that_train_on_while_rounds_are_under_way(overlap: str, change: bool) -> None:
    """Adoptions in the middle of a round are no change; an event is found beside them."""
    losses = dict[int, float]()

    def script(swarm: Swarm) -> Tensor:
        assert isinstance(swarm, LocalMember)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        outcomes: list[Outcome] = []
        sync = attach(
            model, optimizer, swarm, batch_size=8, clock=swarm.clock, on_round=outcomes.append
        )
        first = copy.deepcopy(model.state_dict())
        rng, step = torch.Generator().manual_seed(swarm.index), 0
        while not sync.done:
            inputs = torch.randn(8, 8, generator=rng)
            optimizer.zero_grad()
            (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            step += 1
            if change and swarm.index == 0 and step == 5 * H + 4:
                model.load_state_dict(first)
            swarm.sleep(0.1)
        assert (sync.stats["samples_dropped"] > 0) == (change and swarm.index == 0)
        with sync.evaluate_anchor(), torch.no_grad():
            inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(99))
            error = model(inputs) - inputs.sin().sum(1, keepdim=True)
            losses[swarm.index] = float(error.square().mean())
        return flat(model)

    settings = msgspec.structs.replace(
        SETTINGS,
        rounds=12,
        outer=OuterSettings("sgd", 1.0),
        overlap=overlap,
        delay=3 if overlap == "late" else None,
    )
    LocalSwarm(2, settings=settings, latency_s=0.01).run(script, step_s=0.1)
    assert max(losses.values()) < 0.8


# ---- recurrence


def judged(*rounds: list[float]) -> list[str]:
    recurrence = Recurrence()
    return [recurrence.judge(lengths, [False] * len(lengths))[0] for lengths in rounds]


def test_recurrence_tells_a_habit_from_an_event() -> None:
    calm, once = [0.0] * 10, [0.0] * 6 + [8.0] + [0.0] * 3
    assert judged(calm, once, calm) == ["none", "event", "none"]
    assert judged(calm, once, [0.0, 9.0] + [0.0] * 8, [0.0] * 8 + [8.5, 0.0]) == [
        "none",
        "event",
        "event",
        "habit",
    ]  # of about the same length, three rounds running
    assert judged([0.0] + [0.5] * 9) == ["habit"]
    assert judged([0.0] + [0.5] * 9, [0.5] * 4 + [60.0] + [0.5] * 5) == ["habit", "event"]
    assert judged([8.0] + [0.0] * 9) == ["event"]  # before the first step nothing recurs
    assert judged([0.0, 8.0] + [0.0] * 8) == ["habit"]  # too soon to know
    assert judged([0.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0, 3.0, 0.0]) == ["event"]


def test_a_views_elements_are_drawn_anew_and_follow_the_memory() -> None:
    model = net()
    watch = WeightWatch(model, [torch.optim.SGD(model.parameters(), lr=0.1)], Random(1))
    sample = watch._sample
    before = torch.cat(sample.gather())
    sample.draw()
    assert not torch.equal(torch.cat(sample.gather()), before)
    assert not sample.moved()
    before = torch.cat(sample.gather())
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
    assert torch.equal(torch.cat(sample.gather()), before)  # what was there
    assert sample.moved()
    assert torch.equal(torch.cat(sample.gather()), before + 1)


def test_who_finishes_keeps_what_was_left_in_the_model(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    average = copy.deepcopy(script.model.state_dict())
    script.run(2 * H + 5)
    before = script.anchor()
    script.model.load_state_dict(average)
    assert script.sync.finish() is None
    assert not script.sync.attached
    assert torch.equal(script.anchor(), before)
    assert all(torch.equal(script.model.state_dict()[name], average[name]) for name in average)
    assert "work of 160 samples" in dropped(caplog)[0]
    assert "goes back" not in dropped(caplog)[0]
    assert script.sync.finish() is None


def test_who_finishes_contributes_what_is_left() -> None:
    script = Script()
    script.run(2 * H + 5)
    outcome = script.sync.finish()
    assert outcome is not None
    assert outcome.counted
    assert (script.sync.attached, script.swarm.anchor().round) == (False, 3)
