"""A run of two in virtual time: one ordinary script, and one as users of trainers and optimizers
have reported it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import Attachment, attach

H, ROUNDS, BATCH, MOST = 5, 12, 32, 90
SETTINGS = RunSettings(
    sync_every=H, rounds=ROUNDS, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6)
)
SAID_AT_THE_END = "is finished"


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


class Script:
    """A loop as users write it; data of one half of the inputs."""

    def __init__(
        self,
        swarm: LocalMember,
        make: Callable[[Any], Any] = adamw,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.swarm = swarm
        self.model: nn.Module = net(dtype)
        self.optimizer = make(self.model.parameters())
        self.draw = torch.Generator().manual_seed(swarm.index)
        self.steps = 0
        self.sync: Attachment

    def attach(self, optimizer: Any = ..., **more: Any) -> Script:
        given = self.optimizer if optimizer is ... else optimizer
        self.sync = attach(
            self.model, given, self.swarm, batch_size=BATCH, clock=self.swarm.clock, **more
        )
        return self

    def loss(self, model: nn.Module | None = None) -> Tensor:
        inputs = torch.randn(BATCH, 8, generator=self.draw)
        inputs[:, 0] = inputs[:, 0].abs() * (2 * self.swarm.index - 1)
        model = self.model if model is None else model
        outputs = model(inputs.to(next(model.parameters()).dtype)).float()
        return (outputs - inputs.sin().sum(1, keepdim=True)).square().mean()

    def going(self) -> Iterator[int]:
        """Iterations, each some time after the last one."""
        while not self.sync.done and self.steps < MOST:
            yield self.steps
            self.steps += 1
            self.swarm.sleep(0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def ordinary(swarm: LocalMember) -> Script:
    script = Script(swarm).attach()
    for _ in script.going():
        script.step()
    return script


@contextmanager
def hearing() -> Generator[list[str]]:
    """Warnings, without those that a finished run gives."""
    words = list[str]()

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if SAID_AT_THE_END not in record.getMessage():
                words.append(record.getMessage())

    handler = Hearing(logging.WARNING)
    logging.getLogger("atoll").addHandler(handler)
    try:
        yield words
    finally:
        logging.getLogger("atoll").removeHandler(handler)


def anchor_of(script: Script) -> Tensor:
    with script.sync.evaluate_anchor():
        return torch.cat([p.detach().float().reshape(-1) for p in script.model.parameters()])


def play(odd: Callable[[LocalMember], Script]) -> tuple[Tensor, dict[str, int | float], list[str]]:
    """The last anchor, the odd member's stats and what was said."""

    def each(swarm: Swarm) -> tuple[Tensor, dict[str, int | float]]:
        assert isinstance(swarm, LocalMember)
        script = odd(swarm) if swarm.index else ordinary(swarm)
        return anchor_of(script), script.sync.stats

    with hearing() as words:
        found = LocalSwarm(2, settings=SETTINGS, latency_s=0.01).run(each)
    (anchor, _), (_, stats) = found
    return anchor, stats, words


@functools.cache
def wanted() -> Tensor:
    return play(ordinary)[0]


def way_of_the_run() -> tuple[Tensor, float]:
    """The anchor that ordinary members come to, and how far that is from where it began."""
    anchor = wanted()
    start = torch.cat([p.detach().reshape(-1) for p in net().parameters()])
    return anchor, float((anchor - start).norm())


def both(script: Callable[[LocalMember], Any], **more: Any) -> tuple[list[Any], list[str]]:
    """What the script returns at each of two members, and what was said, each line once."""

    def each(swarm: Swarm) -> Any:
        assert isinstance(swarm, LocalMember)
        return script(swarm)

    settings = msgspec.structs.replace(SETTINGS, **more)
    with hearing() as words:
        found = LocalSwarm(2, settings=settings, latency_s=0.01).run(each)
    return list(found), list(dict.fromkeys(words))
