"""AtollLightningCallback: Lightning's Trainer as a member of a swarm. Needs ``pip install
'atoll[lightning]'``.

lightning.Trainer(max_epochs=3, callbacks=[AtollLightningCallback(join(INVITE))]).fit(module, data)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from ...collectives.errors import ConfigError
from ...collectives.outcomes import Outcome
from ...collectives.script_swarm import Swarm
from ..script.attachment import Attachment, attach
from ..script.consent import OnAdopted
from ..script.evaluation import Evaluate
from .loaders import CountedLoader, batch_size, reorder, reseed, sharded

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
except ImportError as error:
    raise ConfigError(
        f"AtollLightningCallback needs lightning: {error}",
        key="callbacks",
        hint="pip install 'atoll[lightning]'",
    ) from error


class AtollLightningCallback(Callback):
    """Attaches the module and its optimizers for the length of a `fit()`, and ends that when the
    run is done.

        trainer = lightning.Trainer(callbacks=[AtollLightningCallback(join(), samples=len)])
        trainer.fit(module, loader)

    Training starts from the run's anchor, also where Lightning resumes: from its checkpoint come
    the inner optimizer and the schedule. At the end progress is contributed (`Attachment.finish`),
    before callbacks such as StochasticWeightAveraging put other weights into the module: wherever
    it is listed, this one goes first.

    ``shard``: read the samples that the run leases to this member (`Swarm.shard`), so that no two
    members read the same ones. An epoch is then as many batches as ever. Without it each member
    shuffles by a seed of its own, which follows from torch's and its peer id; that is torch's,
    numpy's and Python's global seed from then on, too.

    ``samples(batch)`` says how many samples a batch has; by default `batch_size`, and of a shard it
    is known. Of several optimizers (manual optimization) ``counts`` is the index of the one that
    ends a step; without it a step is over when each has stepped. ``attachment``: the newest one,
    None before the first `fit()`; it stays readable after the end.
    """

    def __init__(
        self,
        swarm: Swarm | None,
        *,
        shard: bool = False,
        samples: Callable[[Any], int] = batch_size,
        counts: int | None = None,
        on_round: Callable[[Outcome], None] | None = None,
        on_adopted: OnAdopted | None = None,
        strict: bool = False,
        include: Any = None,
        evaluate: Evaluate | None = None,
    ) -> None:
        """As for `attach`, which is called when training begins and raises there (under torchrun:
        None in all ranks but the first); ``evaluate`` is given the module. With
        BackboneFinetuning ``include=["backbone.*"]``.
        """
        self.attachment: Attachment | None = None
        self._swarm, self._samples, self._on_round, self._strict = swarm, samples, on_round, strict
        self._on_adopted, self._include, self._evaluate = on_adopted, include, evaluate
        self._shard, self._counts = shard, counts
        self._arranged: Any = None  # Lightning's loader, as it was arranged last
        self._own_loader: Any = None  # the script's, in place of which a shard is read

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Go before all other callbacks: at the end they may change the weights."""
        callbacks: list[Callback] = cast("Any", trainer).callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Contribute what is left, and detach, before the epoch in which StochasticWeightAveraging
        trains nothing and renews running statistics with the averaged weights.
        """
        averaging = (
            each
            for each in cast("Any", trainer).callbacks
            if isinstance(each, StochasticWeightAveraging)
        )
        assert self.attachment is not None
        self._arrange(trainer)
        if any(trainer.current_epoch == each.swa_end + 1 for each in averaging):
            self.attachment.finish()
            if self._own_loader is not None:  # nothing is attached that samples are leased to
                self._arranged.flattened = [self._own_loader]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach. Raises ConfigError without an optimizer, or without the one ``counts`` names."""
        optimizers, counts = trainer.optimizers, self._counts
        if not optimizers or not 0 <= (counts or 0) < len(optimizers):
            raise ConfigError(
                f"the module has {len(optimizers)} optimizers, and counts={counts}",
                key="configure_optimizers",
                why="A step is counted when an optimizer steps.",
                hint="counts is the index of one in what configure_optimizers returns, from 0 on.",
            )
        if self.attachment is not None:
            self.attachment.detach()
        self.attachment = attach(
            pl_module,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            self._swarm,
            counts=None if counts is None else optimizers[counts],
            on_round=self._on_round,
            on_adopted=self._on_adopted,
            strict=self._strict,
            include=self._include,
            evaluate=self._evaluate,
        )
        self._arranged = self._own_loader = None
        self._arrange(trainer)
        planned = trainer.estimated_stepping_batches
        # of several optimizers Lightning counts each one's steps
        if trainer.lr_scheduler_configs and len(optimizers) == 1 and planned < float("inf"):
            self.attachment.schedule_ends.compare(
                int(planned) - trainer.global_step,
                decays=True,
                setting="lightning.Trainer(max_steps={})",
            )

    def _arrange(self, trainer: Trainer) -> None:
        """Take this member's samples, or its own order, from Lightning's loader: once, and again
        when Lightning has made a new one. Raises ConfigError where they cannot be shared out.
        """
        assert self.attachment is not None
        loop = cast("Any", trainer.fit_loop)
        combined, swarm = loop._combined_loader, self.attachment.swarm
        if combined is None or combined is self._arranged:
            return
        self._arranged, loaders = combined, list(combined.flattened)
        if self._shard and len(loaders) != 1:
            raise ConfigError(
                f"{len(loaders)} loaders are combined, and a run shares out the samples of one",
                key="shard",
                hint="Make one data set of them, such as torch.utils.data.StackDataset.",
            )
        if self._shard:
            self._own_loader = loaders[0]
            combined.flattened = [CountedLoader(loaders[0], sharded(swarm, loaders[0]).endless)]
            shuffles = True
        else:
            reseed(swarm)
            shuffled = [reorder(each, swarm) for each in loaders]
            # that of a loader with a state to go on from is made once
            stateful = any(hasattr(each, "load_state_dict") for each in loaders)
            shuffles = any(shuffled) and not stateful
        if shuffles:  # the iterator was made before, and its workers have read by the old order
            iter(loop._data_fetcher)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Declare the batch's samples."""
        assert self.attachment is not None
        if not self._shard:
            self.attachment.samples(self._samples(batch))
            self.attachment.first_batches.saw(batch, self.attachment.round)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The node is shown the loss; stop when the run is done."""
        assert self.attachment is not None
        loss = (
            cast("Mapping[str, Any]", outputs).get("loss")
            if isinstance(outputs, Mapping)
            else outputs
        )
        if isinstance(loss, Tensor):
            self.attachment.log(loss=loss)
        if self.attachment.done:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Contribute what is left, and detach."""
        assert self.attachment is not None
        self.attachment.finish()
