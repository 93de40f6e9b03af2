"""Buffers of a model among members: averaged, compared, or one member's own and said so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach

ROUNDS, H = 5, 4
SETTINGS = RunSettings(sync_every=H, rounds=ROUNDS, codec="fp32")


class Codebook(nn.Module):
    """A codebook by moving averages, as VQ-VAE's (arXiv 1711.00937), set from its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.codebook: Tensor
        self.calls: Tensor
        self.initted: Tensor
        self.register_buffer("codebook", torch.zeros(3, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("initted", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if not self.initted:
                self.codebook.copy_(x[:3])
                self.initted.fill_(True)
            self.codebook.data.lerp_(x[:3], 0.1)
            self.calls += 1
        return self.body(x) + self.codebook.mean(0)


class Normaliser(nn.Module):
    """Observations as reinforcement learning normalises them, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.running_mean: Tensor
        self.running_var: Tensor
        self.count: Tensor
        self.register_buffer("running_mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("running_var", torch.ones(4, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean = self.running_mean.lerp(x.double().mean(0), 0.1)
            self.running_var = self.running_var.lerp(x.double().var(0), 0.1)
            self.count = self.count + len(x)
        return self.body(((x - self.running_mean) / self.running_var.sqrt()).float())


class Centred(nn.Module):
    """The centre of a teacher's outputs (DINO, arXiv 2104.14294)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        self.center = self.center * 0.9 + out.detach().mean(0, keepdim=True) * 0.1
        return out - self.center


class Queue(nn.Module):
    """A queue of negatives (MoCo, arXiv 1911.05722), drawn without a common seed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.queue: Tensor
        self.queue_ptr: Tensor
        self.register_buffer("queue", torch.randn(4, 16, generator=unlike()))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        at = int(self.queue_ptr)
        self.queue[:, at : at + 8] = out.detach().T
        self.queue_ptr[0] = (at + 8) % 16
        return out + out @ self.queue.mean(1, keepdim=True)


class Attention(nn.Module):
    """Constants: a causal mask with infinities, rotary frequencies, position ids; and a cache of
    angles that grows with the sequence.
    """

    def __init__(self, theta: float = 1e4) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.cos_cached: Tensor
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("inv_freq", theta ** -(torch.arange(0, 4, 2) / 4), persistent=False)
        self.register_buffer("position_ids", torch.arange(8).expand((1, -1)))
        self.register_buffer("cos_cached", torch.ones(2, 4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cos_cached = torch.ones(len(self.cos_cached) + 1, 4)
        self.scratch = x.mean(0)
        return self.body(x)


class Spectral(nn.Module):
    """Power iterations of both kinds of spectral_norm, that each member begins elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        new = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        old = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.body = nn.Sequential(new, old)
        with torch.no_grad():
            for name, buffer in self.named_buffers():
                if name.endswith(("_u", "_v")):
                    buffer.copy_(nn.functional.normalize(torch.randn(4, generator=unlike()), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Shadowed(nn.Module):
    """Averages of the weights in buffers, as latent diffusion keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.shadow: Tensor
        self.updates: Tensor
        self.register_buffer("shadow", self.body.weight.detach().clone())
        self.register_buffer("updates", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.shadow.lerp_(self.body.weight.detach(), 0.1)
        self.updates += 1
        return self.body(x)


def observed() -> nn.Module:
    """The observer of quantisation-aware training, whose range is infinite at first."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    return nn.Sequential(
        nn.Linear(4, 4), FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=127)
    )


_seeds = iter(range(10**6))


def unlike() -> torch.Generator:
    """Another one at each call, as without a common seed."""
    return torch.Generator().manual_seed(next(_seeds))


def play(
    make: Callable[[LocalMember], nn.Module], settings: RunSettings = SETTINGS, peers: int = 3
) -> tuple[list[dict[str, Tensor]], list[dict[str, float]]]:
    """The state of each member's model at the run's last anchor, and what each has reported."""

    def script(swarm: Any) -> dict[str, Tensor]:
        torch.manual_seed(5)
        model = make(swarm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = attach(model, optimizer, swarm, batch_size=8, clock=swarm.clock)
        draw = torch.Generator().manual_seed(swarm.index)
        while not sync.done:
            x = torch.randn(8, 4, generator=draw) + swarm.index
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with sync.evaluate_anchor():
            state = {name: value.clone() for name, value in model.state_dict().items()}
        reported = dict[str, float]()
        for each in swarm.reports:
            reported |= {name: v for name, v in each.items() if name.startswith("buffer_")}
        return state, reported  # type: ignore[return-value]

    found: Any = LocalSwarm(peers, settings=settings, latency_s=0.01).run(script, step_s=0.1)
    return [state for state, _ in found], [reported for _, reported in found]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of buffers, each line once."""
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return list(dict.fromkeys(line for line in lines if "finished" not in line))


@pytest.mark.parametrize(
    ("make", "learnt"),
    [
        (Codebook, ["codebook", "initted"]),
        (Normaliser, ["count"]),
        (Centred, ["center"]),
        (
            observed,
            ["1.scale", "1.activation_post_process.min_val", "1.activation_post_process.max_val"],
        ),
    ],
)
def test_what_training_changes_is_named_with_the_line_that_averages_it(
    make: Callable[[], nn.Module], learnt: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    states, reports = play(lambda _: make())
    (line,) = warned(caplog)
    assert line.startswith(f"learnt here, and not averaged: the buffers {', '.join(learnt)}. ")
    declared = ", ".join(f'"{name}" = "mean"' for name in learnt)
    assert f"[model] buffers = {{ {declared} }}" in line
    assert reports == [{f"buffer_learnt/{name}": 1.0 for name in learnt}] * 3
    assert not any(torch.equal(states[0][name], states[1][name]) for name in learnt[:1])


def test_buffers_that_are_declared_are_the_same_at_all_members_after_each_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, buffers={"codebook": "mean", "initted": "mean", "call*": "mean"}
    )
    states, _ = play(lambda _: Codebook(), settings)
    assert warned(caplog) == []
    for name in ("codebook", "calls", "initted"):
        assert all(torch.equal(state[name], states[0][name]) for state in states)
    assert 16 <= states[0]["calls"] <= ROUNDS * H  # of who comes late fewer
    assert states[0]["calls"].dtype is torch.int64
    assert states[0]["initted"].dtype is torch.bool
    assert states[0]["initted"]
    # each member's inputs lie about its index
    assert 0.5 < states[0]["codebook"].mean() < 1.5


def test_running_statistics_of_ones_own_modules_are_averaged() -> None:
    states, _ = play(lambda _: Normaliser())
    assert all(torch.equal(state["running_mean"], states[0]["running_mean"]) for state in states)
    assert torch.equal(states[1]["running_var"], states[2]["running_var"])
    assert states[0]["running_mean"].dtype is torch.float64
    assert 0.5 < states[0]["running_mean"].mean() < 1.5


@pytest.mark.parametrize("make", [Queue, Attention, Spectral, Shadowed, lambda: nn.BatchNorm1d(4)])
def test_constants_caches_queues_and_averages_raise_nothing(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    states, reports = play(lambda _: make())
    assert warned(caplog) == []
    assert reports == [{}] * 3
    assert len(states) == 3


def test_a_constant_that_one_member_has_otherwise_is_named_at_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, reports = play(lambda swarm: Attention(theta=5e5 if swarm.index == 1 else 1e4))
    lines = warned(caplog)
    assert {line.partition(". ")[0] for line in lines} == {
        "buffers that other members have otherwise than this script: inv_freq, at p1",
        "buffers that other members have otherwise than this script: inv_freq, at p0, p2",
    }
    assert reports == [
        {"buffer_differs/inv_freq": 1.0},
        {"buffer_differs/inv_freq": 2.0},
        {"buffer_differs/inv_freq": 1.0},
    ]


def test_a_mask_that_differs_and_one_of_another_type_that_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A member in bfloat16 has the same constants, rounded; another mask is another one."""

    def narrow(swarm: LocalMember) -> nn.Module:
        model = Attention()
        if swarm.index == 2:
            model.inv_freq = model.inv_freq.to(torch.bfloat16)
        return model

    assert play(narrow)[1] == [{}] * 3

    def other(swarm: LocalMember) -> nn.Module:
        model = Attention()
        if swarm.index == 2:
            model.mask = torch.full((8, 8), -torch.inf).triu(3)
            model.position_ids = torch.arange(1, 9).expand((1, -1))
        return model

    differs = {"buffer_differs/mask": 1.0, "buffer_differs/position_ids": 1.0}
    assert play(other)[1] == [differs, differs, dict.fromkeys(differs, 2.0)]
    assert "mask, position_ids" in warned(caplog)[0]


def test_a_buffer_that_is_declared_the_same_may_not_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = msgspec.structs.replace(SETTINGS, buffers={"center": "same"})
    _, reports = play(lambda _: Centred(), settings)
    assert [line.partition(". ")[0] for line in warned(caplog)] == [
        'declared "same" in the run\'s manifest, and changed here since attach(): center'
    ]
    assert reports == [{"buffer_learnt/center": 1.0}] * 3
    caplog.clear()
    settings = msgspec.structs.replace(SETTINGS, buffers={"center": "own"})
    assert play(lambda _: Centred(), settings)[1] == [{}] * 3
    assert warned(caplog) == []


def test_a_late_member_takes_the_codebook_and_does_not_begin_its_own() -> None:
    """A flag that goes with it is averaged, too: else its first batch would be the codebook."""
    settings = msgspec.structs.replace(
        SETTINGS, rounds=8, buffers={"codebook": "mean", "initted": "mean"}
    )
    first = dict[int, Tensor]()

    def script(swarm: Any) -> Tensor:
        torch.manual_seed(5)
        model = Codebook()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = attach(model, optimizer, swarm, batch_size=8, clock=swarm.clock)
        first[swarm.index] = model.codebook.clone()
        assert bool(model.initted) == (sync.round > 0)
        while not sync.done:
            model(torch.full((8, 4), float(swarm.index))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.codebook.clone()

    swarm = LocalSwarm(3, settings=settings, latency_s=0.01).join_at(2, 1.7)
    found = swarm.run(script, step_s=0.1)
    assert first[2].abs().max() > 0
    assert all(torch.equal(each, found[0]) for each in found)
