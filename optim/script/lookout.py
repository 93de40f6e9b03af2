"""Who is there, and what the node is shown of training: words for people, once each, and metrics,
once a round.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...collectives.errors import AtollError
from ...collectives.identifiers import PeerId
from ...collectives.metrics import Warned, number_of
from ...collectives.outcomes import Outcome
from ...collectives.reach import Reach, reach
from ...collectives.script_swarm import PeerView, Swarm
from ...collectives.telemetry import emit
from ..rounds.events import QuorumSeen, TrainingAlone
from .adoption import AdoptionLosses

logger = logging.getLogger("atoll")

SAME_ORDER = (
    "%s reads the same data in the same order as this member: the first batches of %d rounds "
    "running were equal to what is read here. One of the two trains for nothing. "
    "Share the data out: swarm.shard(loader), in Trainer and Lightning shard=True of the callback; "
    "or give each member data, or a seed, of its own"
)
OWN = frozenset(
    {"step", "samples", "dropped", "moved", "moved_step", "moved_by", "step_s", "gpu_busy"}
    | {"loss_before", "loss_after", "loss_noise", "held_out", "held_out_own", "averaging_gains"}
    | {"samples_short", "samples_zero", "samples_again", "encoding_error"}
)
OWN_BEGINNINGS = ("uncounted_", "still_", "buffer_", "frozen_", "parts_", "encoding_error/")
"""Metrics that an attachment itself reports by `Swarm.report`, from which the node judges."""


class Lookout:
    """What an attachment knows of the others, and its metrics. Raises what the swarm raises."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.peers = 0
        self.metrics: dict[str, float] = {}
        self.privacy: dict[str, Any] | None = None  # what this member has spent of it
        self.averaging = ""  # what members' evaluations have against averaging
        self._sums: dict[str, tuple[Any, int]] = {}
        self._moved: dict[str, float] = {}  # of the newest change of the weights by others
        settings = swarm.settings
        # an anchor of a part of the members is another one for each member's data
        of_all = settings.sample is None and settings.arrivals is None
        self._adoptions = AdoptionLosses() if of_all else None
        self._refused = Warned("attachment.log()")
        self._own = set[str]()  # names that were refused
        self._warned_alone = self._warned_no_quorum = False
        self._same_order = set[PeerId]()  # who reads the same data, as was said
        self._seen: dict[PeerId, bool] = {}  # whether each other member lived when last looked at
        self._member: bool | None = None  # whether this peer was one then

    def add(self, name: str, value: Any) -> None:
        """One more value of a metric: a number, or a tensor of one element, which stays where it is
        until the round ends. Anything else is left out, with a warning once for each name.
        """
        if name in OWN or name.startswith(OWN_BEGINNINGS):
            if name not in self._own:
                self._own.add(name)
                logger.warning(
                    "attachment.log() leaves %r out: the run has a number of its own by that name. "
                    "Log it by another, such as %r; training goes on",
                    name,
                    f"my/{name}",
                )
            return
        try:
            number = _lazily(value) if isinstance(value, Tensor) else number_of(value)
        except TypeError as error:
            self._refused.refuse(name, value, error)
            return
        total, count = self._sums.get(name, (0.0, 0))
        if (
            isinstance(total, Tensor)
            and isinstance(number, Tensor)
            and total.device != number.device
        ):
            total = number_of(total)
        self._sums[name] = (total + number, count + 1)
        if name == "loss" and self._adoptions is not None:
            self._adoptions.add(number)

    def adopted(self, turns: Sequence[Outcome]) -> None:
        """What became of contributions at a boundary."""
        decided = [turn for turn in turns if turn.status == "committed"]
        if decided and self._adoptions is not None:
            self._adoptions.adopted(whole=all(turn.counted for turn in decided))

    def moved(self, step: int, steps_long: float) -> None:
        """The weights were changed after inner step ``step``, by so many times the length of a
        step, and not by the optimizer; 0.0: tensors were replaced.
        """
        changes = self._moved.get("moved", 0.0) + 1
        self._moved = {"moved": changes, "moved_step": float(step), "moved_by": steps_long}

    def so_far(self, name: str) -> float | None:
        """The mean of what was added of a metric since the last round; None where nothing was."""
        total, count = self._sums.get(name, (0.0, 0))
        return number_of(total) / count if count else None

    def contributing(self) -> float | None:
        """A contribution is about to be made. Returns the loss where a governor goes by it; tells
        the node what is added up with a masked vector.
        """
        settings = self.swarm.settings
        wanted = settings.secure.metrics if settings.secure else ()
        if reported := {name: value for name in wanted if (value := self.so_far(name)) is not None}:
            with suppress(AtollError):  # without a node there is no contribution, either
                self.swarm.report(reported)
        return self.so_far("loss") if settings.outer.governor else None

    def mean(self) -> None:
        """The metrics are the means of what was added since the last time."""
        self.metrics = {
            name: number_of(total) / count for name, (total, count) in self._sums.items()
        } or self.metrics
        self._sums.clear()

    def count(self) -> Sequence[PeerView]:
        """The members; ``peers``: how many of them live, without this one."""
        members = self.swarm.members()
        others = {member.peer: member.live for member in members if member.peer != self.swarm.peer}
        self.peers = sum(others.values())
        member = len(others) < len(members)
        if member and self._member is False:
            logger.info("admitted: this peer is a member of the run from now on")
        self._member = member
        self._tell_of(others)
        for view in members:
            if view.same_order and view.peer not in self._same_order:
                self._same_order.add(view.peer)
                logger.warning(SAME_ORDER, view.peer[-8:], view.same_order)
        return members

    def _tell_of(self, others: dict[PeerId, bool]) -> None:
        """Say who came, who is gone and who is back since the last look."""
        for peer, live in others.items():
            before = self._seen.get(peer)
            if live and before is None:
                logger.info("%s is a member", peer[-8:])
            elif live and not before:
                logger.info("%s is back", peer[-8:])
            elif before and not live:
                logger.info("%s is not reached any more; %s", peer[-8:], self._without)
        for peer in self._seen.keys() - others.keys():
            logger.info("%s is no member any more", peer[-8:])
        self._seen = others

    @property
    def _without(self) -> str:
        """What becomes of rounds without a member, in words."""
        if self.swarm.settings.secure is not None:
            return "atoll status says whether a sum needs it"
        return "rounds go on without it"

    @property
    def spent(self) -> str:
        """That this member may spend no more of its privacy, in words; "" where it may."""
        privacy = self.privacy
        if privacy is None or privacy["left"] > 0:
            return ""
        return (
            f"this site has spent epsilon {privacy['epsilon']:.3g} of its privacy, and one more "
            f"round would pass {privacy['stop_at_epsilon']:g}"
        )

    def tell_finished(self, why: str = "") -> None:
        """Say, also to a script without logging, that the run has all its rounds, or why it is over
        for this member, and what there is to do with it.
        """
        run = self.swarm.run_id[:8]
        logger.warning(
            "run %s is finished%s: %s, and later steps are not counted. The model: %s",
            run,
            " here" if why else "",
            why or f"all its {self.swarm.settings.rounds} rounds are committed",
            f"atoll export {run} DIR; a new run from it: atoll new --from DIR --name NAME"
            if self.swarm.model_folder is not None
            else "it is in yours inside `with attachment.evaluate_anchor():`",
        )

    def tell_round(self, outcome: Outcome, samples: int) -> None:
        """Say in a line what became of a contribution of ``samples`` samples."""
        of = f"/{self.swarm.settings.rounds}" if self.swarm.settings.rounds else ""
        line = f"round {outcome.round}{of}" if outcome.round else "a round"
        if outcome.status == "open":
            return  # it is told when it is decided; a lack of quorum is told for itself
        if outcome.status == "committed":
            line += f": {len(outcome.contributors)} contributed"
        elif outcome.status == "lost":
            line += ": the contribution is lost, and made again"
        if not outcome.counted and outcome.status != "lost":
            line += f", not this peer ({outcome.reason or 'its contribution came too late'})"
        line += f", {samples} samples here"
        line += "".join(f", {name} {value:.4g}" for name, value in sorted(self.metrics.items()))
        logger.info("%s", line)

    def look(self, report: dict[str, float], *, undecided: bool, done: bool) -> None:
        """See who is there and say what has changed; tell the node ``report``. ``undecided``: a
        round was waited for in vain. ``done``: the run has all its rounds.
        """
        members = self.count()
        self.privacy = msgspec.to_builtins(getattr(self.swarm, "spent", None))  # a node tells it
        self._tell_averaging(str(getattr(self.swarm, "averaging", "")))
        readings = self._adoptions.reading() if self._adoptions is not None else {}
        self.swarm.report({**report, **self._moved, **self.metrics, **readings})
        there = reached(members, self.swarm.settings.lying)
        self._tell_quorum(there, undecided)
        if self.peers:
            self._warned_alone = False
        elif there.quorum and not self._warned_alone and not done:
            self._warned_alone = True
            logger.info("training alone; peers may join at any time")
            emit(TrainingAlone(self.swarm.run_id, node_lost=False))

    def _tell_averaging(self, standing: str) -> None:
        """Say once what speaks against averaging, and once that it is over."""
        before, self.averaging = self.averaging, standing
        if standing and not before:
            logger.warning("averaging does not help this run (V21): %s", standing)
        elif before and not standing:
            logger.info("averaging helps this run again")

    def _tell_quorum(self, there: Reach, undecided: bool) -> None:
        """Say once that the open round cannot be decided, when one was waited for in vain; and once
        that it can be again.
        """
        if there.quorum != self._warned_no_quorum:
            return
        if there.quorum:
            logger.warning("quorum is back: %s", there)
        elif undecided:
            logger.warning("%s; training goes on here and is contributed later", there)
        else:
            return
        self._warned_no_quorum = not there.quorum
        emit(QuorumSeen(self.swarm.run_id, there))


def _lazily(value: Tensor) -> Tensor:
    """A tensor of one element as a float64 on its device, not waited for: float32 has no odd counts
    beyond 2^24. (Not all devices have float64.) Raises TypeError for any other.
    """
    if value.is_complex() or value.is_meta or value.is_quantized or value.layout != torch.strided:
        raise TypeError(
            "is complex: log its real part, or its absolute value"
            if value.is_complex()
            else "has no plain value"
        )
    try:
        wide = torch.float64 if value.device.type in ("cpu", "cuda") else torch.float32
        return value.detach().reshape(()).to(wide)
    except Exception:  # whatever a subclass of it raises here
        raise TypeError(f"has the shape {tuple(value.shape)}, not one element") from None


def reached(members: Sequence[PeerView], lying: int) -> Reach:
    """Whether these members can decide a round, of whom so many may lie."""
    organiser = next((member.peer for member in members if member.organiser), None)
    return reach({member.peer: member.live for member in members}, organiser, tolerated=lying)
