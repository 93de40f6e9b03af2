"""AtollCallback: transformers' Trainer as a member of a swarm. Needs ``pip install
'atoll[trainer]'``.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[AtollCallback(join(INVITE))])
    trainer.train()

A script on accelerate alone needs no callback: `attach` finds the optimizer inside of accelerate's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...collectives.errors import ConfigError
from ...collectives.swarm import Outcome, Swarm
from ..script.attachment import Attachment, attach
from ..script.consent import OnAdopted
from ..script.schedules import compare_schedule

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ConfigError(
        f"AtollCallback needs transformers and accelerate: {error}",
        key="callbacks",
        hint="pip install 'atoll[trainer]'",
    ) from error


class AtollCallback(TrainerCallback):
    """Attaches the Trainer's model and optimizer for the length of a `train()`, and ends that when
    the run is done.

        trainer = Trainer(model=model, args=args, train_dataset=data,
                          callbacks=[AtollCallback(join())])
        trainer.train()

    Training starts from the run's anchor, also where Trainer resumes: from its checkpoint come the
    inner optimizer and the schedule. At the end progress is contributed (`Attachment.finish`),
    before the best model is loaded and before other callbacks change the weights. A step counts as
    the batches it was made of, each of the size that Trainer takes now: after an out-of-memory
    error with ``auto_find_batch_size`` of a smaller one. ``max_steps`` that is not the run's
    (`steps_left`) is told. ``attachment``: the newest one, None before the first `train()`; it
    stays readable after the end.
    """

    def __init__(
        self,
        swarm: Swarm | None,
        *,
        on_round: Callable[[Outcome], None] | None = None,
        on_adopted: OnAdopted | None = None,
        strict: bool = False,
    ) -> None:
        """As for `attach`, which is called when training begins and raises there (under torchrun:
        None in all ranks but the first).
        """
        self.attachment: Attachment | None = None
        self._swarm, self._on_round, self._strict = swarm, on_round, strict
        self._on_adopted = on_adopted
        self._batches = 0  # of the step under way

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attachment is not None:
            self.attachment.detach()
        self.attachment = attach(
            kwargs["model"],
            kwargs["optimizer"],
            self._swarm,
            on_round=self._on_round,
            on_adopted=self._on_adopted,
            strict=self._strict,
            tokenizer=kwargs.get("processing_class"),
        )
        self._batches = 0
        compare_schedule(
            self.attachment.swarm,
            state.max_steps - state.global_step,
            decays=not str(getattr(args.lr_scheduler_type, "value", "")).startswith("constant"),
            setting="TrainingArguments(max_steps={})",
        )

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """One more batch of a step with accumulation."""
        self._batches += 1

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Declare the step's samples."""
        assert self.attachment is not None
        batches, self._batches = self._batches + 1, 0
        # `args` keeps the size that was asked for; it may not have fitted into memory
        self.attachment.samples((state.train_batch_size or args.train_batch_size) * batches)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop when the run is done; contribute what is left after the last step."""
        assert self.attachment is not None
        if self.attachment.done:
            control.should_training_stop = True
        self._last(control.should_training_stop)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Contribute what is left where an evaluation has ended training."""
        self._last(control.should_training_stop)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The node is shown the loss. The log of the whole training is the last that comes before
        the best model is loaded.
        """
        logs = kwargs.get("logs", {})
        loss = logs.get("loss")
        if loss is not None and self.attachment is not None:
            self.attachment.log(loss=loss)
        self._last("train_loss" in logs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Contribute what is left, and detach."""
        assert self.attachment is not None
        self.attachment.finish()

    def _last(self, ends: bool) -> None:
        """The last contribution, as soon as it is known that no step follows."""
        if ends and self.attachment is not None and self.attachment.stats["samples_unsent"]:
            self.attachment.sync()
