"""The training loop: causal language models of transformers, on answers or on text.

    steps = FineTuning(model, tokenizer, data, settings, swarm)
    while not steps.finished():
        steps.step()

A step takes documents of so many tokens, packs them into rows, sums the loss of micro-batch after
micro-batch, and divides by what is learned in all of them: so it is one step of one large batch,
however it is cut. Alone it is an ordinary loop; with a swarm `attach` is all that is added.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....collectives.errors import AtollError, StateError
from ....collectives.foreign import escaped
from ....collectives.outcomes import Outcome
from ....collectives.script_swarm import Swarm
from ....optim import Attachment, attach
from ....optim.script.evaluation import AHEAD, drawn_of, undisturbed
from ...manifest.tables import DataTable, InnerTable, PromptsTable
from ..loop import lr_at, schedule_position
from ..models.loading import check_length
from .feeding import DocumentFeed, LeasedFeed, OwnFeed
from .keeping import random_state, restore_random
from .losses import SummedLoss
from .optimizing import BackwardOptimizer, make_optimizer, trained_parameters
from .packing import IGNORED, PackedBatch, check_causal, check_packing, lay_out
from .preparing import PreparedData, TokenStore
from .sharding import ONE_CARD, Cards

logger = logging.getLogger("atoll")

STATE_FILE = "finetune.safetensors"
EVALUATED, WATCHED, FEWEST = 65_536, 4096, 512
"""Held-out tokens of an evaluation, and of one that is made around the adoption of an anchor: at
most, and where fewer say nothing."""
KEEPING_SHARE = 0.05  # of the time that keeping the state may take
STEP_EVERY = 5  # steps between two ``step`` records

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class FineTuneSettings:
    """``[data]``, ``[train.inner]`` and ``[prompts]`` of the manifest, and how the model is held:
    ``bf16``: calculations in bfloat16 where what is trained is in float32; ``checkpointing``:
    activations are computed again in the backward pass. ``name``: of the run that nobody else
    is in.
    """

    data: DataTable = DataTable()
    inner: InnerTable = InnerTable()
    prompts: PromptsTable | None = None
    bf16: bool = False
    checkpointing: bool = True
    name: str = "alone"


class FineTuning:
    """One member, or one machine alone. Makes the model ready, attaches it, and goes on from what
    was kept.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        data: PreparedData,
        settings: FineTuneSettings,
        swarm: Swarm | None = None,
        *,
        cards: Cards = ONE_CARD,
        folder: Path | None = None,
        say: Say = lambda record: None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``cards``: that train together as this member, a process each. ``folder``: where the
        state is kept, None: nowhere. ``say`` hears records as of `recipes.train`, ``tell`` lines
        for a person.

        Raises ConfigError where the model cannot be trained so, StateError for a damaged state.
        """
        self.model, self.tokenizer, self.data, self.settings = model, tokenizer, data, settings
        self.inner, self.swarm, self.say, self.tell = settings.inner, swarm, say, tell
        self.cards = cards
        cards.shard(model)
        self.device = next(model.parameters()).device
        vocabulary = len(model.get_input_embeddings().weight)
        if said := check_length(model, settings.data.length):
            tell(said)
        check_causal(model, vocabulary)
        if settings.data.packing:
            check_packing(model, vocabulary, tell)
        self.loss = SummedLoss(model, cards)
        if settings.checkpointing:
            _checkpoint_activations(model)
        model.train()
        cards.let_go(model)
        self.trained = trained_parameters(model)
        backward = self.inner.in_backward
        self.optimizer = (BackwardOptimizer if backward else make_optimizer)(
            self.trained, self.inner
        )
        self.steps = self._since_round = 0
        self._path = folder / STATE_FILE if folder is not None else None
        self._kept_at, self._keeping_s = time.monotonic(), 0.0
        self.attachment: Attachment | None = None
        self._watched = self._affordable(swarm) if swarm is not None else 0
        if cards.decide(swarm is not None):
            self.attachment = attach(
                model,
                None if backward else self.optimizer,
                swarm,
                on_round=self._round,
                tokenizer=tokenizer,
                evaluate=self._watch if self._watched else None,
            )
            self.swarm = self.attachment.swarm  # that of all cards
            self.attachment.schedule_ends.follows = True  # `validate` says where it does not end
        self.feed = self._feed()
        self._resume()
        self._round_seen = self._entered_at = self.round

    def _feed(self) -> DocumentFeed:
        table, swarm = self.settings.data, self.swarm
        if table.source == "shared" and swarm is not None:
            return LeasedFeed(self.data.training, swarm, self.cards)
        name = f"{swarm.run_id}/{swarm.peer}" if swarm is not None else self.settings.name
        return OwnFeed(self.data.training, f"{name}/{table.seed}")

    @property
    def round(self) -> int:
        """Committed rounds of the anchor that is trained from; alone 0."""
        return self.attachment.round if self.attachment is not None else 0

    @property
    def position(self) -> int:
        """Where in the learning-rate schedule this member is."""
        if self.attachment is None or self.swarm is None:
            return self.steps
        settings = self.swarm.settings
        return schedule_position(
            self.attachment, settings, self.inner, self.steps, self._since_round
        )

    def finished(self, steps: int | None = None) -> bool:
        """Whether to end: the run is done, ``steps`` own steps are made, or (without a number of
        rounds) the schedule is over.
        """
        if steps is not None and self.steps >= steps:
            return True
        if self.attachment is not None and self.attachment.done:
            return True
        rounds = self.swarm.settings.rounds if self.swarm is not None else None
        return rounds is None and self.inner.steps is not None and self.position >= self.inner.steps

    # ---- a step

    def step(self) -> float:
        """One step of the optimizer; its loss in nats a learned token. Raises StateError where that
        is no number: nothing good comes after it.
        """
        began_s, inner = time.perf_counter(), self.inner
        documents = self.feed.take(inner.tokens_per_step)
        # an optimizer in backward sees all of a step at once
        rows = len(documents) if inner.in_backward else inner.micro_batch
        batches = self._batches(documents, rows)
        targets = sum(_targets(batch) for batch in batches)
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.position, inner, self.steps)
        loss = self.cards.add(float(self._backward(batches, targets))) / targets
        if not math.isfinite(loss):
            raise StateError(
                f"the loss of step {self.steps + 1} is {loss}",
                why="Training has diverged, or the weights it began with hold no numbers.",
                hint="A smaller [train.inner] lr, or a longer warmup.",
            )
        if self.attachment is not None and not self.feed.shared:
            self.attachment.samples(self.cards.share(targets))
        # without what the optimizer takes, in whose step a member may wait for others
        tokens_s = sum(len(ids) for ids, _ in documents) / (time.perf_counter() - began_s)
        before = self.round
        self._update()
        self.steps += 1
        self._since_round = self._since_round + 1 if self.round == before else 0
        self._log(loss, tokens_s)
        return loss

    def _backward(self, batches: list[PackedBatch], targets: int) -> Tensor:
        """The gradient of the mean over ``targets``; returns this card's part of the sum,
        float64.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch, counts in self.cards.deal(batches):
            with self._precision():
                summed = self.loss(batch.to(self.device)) * counts
            # of several cards' gradients the mean is taken, and the sum is meant
            (summed / targets * self.cards.size).backward()
            total += summed.detach()
        return total

    def _update(self) -> None:
        """The optimizer's step; where it has stepped in backward, it is only counted."""
        if isinstance(self.optimizer, BackwardOptimizer):
            if self.attachment is not None:
                self.attachment.step()
            return
        if self.inner.clip:
            nn.utils.clip_grad_norm_(self.trained, self.inner.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _batches(self, documents: list[Any], rows: int) -> list[PackedBatch]:
        table = self.settings.data
        laid = lay_out(
            documents,
            length=table.length,
            rows=rows,
            packing=table.packing,
            cards=self.cards.size,
        )
        return [batch for batch in laid if _targets(batch)]

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        floats = any(each.dtype == torch.float32 for each in self.trained)
        if self.settings.bf16 and floats and not self.cards.casts:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _log(self, loss: float, tokens_s: float) -> None:
        if self.attachment is not None:
            self.attachment.log(loss=loss, tokens_s=tokens_s)
        if self.steps % STEP_EVERY == 0 or self.steps == 1:
            found = {"step": self.steps, "position": self.position, "loss": round(loss, 5)}
            self.say({"event": "step", **found, "tokens_s": round(tokens_s)})

    def tokens_s(self) -> float:
        """About how many tokens a second are trained on, by one micro-batch of which nothing is
        left. Random numbers are as before.
        """
        cards, rows = self.cards.size, self.inner.micro_batch
        # no step has more rows than its tokens fill
        length = min(self.settings.data.length * rows * cards, self.inner.tokens_per_step)
        documents = OwnFeed(self.data.training, "rate").take(length)
        batches = self._batches(documents, rows)[:cards]
        devices = [self.device] if self.device.type == "cuda" else []
        stepping = self.optimizer if isinstance(self.optimizer, BackwardOptimizer) else None
        with torch.random.fork_rng(devices=devices):
            began_s = time.perf_counter()
            if stepping is not None:
                stepping.live = False
            float(self._backward(batches, 1))  # waits for the device
            took_s = time.perf_counter() - began_s
        if stepping is not None:
            stepping.live = True
        for each in self.trained:
            each.grad = None
        return sum(batch.ids.numel() for batch in batches) / took_s

    # ---- what it has learned

    @torch.no_grad()
    def evaluate(self, most: int = EVALUATED) -> tuple[int, float]:
        """(tokens, summed negative log-likelihood in nats) over the first ``most`` tokens of the
        held-out documents: sums of several members may be added.
        """
        documents, left = list[Any](), most
        store: TokenStore = self.data.held_out
        for index in range(len(store)):
            if left <= 0:
                break
            documents.append(store[index])
            left -= len(documents[-1][0])
        nll = 0.0
        with undisturbed(self.model):
            batches = self._batches(documents, self.inner.micro_batch)
            tokens = sum(_targets(batch) for batch in batches)
            for batch, counts in self.cards.deal(batches):
                with self._precision():
                    nll += float(self.loss(batch.to(self.device))) * counts
        return tokens, self.cards.add(nll)

    def evaluate_anchor(self) -> dict[str, Any]:
        """Of the newest anchor, alone of the model; also said as ``evaluation``."""
        if self.attachment is None:
            found = {"round": 0, "digest": ""}
            tokens, nll = self.evaluate()
        else:
            with self.attachment.evaluate_anchor() as view:
                found = {"round": view.round, "digest": view.digest}
                tokens, nll = self.evaluate()
        held_out = round(nll / tokens, 5) if tokens else None
        found |= {"tokens": tokens, "nll": nll, "held_out": held_out}
        self.say({"event": "evaluation", **found})
        return found

    def _affordable(self, swarm: Swarm) -> int:
        """Held-out tokens of an evaluation around the adoption of an anchor; 0: there is none.

        The first reading is made before anybody knows what it takes: three forward passes, about as
        much as one step of so many tokens. In a run of few short steps the others would wait for it
        longer than `[evaluate]` allows.
        """
        found, held_out = swarm.settings, self.data.held_out.tokens
        if found.evaluate is None or not held_out:
            return 0
        if self.cards.size > 1:
            self.tell("whether averaging helps is not evaluated by a member of several cards")
            return 0
        if found.sync_every is None:
            return WATCHED
        rounds = AHEAD if found.rounds is None else min(AHEAD, found.rounds)
        trained = rounds * found.sync_every * self.inner.tokens_per_step
        most = min(WATCHED, round(found.evaluate.share * trained))
        if most >= min(FEWEST, held_out):
            return most
        self.tell(
            f"whether averaging helps is not evaluated: {found.evaluate.share:.2%} of this run's "
            f"time is enough for {most} held-out tokens"
        )
        return 0

    def _watch(self, model: Any) -> float:
        """What `attach` calls around the adoption of an anchor."""
        tokens, nll = self.evaluate(self._watched)
        return nll / tokens

    def answer(self, prompt: str, tokens: int) -> str:
        """What the model makes of a prompt of the manifest: always its likeliest token."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template:
            asked = [{"role": "user", "content": prompt}]
            given = tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        else:
            given = tokenizer(prompt, return_tensors="pt")
        given = {key: value.to(self.device) for key, value in given.items()}
        with undisturbed(self.model), self._precision():
            out = self.model.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.eos_token_id or 0,
                synced_gpus=self.cards.size > 1,  # each gathers what it needs from all
            )
        fresh = out[0, given["input_ids"].shape[1] :]
        return tokenizer.decode(fresh, skip_special_tokens=True)

    def show_answers(self) -> None:
        """Every so many rounds, at the one member that is drawn for it."""
        prompts, swarm = self.settings.prompts, self.swarm
        if prompts is None or swarm is None or self.attachment is None:
            return
        live = [member.peer for member in swarm.members() if member.live] or [swarm.peer]
        if swarm.peer not in drawn_of(swarm.run_id, self.round, live, 1):
            return
        with self.attachment.evaluate_anchor() as view:
            for prompt in prompts.texts:
                text = self.answer(prompt, prompts.tokens)
                self.say({"event": "sample", "round": view.round, "prompt": prompt, "text": text})
                self.tell(f"round {view.round}, {escaped(prompt, 60)} → {escaped(text, 400)}")

    # ---- rounds, and going on where it stopped

    def after_step(self) -> None:
        """What follows from a round that was committed meanwhile: answers, and the state kept now
        and then.
        """
        prompts, round_ = self.settings.prompts, self.round
        if round_ == self._round_seen and self.attachment is not None:
            return
        due = prompts is not None and round_ // prompts.every > self._round_seen // prompts.every
        self._round_seen = round_
        if due:
            with contextlib.suppress(AtollError):  # a lost node is noticed by the next step
                self.show_answers()
        kept_s = time.monotonic() - self._kept_at
        if self.cards.decide(self._keeping_s < KEEPING_SHARE * kept_s):
            self.keep()

    def keep(self) -> None:
        """Keep all that is needed to go on from here. What cannot be written is told, and training
        goes on.
        """
        if self._path is None:
            return
        began_s = time.monotonic()
        self.cards.let_go(self.model)
        state: dict[str, Any] = {
            "steps": self.steps,
            "since_round": self._since_round,
            "position": self.feed.position,
            "data": self.data.training.digest,
            "model": dict(self._named()),
            "optimizer": self.optimizer.state_dict(),
        }
        own = {
            "random": random_state(),
            "attachment": self.attachment.state_dict() if self.attachment is not None else None,
        }
        try:
            self.cards.keep(self._path, state, own)
        except AtollError as error:
            logger.warning("%s", error)
        self._kept_at = time.monotonic()
        self._keeping_s = self._kept_at - began_s

    def _named(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: each.detach() for name, each in named if each.requires_grad}

    @torch.no_grad()
    def _resume(self) -> None:
        state = self.cards.kept(self._path) if self._path is not None else None
        if state is None:
            return
        self.cards.let_go(self.model)
        named = self._named()
        if {name: each.shape for name, each in state["model"].items()} != {
            name: each.shape for name, each in named.items()
        }:
            raise StateError(
                f"{self._path} is of another model",
                why="What is trained has other names or shapes.",
                hint=f"Begin without it: mv {self._path} {self._path}.old",
            )
        for name, value in state["model"].items():
            self.cards.put(named[name], value)
        self.cards.resume(self.optimizer, state["optimizer"])
        if self.attachment is not None and state["attachment"] is not None:
            self._resume_attachment(state["attachment"])
        self.steps, self._since_round = state["steps"], state["since_round"]
        if state["data"] == self.data.training.digest:
            self.feed.position = state["position"]
        else:
            self.tell("the data are others than when training stopped: it begins at their first")
        if state["random"] is not None:
            restore_random(state["random"])
        self.tell(f"going on after step {self.steps:,}")

    def _resume_attachment(self, state: Mapping[str, Any]) -> None:
        assert self.attachment is not None
        self.attachment.load_state_dict(state)
        _ = self.attachment.begun  # the anchor's values, where the run has moved on

    def _round(self, outcome: Outcome) -> None:
        self.say({"event": "round", **asdict(outcome)})

    def finish(self, *, evaluate: bool = True) -> dict[str, Any]:
        """Keep the state, evaluate, take the hooks off; returns and says the ``final`` record."""
        if self.attachment is not None and self.attachment.swarm.settings.trains_on:
            self.attachment.settle()
        self.keep()
        found = self.evaluate_anchor() if evaluate and len(self.data.held_out) else {}
        record: dict[str, Any] = {"event": "final", "steps": self.steps, **found}
        if self.attachment is not None:
            stats = self.attachment.stats
            record |= {
                "peer": self.attachment.swarm.peer,
                "round": found.get("round", self.round),
                "anchor_digest": found.get("digest", ""),
                "rounds": self.round - self._entered_at,
                **{key: stats[key] for key in FINAL_STATS if key in stats},
                "privacy": self.attachment.describe()["privacy"],
            }
            if self.attachment.done and self._path is not None and not self.cards.rank:
                self._path.unlink(missing_ok=True)  # nothing is left to go on with
            self.attachment.detach()
        self.say(record)
        return record


FINAL_STATS = ("counted", "samples_counted", "bytes_sent", "bytes_received", "waiting_s")


def _checkpoint_activations(model: Any) -> None:
    """transformers has renamed the method, and the old name warns."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _targets(batch: PackedBatch) -> int:
    return int((batch.targets != IGNORED).sum())
