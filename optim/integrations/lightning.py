"""AtollLightningCallback: Lightning's Trainer as a member of a swarm. Needs ``pip install
'atoll[lightning]'``.

lightning.Trainer(max_epochs=3, callbacks=[AtollLightningCallback(join(INVITE))]).fit(module, data)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch import Tensor

from ...collectives.errors import ConfigError
from ...collectives.swarm import Outcome, Swarm
from ..script.attachment import Attachment, attach
from ..script.consent import OnAdopted
from ..script.schedules import compare_schedule

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
except ImportError as error:
    raise ConfigError(
        f"AtollLightningCallback needs lightning: {error}",
        key="callbacks",
        hint="pip install 'atoll[lightning]'",
    ) from error


def batch_size(batch: Any) -> int:
    """Length of the first tensor in ``batch`` (a tensor, or a mapping or sequence that holds one);
    1 when there is none.
    """
    found = _first(batch)
    return len(found) if found is not None and found.dim() else 1


def _first(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = cast("Mapping[Any, Any]", batch).values()
    elif not isinstance(batch, (list, tuple)):
        return None
    return next(
        (found for part in cast("Iterable[Any]", batch) if (found := _first(part)) is not None),
        None,
    )


class AtollLightningCallback(Callback):
    """Attaches the module and its one optimizer for the length of a `fit()`, and ends that when the
    run is done.

        trainer = lightning.Trainer(callbacks=[AtollLightningCallback(join(), samples=len)])
        trainer.fit(module, loader)

    Training starts from the run's anchor, also where Lightning resumes: from its checkpoint come
    the inner optimizer and the schedule. At the end progress is contributed (`Attachment.finish`),
    before callbacks such as StochasticWeightAveraging put other weights into the module: wherever
    it is listed, this one goes first.
    ``samples(batch)`` says how many samples a batch has; by default `batch_size`. ``attachment``:
    the newest one, None before the first `fit()`; it stays readable after the end.
    """

    def __init__(
        self,
        swarm: Swarm | None,
        *,
        samples: Callable[[Any], int] = batch_size,
        on_round: Callable[[Outcome], None] | None = None,
        on_adopted: OnAdopted | None = None,
        strict: bool = False,
    ) -> None:
        """As for `attach`, which is called when training begins and raises there (under torchrun:
        None in all ranks but the first).
        """
        self.attachment: Attachment | None = None
        self._swarm, self._samples, self._on_round, self._strict = swarm, samples, on_round, strict
        self._on_adopted = on_adopted

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
        if any(trainer.current_epoch == each.swa_end + 1 for each in averaging):
            self.attachment.finish()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach. Raises ConfigError where there is not one optimizer."""
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"the module has {len(trainer.optimizers)} optimizers",
                key="configure_optimizers",
                why="A step is counted when the one optimizer steps.",
                hint=(
                    "Train with one optimizer, or attach(module, None, swarm) and call "
                    "attachment.step() yourself."
                ),
            )
        if self.attachment is not None:
            self.attachment.detach()
        self.attachment = attach(
            pl_module,
            trainer.optimizers[0],
            self._swarm,
            on_round=self._on_round,
            on_adopted=self._on_adopted,
            strict=self._strict,
        )
        planned = trainer.estimated_stepping_batches
        if trainer.lr_scheduler_configs and planned < float("inf"):
            compare_schedule(
                self.attachment.swarm,
                int(planned) - trainer.global_step,
                decays=True,
                setting="lightning.Trainer(max_steps={})",
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Declare the batch's samples."""
        assert self.attachment is not None
        self.attachment.samples(self._samples(batch))

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
