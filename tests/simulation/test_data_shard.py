"""Shards of many members in virtual time: clean runs, unequal speeds, overlap, churn; and exact
resume of one, or of all, 50 seeds each.
"""

from __future__ import annotations

import copy
from collections import Counter
from random import Random
from typing import Any, Literal

import msgspec
import pytest
import torch
from seeds import seeds
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import Attachment, attach
from atoll.optim.data.shard import Shard

SIZE, BATCH, H = 1200, 4, 4
SETTINGS = RunSettings(
    sync_every=H, rounds=12, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6)
)


class Points(Dataset[tuple[Tensor, Tensor, int]]):
    """A linear problem; every sample knows its number."""

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(size, 6, generator=draw)
        self.targets = self.inputs @ torch.randn(6, 2, generator=draw)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


class Trained:
    """What one life of a member has read, and which of it was counted."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.counted: list[int] = []
        self.read: list[int] = []
        self.digests: dict[int, str] = {}
        self.displaced = 0
        self.steps_s: list[float] = []


def script(lives: list[Trained], saved: dict[int, Any] | None = None, size: int = SIZE) -> Any:
    """A plain loop. With ``saved`` it writes a checkpoint after every step, and goes on from the
    one it finds.
    """
    points = Points(size)

    def train(swarm: LocalMember) -> Trained:
        life = Trained()
        lives.append(life)
        torch.manual_seed(7)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        before = [0]

        def on_round(outcome: Any) -> None:
            samples = attachment.stats["samples_counted"] - before[0]
            before[0] += samples
            life.counted += life.waiting[:samples]
            del life.waiting[:samples]

        attachment = attach(model, optimizer, swarm, clock=swarm.clock, on_round=on_round)
        if saved and swarm.index in saved:
            parameters, state, progress, waiting = saved[swarm.index]
            model.load_state_dict(parameters)
            optimizer.load_state_dict(state)
            attachment.load_state_dict(progress)
            life.waiting, before[0] = list(waiting), attachment.stats["samples_counted"]
        data = swarm.shard(DataLoader(points, batch_size=BATCH, shuffle=True))
        while not attachment.done:
            _pass(life, model, optimizer, attachment, data)
            life.displaced = data.displaced
        return life

    def _pass(
        life: Trained,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        attachment: Attachment,
        data: Shard,
    ) -> None:
        member = attachment.swarm
        assert isinstance(member, LocalMember)
        for inputs, targets, numbers in data:
            life.read += numbers.tolist()
            life.waiting += numbers.tolist()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            life.steps_s.append(member.clock())
            if saved is not None:
                state = (
                    model.state_dict(),
                    optimizer.state_dict(),
                    attachment.state_dict(),
                    life.waiting,
                )
                saved[member.index] = copy.deepcopy(state)
                life.digests[attachment.round] = state[2]["strands"]["0"]["digest"]
            if attachment.done:
                return

    return train


def counted(lives: list[Trained]) -> Counter[int]:
    return Counter(sample for life in lives for sample in life.counted)


@pytest.mark.parametrize("overlap", ["none", "late", "eager"])
@pytest.mark.parametrize("speeds", [(0.25, 0.25, 0.25), (0.1, 0.25, 0.6)])
def test_on_a_clean_run_no_sample_is_seen_twice_and_none_is_left_out(
    overlap: Literal["none", "late", "eager"], speeds: tuple[float, ...]
) -> None:
    settings = msgspec.structs.replace(SETTINGS, overlap=overlap, rounds=20)
    lives, size = list[Trained](), 300
    LocalSwarm(3, settings=settings, latency_s=0.02).run(script(lives, size=size), step_s=speeds)
    seen = Counter(sample for life in lives for sample in life.read)
    epochs, more = divmod(sum(seen.values()), size)
    assert epochs >= 1
    assert Counter(seen.values()) == Counter(
        {epochs: size - more, epochs + 1: more}
    )  # no sample is an epoch ahead of another
    assert [life.displaced for life in lives] == [0, 0, 0]
    assert (
        counted(lives) <= seen
    )  # with overlap the last contributions are under way when the run is done
    assert overlap != "none" or counted(lives) == seen


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_with_churn_no_certified_work_is_of_the_same_samples(seed: int) -> None:
    """Members are late, killed and frozen; within the first epoch what rounds have counted is of
    different samples each time, but for what somebody had trained who was away so long that it lost
    its place."""
    rng = Random(seed)
    lives: list[Trained] = []
    swarm = LocalSwarm(
        4,
        settings=msgspec.structs.replace(SETTINGS, rounds=14),
        seed=seed,
        latency_s=0.02,
        jitter_s=0.03,
    )
    swarm.join_at(3, rng.uniform(0.5, 6.0)).crash_at(
        rng.randrange(1, 3), rng.uniform(3.0, 9.0), back_after_s=rng.uniform(0.2, 3.0)
    )
    swarm.freeze_at(rng.randrange(3), rng.uniform(6.0, 10.0), rng.uniform(0.2, 0.8))
    swarm.run(script(lives), step_s=[rng.choice([0.15, 0.25, 0.4]) for _ in range(4)])
    assert sum(counted(lives).values()) > SIZE // 3
    twice = [sample for sample, times in counted(lives).items() if times > 1]
    assert len(twice) <= sum(life.displaced for life in lives)
    assert all(life.displaced <= len(life.read) for life in lives)


def played(seed: int, strike: Any = None) -> tuple[list[Trained], dict[int, str]]:
    """A run whose members save after every step; returns their lives, and the anchor after each
    round.
    """
    lives: list[Trained] = []
    swarm = LocalSwarm(3, settings=SETTINGS, seed=seed, latency_s=0.01)
    if strike is not None:
        strike(swarm)
    swarm.run(script(lives, {}), step_s=1.0)
    digests: dict[int, str] = {}
    for life in lives:
        for round_, digest in life.digests.items():
            assert digests.setdefault(round_, digest) == digest
    return lives, digests


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[Trained], dict[int, str]]:
    return played(0)


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_killed_and_resumed_the_run_goes_on_bit_for_bit(
    seed: int, uninterrupted: tuple[list[Trained], dict[int, str]]
) -> None:
    """One member (even seeds) or all of them (odd) are killed in the middle of a step, node and
    script, and resume by their last checkpoint: every later anchor has the bits of the run that
    nobody disturbed, so every sample was read as it would have been."""
    rng = Random(seed)
    plain, expected = uninterrupted
    step_s = max(
        rng.choice([*zip(*(life.steps_s for life in plain), strict=True)][H : 9 * H])
    )  # when all of them had made a step
    when, back = step_s + rng.uniform(0.02, 0.6), rng.uniform(0.02, 0.2)

    def strike(swarm: LocalSwarm) -> None:
        for index in range(3) if seed % 2 else [rng.randrange(3)]:
            swarm.crash_at(index, when, back_after_s=back)

    lives, digests = played(0, strike)
    assert len(lives) == (6 if seed % 2 else 4)
    assert digests == expected
    assert max(digests) == SETTINGS.rounds
