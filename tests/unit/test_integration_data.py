"""Which samples members read in Trainer and Lightning, in which order, and how many of them steps
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset

from atoll.collectives.errors import ConfigError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import Attachment, SoloSwarm
from atoll.optim.integrations.loaders import CountedLoader, reorder, seed_of, sizes_of

SAMPLES, LARGE, BATCH = 96, 1024, 8
SETTINGS = RunSettings(sync_every=3, rounds=4, codec="fp32", outer=OuterSettings("sgd", 1.0))
slow = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Noting(nn.Module):
    """For Trainer: sample i is the number i; notes which ones each backward was of."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(1, 1), most
        self.read = list[list[int]]()
        self.works: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if len(x) > self.most:
            raise RuntimeError("CUDA out of memory.")
        self.works()
        self.read.append([int(each) for each in x.flatten().tolist()])
        return {"loss": (self.linear(x / SAMPLES)).square().mean()}


def numbers(count: int = SAMPLES) -> Any:
    return [{"x": torch.tensor([float(number)])} for number in range(count)]


def working(swarm: Swarm) -> Callable[[], None]:
    """What a step does besides: in virtual time it takes some of that."""
    return (lambda: swarm.sleep(1.0)) if isinstance(swarm, LocalMember) else lambda: None


def trained(
    swarm: Swarm,
    folder: Path,
    *,
    model: Noting | None = None,
    data: Any = None,
    resume: bool = False,
    callbacks: Any = (),
    shard: bool = False,
    **more: Any,
) -> tuple[list[list[int]], Attachment]:
    """What a Trainer read, batch by batch, and its attachment."""
    from transformers import Trainer, TrainingArguments

    from atoll.optim import AtollCallback

    torch.manual_seed(0)
    model = model or Noting()
    model.works = working(swarm)
    callback = AtollCallback(swarm, shard=shard)
    given: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 20,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        **more,
    }
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=2, **given
        ),
        train_dataset=data or numbers(),
        callbacks=[callback, *callbacks],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    assert callback.attachment is not None
    return model.read, callback.attachment


def fitted(
    swarm: Swarm,
    loader: Any,
    folder: Path,
    *,
    callbacks: Any = (),
    resume: str | None = None,
    shard: bool = False,
    samples: Callable[[Any], int] = len,
    **more: Any,
) -> tuple[list[list[int]], Attachment]:
    """What Lightning's Trainer read, batch by batch, and its attachment."""
    import lightning

    from atoll.optim import AtollLightningCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.norm = nn.BatchNorm1d(1)
            self.read = list[list[int]]()

        def training_step(self, batch: Any, index: int) -> Tensor:
            (x,) = batch
            work()
            self.read.append([int(each) for each in x.flatten().tolist()])
            return self.norm(self.linear(x / SAMPLES)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    work = working(swarm)
    callback = AtollLightningCallback(swarm, shard=shard, samples=lambda batch: samples(batch[0]))
    net = Net()
    given: dict[str, Any] = {"max_epochs": 20, "enable_checkpointing": False, **more}
    lightning.Trainer(
        accelerator="cpu",
        callbacks=[callback, *callbacks],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    ).fit(net, loader, ckpt_path=resume)
    assert callback.attachment is not None
    return net.read, callback.attachment


def tensors(count: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).unsqueeze(1))


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def both(script: Callable[[LocalMember, int], Any]) -> list[Any]:
    """Two members of one run, each with the same script."""

    def one(swarm: Any) -> Any:
        found = script(swarm, swarm.index)
        swarm.sleep(1.0)
        return found

    return LocalSwarm(2, settings=SETTINGS, latency_s=0.01).run(one)


# ---- without a library


def named(peer: str) -> Swarm:
    swarm = SoloSwarm(SETTINGS)
    swarm.peer = PeerId(peer)
    return swarm


def test_a_members_seed_follows_from_the_scripts_and_from_its_name() -> None:
    one, other = named("one"), named("other")
    other.run_id = one.run_id
    assert seed_of(one, 42) == seed_of(one, 42)
    assert len({seed_of(one, 42), seed_of(one, 43), seed_of(other, 42)}) == 3
    assert 0 <= seed_of(one, 2**63) < 2**62


def orders(loader: Callable[[], DataLoader[Any]]) -> list[list[int]]:
    """What three members read, the last of which is the first one again."""
    found, run = list[list[int]](), named("one").run_id
    for peer in ("one", "other", "one"):
        swarm = named(peer)
        swarm.run_id = run
        torch.manual_seed(0)
        made = loader()
        assert reorder(made, swarm)
        found.append([int(x) for (batch,) in made for x in batch.flatten().tolist()])
        assert sorted(found[-1]) == list(range(SAMPLES))
    return found


def test_loaders_with_a_seed_of_the_scripts_own_have_one_order_at_each_member() -> None:
    def seeded() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(tensors(), batch_size=8, shuffle=True, generator=generator)

    def sampled() -> DataLoader[Any]:
        sampler = RandomSampler(tensors(), generator=torch.Generator().manual_seed(3))
        return DataLoader(tensors(), batch_sampler=BatchSampler(sampler, 8, False))

    for made in (seeded, sampled):
        first, second, again = orders(made)
        assert first != second
        assert first == again


class Infinite(Sampler[int]):
    """facebookresearch/detectron2#1176: a seed that a sampler keeps to itself."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    def __iter__(self) -> Iterator[int]:
        lots = torch.Generator().manual_seed(self._seed)
        yield from torch.randperm(self._size, generator=lots).tolist()


def test_a_sampler_that_keeps_its_seed_to_itself_has_one_order_at_each_member() -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(tensors(), batch_size=8, sampler=Infinite(SAMPLES, 42))

    first, second, again = orders(made)
    assert first != second
    assert first == again


def test_a_loader_that_draws_no_lots_stays_as_it_is() -> None:
    loader = DataLoader(tensors(), batch_size=8)
    assert not reorder(loader, named("one"))
    assert [int(x) for (batch,) in loader for x in batch.flatten()] == list(range(SAMPLES))


@pytest.mark.parametrize(("drop_last", "last"), [(False, 4), (True, 8)])
def test_the_last_batch_of_a_pass_may_be_shorter(drop_last: bool, last: int) -> None:
    loader = DataLoader(tensors(100), batch_size=8, drop_last=drop_last)
    assert sizes_of(loader) == (8, last, 12 + (not drop_last))
    counted = CountedLoader(loader, None)
    assert isinstance(counted, DataLoader)
    assert len(counted) == len(loader)
    found = list(counted)
    assert [each.samples for each in counted.waiting] == [len(batch) for (batch,) in found]


# ---- Trainer


@pytest.mark.parametrize("accumulated", [1, 2])
class TestTrainer:
    pytestmark = slow

    def test_members_that_share_read_no_sample_twice(
        self, accumulated: int, tmp_path: Path
    ) -> None:
        def script(swarm: LocalMember, index: int) -> tuple[list[list[int]], float, int]:
            read, sync = trained(
                swarm,
                tmp_path / str(index),
                data=numbers(LARGE),
                shard=True,
                gradient_accumulation_steps=accumulated,
                max_steps=12,
            )
            return read, sync.stats["samples_counted"], sync.position

        (one, counted, position), (other, others, _) = both(script)
        read = flat(one) + flat(other)
        assert len(set(read)) == len(read)
        assert position == counted + others
        assert 0 <= len(read) - position <= 2 * accumulated * BATCH  # a step of each, undecided
        assert min(counted, others) >= 9 * accumulated * BATCH

    def test_members_that_do_not_have_an_order_each(self, accumulated: int, tmp_path: Path) -> None:
        def script(swarm: LocalMember, index: int) -> list[list[int]]:
            more: dict[str, Any] = {"gradient_accumulation_steps": accumulated, "max_steps": 12}
            return trained(swarm, tmp_path / str(index), **more)[0]

        one, other = both(script)
        assert sorted(flat(one)[:SAMPLES]) == sorted(flat(other)[:SAMPLES]) == list(range(SAMPLES))
        assert flat(one)[:SAMPLES] != flat(other)[:SAMPLES]

    @pytest.mark.parametrize("most", [16, 5])
    def test_a_step_counts_its_samples(self, accumulated: int, most: int, tmp_path: Path) -> None:
        """Two epochs of 50 samples, in batches of 16; or, for want of memory, of 5."""
        model, settings = Noting(most), RunSettings(sync_every=1000, codec="fp32")
        read, sync = trained(
            SoloSwarm(settings),
            tmp_path,
            model=model,
            data=numbers(50),
            per_device_train_batch_size=16,
            gradient_accumulation_steps=accumulated,
            num_train_epochs=2,
            auto_find_batch_size=True,
        )
        assert sync.stats["samples_counted"] == len(flat(read)) == 100
        assert max(len(batch) for batch in read) == most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestTrainerOnce:
    def test_a_shard_is_gone_on_with_when_trainer_resumes(self, tmp_path: Path) -> None:
        """Trainer would skip the batches that it has had; the run knows which samples come next."""
        swarm = SoloSwarm(RunSettings(sync_every=1, rounds=12, codec="fp32"))
        first, _ = trained(
            swarm, tmp_path, shard=True, max_steps=5, save_strategy="steps", save_steps=5
        )
        second, sync = trained(swarm, tmp_path, shard=True, max_steps=12, resume=True)
        assert (len(first), len(second)) == (5, 7)
        assert sorted(flat(first) + flat(second)) == list(range(SAMPLES))
        assert sync.done

    def test_a_shard_takes_smaller_batches_after_memory_ran_out(self, tmp_path: Path) -> None:
        swarm = SoloSwarm(RunSettings(sync_every=1, rounds=24, codec="fp32"))
        read, sync = trained(
            swarm,
            tmp_path,
            model=Noting(most=4),
            shard=True,
            max_steps=24,
            auto_find_batch_size=True,
        )
        assert [len(batch) for batch in read] == [4] * 24
        assert sorted(flat(read)) == list(range(SAMPLES))
        assert sync.stats["samples_counted"] == SAMPLES

    def test_what_cannot_be_shared_out_is_refused(self, tmp_path: Path) -> None:
        class Stream(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(numbers())

        with pytest.raises(ConfigError, match="a stream has no numbered samples") as caught:
            trained(SoloSwarm(SETTINGS), tmp_path, data=Stream(), shard=True, max_steps=3)
        assert str(caught.value.hint).startswith("Leave shard=True out: each member then reads")


# ---- Lightning


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestLightning:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_members_that_share_read_no_sample_twice(self, workers: int, tmp_path: Path) -> None:
        def script(swarm: LocalMember, index: int) -> tuple[list[list[int]], float, int]:
            loader = DataLoader(tensors(LARGE), batch_size=BATCH, num_workers=workers)
            read, sync = fitted(swarm, loader, tmp_path / str(index), shard=True)
            return read, sync.stats["samples_counted"], sync.position

        (one, counted, position), (other, others, _) = both(script)
        read = flat(one) + flat(other)
        assert len(set(read)) == len(read)
        assert position == counted + others
        assert 0 <= len(read) - position <= 2 * BATCH
        assert min(counted, others) >= 9 * BATCH

    def test_members_that_do_not_have_an_order_each(self, tmp_path: Path) -> None:
        """With the same global seed, and a loader that is shuffled by it, read by a worker."""

        def script(swarm: LocalMember, index: int) -> list[list[int]]:
            loader = DataLoader(tensors(), batch_size=BATCH, shuffle=True, num_workers=1)
            return fitted(swarm, loader, tmp_path / str(index))[0]

        one, other = both(script)
        assert sorted(flat(one)[:SAMPLES]) == sorted(flat(other)[:SAMPLES]) == list(range(SAMPLES))
        assert flat(one)[:SAMPLES] != flat(other)[:SAMPLES]

    def test_accumulated_and_shorter_batches_are_counted(self, tmp_path: Path) -> None:
        """Two epochs of 50 samples in batches of 8, three to a step."""
        swarm = SoloSwarm(RunSettings(sync_every=1000, codec="fp32"))
        loader = DataLoader(tensors(50), batch_size=BATCH)
        read, sync = fitted(swarm, loader, tmp_path, accumulate_grad_batches=3, max_epochs=2)
        assert sync.stats["samples_counted"] == len(flat(read)) == 100
        assert sync.stats["steps"] == 6

    def test_a_shard_is_gone_on_with_when_lightning_resumes(self, tmp_path: Path) -> None:
        from lightning.pytorch.callbacks import ModelCheckpoint

        swarm = SoloSwarm(RunSettings(sync_every=1, rounds=12, codec="fp32"))
        saved = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
        first, _ = fitted(
            swarm,
            DataLoader(tensors(), batch_size=BATCH),
            tmp_path,
            shard=True,
            max_steps=5,
            callbacks=[saved],
            enable_checkpointing=True,
        )
        second, sync = fitted(
            swarm,
            DataLoader(tensors(), batch_size=BATCH),
            tmp_path,
            shard=True,
            resume=saved.best_model_path,
        )
        assert (len(first), len(second)) == (5, 7)
        assert sorted(flat(first) + flat(second)) == list(range(SAMPLES))
        assert sync.done

    def test_the_epoch_that_renews_statistics_reads_the_scripts_own_loader(
        self, tmp_path: Path
    ) -> None:
        from lightning.pytorch.callbacks import StochasticWeightAveraging

        swarm = SoloSwarm(RunSettings(sync_every=5, rounds=1000, codec="fp32"))
        averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
        loader = DataLoader(tensors(), batch_size=BATCH)
        read, sync = fitted(
            swarm, loader, tmp_path, shard=True, callbacks=[averaging], max_epochs=3
        )
        assert sync.stats["samples_counted"] == 3 * SAMPLES
        assert flat(read)[3 * SAMPLES :] == list(range(SAMPLES))

    def test_the_search_for_a_batch_size_is_not_counted(self, tmp_path: Path) -> None:
        import lightning
        from lightning.pytorch.callbacks import BatchSizeFinder

        from atoll.optim import AtollLightningCallback

        class Net(lightning.LightningModule):
            batch_size = 2

            def __init__(self) -> None:
                super().__init__()
                self.linear, self.read = nn.Linear(1, 1), list[int]()

            def training_step(self, batch: Any, index: int) -> Tensor:
                self.read.append(len(batch[0]))
                if len(batch[0]) > 16:
                    raise RuntimeError("CUDA out of memory.")
                return self.linear(batch[0] / SAMPLES).square().mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.01)

            def train_dataloader(self) -> Any:
                return DataLoader(tensors(), batch_size=self.batch_size)

        callback = AtollLightningCallback(SoloSwarm(RunSettings(sync_every=1000, codec="fp32")))
        net = Net()
        lightning.Trainer(
            accelerator="cpu",
            callbacks=[callback, BatchSizeFinder(steps_per_trial=1)],
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=2,
        ).fit(net)
        assert callback.attachment is not None
        stats = callback.attachment.stats
        assert net.batch_size == 16
        assert (stats["steps"], stats["samples_counted"]) == (2 * SAMPLES // 16, 2 * SAMPLES)

    @pytest.mark.parametrize(("counts", "steps"), [(None, 4), (1, 4), (0, 12)])
    def test_several_optimizers(self, counts: int | None, steps: int, tmp_path: Path) -> None:
        import lightning

        from atoll.optim import AtollLightningCallback

        class Two(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

            def training_step(self, batch: Tensor, index: int) -> None:
                first, last = cast("Any", self.optimizers())
                self.manual_backward(self.last(self.first(batch)).square().mean())
                first.step()
                if index % 3 == 2:
                    last.step()
                self.zero_grad()

            def configure_optimizers(self) -> Any:
                return [
                    torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.first, self.last)
                ]

        settings = RunSettings(sync_every=1000, codec="fp32")
        for index in (7, -1) if counts is None else ():
            with pytest.raises(ConfigError, match=f"2 optimizers, and counts={index}"):
                self._fit(
                    AtollLightningCallback(SoloSwarm(settings), counts=index), Two(), tmp_path
                )
        callback = AtollLightningCallback(SoloSwarm(settings), counts=counts)
        self._fit(callback, Two(), tmp_path)
        assert callback.attachment is not None
        stats = callback.attachment.stats
        assert (stats["steps"], stats["samples_counted"]) == (steps, 48)

    def _fit(self, callback: Any, module: Any, folder: Path) -> None:
        import lightning

        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[callback],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, DataLoader(cast("Any", torch.randn(48, 2)), batch_size=4))
