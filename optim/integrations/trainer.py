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
from ...collectives.outcomes import Outcome
from ...collectives.script_swarm import Swarm
from ..script.attachment import Attachment, attach
from ..script.consent import OnAdopted
from ..script.evaluation import Evaluate
from .loaders import CountedLoader, reorder, reseed, sharded

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
    the samples of the batches that it was made of: the last one of an epoch may be shorter, and
    after an out-of-memory error with ``auto_find_batch_size`` all are. ``max_steps`` that is not
    the run's (`steps_left`) is told.

    ``shard``: read the samples that the run leases to this member (`Swarm.shard`), so that no two
    members read the same ones. An epoch of Trainer's is then as many batches as ever, and a resume
    skips none. Without it each member shuffles by a seed of its own, which follows from Trainer's
    and its peer id; that is torch's, numpy's and Python's global seed from then on, too.

    ``attachment``: the newest one, None before the first `train()`; it stays readable after the
    end.
    """

    def __init__(
        self,
        swarm: Swarm | None,
        *,
        shard: bool = False,
        on_round: Callable[[Outcome], None] | None = None,
        on_adopted: OnAdopted | None = None,
        strict: bool = False,
        include: Any = None,
        evaluate: Evaluate | None = None,
    ) -> None:
        """As for `attach`, which is called when training begins and raises there (under torchrun:
        None in all ranks but the first). Trainer's own evaluation is left to Trainer: it is of a
        whole data set, and calls back; ``evaluate`` is given the model for a few batches.
        """
        self.attachment: Attachment | None = None
        self._swarm, self._on_round, self._strict = swarm, on_round, strict
        self._on_adopted, self._shard, self._include = on_adopted, shard, include
        self._evaluate = evaluate
        self._loader: CountedLoader | None = None
        self._samples = 0  # of the step under way

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attachment is not None:
            self.attachment.finish()  # what was trained before memory ran out
        self.attachment = attach(
            kwargs["model"],
            kwargs["optimizer"],
            self._swarm,
            on_round=self._on_round,
            on_adopted=self._on_adopted,
            strict=self._strict,
            include=self._include,
            evaluate=self._evaluate,
            tokenizer=kwargs.get("processing_class"),
        )
        self._samples = 0
        self._arrange(args, kwargs.get("train_dataloader"))

    def _arrange(self, args: TrainingArguments, loader: Any) -> None:
        """Take this member's samples, or its own order, and count batches where accelerate takes
        them from the loader inside of its own. Raises ConfigError where they cannot be shared out.
        """
        assert self.attachment is not None
        swarm, inside = self.attachment.swarm, getattr(loader, "base_dataloader", None)
        self._loader = None
        if inside is None and self._shard:
            raise ConfigError(
                f"the batches of a {type(loader).__name__} cannot be shared out",
                key="shard",
                why="Trainer's own loader is one that accelerate has prepared; this one is not.",
                hint="get_train_dataloader() of your Trainer may return "
                "self.accelerator.prepare(loader); or leave shard=True out.",
            )
        if self._shard:
            shard = sharded(swarm, inside)
            self._loader = CountedLoader(inside, shard.endless, whole=shard.batch)
            args.ignore_data_skip = True  # the run knows which samples come next
        else:
            reseed(swarm)
            reorder(loader, swarm)
            if inside is not None:
                self._loader = CountedLoader(
                    inside, None, whole=getattr(inside, "batch_size", None)
                )
        if inside is not None:
            loader.base_dataloader = self._loader

    def _take(self, args: TrainingArguments, state: TrainerState) -> int:
        """The samples of the batch that was trained just now. Trainer's own loader is another where
        it has skipped the first batches of an epoch on resuming: batches are whole ones there.
        """
        if self._loader is not None and self._loader.waiting:
            return self._loader.waiting.popleft().samples
        # `args` keeps the size that was asked for; it may not have fitted into memory
        return state.train_batch_size or args.train_batch_size

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The step's first batch is the next one that was not trained yet."""
        if self._loader is not None and self._loader.waiting and self.attachment is not None:
            batch = self._loader.waiting[0].batch
            self.attachment.first_batches.saw(batch, self.attachment.round)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """One more batch of a step with accumulation."""
        self._samples += self._take(args, state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Declare the step's samples. The first one has fitted into memory: of attempts that do
        not, the schedule is not judged.
        """
        assert self.attachment is not None
        self.attachment.schedule_ends.compare(
            state.max_steps - state.global_step,
            decays=not str(getattr(args.lr_scheduler_type, "value", "")).startswith("constant"),
            setting="TrainingArguments(max_steps={})",
        )
        samples, self._samples = self._samples + self._take(args, state), 0
        self.attachment.samples(samples)

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
