"""Which parameters train: those that are frozen after the model was attached, and those that are
trained and not in the run.

A part that was frozen at `attach`, or was not there, and trains by now trains in this member alone.
A part that this member alone freezes holds back the others: its contribution holds no change of it.
Scripts that freeze in turns (GANs, alternating phases) do not: their parts rest for a while and
move again. So a part is frozen when it has required no gradient and was not moved for
`FROZEN_ROUNDS` rounds and `FROZEN_STEPS` steps, and for three times as many rounds as it has ever
rested before. Whether others train it is seen from the anchors: there it goes on moving, and not
only by what outer momentum is left, which dies away.
"""

from __future__ import annotations

import logging
import math
import weakref
from contextlib import suppress

import torch
from torch import Tensor, nn

from ...collectives.errors import AtollError
from ...collectives.layout import Layout
from ...collectives.outer_rules import OuterSettings
from ...collectives.script_swarm import Swarm
from ..model.factors import FACTOR
from ..model.flat import clean_name, unwrap
from .saving import some

logger = logging.getLogger("atoll")

FROZEN_ROUNDS = 3
FROZEN_STEPS = 64
LONGER = 3  # than it has rested before
GONE_ROUNDS = 5  # after so many without one nothing trains outside of the run any more
SAMPLED = 64  # elements of a part at rest, by which anchors are seen to move
DIED_AWAY = 0.25  # what is left by then of a movement that only outer momentum goes on with
STILL_MOVES = 0.5  # of the first round's way: more than that


class _Rest:
    """Of one parameter: how long it has rested, the longest rest before, and how far anchors moved
    it in the first round of its rest, in the newest, and in the one under way.
    """

    __slots__ = ("first", "last", "longest", "moves", "rounds", "steps")

    def __init__(self) -> None:
        self.rounds = self.steps = self.longest = 0
        self.first = self.last = self.moves = 0.0

    def go_on(self, steps: int) -> None:
        """One more round of so many steps."""
        self.rounds += 1
        self.steps += steps
        self.first, self.last = self.first or self.moves, self.moves
        self.moves = 0.0

    def end(self) -> None:
        """It was trained."""
        self.longest = max(self.longest, self.rounds)
        self.rounds = self.steps = 0
        self.first = self.last = self.moves = 0.0

    @property
    def lasts(self) -> bool:
        """Whether it is frozen for good, as far as can be seen."""
        least = max(FROZEN_ROUNDS, LONGER * self.longest)
        return self.rounds >= least and self.steps >= FROZEN_STEPS

    def others_train(self, outer: OuterSettings) -> bool:
        """Whether what moves in anchors is more than what is left of outer momentum. Decay of the
        outer step's own cannot be told from it.
        """
        least, momentum = 0.0, outer.momentum
        if 0 < momentum < 1:
            least = math.log(DIED_AWAY) / math.log(momentum)
            least *= outer.every if outer.kind == "delayed_nesterov" else 1
        # The first round of a rest has no anchor before it.
        moved_on = self.last > STILL_MOVES * self.first > 0
        return moved_on and self.rounds - 1 > least and not outer.weight_decay


class TrainingParts:
    """Of one attachment. `look` before the attachment writes the parameters, `wrote` after it, and
    `close` at the end of a round.
    """

    def __init__(self, model: nn.Module, layout: Layout, swarm: Swarm) -> None:
        """``layout``: of the run's whole vector. What is frozen now waits to be unfrozen, and is
        not told of; nor is a factor of an adapter that the run itself lets rest.
        """
        self._model, self._swarm = weakref.ref(model), swarm
        self._names = {spec.name for spec in layout.tensors if spec.role == "parameter"}
        live, by_turns = self._live(), swarm.settings.adapters.mode != "plain"
        self._rests = {
            name: _Rest()
            for name in live
            if name in self._names and not (by_turns and FACTOR.search(name))
        }
        self._waiting = {name for name in self._rests if not live[name].requires_grad}
        self._numel = {name: live[name].numel() for name in self._rests}
        self._moved = set[str]()
        self._versions = dict[str, int]()
        self._before = dict[str, Tensor]()  # of parts at rest, until the attachment has written
        self._outside = set[str]()  # told of
        self._without = 0  # rounds in which nothing outside trained, once something had
        self._noted_frozen = self._told_frozen = False
        self._steps = 0  # when the last round ended
        self.wrote()

    def _live(self) -> dict[str, Tensor]:
        if (model := self._model()) is None:
            return {}
        return {clean_name(name): each for name, each in unwrap(model).named_parameters()}

    def look(self) -> None:
        """Note which parameters are trained, or have moved since the attachment wrote them."""
        for name, each in self._live().items():
            if name not in self._rests:
                continue
            if each.requires_grad or _version(each) != self._versions.get(name):
                self._moved.add(name)
            elif name not in self._waiting:
                self._before[name] = _sampled(each)

    def wrote(self) -> None:
        """The attachment has written the parameters."""
        before, self._before = self._before, {}
        self._versions.clear()
        for name, each in self._live().items():
            if name in self._rests:
                self._versions[name] = _version(each)
            if name in before:
                self._rests[name].moves += float((_sampled(each) - before[name]).norm())

    def close(self, steps: int) -> None:
        """A round ends, after so many inner steps in all."""
        self.look()
        new, self._steps = max(0, steps - self._steps), steps
        moved, self._moved = self._moved, set()
        for name, rest in self._rests.items():
            if name in moved:
                self._waiting.discard(name)
                rest.end()
            elif name not in self._waiting:
                rest.go_on(new)
        self._tell_frozen()
        self._tell_outside()

    def _tell_frozen(self) -> None:
        frozen = [name for name, rest in self._rests.items() if rest.lasts]
        if len(frozen) == len(self._rests):
            return  # that nothing is trained at all is told of for itself
        if frozen and not self._noted_frozen:
            logger.info("frozen since it was attached: %s", some(frozen))
        self._noted_frozen = bool(frozen)
        outer = self._swarm.settings.outer
        alone = [name for name in frozen if self._rests[name].others_train(outer)]
        share = sum(self._numel[name] for name in frozen) / max(1, sum(self._numel.values()))
        if alone and not self._told_frozen:
            self._told_frozen = True
            logger.warning(
                "frozen here (requires_grad is False) and trained by other members: %s, %.2g %% of "
                "what the run trains. This member contributes no change of it, which holds back "
                "what the others learn there. Freeze it in the scripts of all members, or train it "
                "in all",
                some(alone),
                100 * share,
            )
            self._tell({"parts_frozen": share})
        elif self._told_frozen and not frozen:
            self._told_frozen = False
            logger.info("what was frozen here is trained again")
            self._tell({"parts_frozen": 0.0})

    def _tell_outside(self) -> None:
        outside = [
            name
            for name, each in self._live().items()
            if each.requires_grad and name not in self._names
        ]
        if new := [name for name in outside if name not in self._outside]:
            self._outside.update(new)
            logger.warning(
                "trained here by now, and no part of the run, since frozen when the model was "
                "attached, or not there: %s. It is trained in this member only, and an export has "
                "it as it was. To have it in the run from the start: attach(..., include=[%r]) in "
                "the scripts of all members of a new run",
                some(new),
                _pattern(new),
            )
            self._tell({"parts_outside": float(len(self._outside))})
        self._without = 0 if outside else self._without + 1
        if self._outside and self._without == GONE_ROUNDS:
            self._outside.clear()
            self._tell({"parts_outside": 0.0})

    def _tell(self, metrics: dict[str, float]) -> None:
        with suppress(AtollError):  # without a node the script has been told
            self._swarm.report(metrics)


def _pattern(names: list[str]) -> str:
    """One that matches all of them: the longest common start of whole parts of names."""
    if len(names) == 1:
        return names[0]
    common = list[str]()
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join([*common, "*"])


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@torch.no_grad()
def _sampled(tensor: Tensor) -> Tensor:
    """A few elements of a parameter, or of this rank's slice of it: float32, on the CPU."""
    local = getattr(tensor, "to_local", None)
    flat = (tensor if local is None else local()).detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].to("cpu", torch.float32, copy=True)
