"""Scripts as users of trainers and optimizers have reported them, in a run of two: each trains the
run's model as its author means it, or is told what is wrong and what to do.

Each names the thread that it is taken from. The other member is an ordinary one.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from remembering_kit import Sharpness
from reported_kit import (
    BATCH,
    ROUNDS,
    H,
    Script,
    adamw,
    ordinary,
    play,
    wanted,
    way_of_the_run,
)
from torch import Tensor, nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember

# ---- 1: weights that the script did not train


class Average:
    """Of weights, as scripts keep it."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mine, p in zip(self.values, model.parameters(), strict=True):
            mine.lerp_(p.data, 0.05)

    def into(self, model: nn.Module) -> None:
        for mine, p in zip(self.values, model.parameters(), strict=True):
            p.data.copy_(mine)


def averages_left_by_evaluations(swarm: LocalMember) -> Script:
    """PKU-YuanGroup/Open-Sora-Plan#186: stored, copied into the model to evaluate, not restored."""
    script = Script(swarm).attach()
    average = Average(script.model)
    for number in script.going():
        script.step()
        average.update(script.model)
        if number in (23, 41):
            average.into(script.model)
    return script


def averages_kept_by_reference(swarm: LocalMember) -> Script:
    """aqlaboratory/openfold#90: what was to be restored is a reference, so averages stay."""
    script = Script(swarm).attach()
    average = Average(script.model)
    for number in script.going():
        script.step()
        average.update(script.model)
        if number == 32:
            kept = script.model.state_dict()
            average.into(script.model)
            script.model.load_state_dict(kept)
    return script


def best_weights_on_a_plateau(swarm: LocalMember) -> Script:
    """huggingface/transformers#33336, ultralytics/ultralytics#5980: earlier weights are loaded into
    a training that goes on."""
    script = Script(swarm).attach()
    best = copy.deepcopy(script.model.state_dict())
    for number in script.going():
        script.step()
        if number == 12:
            best = copy.deepcopy(script.model.state_dict())
        if number == 37:
            script.model.load_state_dict(best)
    return script


def averages_left_at_the_end(swarm: LocalMember) -> Script:
    """neuralmagic/sparseml#1493: averaged weights are copied into the model when training ends."""
    script = Script(swarm).attach()
    average = Average(script.model)
    for number in script.going():
        if number == 28:
            break
        script.step()
        average.update(script.model)
    average.into(script.model)
    script.sync.sync()
    return script


@pytest.mark.parametrize(
    ("odd", "times", "place"),
    [
        (averages_left_by_evaluations, 2, "after step 24"),
        pytest.param(averages_kept_by_reference, 1, "after step 33", marks=pytest.mark.slow),
        pytest.param(best_weights_on_a_plateau, 1, "after step 38", marks=pytest.mark.slow),
        pytest.param(averages_left_at_the_end, 1, "after step 28", marks=pytest.mark.slow),
    ],
)
def test_weights_that_were_not_trained_are_not_contributed(
    odd: Callable[[LocalMember], Script], times: int, place: str
) -> None:
    _, stats, words = play(odd)
    assert len(words) == times
    assert place in words[0]
    assert all("and not by the optimizer" in each for each in words)
    assert 0 < stats["samples_dropped"] <= times * H * BATCH


# ---- 2: what remembers where the parameters were


class MasterAdamW(torch.optim.AdamW):
    """NVIDIA/Model-Optimizer#2483, radixark/miles#2572: masters in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad.float()
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                    state["number"] = 0
                state["number"] += 1
                number = state["number"]
                state["exp_avg"].lerp_(grad, 0.1)
                state["exp_avg_sq"].lerp_(grad.square(), 0.001)
                width = (state["exp_avg_sq"] / (1 - 0.999**number)).sqrt() + 1e-8
                way = state["exp_avg"] / (1 - 0.9**number) / width
                state["master"].mul_(1 - group["lr"] * group["weight_decay"])
                p.copy_(state["master"].sub_(way, alpha=group["lr"]))


def masters_in_the_state(swarm: LocalMember) -> Script:
    script = Script(swarm, lambda p: MasterAdamW(p, lr=3e-3), torch.bfloat16).attach()
    for _ in script.going():
        script.step()
    return script


def masters_by_hand(swarm: LocalMember, *, moved: bool = True, rounds: bool = False) -> Script:
    """NVIDIA/apex#42, karpathy/llm.c#702: masters beside the model, each step copied into it.
    ``rounds``: the script ends rounds itself, and tells nothing of its steps.
    """
    script = Script(swarm, dtype=torch.bfloat16)
    parameters = list(script.model.parameters())
    masters = [p.detach().float().requires_grad_() for p in parameters]
    optimizer = adamw(masters)

    @torch.no_grad()
    def adopted(by: Any) -> None:
        for p, master in zip(parameters, masters, strict=True):
            master.add_(by[p])

    script.attach(None, on_adopted=adopted if moved else None)
    for number in script.going():
        script.model.zero_grad()
        script.loss().backward()
        with torch.no_grad():
            for p, master in zip(parameters, masters, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
            optimizer.step()
            for p, master in zip(parameters, masters, strict=True):
                p.copy_(master)
        if not rounds:
            script.sync.step()
        elif number % H == H - 1:
            script.sync.samples(H * BATCH)
            script.sync.sync()
    return script


def slow_weights_in_the_loop(swarm: LocalMember) -> Script:
    """lucidrains/ema-pytorch#11, Lookahead by hand: every fifth step the model goes half of the way
    back to weights that the loop keeps."""
    script = Script(swarm).attach()
    slow = [p.detach().clone() for p in script.model.parameters()]
    for number in script.going():
        script.step()
        if number % 5 == 2:
            with torch.no_grad():
                for mine, p in zip(slow, script.model.parameters(), strict=True):
                    p.copy_(mine.lerp_(p, 0.5))
    return script


def by_hand_alone(swarm: LocalMember) -> Script:
    """Steps by hand that remember nothing."""
    script = Script(swarm).attach(None)
    for _ in script.going():
        script.step()
        script.sync.step()
    return script


@pytest.mark.parametrize("rounds", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_takes_anchors_back_is_told_and_who_moves_them_is_not(rounds: bool) -> None:
    anchor, far = way_of_the_run()
    cured, stats, words = play(lambda swarm: masters_by_hand(swarm, rounds=rounds))
    assert (words, stats["counted"]) == ([], ROUNDS)
    assert float((cured - anchor).norm()) < 0.1 * far
    back, _, words = play(lambda swarm: masters_by_hand(swarm, moved=False, rounds=rounds))
    assert float((back - anchor).norm()) > 0.2 * far
    (said,) = words
    assert "made by hand" in said
    assert "attach(..., on_adopted=f)" in said


@pytest.mark.slow
@pytest.mark.parametrize("odd", [masters_in_the_state, by_hand_alone])
def test_what_is_cured_trains_the_runs_model(odd: Callable[[LocalMember], Script]) -> None:
    anchor, far = way_of_the_run()
    found, stats, words = play(odd)
    assert (words, stats["counted"], stats["samples_dropped"]) == ([], ROUNDS, 0)
    assert float((found - anchor).norm()) < 0.1 * far


def test_slow_weights_of_the_loop_are_contributed_and_named() -> None:
    _, stats, words = play(slow_weights_in_the_loop)
    said = [each for each in words if "and not by the optimizer" not in each]
    assert any("between two steps takes back" in each for each in said)
    assert stats["counted"] >= ROUNDS - 2


@pytest.mark.slow
def test_an_optimizer_over_masters_is_refused_with_the_way() -> None:
    """NovaSky-AI/SkyRL#2149, facebookresearch/pytext#966: its groups are the masters'."""

    def masters(swarm: LocalMember) -> Script:
        script = Script(swarm, dtype=torch.bfloat16)
        script.optimizer = adamw([p.detach().float() for p in script.model.parameters()])
        with pytest.raises(ConfigError, match="steps 4 float32 tensors beside") as refused:
            script.attach()
        assert "on_adopted=f" in (refused.value.hint or "")
        return ordinary(swarm)

    assert play(masters)[2] == []


# ---- 3: trained, attached, and not counted


def made_again(swarm: LocalMember) -> Script:
    """fastai/fastai#2133, alan-turing-institute/deepsensor#47, tttianhao/CLEAN#56: a new optimizer
    when layers are unfrozen, or an epoch begins."""
    script = Script(swarm).attach()
    for number in script.going():
        if number == 22:
            script.optimizer = adamw(script.model.parameters())
        script.step()
    return script


def gradients_by_hand(swarm: LocalMember) -> Script:
    """spro/practical-pytorch#9: ``p.data.add_(p.grad.data, alpha=-lr)``."""
    script = Script(swarm).attach()
    for _ in script.going():
        script.model.zero_grad()
        script.loss().backward()
        for p in script.model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad.data, alpha=-0.02)
    return script


def schedule_alone(swarm: LocalMember) -> Script:
    """ClementPinard/SfmLearner-Pytorch#5, pytorch/pytorch#3814: the schedule steps, the optimizer
    does not."""
    script = Script(swarm).attach()
    for _ in script.going():
        script.optimizer.zero_grad()
        script.loss().backward()
    return script


def weights_of_a_copy(swarm: LocalMember) -> Script:
    """Reptile, evolution strategies: no gradient ever reaches the model, whose weights are set."""
    script = Script(swarm).attach()
    for _ in script.going():
        fast = copy.deepcopy(script.model)
        optimizer = torch.optim.SGD(fast.parameters(), lr=0.05)
        script.loss(fast).backward()
        optimizer.step()
        with torch.no_grad():
            for p, other in zip(script.model.parameters(), fast.parameters(), strict=True):
                p.lerp_(other, 0.5)
    return script


@pytest.mark.parametrize(
    ("odd", "words", "cure"),
    [
        (made_again, "no step of the attached optimizer came between", "Attach the optimizer that"),
        pytest.param(
            gradients_by_hand, "and its weights changed", "step()", marks=pytest.mark.slow
        ),
        pytest.param(schedule_alone, "nothing is trained here", "is not", marks=pytest.mark.slow),
        (weights_of_a_copy, "without gradients and without a step", "attach(model, None, swarm)"),
    ],
)
def test_training_that_is_not_counted_is_told(
    odd: Callable[[LocalMember], Script], words: str, cure: str
) -> None:
    _, stats, said = play(odd)
    assert stats["counted"] < ROUNDS
    assert len(said) == 1
    assert words in said[0]
    assert cure in said[0]


def steps_inside_of_backward(swarm: LocalMember) -> Script:
    """pytorch/pytorch#116975: an optimizer a parameter, stepped when its gradient comes."""
    script = Script(swarm)
    each = {p: adamw([p]) for p in script.model.parameters()}

    def stepping(p: Any) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(stepping)
    script.attach(list(each.values()))
    for _ in script.going():
        script.loss().backward()
    return script


def sharpness_with_a_scaler(swarm: LocalMember) -> Script:
    """davda54/sam#7, #11, #79: two half-steps and a scaler; ``second_step`` assigns ``p.data``."""
    script = Script(swarm, lambda p: Sharpness(p, lr=0.02)).attach()
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    for _ in script.going():
        for half in (script.optimizer.first_step, script.optimizer.second_step):
            scaler.scale(script.loss()).backward()
            scaler.unscale_(script.optimizer)
            half()
            script.optimizer.zero_grad()
            scaler.update()
    return script


@pytest.mark.slow
@pytest.mark.parametrize("odd", [steps_inside_of_backward, sharpness_with_a_scaler])
def test_odd_steps_are_counted_one_by_one(odd: Callable[[LocalMember], Script]) -> None:
    _, stats, words = play(odd)
    assert words == []
    assert (stats["counted"], stats["samples_dropped"]) == (ROUNDS, 0)
    assert stats["steps"] >= ROUNDS * H - H


# ---- 4: what a codec loses


class Scales(nn.Module):
    """huggingface/pytorch-image-models#2605, kyegomez/SingLoRA#6: scales that begin at 1e-6, a
    temperature, low-rank factors of which one is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 64), nn.Linear(64, 1)
        self.block = nn.Linear(64, 64)
        self.gamma = nn.Parameter(torch.full((64,), 1e-6))
        self.up, self.down = nn.Parameter(torch.zeros(64, 4)), nn.Parameter(torch.randn(4, 64) / 8)
        self.temperature = nn.Parameter(torch.tensor(2.6))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        hidden = hidden + self.gamma * torch.tanh(self.block(hidden))
        hidden = hidden + 16 * hidden @ self.down.t() @ self.up.t()
        return self.leave(hidden) * (self.temperature.exp() / 14)


class Rows(nn.Module):
    """bitsandbytes-foundation/bitsandbytes#11: an embedding of long rows that is tuned by short
    steps, rare rows among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.leave = nn.Embedding(256, 32), nn.Linear(32, 1)
        self.rows.weight.data.mul_(20)

    def forward(self, inputs: Tensor) -> Tensor:
        ids = (inputs[:, 0].abs().pow(4) * 8).long().clamp_(max=255)
        return self.leave(torch.tanh(self.rows(ids) / 20))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8_dither", "int8", "int4"])
@pytest.mark.parametrize("model", [Scales, Rows])
def test_each_tensor_goes_its_way(model: Callable[[], nn.Module], codec: str) -> None:
    """pytorch/pytorch#52034: small tensors beside large ones."""

    def way(codec: str) -> dict[str, Tensor]:
        def script(swarm: Swarm) -> dict[str, Tensor]:
            assert isinstance(swarm, LocalMember)
            mine = Script(swarm)
            mine.model = model()
            mine.optimizer = torch.optim.AdamW(mine.model.parameters(), lr=1e-3)
            start = {name: p.detach().clone() for name, p in mine.model.named_parameters()}
            mine.attach()
            for _ in mine.going():
                mine.step()
            with mine.sync.evaluate_anchor():
                return {name: p.detach() - start[name] for name, p in mine.model.named_parameters()}

        settings = RunSettings(
            sync_every=H, rounds=ROUNDS, codec=codec, outer=OuterSettings("sgd", 1.0)
        )
        return LocalSwarm(2, settings=settings, latency_s=0.01).run(script)[0]

    right, found = way("fp32"), way(codec)
    for name, value in right.items():
        along = float((found[name] * value).sum() / value.square().sum())
        assert 0.95 < along < 1.05, (name, along)


# ---- 7: wrappers


class Contributed(torch.optim.Optimizer):
    """anthony-wang/CrabNet#36, xiwenc1/TimeMIL#6: torch's ``__init__`` is not called."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Keyed(torch.optim.Optimizer):
    """meta-pytorch/torchrec#864: by names, and without torch's ``__init__``."""

    def __init__(self, params: dict[str, Tensor], inner: torch.optim.Optimizer) -> None:
        self.params, self._inner = params, inner
        self.state, self.param_groups = inner.state, inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self._inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)


class Wrapped:
    """fastai/fastai#3642: no optimizer of torch's, and torch's under ``opt``."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt

    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.opt.step()

    def zero_grad(self) -> None:
        self.opt.zero_grad()


@pytest.mark.parametrize(
    "kind",
    ["contributed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("keyed", "wrapped"))],
)
def test_wrappers_train_as_what_they_wrap(kind: str) -> None:
    def odd(swarm: LocalMember) -> Script:
        script = Script(swarm)
        inner, named = script.optimizer, dict(script.model.named_parameters())
        script.optimizer = {
            "contributed": lambda: Contributed(inner),
            "keyed": lambda: Keyed(dict(named), inner),
            "wrapped": lambda: Wrapped(inner),
        }[kind]()
        script.attach()
        for _ in script.going():
            script.step()
        return script

    anchor, stats, words = play(odd)
    assert (words, stats["counted"]) == ([], ROUNDS)
    assert torch.equal(anchor, wanted())


def test_several_in_one_that_is_no_optimizer_are_named() -> None:
    class Both:
        def __init__(self, *optimizers: Any) -> None:
            self.parts = list(optimizers)

        def step(self) -> None:
            for each in self.parts:
                each.step()

    def odd(swarm: LocalMember) -> Script:
        script = Script(swarm)
        first, *rest = script.model.parameters()
        with pytest.raises(ConfigError) as refused:
            script.attach(Both(adamw([first]), adamw(rest)))
        assert "attach(model, optimizer.parts, swarm)" in (refused.value.hint or "")
        return ordinary(swarm)

    assert play(odd)[2] == []


# ---- objects that are not what was attached


def a_copy_is_trained(swarm: LocalMember) -> Script:
    """The model is copied after it was attached, and the copy is what trains."""
    script = Script(swarm).attach()
    for number in script.going():
        if number == 12:
            script.model = copy.deepcopy(script.model)
            script.optimizer = adamw(script.model.parameters())
        script.step()
        script.sync.log(loss=1.0)
        if number > 12:
            swarm.sleep(30.0)
    return script


def test_a_script_that_trains_a_copy_is_asked_whether_it_does() -> None:
    _, stats, words = play(a_copy_is_trained)
    assert stats["steps"] == 12
    (said,) = words
    assert "no gradient has reached the attached model" in said


@pytest.mark.slow
def test_a_scripted_module_trains_as_its_source() -> None:
    def scripted(swarm: LocalMember) -> Script:
        script = Script(swarm)
        with warnings.catch_warnings(action="ignore"):
            script.model = torch.jit.script(script.model)
        script.optimizer = adamw(script.model.parameters())
        script.attach()
        for _ in script.going():
            script.step()
        return script

    anchor, stats, words = play(scripted)
    assert (words, stats["counted"]) == ([], ROUNDS)
    assert torch.allclose(anchor, wanted(), atol=1e-6)
