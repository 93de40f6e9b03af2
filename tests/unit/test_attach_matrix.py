"""attach with models and loops as users write them: every kind of loop, adapters only, tied
weights, compiled and narrow models, accelerate.

More of the matrix: test_optim_attach.py (counting, running statistics, refusals),
tests/process/test_ranks.py (DDP, FSDP2, TP) and tests/process/test_examples.py (Trainer, Lightning,
torchrun).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.optim import Attachment, SoloSwarm, attach
from atoll.optim.model.flat import FlatVector

H = 3
SETTINGS = RunSettings(sync_every=H, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6))


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter beside it (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


class Tied(nn.Module):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = (
            nn.Embedding(6, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 6, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(inputs))))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def names(attachment: Attachment) -> list[str]:
    return [spec.name for spec in attachment._flat.layout.tensors]


def test_only_adapters_are_trained_and_sent() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(nn.Linear(5, 6), 2), nn.Tanh(), Adapted(nn.Linear(6, 3), 2))
    base = {name: value.clone() for name, value in model.state_dict().items() if "base" in name}
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-2
    )
    swarm = SoloSwarm(SETTINGS)
    attachment = attach(model, optimizer, swarm)
    train(model, optimizer, 2 * H)
    assert names(attachment) == ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"]
    assert (attachment.round, swarm.anchor().numel) == (2, 2 * (5 + 6) + 2 * (6 + 3))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in base.items())
    assert not torch.equal(model[0].up.weight, torch.zeros(6, 2))  # type: ignore[union-attr]


def test_tied_weights_stay_one_tensor_and_are_counted_once() -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    swarm = SoloSwarm(SETTINGS)
    attachment = attach(model, optimizer, swarm)
    for _ in range(H):
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert names(attachment) == ["embedding.weight", "middle.weight", "middle.bias"]
    assert model.head.weight is model.embedding.weight
    anchor = torch.empty(swarm.anchor().numel)
    swarm.anchor().copy_into(anchor)
    assert torch.equal(model.head.weight.detach().reshape(-1), anchor[:24])


def batches() -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, 5, generator=draw)


def ordinary(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield optimizer
    for inputs in batches():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        yield optimizer


def closure(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    optimizer, data = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), batches()
    yield optimizer
    for inputs in data:

        def evaluate(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            (loss := model(inputs).square().mean()).backward()
            return loss

        optimizer.step(evaluate)
        yield optimizer


def accumulated(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches()
    yield optimizer
    while True:
        optimizer.zero_grad()
        for _ in range(3):
            (model(next(data)).square().mean() / 3).backward()
        optimizer.step()
        yield optimizer


def scheduled(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    steps = ordinary(model)
    yield (optimizer := next(steps))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    for _ in steps:
        scheduler.step()
        yield optimizer


def scaled(fused: bool) -> Callable[[nn.Module], Iterator[torch.optim.Optimizer]]:
    """Mixed precision; every third gradient overflows and is skipped."""

    def loop(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        yield optimizer
        for number, inputs in enumerate(batches()):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(inputs).square().mean()
            scaler.scale(loss.float() * (float("inf") if number % 3 == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if number % 3 != 1:
                yield optimizer

    return loop


def compiled(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    return ordinary(torch.compile(model, backend="eager"))  # type: ignore[arg-type]


LOOPS = {
    "ordinary": ordinary,
    "closure": closure,
    "accumulation": accumulated,
    "scheduler": scheduled,
    "GradScaler": scaled(fused=False),
    "GradScaler, fused": scaled(fused=True),
    "torch.compile": compiled,
}


@pytest.mark.filterwarnings("ignore")  # torch warns about itself
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_it_does_alone_and_its_real_steps_count(loop: str) -> None:
    """Between rounds to the bit. A round of the mean of one ends every H steps; its rounding is all
    that tells them apart after it.
    """
    alone, member = net(), net()
    mine, theirs = LOOPS[loop](member), LOOPS[loop](alone)
    settings = RunSettings(sync_every=H, codec="fp32", method="local_sgd")
    attachment = attach(member, next(mine), SoloSwarm(settings))
    next(theirs)
    for step in range(1, 3 * H + 1):
        next(mine)
        next(theirs)
        if step < H:
            assert all(
                torch.equal(*pair)
                for pair in zip(member.parameters(), alone.parameters(), strict=True)
            )
        assert (attachment.stats["steps"], attachment.round) == (step, step // H)
    for here, there in zip(member.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch warns about itself
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_trains_to_the_same_bits_under_the_same_names(backend: str) -> None:
    plain, inside = net(), net()
    compiled = torch.compile(inside, backend=backend)
    for model in (plain, compiled):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
        train(model, optimizer, 2 * H)
        assert attachment.round == 2
        assert names(attachment) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for here, there in zip(
        plain.parameters(), inside.parameters(), strict=True
    ):  # inductor's kernels round otherwise than eager ones
        assert (
            torch.equal(here, there)
            if backend == "eager"
            else torch.allclose(here, there, rtol=1e-4, atol=1e-5)
        )
    other = (
        net()
    )  # torch.compile has wrapped the step of this optimizer by now, so as never to compile it
    attach(other, torch.optim.LBFGS(other.parameters()), SoloSwarm(SETTINGS)).detach()


def test_a_bfloat16_model_has_a_float32_anchor_that_moves_by_less_than_it_can_hold() -> None:
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    swarm = SoloSwarm(
        RunSettings(sync_every=1, codec="fp32", outer=OuterSettings("sgd", 1 / 512, 0.0))
    )
    attach(model, optimizer, swarm)
    before = FlatVector(model)
    start, anchor = torch.empty(before.numel), torch.empty(before.numel)
    before.write_to(start)
    train(model, optimizer, 1)
    swarm.anchor().copy_into(anchor)
    moved = anchor != start
    lost = (anchor.to(torch.bfloat16) == start.to(torch.bfloat16)) & moved
    assert (
        int(moved.sum()) > int(lost.sum()) > 0
    )  # some of its movement bfloat16 does not see; the anchor keeps it
    now = torch.empty(before.numel)
    before.write_to(now)
    assert torch.equal(now, anchor.to(torch.bfloat16).float())


def test_frozen_parameters_stay_what_they_are_and_are_not_sent() -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    frozen = [value.detach().clone() for value in model[0].parameters()]  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # of all, as many scripts have it
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    train(model, optimizer, 2 * H)
    assert (names(attachment), attachment.round) == (["2.weight", "2.bias"], 2)
    assert all(torch.equal(*pair) for pair in zip(frozen, model[0].parameters(), strict=True))  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # accelerate's own, at import
@pytest.mark.parametrize("before", [True, False])
def test_accelerate_with_accumulation(before: bool) -> None:
    """Its optimizer steps only when gradients are whole; only these steps count."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS)) if before else None
    wrapped, stepper = accelerator.prepare(model, optimizer)
    attachment = attachment or attach(wrapped, stepper, SoloSwarm(SETTINGS))
    for _ in range(2 * H):
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(torch.ones(4, 5)).square().mean())
            attachment.samples(4)
            stepper.step()
            stepper.zero_grad()
    assert (attachment.round, attachment.stats["steps"], attachment.stats["samples_counted"]) == (
        1,
        H,
        2 * 4 * H,
    )


def test_a_model_that_is_moved_after_it_was_attached_is_followed() -> None:
    """`Module.to` keeps parameters and replaces buffers: the anchor's running statistics are those
    of the model, not of what it was.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    model.double()
    train(model, optimizer, H)
    assert attachment.round == 1
    live = model[1].running_mean
    assert isinstance(live, Tensor)
    with attachment.evaluate_anchor() as anchor:
        assert anchor.round == 1
        out = torch.empty(anchor.numel)
        anchor.copy_into(out)
        assert torch.equal(out[-12:-6], live.float())
    assert live.abs().max() > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [("resized", "2.weight is of shape \\[4, 6\\] now"), ("gone", "2.weight is gone")],
)
def test_a_model_that_becomes_another_after_it_was_attached_is_refused(
    change: str, words: str
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    train(model, optimizer, 1)
    model[2] = nn.Linear(6, 4) if change == "resized" else nn.Identity()
    with pytest.raises(ConfigError, match=words):
        train(model, optimizer, H)
    assert attachment.stats["samples_counted"] == 0


def test_what_is_unfrozen_after_it_was_attached_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    train(model, optimizer, H)
    model[0].requires_grad_(True)
    train(model, optimizer, 2 * H)
    assert attachment.round == 3
    (line,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert line.startswith("trained here by now, and no part of the run")
    assert "attached, or not there: 0.weight, 0.bias. " in line


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_at_the_end_of_a_schedule_that_falls_to_zero_are_steps(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    """A loop that ends with the run must not wait for ever."""
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 2 * H - 1)
    assert attachment.round == 2
