"""More of what users of trainers, optimizers and adapters have reported, in a run of two: what is
right stays right, and what is not is told with what to do.

Each names the thread that it is taken from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reported_kit import BATCH, ROUNDS, H, Script, adamw, both, play
from seeds import RARE
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember

BEGIN_S = 5.0  # both have entered the run


def with_model(swarm: LocalMember, model: nn.Module) -> Script:
    """The script of this model, whose trainable parameters are trained."""
    mine = Script(swarm)
    mine.model = model
    mine.optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    return mine


def reported(swarm: LocalMember, beginning: str) -> dict[str, float]:
    found = dict[str, float]()
    for each in swarm.reports:
        found |= {name: value for name, value in each.items() if name.startswith(beginning)}
    return found


# ---- 1: weights that the script did not train


class Adapted(nn.Module):
    """A frozen layer with factors beside it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 16).to(dtype).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, 8) / 3)
        self.up = nn.Parameter(torch.zeros(16, 4))
        self.leave = nn.Linear(16, 1)

    @property
    def product(self) -> Tensor:
        return self.up.detach() @ self.down.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.base(inputs.to(self.base.weight.dtype)).float()
        return self.leave(torch.tanh(hidden + inputs @ self.down.t() @ self.up.t()))


def adapted(
    change: Callable[[Adapted, int], None], dtype: torch.dtype = torch.float32
) -> Callable[[LocalMember], dict[str, float]]:
    """Factors are trained, and the second member does something to the frozen layer."""

    def script(swarm: LocalMember) -> dict[str, float]:
        model = Adapted(dtype)
        mine = with_model(swarm, model).attach()
        for number in mine.going():
            mine.step()
            if swarm.index:
                change(model, number)
        assert mine.sync.stats["counted"] == ROUNDS
        return reported(swarm, "frozen_")

    return script


def merged_and_left(model: Adapted, number: int) -> None:
    """jingyaogong/minimind#598: factors are added to the layer for an evaluation, and stay in it."""
    if number == 22:
        model.base.weight.data += model.product


def merged_and_taken_out(model: Adapted, number: int) -> None:
    """huggingface/trl#6688, KohakuBlueleaf/LyCORIS#264: added and taken away again in bfloat16, each
    time with another rounding."""
    if number % 10 == 9:
        model.base.weight.data += model.product.bfloat16()
        model.base.weight.data -= model.product.bfloat16()


@pytest.mark.parametrize(
    ("change", "dtype"),
    [(merged_and_left, torch.float32), (merged_and_taken_out, torch.bfloat16)],
)
def test_a_frozen_layer_that_one_member_changes_is_named(
    change: Callable[[Adapted, int], None], dtype: torch.dtype
) -> None:
    reports, (line,) = both(adapted(change, dtype))
    assert line.startswith(
        "frozen, no part of the run, and changed here by the script: base.weight"
    )
    assert "include=['base.weight']" in line
    assert reports == [{}, {"frozen_changed/base.weight": 1.0}]


def test_a_frozen_layer_that_is_put_back_or_converted_is_not() -> None:
    def back_from_a_copy(model: Adapted, number: int) -> None:
        if number % 10 == 9:
            kept = model.base.weight.clone()
            model.base.weight.data += model.product
            model.base.weight.data.copy_(kept)
        if number == 40:
            model.base.double()
            model.base.float()
        if number == 50:
            model.base.bfloat16()

    assert both(adapted(back_from_a_copy)) == ([{}, {}], [])


class Taught(nn.Module):
    """A teacher that follows its student, in parameters without gradients (DINO, MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.leave = nn.Linear(8, 16), nn.Linear(16, 1)
        self.teacher = nn.Linear(8, 16).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, inputs: Tensor) -> Tensor:
        for mine, p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data.lerp_(p.data, 0.05)
        return self.leave(torch.tanh(self.student(inputs)) + 0.1 * self.teacher(inputs))


class Codes(nn.Module):
    """facebookresearch/multimodal#47: the codes are the weight of an embedding, moved by averages of
    what comes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.codes = nn.Embedding(8, 8).requires_grad_(False)
        self.leave = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        nearest = torch.cdist(inputs, self.codes.weight).argmin(1)
        for code in range(8):
            if (nearest == code).any():
                self.codes.weight.data[code].lerp_(inputs[nearest == code].mean(0), 0.1)
        return self.leave(inputs - self.codes(nearest))


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize(("make", "named"), [(Taught, []), (Codes, ["codes.weight"])])
def test_a_teacher_is_a_members_own_and_a_codebook_is_named(
    make: Callable[[], nn.Module], named: list[str]
) -> None:
    def script(swarm: LocalMember) -> dict[str, float]:
        mine = with_model(swarm, make()).attach()
        for _ in mine.going():
            mine.step()
        return reported(swarm, "frozen_")

    reports, words = both(script)
    assert reports == [{f"frozen_changed/{name}": 1.0 for name in named}] * 2
    assert len(words) == len(named)


def swapped_in_at_the_end(swarm: LocalMember) -> Script:
    """official-stockfish/nnue-pytorch#474, pytorch/pytorch#30559: ``optimizer.eval()`` puts averages
    into the model, and nothing takes them out before the last contribution."""
    schedulefree = pytest.importorskip("schedulefree")
    script = Script(swarm, lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-2))
    script.optimizer.train()
    script.attach()
    for number in script.going():
        if number == 28:
            break
        script.step()
    script.optimizer.eval()
    script.sync.finish()
    return script


def dormant_units(swarm: LocalMember) -> Script:
    """timoklein/redo#3: every few steps the unit that is used least begins again."""
    script = Script(swarm).attach()
    model: Any = script.model
    for number in script.going():
        script.step()
        if number % 4 == 3:
            with torch.no_grad():
                worst = int(model[2].weight[0].abs().argmin())
                model[0].weight[worst].normal_(0, 0.3, generator=script.draw)
                model[2].weight[0, worst] = 0.0
    return script


@pytest.mark.slow
@pytest.mark.rota(7)
def test_averages_that_are_left_in_are_dropped_and_units_that_begin_again_are_training() -> None:
    _, stats, (line,) = play(swapped_in_at_the_end)
    assert (stats["counted"], stats["samples_dropped"]) == (6, BATCH)
    assert "after step 28 and not by the optimizer" in line
    _, stats, words = play(dormant_units)
    assert stats["counted"] >= ROUNDS - 1
    assert stats["samples_dropped"] <= H * BATCH  # until it is seen that it recurs
    assert "(0.weight, 2.weight): contributed as training" in words[-1]


def smaller_layers(script: Script) -> None:
    """microsoft/nni#4521, FasterAI-Labs/fasterai#92: pruned layers in place of those that were
    attached, and an optimizer over them."""
    model: Any = script.model
    model[0], model[2] = nn.Linear(8, 12), nn.Linear(12, 1)
    script.optimizer = adamw(model.parameters())


def masked_weights(script: Script) -> None:
    """pytorch/pytorch#24076: pruning renames the weight, which stays the same tensor."""
    model: Any = script.model
    prune.l1_unstructured(model[0], "weight", 0.3)


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (smaller_layers, r"0\.weight is of shape \[12, 8\] now"),
        (masked_weights, r"0\.weight is gone from the model"),
    ],
)
def test_another_model_in_the_middle_is_refused(
    change: Callable[[Script], None], says: str
) -> None:
    def trains(mine: Script) -> None:
        for number in mine.going():
            if number == 12:
                change(mine)
            mine.step()
            if number == 20:
                mine.sync.sync()

    def script(swarm: LocalMember) -> None:
        mine = Script(swarm).attach()
        with pytest.raises(ConfigError, match=says):
            trains(mine)

    both(script)


# ---- 3: trained, attached, and not counted


def without_steep_steps(limit: float) -> Callable[[LocalMember], Script]:
    """Haian-Jin/LVSM#19: steps of long gradients are left out, one of seven or all."""

    def odd(swarm: LocalMember) -> Script:
        script = Script(swarm).attach()
        for number in script.going():
            script.optimizer.zero_grad()
            (script.loss() * (1e6 if number % 7 == 3 else 1.0)).backward()
            norm = nn.utils.clip_grad_norm_(script.model.parameters(), math.inf)
            if float(norm) <= limit:
                script.optimizer.step()
        return script

    return odd


def short_epochs(*, set_to_none: bool) -> Callable[[LocalMember], Script]:
    """huggingface/transformers#2995, timoschick/pet#36: an epoch has fewer batches than a step is to
    accumulate, and gradients are cleared before each."""

    def odd(swarm: LocalMember) -> Script:
        script = Script(swarm).attach()
        for _ in range(90):
            script.model.zero_grad(set_to_none=set_to_none)
            for batch in range(3):
                script.loss().backward()
                if batch % 4 == 3:
                    script.optimizer.step()
            swarm.sleep(0.1)
        return script

    return odd


def functional_loss(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    def loss(values: Any, inputs: Tensor) -> Tensor:
        out = torch.func.functional_call(model, values, inputs)
        return (out - inputs.sin().sum(1, keepdim=True)).square().mean()

    return loss


def parameters_of_ones_own(swarm: LocalMember) -> Script:
    """pytorch/functorch#280: the parameters that are trained are the script's, and those of the model
    stand still."""
    script = Script(swarm).attach()
    own = {name: p.detach().clone() for name, p in script.model.named_parameters()}
    gradients = torch.func.grad_and_value(functional_loss(script.model))
    for _ in script.going():
        found, value = gradients(own, torch.randn(BATCH, 8, generator=script.draw))
        own = {name: p - 0.02 * found[name] for name, p in own.items()}
        script.sync.log(loss=value)
        swarm.sleep(20.0)
    return script


def functional_gradients(swarm: LocalMember) -> Script:
    """pytorch/functorch#372: gradients of torch.func, by which the script changes the model."""
    script = Script(swarm).attach()
    gradients = torch.func.grad(functional_loss(script.model))
    for _ in script.going():
        named = dict(script.model.named_parameters())
        values = {name: p.detach() for name, p in named.items()}
        found = gradients(values, torch.randn(BATCH, 8, generator=script.draw))
        with torch.no_grad():
            for name, p in named.items():
                p.add_(found[name], alpha=-0.02)
    return script


class Lomo(torch.optim.Optimizer):
    """OpenLMLab/LOMO#14, OpenMOSS/CoLLiE#132: has no step(), and steps inside of a backward of its
    own."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})

    def fused_backward(self, loss: Tensor) -> None:
        loss.backward()
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])
            p.grad = None


def fused_backward(swarm: LocalMember) -> Script:
    script = Script(swarm)
    script.optimizer = lomo = Lomo(script.model, 0.02)
    script.attach(on_adopted=lambda moved: None)
    for _ in script.going():
        lomo.fused_backward(script.loss())
    return script


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (short_epochs(set_to_none=False), "256 times and were cleared"),
        *(
            pytest.param(*each, marks=RARE)
            for each in (
                (without_steep_steps(0.0), "65 times and were cleared"),
                (short_epochs(set_to_none=True), "193 times and were cleared"),
                (parameters_of_ones_own, "for 64 iterations no gradient has reached"),
                (functional_gradients, "has set the model's weights 16 times"),
                (fused_backward, "32 times and its weights changed, but no step"),
            )
        ),
    ],
)
def test_training_that_is_not_counted_is_told(
    odd: Callable[[LocalMember], Script], says: str
) -> None:
    _, stats, (line,) = play(odd)
    assert (stats["counted"], stats["steps"]) == (0, 0)
    assert says in line


@pytest.mark.slow
@pytest.mark.rota(7)
def test_steps_that_are_left_out_at_times_are_not_counted_and_nothing_is_said() -> None:
    _, stats, words = play(without_steep_steps(1e4))
    assert (words, stats["counted"], stats["samples_dropped"]) == ([], ROUNDS, 0)
    assert ROUNDS * H - H <= stats["steps"] <= ROUNDS * H


def zeros_in_a_long_accumulation(swarm: LocalMember) -> Script:
    """Factors of which one is zero at first, so that the other's gradients are."""
    script = with_model(swarm, Adapted()).attach()
    for number in range(300):
        script.loss().backward()
        if number % 150 == 149:
            script.optimizer.step()
            script.optimizer.zero_grad(set_to_none=False)
        swarm.sleep(0.1)
    return script


@pytest.mark.slow
@pytest.mark.rota(7)
def test_gradients_that_are_zero_by_themselves_are_not_cleared() -> None:
    found, words = both(zeros_in_a_long_accumulation)
    assert words == []
    assert [script.sync.stats["steps"] for script in found] == [2, 2]


# ---- 4: what a codec loses


class Experts(nn.Module):
    """bitsandbytes-foundation/bitsandbytes#1849: experts in one tensor of three dimensions. The last
    one is hardly ever asked: its updates are a thousand times as short."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 8, 32) / 3)
        self.down = nn.Parameter(torch.randn(4, 32, 1) / 6)
        self.register_buffer("asked", torch.tensor([1.0, 1.0, 1.0, 1e-3]))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("bi,eio->beo", inputs, self.up))
        out = torch.einsum("beo,eoz->bez", hidden, self.down)
        return (out * self.asked[:, None]).sum(1)  # type: ignore[index]


class Gated(nn.Module):
    """wandb/senpai#669, openai/CLIP#46: a gate that is zero at first, a temperature by its logarithm;
    slopes, and small scales by channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.block, self.leave = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.slopes, self.gate = nn.PReLU(64), nn.Parameter(torch.zeros(1))
        self.scales = nn.Parameter(torch.full((64,), 1e-3))
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.slopes(self.enter(inputs))
        hidden = hidden + self.gate * torch.tanh(self.block(hidden)) + self.scales * hidden
        return self.leave(hidden) * self.temperature.exp() * 0.07


class Layers(nn.Module):
    """mlfoundations/open_clip#831: the rate of each layer is a tenth of the next one's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8 if at == 0 else 32, 32) for at in range(5)])
        self.leave = nn.Linear(32, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return self.leave(inputs)


def by_layers(model: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": list(layer.parameters()), "lr": 1e-2 * 0.1 ** (5 - at)}
        for at, layer in enumerate(model.layers)
    ]
    groups.append({"params": list(model.leave.parameters()), "lr": 1e-2})
    return torch.optim.AdamW(groups)


def plainly(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize("codec", ["int8_dither", "int8", "int4"])
@pytest.mark.parametrize(
    ("make", "optimizer"), [(Experts, plainly), (Gated, plainly), (Layers, by_layers)]
)
def test_each_tensor_and_expert_goes_its_way(
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    codec: str,
) -> None:
    def way(codec: str) -> dict[str, Tensor]:
        def script(swarm: Swarm) -> dict[str, Tensor]:
            assert isinstance(swarm, LocalMember)
            mine = Script(swarm)
            mine.model = make()
            mine.optimizer = optimizer(mine.model)
            start = {name: p.detach().clone() for name, p in mine.model.named_parameters()}
            mine.attach()
            for _ in mine.going():
                mine.step()
            with mine.sync.evaluate_anchor():
                ways = {n: p.detach() - start[n] for n, p in mine.model.named_parameters()}
            return ways | {
                f"{n} {at}": part
                for n, each in ways.items()
                if each.dim() == 3
                for at, part in enumerate(each)
            }

        settings = RunSettings(
            sync_every=H, rounds=ROUNDS, codec=codec, outer=OuterSettings("sgd", 1.0)
        )
        return LocalSwarm(2, settings=settings, latency_s=0.01).run(script)[0]

    right, found = way("fp32"), way(codec)
    for name, value in right.items():
        along = float((found[name] * value).sum() / value.square().sum())
        assert 0.95 < along < 1.05, (name, along)


# ---- 5: buffers


class Routed(nn.Module):
    """pytorch/torchtitan#1593, deepspeedai/DeepSpeed#8358: a bias of the router, by which experts
    that this member asks less are asked more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(8, 4), nn.Linear(8, 4)
        self.expert_bias: Tensor
        self.tokens_per_expert: Tensor
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("tokens_per_expert", torch.zeros(4, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.router(inputs).sigmoid()
        chosen = nn.functional.one_hot((scores + self.expert_bias).argmax(1), 4)
        self.tokens_per_expert += chosen.sum(0)
        self.expert_bias += 0.01 * (chosen.float().mean() - chosen.float().mean(0)).sign()
        return (self.experts(inputs) * scores * chosen).sum(1, keepdim=True)


class Narrow(nn.Module):
    """meta-pytorch/float8_experimental#31: the largest values of the last batches, by which the next
    one is scaled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 1)
        self.amax_history: Tensor
        self.register_buffer("amax_history", torch.zeros(16))

    def forward(self, inputs: Tensor) -> Tensor:
        self.amax_history = self.amax_history.roll(-1)
        self.amax_history[-1] = inputs.detach().abs().amax()
        scale = 448.0 / self.amax_history.amax()
        return self.body((inputs * scale).round() / scale)


class Normalised(nn.Module):
    """thu-ml/tianshou#987, ikostrikov/pytorch-a2c-ppo-acktr-gail#167: sums over all observations, in
    float64, and how many these were."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 1)
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += len(inputs)
        self.mean += (inputs.detach().double().mean(0) - self.mean) * len(inputs) / self.count
        return self.body((inputs - self.mean).float())


@pytest.mark.slow
@pytest.mark.rota(7)
@pytest.mark.parametrize(
    ("make", "learnt"),
    [(Routed, ["expert_bias"]), (Narrow, ["amax_history"]), (Normalised, ["mean", "count"])],
)
def test_what_training_writes_into_buffers_is_named_and_averaged_where_it_is_declared(
    make: Callable[[], nn.Module], learnt: list[str]
) -> None:
    def script(swarm: LocalMember) -> dict[str, Tensor]:
        mine = with_model(swarm, make()).attach()
        for _ in mine.going():
            mine.step()
        with mine.sync.evaluate_anchor():
            return {name: value.clone() for name, value in mine.model.state_dict().items()}

    (one, other), (line,) = both(script)
    assert not torch.equal(one[learnt[0]], other[learnt[0]])
    declared = ", ".join(f'"{name}" = "mean"' for name in learnt)
    assert f"[model] buffers = {{ {declared} }}" in line
    (one, other), words = both(script, buffers=dict.fromkeys(learnt, "mean"))
    assert words == []
    assert all(torch.equal(one[name], other[name]) for name in learnt)
    if make is Normalised:
        assert one["mean"].dtype is torch.float64
        assert float(one["count"]) == pytest.approx(ROUNDS * H * BATCH, rel=0.2)


# ---- 6: data


class WithoutASeed(Sampler[int]):
    """TensorAuto/OpenTau#503: a bare torch.Generator(), which has one seed wherever it is made."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        lots = torch.Generator()
        while True:
            yield from torch.randperm(self.size, generator=lots).tolist()


def numbers(batches: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(BATCH * batches, 8, generator=draw))


def without_a_seed(_: int) -> Iterator[Tensor]:
    data = numbers(64)
    for (inputs,) in DataLoader(data, BATCH, sampler=WithoutASeed(len(data))):
        yield inputs


def without_set_epoch(index: int, seed: int = 0) -> Iterator[Tensor]:
    """pytorch/pytorch#31771, lucidrains/DALLE-pytorch#230: each epoch has the order of the first one,
    and an epoch is two rounds long."""
    data = numbers(2 * H)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=seed)
    while True:
        for (inputs,) in DataLoader(data, BATCH, sampler=sampler):
            yield inputs


def with_a_seed_each(index: int) -> Iterator[Tensor]:
    return without_set_epoch(index, seed=index)


def whole_batches_by_lot(index: int) -> Iterator[Tensor]:
    """The same few batches, in orders that are each member's own."""
    data, lots = numbers(3).tensors[0].split(BATCH), torch.Generator().manual_seed(index)
    while True:
        yield data[int(torch.randint(3, (), generator=lots))]


@pytest.mark.parametrize(
    ("batches", "rounds", "running"),
    [
        (without_set_epoch, 28, 20),
        pytest.param(without_a_seed, 12, 3, marks=RARE),
        pytest.param(with_a_seed_each, 28, 0, marks=RARE),
        pytest.param(whole_batches_by_lot, 60, 0, marks=RARE),
    ],
)
def test_members_that_read_alike_are_told(
    batches: Callable[[int], Iterator[Tensor]], rounds: int, running: int
) -> None:
    """Where batches are told of, as in Trainer and Lightning."""

    def script(swarm: LocalMember) -> int:
        mine, data = Script(swarm).attach(), batches(swarm.index)
        swarm.sleep(BEGIN_S - swarm.clock())
        while not mine.sync.done:
            inputs = next(data)
            mine.sync.first_batches.saw(inputs, mine.sync.round)
            mine.optimizer.zero_grad()
            (mine.model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean().backward()
            mine.optimizer.step()
            swarm.sleep(0.1)
        return max(swarm.same_order.equal.values(), default=0)

    found, words = both(script, rounds=rounds)
    if running:
        assert len(words) == 2
        assert all("reads the same data in the same order" in each for each in words)
        assert all(f"first batches of {running} rounds" in each for each in words)
        assert min(found) >= running
    else:
        assert (found, words) == ([0, 0], [])
