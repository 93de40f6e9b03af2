"""attach(): an ordinary training loop becomes a member of a swarm.

    model, opt = Net(), ...
    attachment = attach(model, opt, swarm)
    for batch in data:
        loss = model(batch); loss.backward(); opt.step(); opt.zero_grad()
        attachment.log(loss=loss)
        if attachment.done: break

The optimizer keeps its class, its state and its state_dict(); a step hook counts its steps and
synchronises when a round is over.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...collectives.errors import (
    AtollError,
    ConfigError,
    DeadlineExceededError,
    LocalProtocolError,
    SwarmClosedError,
)
from ...collectives.outcomes import AnchorView, Outcome
from ...collectives.script_swarm import Swarm
from ...collectives.swarm import sample_count
from ...collectives.telemetry import emit
from ..data.first_batch import FirstBatches
from ..data.ledger import SHORT, SampleLedger, attached, attached_to
from ..model.accuracy import ENCODING_ERROR
from ..model.flat import showing
from ..rounds.composing import flat_vector, strands_of, turns_of
from ..rounds.events import ProgressDropped, Reentered, RoundSeen, TrainingAlone
from ..rounds.fragments import Bases, enter
from ..rounds.replica import WaitedOutcome
from ..rounds.schedule import Since, StepCounter
from ..rounds.strand import Strand
from ..rounds.wait_budget import WaitBudget
from .buffer_watch import BufferWatch
from .checks import (
    check_arguments,
    check_capture,
    check_method,
    check_optimizer,
    check_site,
    check_swarm,
    examples_of,
    has_gradient,
    hooked,
    in_job,
    in_step_of_base,
    included_names,
    moves_nothing,
    naming_tensors,
    outermost,
)
from .consent import Consent, OnAdopted
from .evaluation import Evaluate, Evaluations
from .frozen import FrozenWatch
from .keeping import ModelKeeper
from .lookout import Lookout, reached
from .resume import PendingLoad, save
from .schedules import ScheduleEnds
from .second_steps import SecondSteps
from .state import Totals
from .step_times import StepTimes
from .training_parts import TrainingParts
from .uncounted import Uncounted
from .weights import WeightWatch

if TYPE_CHECKING:
    from ..ranks.swarm import RankSwarm

logger = logging.getLogger("atoll")

# after a failed attempt to re-enter that took t seconds, train at least 10 t before the next
RETRY_FACTOR = 10.0
MUCH_MORE = 1.5  # times the wished error: worth a word
REST_S = 1.0  # how often a script that rests asks whether it may go on


def attach(
    model: nn.Module,
    optimizer: Any,
    swarm: Swarm | None,
    *,
    batch_size: int | None = None,
    examples: int | None = None,
    counts: Any = None,
    include: Any = None,
    sync_every: int | None = None,
    round_s: float | None = None,
    on_round: Callable[[Outcome], None] | None = None,
    on_adopted: OnAdopted | None = None,
    strict: bool = False,
    tokenizer: Any = None,
    evaluate: Evaluate | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Attachment:
    """Make ``model`` and its ``optimizer`` a member of ``swarm``'s run; returns the `Attachment`.

    The model's parameters become the run's anchor (the founder's own parameters found it), so load
    weights and make data loaders before, and load checkpoints of the attachment after.
    ``optimizer`` is any torch optimizer over parameters of the model, also inside accelerate's
    wrapper, or a list of them, such as [muon, adamw]: then an inner step is over when each has
    stepped, or when the one that ``counts`` names has. With None nothing is hooked and
    `Attachment.step` is called by hand. ``batch_size`` is
    the number of samples of an inner step (of this rank's), by which members are weighted;
    `Attachment.samples` tells it step by step, and with `Swarm.shard` it is known. ``examples``:
    how many this site trains on, by which it is weighted in a federated run, whatever it
    processes; by default as many as `atoll.node.site_data` has. ``include``:
    parameters that are frozen now and belong to the run all the same, so that they may be unfrozen
    later: patterns of names, modules or parameters, alike in the scripts of all members.
    ``sync_every`` (inner steps) and ``round_s`` (seconds) may repeat what the run's manifest says;
    the manifest has authority. ``on_round`` hears every Outcome. ``tokenizer`` (or processor: what
    has ``save_pretrained``) goes into the folder that `atoll export` writes. ``clock`` is for
    tests; where the swarm has one of its own (`atoll.node.local`), it is that one.

    ``evaluate`` is given the model and returns its loss on a few held-out batches, the same ones in
    each call (a number, the smaller the better). In a run with ``[evaluate]`` it is called now and
    then before and after a round's model is adopted, without gradients, in evaluation mode and with
    random numbers of its own, for 1 % of the time: so a run in which averaging harms is named. An
    exception in it is told once, and ends evaluations only.

    An optimizer that remembers where the parameters were (slow or averaged weights, masters in
    float32) would take an adopted anchor back. What it keeps is found and moved along, or named
    (`script.consent`). ``on_adopted`` does that in the script's own way, for all optimizers: after
    an anchor was adopted it gets by how much each parameter was moved, as a dict from parameter to
    float32 tensor (float64 for float64) of its shape, on its device.

    In a job of several ranks (torchrun with DistributedDataParallel or fully_shard) all ranks
    attach: rank 0 with the swarm that it joined, the others with None. The job is one peer.
    Whatever one rank asks of its attachment all ranks must, as with torch's own collectives.

    After this call nothing the network or the node does raises, unless ``strict``: then a round
    that misses its deadline raises DeadlineExceededError and a lost node SwarmClosedError, with
    training state intact.

    Raises ConfigError (the argument's name in ``key``) for what cannot be attached,
    ModelMismatchError when the run's model is another.
    """
    if in_job(model):
        from ..ranks.swarm import rank_swarm  # loads what a script on one process does not need

        swarm = rank_swarm(swarm, check_swarm)
        clock = swarm.clock(clock)
    else:
        check_swarm(swarm)
    assert swarm is not None
    check_arguments(swarm.settings, {"sync_every": sync_every, "round_s": round_s})
    inner = _optimizers(optimizer)
    counting = _counting(counts, inner)
    included = included_names(model, include)
    check_site(swarm, inner)
    if inner:
        check_method(swarm.settings)
    for each in inner:
        check_optimizer(model, each)
    if evaluate is not None and not callable(evaluate):
        raise ConfigError(
            f"evaluate is a {type(evaluate).__name__}, which cannot be called",
            key="evaluate",
            hint="evaluate=lambda model: loss_fn(model(held_out_x), held_out_y)",
        )
    if batch_size is not None and (batch_size := sample_count(batch_size)) < 1:
        raise ConfigError(f"batch_size = {batch_size} is not a positive number", key="batch_size")
    for thing, key in (
        (model, "model"),
        *((each, "optimizer") for each in inner),
        (swarm, "swarm"),
    ):
        if attached_to(thing) is not None:
            raise ConfigError(
                f"this {key} is attached already",
                key=key,
                hint="Call detach() on the first attachment.",
            )
    return Attachment(
        model,
        inner,
        swarm,
        outermost=_outermost(optimizer, inner),
        on_adopted=on_adopted,
        counts=counting,
        included=included,
        batch_size=batch_size,
        examples=examples_of(swarm.settings, examples),
        on_round=on_round,
        strict=strict,
        tokenizer=tokenizer,
        evaluate=evaluate,
        clock=_clock_of(swarm, clock),
    )


def _optimizers(given: Any) -> tuple[Optimizer, ...]:
    """The torch optimizers a script gives: one, a list of them, or None. Raises ConfigError."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        return (hooked(given),)
    several = tuple(hooked(each) for each in cast("Sequence[object]", given))
    if not several or len(set(map(id, several))) != len(several):
        raise ConfigError(
            "the list of optimizers is empty, or names one twice",
            key="optimizer",
            hint=(
                "attach(model, [muon, adamw], swarm), or attach(model, None, "
                "swarm) to count steps by hand"
            ),
        )
    return several


def _outermost(given: Any, optimizers: Sequence[Optimizer]) -> list[Any]:
    """What keeps tensors beside the parameters of each of these."""
    if not optimizers:
        return []
    several = given if isinstance(given, list | tuple) else [given]
    return [outermost(each) for each in cast("Sequence[object]", several)]


def _counting(given: Any, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
    """The optimizers that must have stepped for a step to be over. Raises ConfigError for one that
    is not attached.
    """
    if given is None:
        return optimizers
    if (one := hooked(given)) not in optimizers:
        raise ConfigError(
            f"counts names a {type(one).__name__} that is not attached",
            key="counts",
            why="Only steps of attached optimizers are seen.",
            hint="attach(model, [discriminator_opt, generator_opt], swarm, counts=generator_opt)",
        )
    return (one,)


def _clock_of(swarm: Swarm | None, clock: Callable[[], float]) -> Callable[[], float]:
    """That of a swarm in virtual time, where the script gives none: none but it can judge there."""
    return getattr(swarm, "clock", clock) if clock is time.monotonic else clock


class Attachment:
    """A model's membership in a run, made by `attach`. It counts the inner steps of the optimizer;
    after every H of them it contributes what they changed, waits for the round (without overlap),
    and puts the run's new anchor into the model.

        sync = attach(model, optimizer, swarm, batch_size=32)
        while not sync.done:
            ...                                 # forward, backward, optimizer.step()
            sync.log(loss=loss)                 # for `atoll status` and the page; may be left out
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                      "sync": sync.state_dict()}

    It obeys torch's Stateful: whoever loads all three goes on in the round at which they were
    saved. After `detach` the model is a plain one again.
    """

    _evaluating = ""  # what the model is lent to, where it is
    _last: WaitedOutcome | None = None
    _resuming: PendingLoad | None = None
    _retry_at = 0.0  # before, the run is not entered again
    _declared: int | None = None  # samples told for the step under way

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        swarm: Swarm,
        *,
        outermost: Sequence[Any],
        on_adopted: OnAdopted | None,
        counts: Sequence[Optimizer],
        included: Collection[str],
        batch_size: int | None,
        examples: int = 0,
        on_round: Callable[[Outcome], None] | None,
        strict: bool,
        tokenizer: Any,
        evaluate: Evaluate | None,
        clock: Callable[[], float],
    ) -> None:
        """Use `attach`, which checks the arguments first."""
        self.swarm, self.ledger = swarm, SampleLedger(batch_size)
        self.first_batches = FirstBatches(swarm)
        self.schedule_ends = ScheduleEnds(swarm, optimizers, outermost)
        self._strict, self._clock, self._on_round = strict, clock, on_round
        self._counter = StepCounter()
        self._budget = WaitBudget.of(swarm.settings)
        self._ranks = cast("RankSwarm", swarm) if hasattr(swarm, "ranks") else None
        self._adapters = turns_of(model, swarm.settings, wrapped=self._ranks is not None)
        self._flat = flat_vector(
            model, swarm.settings, included=included, sharded=self._ranks is not None
        )
        self._keeper = ModelKeeper(
            model,
            self._flat,
            swarm.settings,
            swarm.model_folder,
            tokenizer=tokenizer,
            writes=self._ranks is None or self._ranks.ranks.rank == 0,
        )
        self._parts = TrainingParts(model, self._flat.layout, swarm)
        self._frozen = FrozenWatch(model, self._flat.layout, swarm)
        self._buffers = BufferWatch(model, swarm, alone=self._ranks is not None)
        if self._ranks is not None:
            self._flat = self._ranks.place(model, self._flat)
        self._strands = strands_of(swarm, self._flat, self._counter, clock, self._drop, examples)
        self._lookout = Lookout(swarm)
        self._evaluations = Evaluations(model, evaluate, swarm, clock)
        self._times = StepTimes(clock, lambda: next((t.device for t in self._flat.tensors), None))
        self._totals, self._uncollected = Totals(), Since(self._counter)
        self._node_lost = self._detached = self._warned = self._told_error = False
        self._counts = {id(each) for each in counts}  # whose steps make up one
        self._stepped: dict[int, Tensor | None] = {}  # optimizers in the step under way: found_inf
        self._stateless, self._second_steps = set[int](), SecondSteps()
        self._told_habit = self._told_moved = False  # that the script changes weights itself
        self._consent = Consent(model, self._flat, outermost, optimizers, on_adopted)
        with naming_tensors(self._flat), self._consent.adopting():
            enter(swarm, self._flat, self._strands)
        self._parts.wrote()
        self._weights = WeightWatch(model, optimizers, included=included)
        self._adapters.turn(self.round)
        self._hooks: list[Any] = []
        self._hook(optimizers)
        attached[model] = attached[swarm] = weakref.ref(self)
        self._keeper.begin(self.evaluate_anchor, self.round)
        self._uncounted = Uncounted(model, optimizers, self._weights, clock, swarm.report)
        self._look_around()
        if self._finished:
            self._uncounted.remove()
            self._lookout.tell_finished(self._over)
        self._rest()

    def _hook(self, optimizers: Sequence[Optimizer]) -> None:
        """Training begins: see the optimizers' steps."""
        self._weights.begin()
        self._evaluations.begin(self.round)
        # A compiled function around optimizer.step() must break its graph here.
        before, after = (
            cast("Any", torch.compiler.disable(hook))
            for hook in (self._before_step, self._after_step)
        )
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(before))
            self._hooks.append(optimizer.register_step_post_hook(after))
            attached[optimizer] = weakref.ref(self)

    # ---- counting

    def samples(self, count: int) -> None:
        """The step under way processes ``count`` more samples (default: `attach`'s ``batch_size``,
        else 1; with a shard, those it gave). Members are weighted by their samples."""
        count = sample_count(count)
        if count < 0:
            raise ConfigError(
                f"samples({count}): a number of samples cannot be negative", key="samples"
            )
        self._declared = sample_count((self._declared or 0) + count)
        self._uncounted.look()

    def step(self) -> None:
        """Count one inner step by hand: after each, for an attachment without an optimizer."""
        if self._hooks:
            raise ConfigError(
                "the optimizer's hook counts its steps already",
                key="optimizer",
                hint="Leave step() out, or attach(model, None, swarm).",
            )
        self._finish_resume()
        self._show_gradients()
        self._uncounted.stepped_by_hand()
        self._count(None)

    def _show_gradients(self) -> None:
        """Before a round's first step, where nobody has said what is read."""
        if self.first_batches.wants(round_ := self.round):
            self.first_batches.trained(self._flat.tensors, round_)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if in_step_of_base(optimizer):
            return None
        check_capture(optimizer)
        if not optimizer.state:
            self._stateless.add(id(optimizer))
        self._outside("optimizer.step()")
        # A closure makes its gradients inside of the step.
        graded = len(args) > 1 or bool(kwargs) or has_gradient(optimizer)
        self._second_steps.stepping(graded=graded)
        self._show_gradients()
        self._weights.before_step()
        self._uncounted.stepping(True)
        return self._strands[0].replica.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if in_step_of_base(optimizer):
            return
        self._weights.after_step()
        self._uncounted.stepping(False)
        stateless = id(optimizer) in self._stateless
        self._stateless.discard(id(optimizer))
        if stateless and moves_nothing(optimizer):
            return
        self._stepped[id(optimizer)] = getattr(optimizer, "found_inf", None)
        if not self._counts <= self._stepped.keys():
            self._uncounted.stepped_in_part(optimizer)
        else:
            found = [
                found_inf
                for key, found_inf in self._stepped.items()
                if found_inf is not None and key in self._counts
            ]
            self._stepped.clear()
            if self._second_steps.ends_empty():
                return
            self._count(
                sum((each.to(found[0].device) for each in found[1:]), found[0]) if found else None
            )

    def _count(self, found_inf: Tensor | None) -> None:
        self._uncounted.counted()
        samples, self._declared = self.ledger.step(self._declared), None
        if (left := self.ledger.left()) is not None:
            self._tell_short(left)
        if (again := self.ledger.again()) is not None:
            self._tell_again(again)
        work = self.swarm.settings.work
        by_samples = work is None or work.steps is None
        if by_samples and (empty := self.ledger.empty()) is not None:
            self._tell_empty(empty)
        if self._detached or self._finished:
            return
        if work is not None and by_samples and self.ledger.guessed:
            raise ConfigError(
                f"how many samples a step has is not said, and a round of this run is {work}",
                key="batch_size",
                why="Each step would count as one sample.",
                hint="attach(..., batch_size=N), or attachment.samples(len(batch)) before a step",
            )
        samples = self._of_all_ranks(samples)
        self._counter.count(samples, found_inf)
        for strand in self._strands:
            strand.replica.stepped(samples)
        self._buffers.stepped()
        self.schedule_ends.stepped()
        if report := self._times.step():
            with suppress(AtollError):  # a node that is lost is noticed by whoever needs it next
                self.swarm.report(report)
        if self.swarm.settings.target_samples is not None:
            self._count_members_again()
        if due := [strand for strand in self._strands if strand.due]:
            self._sync(due)
            self._rest()
            self._times.pause()
        elif late := [strand for strand in self._strands if strand.late]:
            self._sync(late, only_settle=True)
            self._times.pause()

    def _tell_short(self, left: int) -> None:
        """Steps count fewer samples than the shard gives; 0: no longer."""
        if left:
            logger.warning(
                "each of the last %d steps counted fewer samples than the shard gave for it, and "
                "%d are read and not counted: leave samples() out, or declare each batch as it is, "
                "samples(len(batch))",
                SHORT,
                left,
            )
        with suppress(AtollError):  # without a node the script has been told
            self.swarm.report({"samples_short": float(left)})

    def _tell_again(self, steps: int) -> None:
        """So many steps are on batches that the shard gave before; 0: no longer."""
        if steps:
            logger.warning(
                "each of the last %d steps was made on nothing new of the shard: batches that were "
                "kept (itertools.cycle, a list of them) are trained on again and count as no "
                "samples. Iterate the shard itself in each epoch, or its endless()",
                steps,
            )
        with suppress(AtollError):
            self.swarm.report({"samples_again": float(steps)})

    def _tell_empty(self, steps: int) -> None:
        """So many steps are of no samples; 0: no longer."""
        if steps:
            logger.warning(
                "each of the last %d steps was declared to be of no samples (samples(0)): they are "
                "contributed to no round. samples(len(batch)) says how many a step processes",
                steps,
            )
        with suppress(AtollError):
            self.swarm.report({"samples_zero": float(steps)})

    # ---- rounds

    def sync(self) -> Outcome | None:
        """End the round now: contribute what was trained since the last one and adopt what was
        decided.

        Waits at most for the deadline (`stats`["deadline_s"]), and 5 s where too few members are
        there to decide anything. Returns the last Outcome, None when there was nothing to
        contribute or no node. Called by the hook; call it by hand at any point between two steps,
        such as before a final evaluation. In a federated run a site contributes when its work of
        the round is done, so before that this does nothing, and says so.
        """
        if self._detached:
            raise LocalProtocolError("this attachment was detached")
        self._outside("sync()")
        if left := self._part_done():
            logger.info(
                "sync() contributes nothing: a round of this run is %s, and %d are left of it",
                self.swarm.settings.work,
                left,
            )
            return None
        return None if self._finished else self._sync(self._strands)

    def finish(self) -> Outcome | None:
        """Training has ended: contribute what is left as `sync` does, and detach. Where something
        else than the optimizer has changed the weights since the last step, such as a callback
        that leaves averaged or the best ones in the model, they stay there, and what was trained
        since the last boundary is dropped with a warning. Part of a federated round's work is
        dropped, too. Idempotent.
        """
        if self._detached:
            return None
        self._outside("finish()")
        if left := self._part_done():
            samples = sum(strand.since.settle().samples for strand in self._strands)
            work = self.swarm.settings.work
            self._drop(samples, f"a round of this run is {work}, and {left} are left of it")
            self.detach()
            return None
        outcome = None if self._finished else self._sync(self._strands, leaves=True)
        self.detach()
        return outcome

    def _part_done(self) -> int:
        """Steps or samples that are left of a round's work, where some of it is done; else 0."""
        return 0 if self._finished else max(strand.part_done for strand in self._strands)

    def settle(self) -> Outcome | None:
        """Wait for what is under way and adopt it, without contributing anything; None when there
        was nothing.

        In a run with overlap call it before model and attachment are saved: such a checkpoint is
        resumed exactly. Waits as `sync` does; the outcome is "open" when that was not long enough,
        and the contribution is still under way.
        """
        self._outside("settle()")
        under_way = [strand for strand in self._strands if strand.replica.frozen is not None]
        return self._sync(under_way, only_settle=True) if under_way and not self._detached else None

    # Snapshots outlive the with block of a script that synchronises before it evaluates.
    @torch.inference_mode(mode=False)
    def _sync(
        self, strands: Sequence[Strand], *, only_settle: bool = False, leaves: bool = False
    ) -> Outcome | None:
        """A boundary of these strands: adopt what was decided and contribute; or, some steps into a
        round, adopt only. A script that ``leaves`` keeps the weights that others have left in its
        model.
        """
        self._flat.follow()
        self._parts.look()
        self._collect()
        by_samples = self.swarm.settings.work is None
        if by_samples and self.ledger.guessed and self._lookout.peers and not self._warned:
            self._warned = True
            logger.warning(
                "each step counts as one sample, and members are weighted by their samples: "
                "attach(…, batch_size=N) or attachment.samples(n) says how many they are"
            )
        if not only_settle:
            if self.swarm.settings.overlap == "eager":  # what is expected of the round hangs on it
                self._count_members()
            loss = self._lookout.contributing()
            for strand in strands:
                strand.collect(loss)
            self._judge_weights()
            self._parts.close(self._totals.steps)
            if leaves and any(strand.replica.moved for strand in strands):
                for strand in strands:
                    strand.replica.give_up()
                return None
        turns: list[WaitedOutcome] = []
        noted: list[Strand] = []  # whose they are
        failure: AtollError | None = None
        own = self._evaluated_own(strands)
        replicas = [strand.replica for strand in self._strands]
        with self._weights.writing(ends=not only_settle), self._consent.adopting(replicas):
            try:
                for strand, turn in self._boundary(strands, only_settle):
                    turns.append(turn)
                    noted.append(strand)
                    self._note(strand, turn)
            except AtollError as error:
                failure = error
                self._failed(error)
            self._lookout.adopted([turn.outcome for turn in turns])
            if own is not None:
                self._evaluate_adopted(own, list(zip(noted, turns, strict=True)))
            self._uncounted.wrote()
            if turns and not only_settle and self._ranks is None:
                self._uncounted.contributed(min(strand.replica.still for strand in self._strands))
            if not only_settle:
                for strand in strands:
                    strand.begin()
                self._adapters.turn(self.round)
                self._look_around()
                self.schedule_ends.look(self._totals.steps, self.round)
                self._frozen.look()
                self._buffers.round_over(self.round, self._lookout.peers, last=self._finished)
                self._keeper.refresh(
                    self.evaluate_anchor, self.round, self._clock, last=self._finished
                )
        self._parts.wrote()
        self.ledger.turns += 1
        for turn in turns:
            self._lookout.tell_round(turn.outcome, turn.samples)
        if turns and self._finished:
            self._uncounted.remove()
            self._lookout.tell_finished(self._over)
        if self._on_round is not None:
            for turn in turns:
                self._on_round(turn.outcome)
        return self._outcome(turns, failure)

    def _evaluated_own(self, strands: Sequence[Strand]) -> float | None:
        """The held-out loss before something is adopted; None where that is not looked at."""
        moved = any(strand.replica.moved for strand in strands)
        if not self._evaluations.on or self._node_lost or moved:
            return None
        waits = not self.swarm.settings.trains_on
        if not any(waits or strand.replica.frozen is not None for strand in strands):
            return None
        try:
            live = [member.peer for member in self.swarm.members() if member.live]
        except AtollError:
            return None  # whoever needs the node next notices that it is lost
        if not self._evaluations.due(self.swarm.run_id, self.swarm.peer, live, self.round + 1):
            return None
        with self._evaluation():
            return self._evaluations.own()

    def _evaluate_adopted(self, own: float, turns: Sequence[tuple[Strand, WaitedOutcome]]) -> None:
        """The held-out loss after it, for the next contributions to what has adopted."""
        decided = [strand for strand, turn in turns if turn.outcome.counted]
        if not decided:
            return  # what follows is no round's model: it has work in it that was not counted
        with self._evaluation():
            found = self._evaluations.adopted(own)
        for strand in decided:
            strand.evaluated = found

    @contextmanager
    def _evaluation(self) -> Generator[None]:
        """Within: the script's function is called, and may not step."""
        self._evaluating = "evaluate"
        try:
            yield
        finally:
            self._evaluating = ""

    def _judge_weights(self) -> None:
        """Find out who changed the weights since the last boundary. What an event has left in them
        is not contributed, in any fragment.
        """
        change = self._weights.close(self._totals.steps)
        for strand in self._strands:
            strand.replica.ordinary = change.ordinary
        if change.habit and not self._told_habit:
            self._told_habit = True
            # where the like was dropped before, that it is not any more is no small thing
            logger.log(
                logging.WARNING if self._told_moved else logging.INFO,
                "the script changes weights between steps (%s): contributed as training",
                change.habit,
            )
        if change.taken_back:
            logger.warning("%s", change.taken_back)
        if reason := self._flat.agreed(change.reason):
            self._told_moved = True
            self._lookout.moved(change.step, change.steps_long)
            for strand in self._strands:
                strand.replica.moved = reason

    def moved(self, why: str) -> None:
        """Declare that the weights are changed on purpose beside the optimizer, such as dead
        experts that begin again: what was trained since the last boundary is contributed with that
        change. Call it next to the change, between the same two steps.

        Without it a change that does not recur (an earlier checkpoint, averaged weights left in the
        model) is taken for no training, and the model goes back to the anchor.
        """
        self._weights.meant(why)
        for strand in self._strands:
            strand.replica.on_purpose = True
        logger.info("the weights are changed on purpose: %s", why)

    def _rest(self) -> None:
        """Between two rounds: wait for as long as this machine's owner has paused training, then go
        on from the newest anchor.
        """
        if self._finished or not (why := self.swarm.paused):
            return
        logger.info("training is %s; this machine goes on serving the run", why)
        while self.swarm.paused:
            threading.Event().wait(REST_S)
        logger.info("training goes on")
        self._sync(self._strands)

    def _outside(self, call: str) -> None:
        """Of the with block, and with what a load has left to do."""
        if self._evaluating:
            raise ConfigError(
                f"{call} inside {self._evaluating}",
                key=self._evaluating.removesuffix("()"),
                hint="Call it outside: in it the model is looked at, and not trained.",
            )
        self._finish_resume()

    def _outcome(
        self, turns: Sequence[WaitedOutcome], failure: AtollError | None
    ) -> Outcome | None:
        """The last outcome; or, with strict, what went wrong."""
        outcome = turns[-1].outcome if turns else None
        if not self._strict:
            return outcome
        if failure is not None:
            raise failure
        if outcome is not None and outcome.status == "open" and not self.swarm.settings.trains_on:
            raise DeadlineExceededError(
                f"round {outcome.round} is undecided after {turns[-1].waited_s:.1f} s: "
                f"{outcome.reason or 'no reason given'}"
            )
        return outcome

    def _collect(self) -> None:
        """Totals of what was counted since the last boundary."""
        counted = self._uncollected.settle()
        self._totals.steps += counted.steps
        self._totals.skipped_steps += counted.skipped
        self._uncollected.clear()
        if not self._hooks and (
            declared := self._of_all_ranks(self._declared or 0)
        ):  # by hand, without step(): what samples() was told
            for strand in self._strands:
                strand.replica.collect(declared)
            self._declared = None

    def _boundary(
        self, strands: Sequence[Strand], only_settle: bool
    ) -> Iterator[tuple[Strand, WaitedOutcome]]:
        """The news at a boundary; after the node was lost, by entering the run again."""
        if self._node_lost:
            yield from self._reenter()
            if self._node_lost:
                return
        for strand in strands:
            if only_settle:
                if strand.replica.frozen is not None:  # else it was learnt on entering again
                    yield strand, strand.replica.settle(self._budget.seconds, self._decidable)
            else:
                for turn in strand.replica.turn(self._budget.seconds, self._decidable):
                    yield strand, turn

    def _reenter(self) -> Iterator[tuple[Strand, WaitedOutcome]]:
        started = self._clock()
        if started < self._retry_at:
            return
        try:
            for strand in self._strands:
                if (turn := strand.replica.reenter()) is not None:
                    yield strand, turn
        except AtollError:
            self._retry_at = self._clock() + RETRY_FACTOR * (self._clock() - started)
            raise
        self._node_lost = False
        logger.info("the node is back; training with the swarm from round %d", self.round)
        emit(Reentered(self.swarm.run_id, self.round))

    def _decidable(self) -> bool:
        return reached(self.swarm.members(), self.swarm.settings.lying).quorum

    def _note(self, strand: Strand, turn: WaitedOutcome) -> None:
        outcome, totals = turn.outcome, self._totals
        strand.noted(turn)
        totals.waiting_s += turn.waited_s
        if outcome.status == "open":
            totals.open += not (self.swarm.settings.trains_on and turn.waited_s == 0)
        else:
            totals.rounds += 1
            totals.bytes_sent += outcome.bytes_sent
            totals.bytes_received += outcome.bytes_received
            self._budget.measured(outcome.elapsed_s or turn.waited_s)
            if outcome.counted:
                totals.counted += 1
                totals.samples_counted += turn.samples
            else:
                totals.uncounted += 1
        self._last = turn
        emit(RoundSeen(self.swarm.run_id, turn.samples, turn.waited_s, outcome))

    def _failed(self, error: AtollError) -> None:
        if not isinstance(error, SwarmClosedError):
            logger.warning("this round is lost, training goes on: %s", error)
        elif not self._node_lost:
            self._node_lost = True
            logger.warning("training alone until the node is back in the run: %s", error)
            emit(TrainingAlone(self.swarm.run_id, node_lost=True))

    def _drop(self, samples: int, reason: str) -> None:
        self._totals.samples_dropped += samples
        logger.warning("work of %d samples is not contributed: %s", samples, reason)
        emit(ProgressDropped(self.swarm.run_id, samples, reason))

    def _look_around(self) -> None:
        """Who is there, and what the node is to show. Nothing of it may cost a round."""
        self._lookout.mean()
        if not self._node_lost and not getattr(
            self.swarm, "connected", True
        ):  # where waits only say "open" when the node goes
            self._failed(
                SwarmClosedError(getattr(self.swarm, "trouble", "") or "the connection ended")
            )
        if self._node_lost:
            self._lookout.peers = 0
            return
        undecided = self._last is not None and self._last.outcome.status == "open"
        try:
            self._lookout.look(
                {
                    "step": self._totals.steps,
                    "samples": self._totals.samples_counted,
                    **({"dropped": dropped} if (dropped := self._totals.samples_dropped) else {}),
                    **self._realised_error(),
                    **self._evaluations.newest,
                },
                undecided=undecided,
                done=self._finished,
            )
        except AtollError as error:
            self._failed(error)
            return
        for strand in self._strands:
            strand.schedule.members = strand.replica.members = self._lookout.peers + 1

    def _realised_error(self) -> dict[str, float]:
        """What rounds lose by encoding, of the fragment that loses most, by class of tensor; said
        once where it is far more than the run wishes.
        """
        found = dict[str, float]()
        for strand in self._strands:
            for name, error in strand.replica.extras.realised.items():
                found[name] = max(error, found.get(name, 0.0))
        most, wished = found.get(ENCODING_ERROR, 0.0), self.swarm.settings.error
        if wished is not None and most > MUCH_MORE * wished and not self._told_error:
            self._told_error = True
            logger.warning(
                "a round loses %.2g of the mean by encoding, the run wishes %.2g: values here are "
                "less alike than normal ones; a run with a smaller [exchange] error loses less",
                most,
                wished,
            )
        return found

    def _count_members_again(self) -> None:
        """Before the first round, at steps 1, 2, 4, 8, …: members may have attached before they
        knew one another, and the target is for all of them."""
        steps = self._counter.fired
        if not any(strand.schedule.share for strand in self._strands) and not steps & (steps - 1):
            self._count_members()

    def _count_members(self) -> None:
        """How many there are now. A node that is lost is noticed by whoever needs it next."""
        if self._node_lost:
            return
        with suppress(AtollError):
            self._lookout.count()
            for strand in self._strands:
                strand.schedule.members = strand.replica.members = self._lookout.peers + 1

    # ---- what a script sees

    @property
    def done(self) -> bool:
        """Whether the run has committed as many rounds as its manifest asks for, or takes no more
        from this member, whose privacy is spent. Later steps are no longer counted.
        """
        if not self._detached:
            self._uncounted.look()
        return self._finished

    @property
    def _finished(self) -> bool:
        return all(strand.replica.finished for strand in self._strands) or bool(self._over)

    @property
    def _over(self) -> str:
        """Why the run is over for this member, before its last round; "" where it is not."""
        replicas = [strand.replica for strand in self._strands]
        rounds, at = self.swarm.settings.rounds, min(replica.base.round for replica in replicas)
        if rounds is not None and at >= rounds:
            return ""
        if over := next((replica.over for replica in replicas if replica.over), ""):
            return over
        if any(replica.frozen is not None for replica in replicas):
            return ""
        return self._lookout.spent

    @property
    def round(self) -> int:
        """Committed rounds of the anchor the model started from; in fragments, of the one that is
        behind.
        """
        return min(strand.replica.base.round for strand in self._strands)

    @property
    def position(self) -> int:
        """Samples that all members together have trained on, as far as is known here: those in the
        anchor that the model started from, and for what is under way this member's samples over its
        share of the last round. What a learning-rate schedule should follow: it keeps its pace
        whoever comes or goes, and a late joiner starts where the run is.

            def left(step):
                return max(0.01, 1 - attachment.position / total_samples)

            scheduler = LambdaLR(optimizer, left)
        """
        self.schedule_ends.follows = True
        return min(strand.position for strand in self._strands)

    @property
    def begun(self) -> tuple[int, int]:
        """Committed rounds in the model's anchor, and samples trained since that no decided
        contribution counts; of the first fragment.
        """
        self._finish_resume()
        return self._strands[0].replica.base.round, self._strands[0].unsent

    @property
    def stats(self) -> dict[str, int | float]:
        """Finite numbers and nothing else, for any tracker: totals, the last round, who is there
        (``alone``, ``node_lost`` and ``last_counted`` are 0 or 1), the last round's means of `log`
        as ``metrics/NAME``, and what of its privacy this member has spent as ``privacy/NAME``. What
        has no value now is not in it. In words and lists: `describe`.
        """
        totals, last, since = self._totals, self._last, self._uncollected.settle()
        found: dict[str, Any] = {
            "round": self.round,
            **{name: getattr(totals, name) for name in Totals.__dataclass_fields__},
            "steps": totals.steps + since.steps,
            "skipped_steps": totals.skipped_steps + since.skipped,
            "samples_unsent": max(strand.unsent for strand in self._strands),
            "deadline_s": self._budget.seconds,
            "sync_every": self._strands[0].round_steps
            if self.swarm.settings.sync_every is not None
            else None,
            "peers": self._lookout.peers,
            "alone": int(self._lookout.peers == 0),
            "node_lost": int(self._node_lost),
            "last_counted": int(last.outcome.counted) if last else 0,
            "contributors": len(last.outcome.contributors) if last else 0,
            "last_wait_s": last.waited_s if last else 0.0,
            **{f"metrics/{name}": value for name, value in self._lookout.metrics.items()},
            **{f"privacy/{name}": value for name, value in (self._lookout.privacy or {}).items()},
        }
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }

    def describe(self) -> dict[str, Any]:
        """What `stats` cannot hold, as JSON takes it: the run's id, the newest outcome and who was
        in it, the last round's means of `log` by name (NaN and infinity as text), what of its
        privacy this member has spent (the fields of `Spent`; None in a run without noise). What
        ``evaluate`` found last is in ``evaluation``: ``held_out`` after a round's model was
        adopted, ``held_out_own`` just before, and ``averaging_gains``, by how much the first is
        better, as a share of the larger. ``averaging`` says what the members' readings together
        have against averaging, "" where nothing.
        """
        last = self._last.outcome if self._last else None
        return {
            "run": self.swarm.run_id,
            "last_status": last.status if last else "",
            "last_reason": last.reason if last else "",
            "last_contributors": [share.peer for share in last.contributors] if last else [],
            "metrics": {
                name: value if math.isfinite(value) else str(value)
                for name, value in self._lookout.metrics.items()
            },
            "privacy": self._lookout.privacy,
            "evaluation": dict(self._evaluations.newest),
            "averaging": self._lookout.averaging,
        }

    def log(self, **metrics: Any) -> None:
        """Tell the node about training, such as ``loss=loss``: a number or a tensor of one element.

        Tensors are summed where they are and read once a round, so this never waits for a device.
        The mean of each over the round is what `atoll status` shows and `stats` holds as
        ``metrics/NAME``; that of ``loss`` is what a run's governor goes by. Anything else is left
        out, with a warning once for each name: logging never ends a script.
        """
        for name, value in metrics.items():
            self._lookout.add(name, value)
        self._uncounted.look()

    @contextmanager
    def evaluate_anchor(self, *, own: bool = False) -> Generator[AnchorView]:
        """Put the newest anchor into the model for a with block; the live values come back after
        it, bit for bit.

        Yields the anchor's view (round, digest). ``own``: put this member's personal model there,
        in a run that has them (ConfigError else). Costs a copy of the model in host memory.
        optimizer.step() inside raises ConfigError.
        """
        self._outside("evaluate_anchor()")
        source = self._strands[0].replica.own_model() if own else None
        self._flat.follow()
        view, leased = self._newest()
        self._evaluating = "evaluate_anchor()"
        self._parts.look()
        try:
            with showing(self._flat, source or view, self._replaced):
                yield view
        finally:
            self._evaluating = ""
            self._parts.wrote()
            self._uncounted.wrote()
            if leased:
                view.release()

    def _of_all_ranks(self, samples: int) -> int:
        return samples if self._ranks is None else self._ranks.ranks.total(samples)

    def _replaced(self) -> None:
        if self._ranks is not None:
            self._ranks.written()

    def _newest(self) -> tuple[AnchorView, bool]:
        """The newest anchor there is, and whether it is a lease of one's own."""
        if not self._node_lost:
            try:
                return self.swarm.anchor(), True
            except SwarmClosedError as error:
                self._failed(error)
        bases = [strand.replica.base for strand in self._strands]
        return (bases[0] if len(bases) == 1 else Bases(bases)), False

    def detach(self) -> None:
        """Take the hooks off and give the anchor back. The model keeps its live parameters, the
        swarm stays open. Idempotent.
        """
        if self._detached:
            return
        self._detached = True
        for hook in self._hooks:
            hook.remove()
        self._uncounted.remove()
        self._buffers.close()
        self._adapters.release()
        for key in [key for key, value in attached.items() if value() is self]:
            del attached[key]
        for strand in self._strands:
            strand.replica.base.release()

    # ---- checkpoints

    @property
    def attached(self) -> bool:
        return not self._detached

    def state_dict(self) -> dict[str, Any]:
        """Where this member is: run, round and digest of its anchor, counters and what was not
        sent. See `load_state_dict`.

        Numbers and strings; tensors with feedback (residuals), worker momentum and overlap "eager";
        a `SoloSwarm` adds its anchor and momentum under "swarm". Save the model and the optimizer
        with it, and with overlap call `settle` before all of them.
        """
        if self._detached:
            raise LocalProtocolError("this attachment was detached", hint="Save before detach().")
        self._finish_resume()
        self._collect()
        if any(strand.replica.frozen is not None for strand in self._strands):
            logger.warning(
                "saved while a contribution is under way: who resumes from this state drops it; "
                "call settle() before saving"
            )
        return save(self.swarm, self._strands, self._totals)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state; the model and the optimizer are loaded beside it, in any order,
        after `attach`.

        When the run still has the anchor of the saved state, training goes on exactly where it was.
        When the run has moved on, the model takes the newest anchor before its next step and what
        was not sent is dropped, with a warning. A contribution that was undecided is dropped here
        too: the node may still count it. Raises OutOfDateError when the saved state is not in the
        run's past, StateError for a damaged one.
        """
        self._resuming = PendingLoad(self.swarm, self._strands, state_dict)
        self._totals = self._resuming.totals
        self.schedule_ends.resumed()
        self.ledger.turns += 1
        self._uncollected.clear()
        self._declared = None

    def _finish_resume(self) -> None:
        """The part of `load_state_dict` that needs the model, which a checkpoint may load after
        this attachment.
        """
        resuming, self._resuming = self._resuming, None
        if resuming is not None:
            with self._consent.adopting():
                resuming.finish(self._drop)
            self._uncounted.wrote()
            self._adapters.turn(self.round)
            self._weights.begin()
            for strand in self._strands:
                strand.replica.moved = ""
