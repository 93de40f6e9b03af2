"""Saving an attachment's strands and going on from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...collectives.errors import AtollError, LocalProtocolError, OutOfDateError, StateError
from ...collectives.outcomes import AnchorView
from ...collectives.script_swarm import Swarm
from ..model.feedback import Feedback
from ..model.momentum import ContributionMomentum
from ..rounds.run_extras import RunExtras
from ..rounds.strand import Strand
from .state import SavedAttachment, SavedStrand, Totals, is_current, unpack

MOVED = "the run has moved on since it was saved"
UNDECIDED = "a contribution was undecided when it was saved"
BEGINS = "each round of the run's method begins at the anchor"
NOT_LOADED = "the model was not loaded after attach(), so the progress is not in it"


def save(swarm: Swarm, strands: list[Strand], totals: Totals) -> dict[str, Any]:
    """The state to keep. Resuming by it is exact where nothing is under way (`Attachment.settle`);
    what is, is dropped.
    """
    saved = SavedAttachment(
        swarm.run_id, tuple(_saved(strand) for strand in strands), totals
    ).pack()
    for index, strand in enumerate(strands):
        feedback, momentum = _kept(strand)
        if feedback is not None:
            saved["strands"][str(index)]["residual"] = feedback.residual.clone()
        if momentum is not None:
            saved["strands"][str(index)]["momentum"] = momentum.value.clone()
        if swarm.settings.overlap == "eager":
            own, numel = strand.replica.own, strand.replica.flat.numel
            saved["strands"][str(index)]["own"] = (
                torch.zeros(numel, device="cpu") if own is None else own.clone()
            )
    keeper = _keeper(swarm)
    if keeper is not None:
        saved["swarm"] = keeper.state_dict()
    return saved


def _kept(strand: Strand) -> tuple[Feedback | None, ContributionMomentum | None]:
    """The residual and the momentum that a strand carries from one contribution to the next."""
    extras = strand.replica.extras
    return (extras.feedback, extras.momentum) if isinstance(extras, RunExtras) else (None, None)


def _saved(strand: Strand) -> SavedStrand:
    replica = strand.replica
    frozen = replica.frozen.samples if replica.frozen is not None else 0
    return SavedStrand(
        replica.base.round,
        replica.base.digest,
        replica.unsent,
        frozen,
        strand.since.settle(),
        strand.schedule.elapsed_s,
        replica.share,
    )


class PendingLoad:
    """What is left to do of a load when the model, which a checkpoint may load later, is there: one
    finish a strand.
    """

    def __init__(self, swarm: Swarm, strands: list[Strand], state: Mapping[str, Any]) -> None:
        """Take the anchors. Raises OutOfDateError when the saved state is not in the run's past,
        StateError for a damaged one.
        """
        if any(strand.replica.frozen is not None for strand in strands):
            raise LocalProtocolError(
                "a contribution is undecided", hint="Load the state right after attach()."
            )
        saved = unpack(state, len(strands))
        if saved.run != swarm.run_id:
            raise OutOfDateError(
                f"the saved state is of run {saved.run}, this is run {swarm.run_id}",
                hint="Join the run it was saved in.",
            )
        keeper = _keeper(swarm)
        if keeper is not None:
            if "swarm" not in state:
                raise StateError(
                    "the saved state lacks the swarm's own state",
                    why="It was saved in a run with a log.",
                )
            keeper.load_state_dict(state["swarm"])
        self.totals = saved.totals
        self._left: list[tuple[Strand, int, str]] = []
        views = list[AnchorView]()
        try:
            for strand in strands:
                views.append(strand.replica.swarm.anchor())
            current = [
                is_current(old, view.round, view.digest)
                for old, view in zip(saved.strands, views, strict=True)
            ]
        except AtollError:
            for view in views:
                view.release()
            raise
        for index, (strand, old, view) in enumerate(
            zip(strands, saved.strands, views, strict=True)
        ):
            tensors = state["strands"][str(index)]
            self._take(
                strand, old, view, current[index], tensors.get("residual"), tensors.get("own")
            )
            self._go_on(strand, tensors.get("momentum"))

    def _take(
        self,
        strand: Strand,
        old: SavedStrand,
        view: AnchorView,
        current: bool,
        residual: torch.Tensor | None,
        own: torch.Tensor | None,
    ) -> None:
        replica = strand.replica
        replica.take(view)
        replica.forget()
        strand.schedule.restart(old.elapsed_s)
        exact = current and not old.frozen and replica.resumes
        feedback, _ = _kept(strand)
        if current and feedback is not None and residual is not None:
            if residual.shape != feedback.residual.shape:
                raise StateError(
                    f"a residual of {residual.numel()} elements, for {feedback.residual.numel()}"
                )
            feedback.residual.copy_(residual)
        if exact and own is not None:
            replica.own = own.clone()
        replica.share = strand.schedule.share = old.share
        replica.among = strand.schedule.among = 0  # who was there then is not saved
        replica.unsent = old.unsent if exact else 0
        if exact:
            strand.since.restore(old.since)
            self._left.append((strand, old.progress, ""))
        else:
            strand.since.clear()
            self._left.append(
                (
                    strand,
                    old.progress + old.frozen,
                    (UNDECIDED if replica.resumes else BEGINS) if current else MOVED,
                )
            )

    def _go_on(self, strand: Strand, momentum: torch.Tensor | None) -> None:
        """Worker momentum is of no one anchor: it goes on wherever the run is."""
        _, own = _kept(strand)
        if own is not None and momentum is not None:
            if momentum.shape != own.value.shape:
                raise StateError(
                    f"a momentum of {momentum.numel()} elements, for {own.value.numel()}"
                )
            own.restore(momentum)

    def finish(self, drop: Callable[[int, str], None]) -> None:
        """The part that needs the model."""
        for strand, samples, why in self._left:
            replica, reason = strand.replica, why
            if not reason and (samples == 0 or not replica.at_base()):
                continue
            if not reason:
                reason = NOT_LOADED
                strand.since.clear()
            else:
                replica.flat.read_from(replica.base)
            replica.unsent = 0
            if samples:
                drop(samples, reason)


def _keeper(swarm: Swarm) -> Any:
    """The swarm if it has state of its own to save (no log has it), else None."""
    return swarm if hasattr(swarm, "state_dict") and hasattr(swarm, "load_state_dict") else None
