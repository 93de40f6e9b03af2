"""Training that is seen and not counted, contributions of zero: named once, with the cause; and no
word in honest training."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.run.events import read_event
from atoll.node.run.verdicts import NOT_COUNTED, Verdicts
from atoll.node.run.verdicts import STILL as STILL_METRICS
from atoll.optim import Attachment, DiLoCo, GradientAveraging, SoloSwarm, attach
from atoll.optim.script.silence import ADDING_S, FIRST_FOREIGN, Finding, Silence
from atoll.optim.script.uncounted import CURES, STILL

SETTINGS = RunSettings(sync_every=5, outer=OuterSettings("nesterov", 0.9, 0.6))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (scale * model(torch.randn(8, 4)).square().mean()).backward()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Member:
    """A run of one, and what it was told."""

    def __init__(
        self, caplog: pytest.LogCaptureFixture, model: nn.Sequential | None = None
    ) -> None:
        caplog.set_level(logging.WARNING, "atoll")
        self.caplog, self.clock = caplog, Clock()
        self.model, self.swarm = model or net(), SoloSwarm(SETTINGS)

    def attach(self, optimizer: Any, **how: Any) -> Attachment:
        return attach(self.model, optimizer, self.swarm, batch_size=8, clock=self.clock, **how)

    @property
    def said(self) -> list[str]:
        return [
            record.getMessage()
            for record in self.caplog.records
            if record.levelno >= logging.WARNING and " is finished" not in record.getMessage()
        ]

    @property
    def found(self) -> dict[str, float]:
        return {
            name: value
            for name, value in self.swarm.reported.items()
            if name.startswith(("uncounted_", "still_")) and value
        }


@pytest.fixture
def member(caplog: pytest.LogCaptureFixture) -> Member:
    return Member(caplog)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# ---- the rules


def test_weights_that_others_change_are_found_at_the_sixteenth_time_before_any_step() -> None:
    silence = Silence()
    found = [silence.backward(0.0, foreign=int(at > 0)) for at in range(20)]
    assert [at for at, each in enumerate(found) if each] == [16]
    assert found[16] == Finding("foreign", 17)
    assert silence.counted(1.0) == Finding("foreign", 17)
    assert silence.finding is None


def test_after_steps_the_usual_number_of_changes_is_known() -> None:
    silence = Silence()
    for _ in range(10):  # SAM by hand: two changes a step
        for _ in range(2):
            assert silence.backward(0.0, foreign=1) is None
        silence.counted(0.0)
    found = [silence.backward(0.0, foreign=1) for _ in range(12)]
    assert [at for at, each in enumerate(found) if each] == [3 + 3 * 2 - 1]


def test_gradients_that_add_up_are_found_after_ten_minutes_and_sixty_four_backwards() -> None:
    silence = Silence()
    assert all(silence.backward(0.0) is None for _ in range(512))
    assert silence.backward(ADDING_S - 1) is None
    assert silence.backward(ADDING_S) == Finding("adding", 514)
    slow = Silence()
    assert all(slow.backward(600.0 * at) is None for at in range(63))
    assert slow.backward(600.0 * 63) == Finding("adding", 64)


def test_a_usual_accumulation_is_eight_times_as_long_before_it_is_found() -> None:
    silence = Silence()
    for at in range(100):
        assert silence.backward(100.0 * at) is None or at >= 63
    silence.counted(10_000.0)
    found = [silence.backward(10_000.0 + 100.0 * at) for at in range(801)]
    assert [at for at, each in enumerate(found) if each] == [800]


def test_gradients_that_are_cleared_are_found_though_one_optimizer_has_stepped_once() -> None:
    """Of two under a GradScaler that skips all later steps; while one of them steps, none."""
    silence = Silence()
    silence.stepped_in_part()
    found = [silence.backward(0.0, cleared=True) for _ in range(64)]
    assert found == [None] * 63 + [Finding("cleared", 64)]
    turns = Silence()
    for _ in range(40):  # a discriminator
        assert turns.backward(0.0, cleared=True) is None
        turns.stepped_in_part()
        assert turns.backward(0.0, cleared=True) is None


def test_steps_by_hand_may_come_once_a_round() -> None:
    silence = Silence(by_hand=True)
    assert all(silence.backward(0.0, foreign=1, cleared=True) is None for _ in range(500))
    assert silence.backward(ADDING_S) == Finding("adding", 501)


def test_steps_that_train_replaced_tensors_withdraw_nothing() -> None:
    silence = Silence()
    assert silence.backward(0.0, replaced=True) == Finding("replaced", 1)
    assert silence.counted(0.0, replaced=True) is None
    assert silence.backward(0.0, replaced=True) is None
    assert silence.counted(0.0) == Finding("replaced", 1)


# ---- trained and not counted


def test_an_optimizer_that_was_made_again_is_named_and_withdrawn_by_a_step(member: Member) -> None:
    optimizer = sgd(member.model)
    sync = member.attach(optimizer)
    again = sgd(member.model)
    for step in range(40):
        backward(member.model)
        (optimizer if step < 7 else again).step()
        member.model.zero_grad()
    assert len(member.said) == 1
    assert "made again after attach()" in member.said[0]
    assert member.found == {"uncounted_foreign": 4.0}
    assert sync.stats["steps"] == 7
    backward(member.model)
    optimizer.step()
    assert member.found == {}


def test_changes_that_no_version_shows_are_seen_on_a_sample(member: Member) -> None:
    member.attach(sgd(member.model))
    for _ in range(40):
        backward(member.model)
        for parameter in member.model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(0.05 * parameter.grad)
            parameter.grad = None
    assert member.found == {"uncounted_foreign": 32.0}


def test_an_optimizer_that_was_made_again_is_named_in_a_loop_that_logs(member: Member) -> None:
    """Its changes follow backwards: they are not set by hand, however often the script asks."""
    optimizer = sgd(member.model)
    sync = member.attach(optimizer)
    for at in range(30):
        if at == 10:
            optimizer = sgd(member.model)
        backward(member.model)
        sync.log(loss=1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert not sync.done
        sync.samples(8)
    assert member.found == {"uncounted_foreign": 4.0}
    assert "an optimizer that was made again after attach()" in member.said[0]


def test_an_optimizer_of_a_copy_is_named(member: Member) -> None:
    attached = sgd(member.model)  # which keeps the attachment
    member.attach(attached)
    other = sgd(copy.deepcopy(member.model))
    for _ in range(70):
        backward(member.model)
        other.step()
        member.model.zero_grad()
    assert member.found == {"uncounted_cleared": 65.0}
    assert "made from another model" in member.said[0]


def test_tensors_that_were_replaced_are_named_at_the_next_step(member: Member) -> None:
    optimizer = sgd(member.model)
    member.attach(optimizer)
    state = {name: value.clone() for name, value in member.model.state_dict().items()}
    member.model.load_state_dict(state, assign=True)
    for _ in range(3):
        backward(member.model)
        optimizer.step()
    assert len(member.said) == 1
    assert "0.weight" in member.said[0]
    assert member.found == {"uncounted_replaced": 1.0}


def test_a_module_that_was_exchanged_is_named_at_the_next_step(member: Member) -> None:
    """As by ``model.fc = nn.Linear(…)`` after attach."""
    optimizer = sgd(member.model)
    member.attach(optimizer)
    last = member.model[2]
    assert isinstance(last, nn.Linear)
    member.model[2] = nn.Linear(last.in_features, last.out_features)
    backward(member.model)
    optimizer.step()
    assert "(2.weight, 2.bias)" in member.said[0]
    assert member.found == {"uncounted_replaced": 1.0}


def test_tensors_that_were_replaced_with_their_optimizer_are_named_by_the_next_log(
    member: Member,
) -> None:
    sync = member.attach(sgd(member.model))
    state = {name: value.clone() for name, value in member.model.state_dict().items()}
    member.model.load_state_dict(state, assign=True)
    other = sgd(member.model)
    for _ in range(3):
        backward(member.model)
        other.step()
        sync.log(loss=1.0)
    assert member.found == {"uncounted_replaced": 1.0}


def test_an_attached_optimizer_that_never_steps_is_named(member: Member) -> None:
    first, last = member.model[0], member.model[2]
    stepping, resting = sgd(first), torch.optim.AdamW(last.parameters())
    sync = member.attach([stepping, resting])
    for _ in range(70):
        backward(member.model)
        stepping.step()
    assert "AdamW did not" in member.said[0]
    assert "counts=" in member.said[0]
    assert sync.stats["steps"] == 0


def test_counts_names_the_optimizer_that_ends_a_step(member: Member) -> None:
    first, last = member.model[0], member.model[2]
    critic, generator = sgd(first), sgd(last)
    sync = member.attach([critic, generator], counts=generator)
    for step in range(12):
        backward(member.model)
        critic.step()
        if step % 3 == 2:
            generator.step()
        member.model.zero_grad()
    assert sync.stats["steps"] == 4
    assert member.said == []
    sync.detach()
    with pytest.raises(ConfigError, match="counts names a SGD that is not attached"):
        member.attach([critic, generator], counts=sgd(member.model))


# ---- honest training


def accumulation(member: Member) -> None:
    optimizer = sgd(member.model)
    member.attach(optimizer)
    for step in range(1024):
        backward(member.model)
        member.clock.now += 0.5
        if step % 512 == 511:
            optimizer.step()
            optimizer.zero_grad()


def adversarial(member: Member) -> None:
    """Five steps of one optimizer for each of the other's, both attached."""
    first, last = sgd(member.model[0]), sgd(member.model[2])
    member.attach([first, last])
    for step in range(300):
        backward(member.model)
        (last if step % 6 == 5 else first).step()
        member.model.zero_grad()


def half_attached(member: Member) -> None:
    """The same, of which one is not attached."""
    first, last = sgd(member.model[0]), sgd(member.model[2])
    member.attach(last)
    for step in range(300):
        backward(member.model)
        (last if step % 6 == 5 else first).step()
        member.model.zero_grad()


def sharpness(member: Member) -> None:
    optimizer = sgd(member.model)
    member.attach(optimizer)
    for _ in range(50):
        backward(member.model)
        with torch.no_grad():
            for parameter in member.model.parameters():
                parameter.add_(1e-3)
        member.model.zero_grad()
        backward(member.model)
        with torch.no_grad():
            for parameter in member.model.parameters():
                parameter.sub_(1e-3)
        optimizer.step()
        optimizer.zero_grad()


def scaler(member: Member) -> None:
    optimizer = sgd(member.model)
    member.attach(optimizer)
    scaling = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(60):
        optimizer.zero_grad()
        loss = member.model(torch.randn(8, 4)).square().mean() * (torch.inf if step < 40 else 1.0)
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()


def evaluation(member: Member) -> None:
    """Attacks on the model in evaluation mode, whose gradients of weights are thrown away."""
    optimizer = sgd(member.model)
    sync = member.attach(optimizer)
    for _ in range(3):
        member.model.train()
        backward(member.model)
        optimizer.step()
        optimizer.zero_grad()
        member.model.eval()
        with sync.evaluate_anchor():
            member.model(torch.randn(4, 4))
        for _ in range(200):
            backward(member.model)
            member.model.zero_grad()


def averages(member: Member) -> None:
    """Averaged weights, put in for evaluation and taken out again."""
    optimizer = sgd(member.model)
    member.attach(optimizer)
    for _ in range(60):
        backward(member.model)
        optimizer.step()
        optimizer.zero_grad()
        kept = copy.deepcopy(member.model.state_dict())
        member.model.load_state_dict({name: 0.9 * value for name, value in kept.items()})
        member.model.load_state_dict(kept)


def slow_data(member: Member) -> None:
    optimizer = sgd(member.model)
    member.attach(optimizer)
    for _ in range(100):
        member.clock.now += 7200.0
        backward(member.model)
        optimizer.step()
        optimizer.zero_grad()


def line_search(member: Member) -> None:
    optimizer = torch.optim.LBFGS(
        member.model.parameters(), lr=0.01, max_iter=30, tolerance_grad=0, tolerance_change=0
    )
    member.attach(optimizer)
    closures = [0]

    def closure() -> torch.Tensor:
        closures[0] += 1
        optimizer.zero_grad()
        loss = member.model(torch.ones(8, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(12):
        optimizer.step(closure)
    assert closures[0] > 12 * FIRST_FOREIGN


def clamping(member: Member) -> None:
    optimizer = sgd(member.model)
    member.attach(optimizer)
    for _ in range(60):
        backward(member.model)
        optimizer.step()
        optimizer.zero_grad()
        for parameter in member.model.parameters():
            parameter.data.clamp_(-0.3, 0.3)


def warm_up(member: Member) -> None:
    """A rate that begins at 0 with the first round's one step."""
    member.swarm = SoloSwarm(RunSettings(sync_every=1, outer=OuterSettings("sgd", 1.0)))
    optimizer = sgd(member.model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    member.attach(optimizer)
    for _ in range(20):
        backward(member.model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def functional(member: Member) -> None:
    """Other tensors in the model's place for a call (meta-learning)."""
    optimizer = sgd(member.model)
    sync = member.attach(optimizer)
    for _ in range(30):
        fast = {name: value * 0.9 for name, value in member.model.named_parameters()}
        torch.func.functional_call(member.model, fast, torch.randn(8, 4)).mean().backward()
        sync.log(loss=1.0)
        optimizer.step()
        optimizer.zero_grad()


def after_the_end(member: Member) -> None:
    """A finished run: who goes on training does so on their own."""
    member.swarm = SoloSwarm(RunSettings(sync_every=5, rounds=1, outer=SETTINGS.outer))
    optimizer = sgd(member.model)
    sync = member.attach(optimizer)
    for step in range(60):
        backward(member.model)
        (optimizer if step < 5 else sgd(member.model)).step()
        member.model.zero_grad()
    assert sync.done


@pytest.mark.parametrize(
    "script",
    [
        accumulation,
        adversarial,
        half_attached,
        sharpness,
        scaler,
        evaluation,
        averages,
        slow_data,
        line_search,
        clamping,
        warm_up,
        functional,
        after_the_end,
    ],
)
def test_honest_training_is_told_nothing(member: Member, script: Callable[[Member], None]) -> None:
    script(member)
    assert member.said == []
    assert member.found == {}


def test_hooks_leave_with_the_attachment_and_are_not_copied(member: Member) -> None:
    sync = member.attach(sgd(member.model))
    twin = copy.deepcopy(member.model)
    backward(twin)
    assert not any(parameter._backward_hooks for parameter in twin.parameters())
    sync.detach()
    assert not any(parameter._backward_hooks for parameter in member.model.parameters())


# ---- contributions of zero


@pytest.mark.parametrize("cause", ["rate", "frozen", "gradients", "zero", "rounding", "other"])
def test_contributions_of_zero_are_named_with_their_cause(
    cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = net().to(torch.bfloat16) if cause == "rounding" else net()
    member = Member(caplog, model)
    optimizer = sgd(model, {"rate": 0.0, "rounding": 1e-9}.get(cause, 0.05))
    start = copy.deepcopy(model.state_dict())
    if cause == "other":
        optimizer.register_step_post_hook(lambda *_: model.load_state_dict(start) and None)
    if cause == "zero":
        optimizer.register_step_pre_hook(lambda *_: model.zero_grad(set_to_none=False))
    member.attach(optimizer)
    for _ in range(20):
        if cause != "gradients":
            inputs = torch.randn(8, 4, dtype=next(model.parameters()).dtype, requires_grad=True)
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if cause == "frozen":
            model.requires_grad_(False)
            optimizer.zero_grad()
            model.load_state_dict(start)
    assert f"still_{cause}" in member.found
    assert sum("hold no progress" in line for line in member.said) == 1


def test_progress_withdraws_what_was_said_of_contributions_of_zero(member: Member) -> None:
    optimizer = sgd(member.model, 0.0)
    member.attach(optimizer)
    for step in range(15):
        optimizer.param_groups[0]["lr"] = 0.05 if step >= 10 else 0.0
        backward(member.model)
        optimizer.step()
        optimizer.zero_grad()
    assert member.swarm.reported["still_rate"] == 0.0
    assert len(member.said) == 1


# ---- at the node


def test_each_cause_is_a_verdict_that_is_withdrawn() -> None:
    assert {name.removeprefix("uncounted_") for name in NOT_COUNTED} == CURES.keys()
    assert {name.removeprefix("still_") for name in STILL_METRICS} == STILL.keys()
    for code, names in (("V14", NOT_COUNTED), ("V15", STILL_METRICS)):
        for name, words in names.items():
            verdicts = Verdicts()
            (raised,) = verdicts.take(
                read_event(
                    {"at": 1.0, "event": "script.report", "metrics": {"step": 3.0, name: 17.0}}
                )
            )
            assert (raised.raised, raised.verdict.code) == (True, code)
            assert words in raised.verdict.said
            assert "17" in raised.verdict.said
            assert not verdicts.take(
                read_event({"at": 2.0, "event": "script.report", "metrics": {"loss": 1}})
            )
            (withdrawn,) = verdicts.take(
                read_event({"at": 3.0, "event": "script.report", "metrics": {name: 0.0}})
            )
            assert (withdrawn.raised, withdrawn.verdict.code) == (False, code)


# ---- optimizers and models of unusual make


class SAM(torch.optim.Optimizer):
    """As most people have it: the loop calls first_step and second_step, never step."""

    def __init__(self, params: Any, base: Any, **how: Any) -> None:
        super().__init__(params, how)
        self.base_optimizer = base(self.param_groups, **how)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.clone()
                parameter.add_(0.05 * parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()
        self.zero_grad()


class Wrapper(torch.optim.Optimizer):
    """As opacus' optimizer: holds another one, and never calls torch's ``__init__``."""

    def __init__(self, held: torch.optim.Optimizer) -> None:
        self.original_optimizer = held

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.original_optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.original_optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.original_optimizer.step(closure)


class Hookless(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        self.param_groups, self.state = [{"params": list(params)}], defaultdict(dict)


def test_a_sharpness_aware_optimizer_is_counted_by_its_base(member: Member) -> None:
    optimizer = SAM(member.model.parameters(), torch.optim.SGD, lr=0.05)
    sync = member.attach(optimizer)
    for _ in range(20):
        backward(member.model)
        optimizer.first_step()
        backward(member.model)
        optimizer.second_step()
    assert (sync.stats["steps"], sync.round, member.said) == (20, 4, [])


def test_an_optimizer_without_hooks_is_counted_by_the_one_that_it_holds(member: Member) -> None:
    optimizer = Wrapper(sgd(member.model))
    sync = member.attach(optimizer)
    for _ in range(10):
        backward(member.model)
        optimizer.step()
    assert (sync.stats["steps"], sync.round) == (10, 2)


def test_an_optimizer_without_hooks_that_holds_none_is_refused_by_name(member: Member) -> None:
    with pytest.raises(ConfigError, match="Hookless has no state, no parameter groups or no hooks"):
        member.attach(Hookless(member.model.parameters()))


def test_an_optimizer_of_a_run_is_not_copied(member: Member) -> None:
    optimizer = DiLoCo(
        member.model.parameters(), sgd(member.model), swarm=member.swarm, model=member.model
    )
    with pytest.raises(ConfigError, match="a DiLoCo cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_a_lazy_module_is_refused_by_the_name_of_its_tensor(member: Member) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    for optimizer in (None, torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(ConfigError, match=r"0\.weight has no shape yet"):
            attach(model, optimizer, member.swarm)


def test_an_expanded_parameter_is_refused_by_its_name(member: Member) -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.randn(1, 4).expand(3, 4))
    with pytest.raises(ConfigError, match="scale is expanded"):
        attach(model, None, member.swarm)


def test_more_samples_than_a_contribution_can_stand_for_are_refused(member: Member) -> None:
    sync = member.attach(sgd(member.model))
    with pytest.raises(ConfigError, match="more than a step or a round has"):
        sync.samples(2**70)


def test_parameters_in_no_attached_optimizer_are_named_at_attach(
    member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "atoll")
    member.attach(sgd(member.model[0]))
    assert any("2.weight, 2.bias" in record.getMessage() for record in caplog.records)
    assert member.said == []


def test_sparse_gradients_are_averaged(member: Member) -> None:
    outer = OuterSettings("sgd", 1.0)
    settings = RunSettings(
        sync_every=None, target_samples=4, method="gradient_averaging", outer=outer
    )
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    before = model[0].weight.detach().clone()
    optimizer = GradientAveraging(model.parameters(), swarm=SoloSwarm(settings), model=model)
    optimizer.attachment.samples(4)
    model(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    moved = (before - model[0].weight.detach()).round(decimals=5)
    assert moved.tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


class Twice(torch.optim.AdamW):
    """Its step is torch's, whose hooks run as well once a plain one was made."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("the user's")
        super().step(closure)


class Thrice(Twice):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)


@pytest.mark.parametrize("kind", [Twice, Thrice])
def test_a_step_that_calls_the_step_of_the_class_above_is_one(
    kind: type[Twice], caplog: pytest.LogCaptureFixture
) -> None:
    torch.optim.AdamW(net().parameters())
    Twice(net().parameters())
    member = Member(caplog)
    optimizer = kind(member.model.parameters(), lr=1e-2)
    sync = member.attach(optimizer)
    for step in range(1, 13):
        backward(member.model)
        optimizer.fails = step == 4
        try:
            optimizer.step()
        except ZeroDivisionError:
            assert step == 4
        optimizer.zero_grad()
    assert (sync.stats["steps"], sync.round) == (11, 2)
    assert not member.said


def test_a_second_step_on_one_backward_is_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """A Trainer's own, after that of a training_step that clears gradients."""
    member = Member(caplog)
    optimizer = torch.optim.AdamW(member.model.parameters(), lr=1e-2)
    attachment = member.attach(optimizer)
    for _ in range(12):
        backward(member.model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    assert attachment.stats["steps"] == 12 + 1  # the first time it is none yet
    assert attachment.stats["samples_counted"] == 8 * 10  # of two rounds of five steps
    assert member.said == []


def test_steps_without_gradients_that_go_on_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    member = Member(caplog)
    optimizer = torch.optim.SGD(member.model.parameters(), lr=1e-2)
    attachment = member.attach(optimizer)
    backward(member.model)
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(21):
        optimizer.step()
    assert attachment.stats["steps"] == 1 + 21
    assert member.found.keys() == {"still_gradients"}


def test_a_closure_makes_its_gradients_inside_of_the_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    member = Member(caplog)
    optimizer = torch.optim.SGD(member.model.parameters(), lr=1e-2)
    attachment = member.attach(optimizer)

    def closure() -> float:
        backward(member.model)
        return 1.0

    for _ in range(10):
        optimizer.zero_grad()
        optimizer.step(closure)
    assert attachment.stats["steps"] == 10
