"""A replica of a federated run whose method corrects inner steps, or whose members keep something
for themselves.

Each round begins at the anchor: what SCAFFOLD's and FedAvg-M's formulas say of a round's steps
holds of no others. So work that was not counted is given up, unlike in `replica`, and so is what
was trained while a contribution was undecided. The corrections are those of
`federated.member.InnerSteps`, which simulations use, too; what is kept is
`federated.site.SiteState`, saved before each contribution.

Where the manifest says what the work of a round is (`WorkSettings`), a site contributes when it has
done that, counts what it has declared, and waits until the round is over: with one step more its
update would be that of another method.

Corrections need the optimizer's hook: `before_step` changes the gradients at the parameters.
Methods with more than one gradient a step need the closure that ``optimizer.step(closure)`` takes:
it clears gradients, computes the loss of one batch, calls backward and returns the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...collectives.errors import ConfigError
from ...collectives.layout import STEPS
from ...collectives.outcomes import AnchorView, Outcome, Pending
from ...collectives.round.sampling import draw_members
from ...collectives.script_swarm import PeerView, Shelved, Swarm
from ...collectives.swarm import RunSettings, SiteSettings
from ..federated.inner import mean_direction
from ..federated.member import InnerSteps, Served, first_control
from ..federated.personal import ditto
from ..federated.site import (
    CLIENTS,
    CONTROLS,
    SiteState,
    check_examples,
    knobs_of,
    method_of,
    unpack,
)
from ..model.flat import FlatVector
from ..model.pseudograd import write_pseudo_gradient
from ..model.reconcile import adopt
from ..model.vector import FlatTensor, RangeSource
from ..rounds.replica import OfferedContribution, Replica
from ..rounds.replica import WaitedOutcome as Look

logger = logging.getLogger("atoll")

LOST = "the round went on without them; each round of this method begins at the anchor"
MEANWHILE = "they were trained while the round before was being decided"
BEHIND = "this node is behind what this member has contributed to already"
TELL_S = 10.0  # a site that waits for longer says for whom
LOOK_S = 2.0  # and looks as often whether a site is missing, which it says at once

Closure = Callable[[], Any]


class SiteReplica(Replica):
    """See the module. float32 vectors as long as the parameters, on their device: the anchor, and
    what the method has (docs/federated.md).
    """

    resumes = False
    looks_back = False

    def __init__(
        self,
        flat: FlatVector,
        swarm: Swarm,
        clock: Callable[[], float],
        dropped: Callable[[int, str], None],
        settings: RunSettings,
        examples: int = 0,
    ) -> None:
        """As for Replica. ``examples``: how many this site has, where the run goes by that. Raises
        ConfigError for a swarm without a shelf whose method keeps something, and for another number
        of examples than in an earlier life; StateError and StorageError for what lies on the shelf.
        """
        super().__init__(flat, swarm, clock, dropped, settings)
        self._run: Swarm = swarm
        self._site = settings.site or SiteSettings()
        self._sample, self._outer_lr = settings.sample, settings.outer.lr
        self.method, self._work = method_of(self._site), self._site.work
        self.follows = self._work is None
        self.examples = examples
        # what a step's correction needs of the anchor; a plain step needs none of it
        self._plain = self.method.plain and self._site.pull is None
        self._shelf = swarm.shelf() if isinstance(swarm, Shelved) else None
        if self._shelf is None and not (self._plain and settings.sample is None):
            raise ConfigError(
                "this swarm has no shelf for a member's own state",
                key="swarm",
                hint="Use atoll.node.join(INVITE).",
            )
        saved = self._shelf.load() if self._shelf is not None else None
        self.kept = (
            SiteState(own=first_control(self.method, flat.parameters))
            if saved is None
            else unpack(saved, flat.parameters)
        )
        self._blank = saved is None
        check_examples(self.kept.examples, examples)
        self._ranges = {
            spec.name: slice(spec.offset, spec.offset + spec.numel) for spec in flat.layout.tensors
        }
        self._seen = 0  # the newest entry of the log that the draw was made from
        # Of the turn under way, and the sum of their learning rates.
        self._steps, self._rates = (
            0,
            0.0,
        )
        self._inner: InnerSteps | None = None
        self._anchor = self._personal = torch.empty(0, dtype=torch.float32, device="cpu")
        known = {self.kept.round: self.kept.anchor, self.kept.round - 1: self.kept.before}
        # Parameters of the last two.
        self._anchors = {round_: anchor for round_, anchor in known.items() if anchor is not None}

    # ---- a turn
    def enter(self) -> None:
        super().enter()
        if self.kept.own is not None and self._blank and self.base.round and self._was_counted():
            logger.warning(
                "this member was in the run before, and what it kept is gone: its old control "
                "variate stays in the run's sum"
            )
        self._begin()

    def _begin(self) -> None:
        """A turn begins at the anchor."""
        kept, base, device = self.kept, self.base, self._device
        if kept.open and base.round > kept.round:
            kept.resolve(self.method.control and self._counted_in(kept.round + 1))
        self.takes_part = self._is_draw_members()
        if not self._plain:
            self._anchor = self._vector(base, 0, self.flat.parameters)
        common, own = None, None
        if self.method.control:
            clients = round(float(self._vector(base, self._ranges[CLIENTS].start, 1)))
            common = self._vector(base, self._ranges[CONTROLS].start, self.flat.parameters).div_(
                max(1, clients)
            )
            assert kept.own is not None
            own = kept.own.to(device)
        momentum = before = None
        if self.method.momentum:
            self._anchors = {
                round_: each for round_, each in self._anchors.items() if round_ == base.round - 1
            }
            momentum, before = self._direction(self._anchors.get(base.round - 1))
            self._anchors[base.round] = self._anchor.cpu()
        self._inner = InnerSteps(
            self.method,
            knobs_of(self._site),
            Served(self._anchor, common, momentum, before, base.round),
            own,
        )
        self._steps, self._rates, self.made = 0, 0.0, 0
        if self._site.pull is not None and not self._personal.numel():
            self._personal = self._anchor if kept.personal is None else kept.personal.to(device)

    def _is_draw_members(self) -> bool:
        """Whether this member takes part in the next round, by the newest entry of the log."""
        if self._sample is None:
            return True
        chosen = None
        while tallies := self._run.tallies(self._seen + (chosen is not None)):
            chosen, self._seen = tallies[-1], tallies[-1].entry
        return chosen is None or any(
            member.peer == self._run.peer
            for member in draw_members(self._run.run_id, chosen.hash, chosen.members, self._sample)
        )

    def _direction(self, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """What an inner step was on average in the round that led here, the server's step taken out
        of it, and the anchor before. Where that is not known (at first, or after an absence) it is
        this anchor, and the direction 0."""
        if before is None or not self.kept.rate:
            return torch.zeros_like(self._anchor), self._anchor
        before = before.to(self._device)
        return mean_direction((before - self._anchor) / self._outer_lr, 1, self.kept.rate), before

    @property
    def _device(self) -> torch.device:
        return self.flat.tensors[0].device

    def _vector(self, base: RangeSource, start: int, numel: int) -> Tensor:
        host = torch.empty(numel, dtype=torch.float32, device="cpu")
        base.copy_into(host, start)
        return host.to(self._device)

    # ---- inner steps
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """The gradients are corrected, now or in the closure."""
        if not self.takes_part or (self.method.plain and not self._needs_closure):
            return None
        rate = float(optimizer.param_groups[0]["lr"])
        closure = cast("Closure | None", args[1] if len(args) > 1 else kwargs.get("closure"))
        if closure is None:
            if self._needs_closure:
                what = "Ditto" if self._site.pull is not None else self.method.name
                raise ConfigError(
                    f"{what} takes more than one gradient a step",
                    key="optimizer",
                    why="Each is one of the same batch, at other parameters.",
                    hint=(
                        "optimizer.step(closure), where closure clears the gradients, computes the "
                        "loss, calls backward and returns the loss"
                    ),
                )
            self._corrected(None, rate)
            return None

        def corrected() -> Any:
            loss = closure()
            self._corrected(closure, rate)
            return loss

        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return (args[0], corrected), rest

    @property
    def _needs_closure(self) -> bool:
        return self.method.reduced or self.method.ahead or self._site.pull is not None

    @torch.no_grad()
    def _corrected(self, closure: Closure | None, rate: float) -> None:
        turn = self._inner
        assert turn is not None
        gradient, live = self._gradient(), self._live()
        second = None
        if closure is not None and self._needs_closure:
            kept = self._snapshot()
            if (at := turn.second_at(gradient, live)) is not None:
                second = self._gradient_at(at, closure)
            if self._site.pull is not None:
                self._personal = ditto(
                    self._personal,
                    self._anchor,
                    lambda v: self._gradient_at(v, closure),
                    1,
                    rate,
                    self._site.pull,
                )
            self.flat.read_from(FlatTensor(kept))
            self._spare.append(kept)
        self._steps, self._rates = self._steps + 1, self._rates + rate
        self._write_gradient(turn.direction(gradient, live, second))

    def _gradient_at(self, parameters: Tensor, closure: Closure) -> Tensor:
        """That of the closure's batch. Leaves the model with these parameters."""
        self._load(parameters)
        with torch.enable_grad():
            closure()
        return self._gradient()

    def _live(self) -> Tensor:
        return torch.cat([tensor.detach().reshape(-1).float() for tensor in self._parameters()])

    def _gradient(self) -> Tensor:
        parts = [t.grad if t.grad is not None else torch.zeros_like(t) for t in self._parameters()]
        return torch.cat([part.detach().reshape(-1).float() for part in parts])

    def _write_gradient(self, values: Tensor) -> None:
        start = 0
        for tensor in self._parameters():
            part = values[start : start + tensor.numel()].view(tensor.shape)
            if tensor.grad is None:
                tensor.grad = torch.empty_like(tensor)
            tensor.grad.copy_(part)
            start += tensor.numel()

    def _load(self, parameters: Tensor) -> None:
        start = 0
        for tensor in self._parameters():
            tensor.copy_(parameters[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    def _parameters(self) -> list[Tensor]:
        return [
            t
            for spec, t in zip(self.flat.layout.tensors, self.flat.tensors, strict=True)
            if spec.role == "parameter"
        ]

    def own_model(self) -> RangeSource:
        """The personal model with the anchor's running statistics. Raises ConfigError if none."""
        if self._site.pull is None:
            return super().own_model()
        return _Personal(self._personal.to("cpu"), self.base)

    # ---- rounds
    def turn(
        self, deadline_s: float, decidable: Callable[[], bool] = lambda: True
    ) -> Iterator[Look]:
        if self.frozen is None and self.kept.round > self.base.round:
            new = self.swarm.anchor()
            if self.kept.round > new.round:
                return self.drop(new, BEHIND)
            new.release()
        yield from super().turn(deadline_s, decidable)

    def _offer(self, deadline_s: float, decidable: Callable[[], bool]) -> Look:
        if self.takes_part:  # else it waits for the end of the round
            self._keep()
        return super()._offer(deadline_s, decidable)

    @torch.no_grad()
    def _keep(self) -> None:
        """Save what is kept, with the contribution that is about to be made and without. Raises
        StorageError: then nothing has changed.
        """
        kept, turn, base = self.kept, self._inner, self.base
        assert turn is not None
        new = SiteState(base.round, True, kept.member, kept.rate, kept.own)
        new.examples = self.examples
        if self.method.momentum:
            new.anchor, new.before = self._anchors[base.round], self._anchors.get(base.round - 1)
            # The same at all whose lr is the same.
            new.rate = self._rates * (self.settings.sync_every or self._steps) / max(1, self._steps)
        if self.method.control:
            # The same change, whichever of the two contributions is counted.
            again = kept.round == base.round and kept.next is not None
            control = turn.control(
                self._anchor - self._live(), self._steps, self._rates / max(1, self._steps)
            )
            new.next = kept.next if again or control is None else control.cpu()
        if self._site.pull is not None:
            new.personal = self._personal.cpu()
        if self._shelf is not None:
            self._shelf.save(new.pack())
        self.kept = new

    def _write(self, out: Tensor) -> None:
        if not self.takes_part:
            out.zero_()
            return
        write_pseudo_gradient(self.flat, self.base, out)
        self._note_progress(out)
        kept = self.kept
        if kept.own is not None and kept.next is not None:
            # a sum by examples: c = Σ pᵢ cᵢ; where none are declared it is the mean of the cᵢ
            weight = 1.0 if self._work is not None else float(self.unsent)
            out[self._ranges[CONTROLS]].copy_(kept.own - kept.next).div_(weight)
            out[self._ranges[CLIENTS]].fill_((kept.member - 1) / weight)
        if self.method.normalised:
            out[: self.flat.parameters].div_(self.made)
            at = self._ranges[STEPS]
            out[at].copy_(self._vector(self.base, at.start, 1)).sub_(self.made)
        self.extras.carry_over(out)

    def _counts(self, samples: int) -> int:
        if self._work is None:
            return samples
        return self.examples if self._work.weights == "examples" else 1

    def _wait(
        self, pending: Pending[Outcome], deadline_s: float, decidable: Callable[[], bool]
    ) -> Outcome:
        """Until the round is over, or the node is lost. Who is waited for is said."""
        if self._work is None:
            return super()._wait(pending, deadline_s, decidable)
        began, after_s, told = self._clock(), TELL_S, ""
        while (outcome := pending.wait(LOOK_S)).status == "open":
            if not getattr(self._run, "connected", True):
                return outcome
            views, waited_s = self._run.members(), self._clock() - began
            missing = str(getattr(self._run, "missing", ""))
            if missing and not told:
                logger.warning("round %d waits for %s", self.base.round + 1, missing)
            elif not missing and waited_s >= after_s:
                self._tell_waiting(views, waited_s)
            told = missing
            if waited_s >= after_s:
                after_s *= 2
        return outcome

    def _tell_waiting(self, views: Sequence[PeerView], waited_s: float) -> None:
        """Say for whom this site waits."""
        late = [view for view in views if view.at_work]
        names = [
            f"{view.peer[-8:]} ({'at work' if view.live else 'not heard'})"
            for view in late
            if view.peer != self._run.peer
        ]
        logger.info(
            "the work of round %d is done here; for %.0f s it has waited for %s",
            self.base.round + 1,
            waited_s,
            ", ".join(names) if names else "the round to be decided",
        )

    def _fate(self) -> bool:
        """The log knows."""
        return self._counted_in(self.kept.round + 1)

    def _counted_in(self, round_: int) -> bool:
        """Whether this member is among those that this round counted. Its entry's number is not
        below the round's.
        """
        return any(
            tally.round == round_ and self._in(tally.shares)
            for tally in self._tallies(round_, round_)
        )

    def _was_counted(self) -> bool:
        return any(self._in(tally.shares) for tally in self._tallies(1, self.base.round))

    def _in(self, shares: Any) -> bool:
        return any(member.peer == self._run.peer for member, _ in shares)

    def _tallies(self, first: int, round_: int) -> Iterator[Any]:
        """The log's entries from number ``first`` to those of that round."""
        while tallies := self._run.tallies(first):
            yield from tallies
            first = tallies[-1].entry + 1
            if tallies[-1].round > round_:
                return

    def _adopt(self, frozen: OfferedContribution, counted: bool, new: AnchorView) -> None:
        self.frozen = None
        if not self.takes_part:
            self.unsent = 0  # what a script went on with while it waited
            return self._move(new, MEANWHILE)
        self.extras.settle(counted)
        if counted:
            self.kept.resolve(True)
        else:  # an earlier life may have offered the same change: `_begin` asks the log
            self._dropped(frozen.samples, LOST)
        return self._move(new, MEANWHILE)

    def _rebase(self, new: AnchorView) -> None:
        if new.round == self.base.round:
            new.release()
        else:
            self._move(new, LOST)

    def _move(self, new: AnchorView, why: str) -> None:
        lost, self.unsent = self.unsent, 0
        adopt(self.flat, new)
        self._take(new)
        self._begin()
        if lost:
            self._dropped(lost, why)

    def forget(self) -> None:
        super().forget()
        self._begin()

    def _remember(self, frozen: OfferedContribution) -> None:
        """Nothing: what is trained meanwhile is given up."""


class _Personal:
    """Own parameters, float32 (parameters,), and for the rest a base's."""

    def __init__(self, parameters: Tensor, base: RangeSource) -> None:
        self._parameters, self._base = parameters, base

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        self._base.copy_into(destination, start)
        own = self._parameters[start : start + destination.numel()]
        destination[: own.numel()].copy_(own)
