"""Evaluating the model on held-out data before and after a round's result is adopted, so that
members know whether averaging helps (`optim.outer.worth`).

`undisturbed` lends the model out so that training does not notice. `Evaluations` says when:
in rounds that are due, at members that are drawn for some rounds at a time by the run's id, and
within a share of the script's time, by what evaluations took so far. What it finds goes into the
member's next contribution, as a reading that the log holds.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...collectives.group import Evaluated
from ...collectives.identifiers import PeerId
from ...collectives.metrics import number_of
from ...collectives.script_swarm import Swarm
from ..outer.readings import LARGEST
from ..outer.worth import BEHIND, by, drawn

logger = logging.getLogger("atoll")

Evaluate = Callable[[Any], Any]
"""A script's function: it is given the model as it was attached, and returns a loss, the smaller
the better: a number, or a tensor of one element.
"""

SEED = 1_717  # of global random numbers in an evaluation
# Rounds whose time may be spent before they are made: harm comes early, and a verdict takes several
# readings. Afterwards members evaluate every 1, 2, 4, 8, … rounds.
AHEAD = 20
TOGETHER = 16  # rounds for which the same members are drawn: their readings can be compared


class Evaluations:
    """Of one attachment. Exceptions of the script's function end them, and nothing else."""

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate | None,
        swarm: Swarm,
        clock: Callable[[], float],
    ) -> None:
        settings = swarm.settings
        if evaluate is not None and settings.evaluate is not None and hasattr(swarm, "ranks"):
            evaluate = None
            logger.warning("evaluate is not called in a job of several ranks")
        self._model, self._evaluate, self._clock = model, evaluate, clock
        self._asked = settings.evaluate
        self._lying, self._rounds = settings.lying, settings.rounds
        self._began: tuple[float, int] | None = None  # when, and in which round
        self._spent_s = self._last_s = 0.0
        self._repeated = False  # whether it gave the same twice
        self._before: float | None = None  # of the anchor that was evaluated last
        self.newest: dict[str, float] = {}  # the newest reading, for people

    @property
    def on(self) -> bool:
        """Whether there is something to call, and the run wants it."""
        return self._evaluate is not None and self._asked is not None

    def begin(self, round_: int) -> None:
        """Training begins at the anchor of ``round_``."""
        self._began = self._clock(), round_

    def due(self, run: str, me: PeerId, live: Sequence[PeerId], round_: int) -> bool:
        """Whether this member, ``me`` of those that live, evaluates at the end of ``round_``."""
        asked, began = self._asked, self._began
        if not self.on or asked is None or began is None or len(live) < 2:
            return False
        if round_ % asked.every or me not in drawn_of(run, round_, live, drawn(self._lying)):
            return False
        if (made := round_ - began[1]) < 1:
            return False
        round_s = (self._clock() - began[0]) / made
        allowed_s, cost_s = asked.share * round_s, 2 * self._last_s
        early = AHEAD if self._rounds is None else min(AHEAD, self._rounds)
        if made <= AHEAD:
            return self._spent_s + cost_s <= allowed_s * early
        # at the same rounds as others, though theirs may cost more or less
        apart = 1 << math.ceil(math.log2(max(1.0, cost_s / allowed_s))) if allowed_s else 1
        return not round_ % apart and self._spent_s + cost_s <= allowed_s * made

    def own(self) -> float | None:
        """The loss of the member's own weights; None where it has none that says something."""
        return self._measured()

    def adopted(self, own: float) -> Evaluated | None:
        """A round's model was adopted, and the weights before had the loss ``own``."""
        anchor = self._measured()
        if anchor is None:
            return None
        if not self._repeated:
            again = self._measured()
            if again is None or abs(by(again, anchor)) > BEHIND / 10:
                return self._end(
                    f"evaluate gave {anchor:.6g} and {again} for the same weights, and differences "
                    "of one in a hundred are looked for: let it use the same batches in each call"
                )
            self._repeated = True
        found = Evaluated(None, anchor, own, self._before)
        self._before = anchor
        self.newest = {"held_out": anchor, "held_out_own": own, "averaging_gains": by(own, anchor)}
        return found

    def _measured(self) -> float | None:
        """A call of the script's function, and what it took."""
        if self._evaluate is None:
            return None
        began = self._clock()
        try:
            with undisturbed(self._model):
                loss = number_of(self._evaluate(self._model))
        except Exception as error:
            return self._end(f"evaluate raised {type(error).__name__}: {error}")
        finally:
            self._last_s = self._clock() - began
            self._spent_s += self._last_s
        return loss if abs(loss) <= LARGEST else LARGEST

    def _end(self, why: str) -> None:
        """Say why, and do not call it any more."""
        self._evaluate = None
        self.newest = {}
        logger.warning("%s. Training goes on without evaluations", why)


def drawn_of(run: str, round_: int, live: Sequence[PeerId], count: int) -> Sequence[PeerId]:
    """Who of those that live evaluates in a round: all members draw the same.

    >>> names = [PeerId(name) for name in "abcdefgh"]
    >>> drawn_of("run", 3, names, 3) == drawn_of("run", 4, names[::-1], 3)
    True
    """
    among = sorted(live)
    if len(among) <= count:
        return among
    return Random(f"evaluate/{run}/{round_ // TOGETHER}").sample(among, count)


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Within: no gradients, evaluation mode, and global random numbers (Python's, numpy's and
    torch's, on all devices in use) from one seed. Afterwards all of this is as it was, and so are
    the gradients and buffers of ``model``.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module._buffers, name, buffer, buffer.clone(), _version(buffer))
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    gradients = [(each, each.grad) for each in model.parameters() if each.grad is not None]
    with _random_numbers(), torch.no_grad():
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training
            for slots, name, buffer, kept, version in buffers:
                slots[name] = buffer
                # kernels of batch normalisation change statistics without a new version
                if _version(buffer) != version or not torch.equal(buffer, kept):
                    buffer.copy_(kept)
            for parameter in model.parameters():
                parameter.grad = None
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def _random_numbers() -> Generator[None]:
    """One seed within, and the states before afterwards."""
    numpy = cast("Any", sys.modules.get("numpy.random"))
    python, arrays = random.getstate(), numpy.get_state() if numpy is not None else None
    generators = [torch.default_generator, *_of_devices()]
    states = [generator.get_state() for generator in generators]
    try:
        random.seed(SEED)
        if numpy is not None:
            numpy.seed(SEED)
        for generator in generators:
            generator.manual_seed(SEED)
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(arrays)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _of_devices() -> list[torch.Generator]:
    """The generators of devices that the script uses."""
    found = list[torch.Generator]()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    if torch.backends.mps.is_available():
        found.append(cast("Any", torch.mps)._get_default_mps_generator())
    return found
