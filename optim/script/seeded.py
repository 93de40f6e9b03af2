"""Training that anybody can do again: a script of a run with BTARD
(docs/internals/protocol/btard.md; Gorbunov et al. 2022, arXiv 2106.11257).

    model = Net()

    def work(seed: int) -> None:
        torch.manual_seed(seed)             # batches, dropout, order: all follows from the seed
        optimizer = ...                     # made here: nothing may be left from before
        for batch in batches(seed):
            ...                             # plain inner steps

    training = SeededTraining(model, swarm, work)
    while not training.done:                # [train] rounds
        training.step()

The same work, with the seed of another peer and from the anchor before, is done where that peer is
looked into. In a run with ``[btard] intervals`` one interval of it is: then work is a function of
seed and interval.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...collectives.errors import ConfigError, NotAdmittedError, StateError
from ...collectives.outcomes import AnchorView, Outcome
from ...collectives.script_swarm import Swarm
from ...collectives.seeded import Seeded, SeededTask
from ..model.pseudograd import write_pseudo_gradient
from ..model.vector import FlatTensor
from ..rounds.composing import flat_vector

logger = logging.getLogger("atoll")
LOOK_S = 1.0  # how often a wait looks whether the node is there
KEPT = 2  # anchors: work is asked for from the newest and from the one before


class SeededTraining:
    """A member's part in the rounds of one run with ``[btard]``: its work is a function of a seed,
    so that any other member can do it again and see whether it lied.

        def work(seed: int) -> None:
            torch.manual_seed(seed)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for batch in batches(seed):
                ...                             # plain inner steps

        training = SeededTraining(model, swarm, work)
        while not training.done:
            training.step()                     # one round

    ``round``: committed rounds in the model. Methods raise what the swarm raises; the model is then
    undefined. A node that is lost takes this peer's part in the run with it (SwarmClosedError): it
    cannot know what it has said before.
    """

    def __init__(self, model: nn.Module, swarm: Swarm, work: Callable[..., None]) -> None:
        """Enter the run; the model becomes its anchor. ``work(seed)`` trains ``model`` in place
        from the parameters it finds; what it does must follow from these and the seed, an int of 63
        bits. In a run with ``[btard] intervals`` it is ``work(seed, interval)``: one of so many
        parts, which begins where the one before ended and takes nothing else from it. Raises
        ConfigError in a run without BTARD, and what `Swarm.open` raises."""
        if swarm.settings.btard is None or not isinstance(swarm, Seeded):
            raise ConfigError(
                "this run has no [btard]",
                key="swarm",
                why="Its nodes ask for nothing by seed.",
                hint="attach(model, opt, swarm)",
            )
        self.flat = flat_vector(model, swarm.settings)
        self.round = 0
        self._swarm, self._seeded, self._work = swarm, swarm, work
        self._intervals = swarm.settings.btard.intervals
        self._anchors: dict[int, Tensor] = {}
        self._take(swarm.open(self.flat.layout, self.flat.write_to))

    def _take(self, view: AnchorView) -> None:
        """The model becomes this anchor, which is kept."""
        try:
            flat = torch.empty(view.numel, dtype=torch.float32, device="cpu")
            view.copy_into(flat)
            self.round = view.round
        finally:
            view.release()
        self._anchors = {
            round_: kept
            for round_, kept in self._anchors.items()
            if self.round - KEPT < round_ < self.round
        } | {self.round: flat}
        self.flat.read_from(FlatTensor(flat))

    @property
    def done(self) -> bool:
        """Whether the run has committed as many rounds as its manifest asks for."""
        rounds = self._swarm.settings.rounds
        return rounds is not None and self.round >= rounds

    def step(self) -> Outcome:
        """Take part in a round until it is committed: compute what the node asks for, own work and
        others'. The model is then the new anchor.

        ``Outcome.counted``: whether this peer's work is in it (a validator's is not). Raises
        StateError where work has left NaN or infinity, NotAdmittedError where this peer takes no
        part in the run any more.
        """
        pending = self._swarm.contribute(samples=1, write=_nothing, base=self.round)
        while not pending.done():
            work = self._seeded.asked(LOOK_S, pending.done)
            if work is not None:
                self._do(work)
        outcome = pending.wait(0.0)
        if outcome.unfit:
            raise NotAdmittedError(
                outcome.reason.removeprefix("refused: "),
                hint="What others have against it: atoll bans, at one of them.",
            )
        self._take(self._swarm.anchor())
        return outcome

    def _do(self, work: SeededTask) -> None:
        anchor = self._anchors.get(work.round)
        if anchor is None:
            return  # of a round that this script was not there in: the others decide
        if work.interval < 0:
            self.flat.read_from(FlatTensor(anchor))
        elif not self._seeded.begin(work, lambda start: self.flat.read_from(FlatTensor(start))):
            return
        if not self._intervals:
            self._train(work.seed)
            self._seeded.answer(
                work, lambda out: write_pseudo_gradient(self.flat, FlatTensor(anchor), out)
            )
        elif work.interval >= 0:
            self._seeded.answer(work, self._looked(work))
        else:
            for interval in range(self._intervals):
                self._train(work.seed, interval)
                self._seeded.answer(work, self.flat.write_to, interval)

    def _looked(self, work: SeededTask) -> Callable[[Tensor], None]:
        """Compute an interval from what another peer has shown; what writes the answer. Whatever
        comes of it is one, NaN too; and where the work fails on that, which may be its aim, it is
        taken for wrong: on what an honest peer has passed through, work does not fail."""
        try:
            self._work(_number(work.seed), work.interval)
        except Exception as error:
            logger.warning(
                (
                    "atoll: work from a state that another peer says it was in has failed; it "
                    "is taken for wrong: %r"
                ),
                error,
            )
            return _wrong
        return self.flat.write_to

    def _train(self, seed: bytes, *interval: int) -> None:
        self._work(_number(seed), *interval)
        if bad := self.flat.not_finite():
            raise StateError(
                f"after work by seed {bad} holds NaN or infinity",
                hint="A smaller learning rate, or clipped gradients.",
            )


def _number(seed: bytes) -> int:
    return int.from_bytes(seed[:8], "big") >> 1


def _wrong(out: Tensor) -> None:
    out.fill_(torch.nan)


def _nothing(out: Tensor) -> None:
    """What is given is asked for."""
