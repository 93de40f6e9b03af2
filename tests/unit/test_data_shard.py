"""A shard in a script of one: which samples a loader is given, what steps count, what a checkpoint
needs, what is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from round_table import RoundTable
from seeds import daily
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings, SecureSettings
from atoll.node.run.events import read_event
from atoll.node.run.verdicts import Verdicts
from atoll.optim import Attachment, SoloSwarm, attach

H = 3
SETTINGS = RunSettings(sync_every=H, codec="fp32", outer=OuterSettings("sgd", 1.0, 0.0))


class Numbers(Dataset[Tensor]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.tensor(float(index))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(())])


class Chosen(BatchSampler):
    """Batches of its own choice."""


class Prefetched(DataLoader[Tensor]):
    """A loader of the script's."""

    def __iter__(self) -> Any:
        return super().__iter__()


def start(swarm: Any) -> tuple[nn.Module, torch.optim.Optimizer, Attachment]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return model, optimizer, attach(model, optimizer, swarm)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[int]:
    model(batch.reshape(-1, 1)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return batch.reshape(-1).to(torch.int64).tolist()


def joined(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_is_every_sample_once_in_full_batches(workers: int) -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    data = swarm.shard(DataLoader(Numbers(40), batch_size=8, shuffle=True, num_workers=workers))
    passes = [[step(model, optimizer, batch) for batch in data] for _ in range(3)]
    assert [sorted(joined(each)) for each in passes] == [list(range(40))] * 3
    assert len({tuple(joined(each)) for each in passes}) == 3  # each in an order of its own
    assert attachment.stats["samples_counted"] + attachment.stats["samples_unsent"] == 120
    odd = SoloSwarm(SETTINGS)
    model, optimizer, _ = start(odd)
    data = odd.shard(DataLoader(Numbers(12), batch_size=8))
    seen = [step(model, optimizer, batch) for _ in range(3) for batch in data]
    assert all(len(batch) == 8 for batch in seen)
    assert [sorted(joined(seen)[at : at + 12]) for at in (0, 12)] == [list(range(12))] * 2


def test_workers_that_read_ahead_change_nothing() -> None:
    def read(workers: int) -> list[list[int]]:
        swarm = SoloSwarm(SETTINGS)
        model, optimizer, _ = start(swarm)
        loader = DataLoader(
            Numbers(64), batch_size=4, num_workers=workers, persistent_workers=workers > 0
        )
        data = swarm.shard(loader)
        before = torch.get_rng_state()
        seen = [step(model, optimizer, batch) for _ in range(2) for batch in data]
        assert torch.equal(torch.get_rng_state(), before)  # the script's random numbers are its own
        return seen

    assert read(0) == read(2)


def test_steps_count_what_they_were_given() -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    data = iter(swarm.shard(DataLoader(Numbers(1000), batch_size=8)))
    for _ in range(H):  # two batches a step: gradients are accumulated
        for _ in range(2):
            model(next(data).reshape(-1, 1)).mean().backward()
        optimizer.step()
    assert (attachment.round, attachment.stats["samples_counted"]) == (1, H * 16)
    next(data)
    attachment.samples(100)  # tokens, perhaps
    with pytest.raises(ConfigError, match="a step of 100 samples, of which the shard gave 8"):
        optimizer.step()


def test_what_was_read_and_led_to_no_step_is_read_again() -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, _ = start(swarm)
    data = swarm.shard(DataLoader(Numbers(100), batch_size=5))
    lost = next(iter(data)).tolist()
    assert [batch.tolist() for batch, _ in zip(data, range(1), strict=False)] == [lost]
    first = [step(model, optimizer, batch) for batch, _ in zip(data, range(4), strict=False)]
    assert first[0] == lost
    # zip took one batch more, and dropped it
    looked_at = data._order(data._order.positions(data._spans(data._next - 5))).tolist()
    assert next(iter(data)).tolist() == looked_at


def test_work_that_was_dropped_is_read_again() -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    data = iter(swarm.shard(DataLoader(Numbers(100), batch_size=5, num_workers=1)))
    seen = [step(model, optimizer, next(data)) for _ in range(2 * H - 1)]
    with torch.no_grad():
        model.weight.fill_(torch.nan)  # type: ignore[operator]
    seen.append(step(model, optimizer, next(data)))
    assert attachment.stats["samples_dropped"] == H * 5
    assert [step(model, optimizer, next(data)) for _ in range(H)] == seen[H:]


@pytest.mark.parametrize("at", [0, H, 2 * H + 1])
def test_a_resumed_script_goes_on_with_the_very_next_sample(at: int) -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    data = iter(swarm.shard(DataLoader(Numbers(100), batch_size=5, num_workers=1)))
    for _ in range(at):
        step(model, optimizer, next(data))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attachment.state_dict()))
    rest = [step(model, optimizer, next(data)) for _ in range(10)]
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    attachment.load_state_dict(saved[2])
    data = iter(swarm.shard(DataLoader(Numbers(100), batch_size=5)))
    assert [step(model, optimizer, next(data)) for _ in range(10)] == rest


def test_a_data_set_is_read_a_sample_at_a_time() -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    assert sorted(
        joined([step(model, optimizer, sample) for sample in swarm.shard(Numbers(10))])
    ) == list(range(10))
    assert attachment.stats["samples_counted"] == 9


def test_a_lost_node_leaves_the_lease() -> None:
    table = RoundTable(["me"], SETTINGS)
    swarm = table.member("me")
    model, optimizer, _ = start(swarm)
    data = iter(swarm.shard(DataLoader(Numbers(100), batch_size=5)))
    seen = [step(model, optimizer, next(data)) for _ in range(H + 1)]
    table.lose("me")
    seen += [step(model, optimizer, next(data)) for _ in range(2 * H)]
    table.find("me")
    seen += [step(model, optimizer, next(data)) for _ in range(20 - len(seen))]
    assert sorted(joined(seen)) == list(range(100))


def test_a_plain_batch_sampler_gives_its_size() -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, _ = start(swarm)
    batches = BatchSampler(SequentialSampler(Numbers(12)), 4, False)
    data = swarm.shard(DataLoader(Numbers(12), batch_sampler=batches))
    seen = [step(model, optimizer, sample) for sample in data]
    assert [len(batch) for batch in seen] == [4, 4, 4]
    assert sorted(joined(seen)) == list(range(12))


@pytest.mark.parametrize("workers", daily(1, (0, 2)))
def test_endless_batches_are_pass_after_pass(workers: int) -> None:
    """Also where the loop reads ahead, and its batches do not end where a pass does."""
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    data = swarm.shard(DataLoader(Numbers(40), batch_size=6, num_workers=workers)).endless()
    seen, ahead = list[list[int]](), next(data)
    for _ in range(40):  # six passes
        batch, ahead = ahead, next(data)
        attachment.samples(len(batch))
        seen.append(step(model, optimizer, batch))
    assert [len(batch) for batch in seen] == [6] * 40
    counts = torch.bincount(torch.tensor(joined(seen)), minlength=40)
    assert counts.tolist() == [6] * 40
    assert attachment.stats["steps"] == 40


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (DataLoader(Stream(), batch_size=4), "a stream has no numbered samples"),
        (Stream(), "a stream has no numbered samples"),
        (
            DataLoader(Numbers(4), batch_sampler=Chosen(SequentialSampler(Numbers(4)), 2, False)),
            "a batch sampler of its own, Chosen",
        ),
        (Prefetched(Numbers(4)), "Prefetched has an __iter__ of its own"),
        (
            DataLoader(Numbers(4), sampler=WeightedRandomSampler([1, 1, 1, 1], 4)),
            "a sampler of its own, WeightedRandomSampler",
        ),
        (DataLoader(Numbers(0)), "the data set is empty"),
    ],
)
def test_what_has_no_order_to_give_up_is_refused(source: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        SoloSwarm(SETTINGS).shard(source)


def test_where_nobody_is_told_of_samples_none_are_shared_out() -> None:
    with pytest.raises(ConfigError, match=r"\[secure\]"):
        SoloSwarm(msgspec.structs.replace(SETTINGS, secure=SecureSettings())).shard(Numbers(4))


def test_a_shard_without_an_attachment_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="nothing is attached"):
        next(iter(SoloSwarm(SETTINGS).shard(Numbers(4))))


def counted(declared: list[int], caplog: pytest.LogCaptureFixture) -> tuple[list[str], list[float]]:
    """What is said of steps over batches of 4 that declare so many samples."""
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    told = list[float]()
    report = swarm.report
    swarm.report = lambda metrics: (  # pyright: ignore[reportAttributeAccessIssue]
        told.extend(value for name, value in metrics.items() if name == "samples_short"),
        report(metrics),
    )
    data = swarm.shard(DataLoader(Numbers(4096), batch_size=4)).endless()
    with caplog.at_level("WARNING", logger="atoll"):
        for count in declared:
            attachment.samples(count)
            step(model, optimizer, next(data))
    words = [each.getMessage() for each in caplog.records if "shard gave" in each.getMessage()]
    return words, told


def test_steps_that_count_fewer_samples_than_they_were_given_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (words,), told = counted([1] * 80 + [4] * 3, caplog)
    assert "64 steps counted fewer samples" in words
    assert "192 are read and not counted" in words
    assert told == [192.0, 0.0]
    verdicts = Verdicts()
    for at, left in enumerate(told):
        (change,) = verdicts.take(
            read_event(
                {"at": float(at), "event": "script.report", "metrics": {"samples_short": left}}
            )
        )
        assert (change.raised, change.verdict.code) == (left > 0, "V14")
        assert "192 are left out" in change.verdict.said


@pytest.mark.parametrize("declared", [[4] * 100, [0, 8] * 60, [4, 4, 4, 0] * 30, [1] * 63 + [4]])
def test_steps_that_fit_what_they_were_given_are_not(
    declared: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that declare two batches at every second step, or drop a batch now and then."""
    assert counted(declared, caplog) == ([], [])


def test_steps_of_no_samples_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A script that says samples(0) at each step contributes nothing, in silence."""
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, attachment = start(swarm)
    with caplog.at_level("WARNING", logger="atoll"):
        for count in [0] * 64 + [4]:
            attachment.samples(count)
            step(model, optimizer, torch.zeros(4, 1))
            if count == 0 and swarm.reported.get("samples_zero"):
                told = swarm.reported["samples_zero"]
    assert told == 64
    assert swarm.reported["samples_zero"] == 0
    assert "the last 64 steps was declared to be of no samples" in caplog.text
    verdicts = Verdicts()
    (change,) = verdicts.take(
        read_event({"at": 0.0, "event": "script.report", "metrics": {"samples_zero": 64.0}})
    )
    assert (change.raised, change.verdict.code) == (True, "V14")


def test_len_of_a_shard_says_what_to_write_for_it() -> None:
    shard = SoloSwarm(RunSettings(sync_every=1)).shard(DataLoader(list(range(8)), batch_size=2))
    with pytest.raises(TypeError, match=r"steps_left\(swarm\) of atoll.optim"):
        len(shard)
    assert shard


def cycled(shard: Any) -> Iterator[Tensor]:
    """facebookresearch/pytext#86, ildoonet/unsupervised-data-augmentation#3."""
    return itertools.cycle(shard)


def listed(shard: Any) -> Iterator[Tensor]:
    return itertools.cycle(list(shard))


@pytest.mark.parametrize("reads", [cycled, listed])
def test_batches_that_are_kept_and_read_again_are_named(
    reads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, _ = start(swarm)
    shard = swarm.shard(DataLoader(Numbers(32), batch_size=4))
    batches = reads(shard)
    verdicts = Verdicts()
    for _ in range(8 + 70):
        step(model, optimizer, next(batches))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "each of the last 64 steps was made on nothing new of the shard" in line
    verdicts.take(
        read_event({"at": 1.0, "event": "script.report", "metrics": dict(swarm.reported)})
    )
    assert "64 steps in a row was made on batches" in verdicts.standing["V14", ""].said
    for batch in shard.endless():
        step(model, optimizer, batch)
        break
    assert swarm.reported["samples_again"] == 0.0
    verdicts.take(
        read_event({"at": 2.0, "event": "script.report", "metrics": dict(swarm.reported)})
    )
    assert not verdicts.standing


def test_several_steps_on_each_batch_are_not(caplog: pytest.LogCaptureFixture) -> None:
    swarm = SoloSwarm(SETTINGS)
    model, optimizer, _ = start(swarm)
    for _, batch in zip(range(40), swarm.shard(Numbers(64)).endless(), strict=False):
        for _ in range(5):
            step(model, optimizer, batch)
    assert caplog.records == []
