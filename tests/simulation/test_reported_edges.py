"""Data, buffers, frozen parts, numbers and schedules as users of trainers have reported them, in a
run of two: what is right stays right, and what is not is told with what to do.

Each names the thread that it is taken from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from reported_kit import (
    BATCH,
    MOST,
    ROUNDS,
    H,
    Script,
    adamw,
    both,
    ordinary,
    play,
    wanted,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, IterableDataset

from atoll.node.simulation.local_member import LocalMember

pytestmark = pytest.mark.slow
BEGIN_S = 5.0  # both have entered the run


# ---- 5: buffers


class Made(Script):
    """With a model of the thread's kind over the eight inputs."""

    def __init__(self, swarm: LocalMember, model: nn.Module) -> None:
        super().__init__(swarm)
        self.model = model
        self.optimizer = adamw([p for p in model.parameters() if p.requires_grad])

    def trained(self) -> dict[str, Tensor]:
        """The state at the run's last anchor."""
        self.attach()
        for _ in self.going():
            self.step()
        with self.sync.evaluate_anchor():
            return {name: value.clone() for name, value in self.model.state_dict().items()}


class Quantizer(nn.Module):
    """speechbrain/speechbrain#2814: a random projection of BEST-RQ that nothing trains, drawn by
    each process from a seed of its own.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 1)
        draw = torch.Generator().manual_seed(seed)
        self.projection: Tensor
        self.register_buffer("projection", torch.randn(8, 8, generator=draw))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(torch.tanh(inputs @ self.projection))


class Assigned(nn.Module):
    """pytorch/pytorch#63916: a buffer that forward assigns, and does not write into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 1)
        self.level: Tensor
        self.register_buffer("level", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.level = 0.9 * self.level + 0.1 * inputs.detach().mean(0)
        return self.body(inputs - self.level)


class Revived(nn.Module):
    """espnet/espnet#6284, ZhikangNiu/encodec-pytorch#15: a codebook by moving averages whose unused
    entries are replaced by inputs, by lot.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 1)
        self.codes: Tensor
        self.used: Tensor
        self.register_buffer("codes", torch.randn(8, 8))
        self.register_buffer("used", torch.ones(8))
        self.draw = torch.Generator().manual_seed(seed)

    def forward(self, inputs: Tensor) -> Tensor:
        nearest = torch.cdist(inputs.detach(), self.codes).argmin(1)
        if self.training:
            hot = nn.functional.one_hot(nearest, 8).float()
            self.used.lerp_(hot.sum(0), 0.1)
            means = hot.t() @ inputs.detach() / hot.sum(0).clamp_min(1)[:, None]
            moved = self.codes.lerp(means, 0.1)
            self.codes.copy_(torch.where(hot.sum(0)[:, None] > 0, moved, self.codes))
            dead = self.used < 0.5
            lots = torch.randint(len(inputs), (8,), generator=self.draw)
            self.codes.copy_(torch.where(dead[:, None], inputs.detach()[lots], self.codes))
            self.used.copy_(torch.where(dead, torch.ones(8), self.used))
        return self.body(inputs - self.codes[nearest])


def test_what_processes_draw_unlike_is_named() -> None:
    _, words = both(lambda swarm: Made(swarm, Quantizer(swarm.index)).trained())
    assert words
    assert all("projection" in each for each in words)
    _, words = both(lambda swarm: Made(swarm, Quantizer(3)).trained())
    assert words == []


@pytest.mark.parametrize("kind", ["assigned", "revived"])
def test_buffers_that_forward_changes_are_named_and_averaged_where_it_is_declared(
    kind: str,
) -> None:
    def script(swarm: LocalMember) -> dict[str, Tensor]:
        return Made(swarm, Assigned() if kind == "assigned" else Revived(swarm.index)).trained()

    names = ["level"] if kind == "assigned" else ["codes", "used"]
    states, words = both(script)
    assert not torch.equal(states[0][names[0]], states[1][names[0]])
    declared = ", ".join(f'"{name}" = "mean"' for name in names)
    assert any(f"[model] buffers = {{ {declared} }}" in each for each in words)
    states, words = both(script, buffers=dict.fromkeys(names, "mean"))
    assert words == []
    for name in names:
        assert torch.equal(states[0][name], states[1][name])


# ---- 6: data, and parts that are frozen


class Stream(IterableDataset[Tensor]):
    """huggingface/datasets#5360: the same lines in each process."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randn(8, generator=draw)


def reading(batches: Callable[[int], Iterator[Tensor]]) -> list[str]:
    """What is said where each member reads these."""

    def script(swarm: LocalMember) -> None:
        mine = Script(swarm).attach()
        swarm.sleep(BEGIN_S - swarm.clock())
        data = batches(swarm.index)
        for _ in mine.going():
            inputs = next(data)
            mine.optimizer.zero_grad()
            (mine.model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean().backward()
            mine.optimizer.step()

    return both(script)[1]


def streamed(_: int) -> Iterator[Tensor]:
    return iter(DataLoader(Stream(0), batch_size=BATCH))


def seeded_alike(_: int) -> Iterator[Tensor]:
    """huggingface/transformers#11254 and scripts with ``set_seed(42)``: one seed, one order."""
    data = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    order = torch.Generator().manual_seed(42)
    while True:
        for (inputs,) in DataLoader(
            torch.utils.data.TensorDataset(data), BATCH, shuffle=True, generator=order
        ):
            yield inputs


def in_turn(_: int) -> Iterator[Tensor]:
    """huggingface/finetrainers#415: in turn, each process from the first sample on."""
    data = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    while True:
        yield from data.split(BATCH)


@pytest.mark.parametrize("batches", [streamed, seeded_alike, in_turn])
def test_members_that_read_alike_are_told(batches: Callable[[int], Iterator[Tensor]]) -> None:
    words = reading(batches)
    assert len(words) == 2
    assert all("reads the same data in the same order as this member" in each for each in words)


def test_members_that_split_a_stream_are_not() -> None:
    def split(index: int) -> Iterator[Tensor]:
        for number, inputs in enumerate(streamed(index)):
            if number % 2 == index:
                yield inputs

    assert reading(split) == []


def unfrozen(script: Script, number: int) -> None:
    """facebookresearch/detectron2#2486: a head of the model is unfrozen in the middle."""
    if number == 20:
        script.model.requires_grad_(True)
        model: Any = script.model
        script.optimizer.add_param_group({"params": list(model[0].parameters())})


def unfrozen_in_the_optimizer(script: Script, number: int) -> None:
    """Lightning's BaseFinetuning: the optimizer has all from the start."""
    if number == 20:
        script.model.requires_grad_(True)


def refrozen(script: Script, number: int) -> None:
    """JDAI-CV/fast-reid#178: frozen at first, trained, and frozen again."""
    if number == 20:
        script.model.requires_grad_(True)
    if number == 40:
        script.model[0].requires_grad_(False)  # type: ignore[index]


@pytest.mark.parametrize("change", [unfrozen, unfrozen_in_the_optimizer, refrozen])
@pytest.mark.parametrize("include", [False, True])
def test_parts_that_are_unfrozen_later_belong_to_the_run_or_are_named(
    change: Callable[[Script, int], None], include: bool
) -> None:
    def script(swarm: LocalMember) -> tuple[Tensor, Tensor]:
        mine = Script(swarm)
        model: Any = mine.model
        first = model[0]
        first.requires_grad_(False)
        given = model[2] if change is unfrozen else model
        mine.optimizer = adamw(list(given.parameters()))
        start = first.weight.detach().clone()
        mine.attach(include=mine.model.parameters() if include else ())
        for number in mine.going():
            change(mine, number)
            mine.step()
        with mine.sync.evaluate_anchor():
            return first.weight.detach().clone(), start

    found, words = both(script)
    (one, start), (other, _) = found
    if include:
        assert words == []
        assert torch.equal(one, other)
        assert not torch.equal(one, start)
    else:
        assert any("include" in each for each in words), words


# ---- 9: numbers


def logged(values: Callable[[int], dict[str, Any]]) -> Callable[[LocalMember], Script]:
    def script(swarm: LocalMember) -> Script:
        mine = Script(swarm).attach()
        for number in mine.going():
            mine.step()
            mine.sync.log(**values(number))
            swarm.report(values(number))
        stats = mine.sync.stats
        assert all(isinstance(v, int | float) and math.isfinite(v) for v in stats.values()), stats
        return mine

    return script


@pytest.mark.parametrize(
    ("values", "named"),
    [
        # marin-community/levanter#735: a tracker that ends on a device's name
        (lambda _: {"device_kind": "TPU v4", "loss": 1.0}, ["'device_kind'"]),
        # aws/sagemaker-experiments#126: NaN, infinity, None
        (lambda n: {"f1": None, "auc": math.nan, "top": math.inf, "n": n}, ["'f1'"]),
        # treeverse/dvclive#253, radixark/miles#1403: numbers of numpy and of torch
        (lambda _: {"lr": np.float32(0.1), "loss": torch.tensor(2.0), "n": np.int64(3)}, []),
        # huggingface/transformers#4883: whole tensors and texts among the logs
        (lambda _: {"grads": torch.ones(3), "note": "ok"}, ["'grads'", "'note'"]),
    ],
)
def test_what_is_logged_ends_no_training(
    values: Callable[[int], dict[str, Any]], named: list[str]
) -> None:
    anchor, stats, words = play(logged(values))
    assert torch.equal(anchor, wanted())
    assert stats["counted"] == ROUNDS
    assert all(sum(name in each for each in words) == 2 for name in named)  # log() and report()
    assert len(words) == 2 * len(named)


# ---- 10: schedules of plain loops


def scheduled(
    make: Callable[[torch.optim.Optimizer, int], Any], micro: int = 1, every: int = 1
) -> Callable[[LocalMember], Script]:
    """``make``: of the optimizer and the run's steps. The schedule steps after each of ``micro``
    batches that a step accumulates, of each ``every``-th step.
    """

    def script(swarm: LocalMember) -> Script:
        mine = Script(swarm)
        schedule = make(mine.optimizer, H * ROUNDS)
        mine.attach()
        swarm.sleep(BEGIN_S - swarm.clock())
        for number in mine.going():
            mine.optimizer.zero_grad()
            for at in range(micro):
                (mine.loss() / micro).backward()
                if at == micro - 1:
                    mine.optimizer.step()
                if number % every == every - 1:
                    schedule.step()
        return mine

    return script


def transformers_cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Of transformers and diffusers: after its end the rate goes up again."""

    def way(step: int, *, num_training_steps: int) -> float:
        return max(0.0, 0.5 * (1 + math.cos(math.pi * step / num_training_steps)))

    return schedulers.LambdaLR(optimizer, functools.partial(way, num_training_steps=steps))


LATE = "when the run ends"


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        # ScrollPrize/villa#1495: made of epochs, stepped each iteration
        (scheduled(lambda o, _: transformers_cosine(o, 6)), "ends at 10 % of the run's steps"),
        (
            scheduled(lambda o, _: schedulers.PolynomialLR(o, 6)),
            "ends at 10 % of the run's steps, and the rate is 0 from there",
        ),
        # vllm-project/speculators#1104: of all epochs, where the run ends before
        (scheduled(lambda o, n: transformers_cosine(o, 4 * n)), f"at 25 % of its way {LATE}"),
        # huggingface/accelerate#963: stepped with each batch that is accumulated
        (scheduled(transformers_cosine, micro=4), "ends at 25 % of the run's steps"),
        # huggingface/diffusers#4387: made for batches, stepped with steps
        (
            scheduled(lambda o, n: schedulers.LinearLR(o, 1.0, 0.0, 4 * n)),
            f"at 25 % of its way {LATE}",
        ),
        # Lightning-AI/pytorch-lightning#1476: stepped by epochs, made of steps
        (
            scheduled(lambda o, n: schedulers.CosineAnnealingLR(o, n), every=4),
            "of its steps end with the run",
        ),
    ],
)
def test_schedules_that_do_not_end_with_the_run_are_named(
    script: Callable[[LocalMember], Script], said: str
) -> None:
    found, words = both(script)
    assert [each.sync.stats["counted"] for each in found] == [ROUNDS, ROUNDS]
    (line,) = [each for each in words if "the learning rate is 0" not in each]
    assert said in line


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize(
    "script",
    [
        scheduled(transformers_cosine),
        scheduled(lambda o, n: transformers_cosine(o, 4 * n), micro=4),
        scheduled(lambda o, n: schedulers.CosineAnnealingLR(o, n // 4), every=4),
    ],
)
def test_schedules_that_do_are_not(script: Callable[[LocalMember], Script]) -> None:
    found, words = both(script)
    assert ([each.sync.stats["counted"] for each in found], words) == ([ROUNDS, ROUNDS], [])


def test_the_ordinary_script_is_told_nothing() -> None:
    assert play(ordinary)[2] == []
    assert H * ROUNDS < MOST


# ---- the same order at unlike speeds


def at_unlike_speeds(
    batches: Callable[[int], Iterator[Tensor]], *, slower: float = 0.16
) -> list[str]:
    """What is said where each member tells of its batches, as Trainer's and Lightning's callbacks
    do, and member 1 makes fewer steps in a round.
    """

    def script(swarm: LocalMember) -> int:
        mine, data = Script(swarm).attach(), batches(swarm.index)
        swarm.sleep(BEGIN_S - swarm.clock())
        while not mine.sync.done:
            inputs = next(data)
            mine.sync.first_batches.saw(inputs, mine.sync.round)
            mine.optimizer.zero_grad()
            (mine.model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean().backward()
            mine.optimizer.step()
            mine.steps += 1
            swarm.sleep(slower if swarm.index else 0.1)
        return mine.steps

    (many, fewer), words = both(script, rounds=24)
    assert fewer < many
    return words


def few_samples(index: int) -> Iterator[Tensor]:
    """One by one, by lot, of which each member has its own."""
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    order = torch.Generator().manual_seed(index)
    while True:
        for at in torch.randperm(len(data), generator=order).tolist():
            yield data[at : at + 1]


@pytest.mark.parametrize("batches", [streamed, in_turn])
def test_a_slower_member_that_reads_the_same_later_is_named(
    batches: Callable[[int], Iterator[Tensor]],
) -> None:
    """huggingface/datasets#3423 and #5360, where a machine is slower."""
    words = at_unlike_speeds(batches)
    assert words
    assert all("reads the same data in the same order as this member" in each for each in words)


def test_members_that_draw_from_the_same_few_samples_are_not() -> None:
    assert at_unlike_speeds(few_samples) == []
