"""What a checkpoint of an attachment holds, and how an old one relates to the run as it is now.

Only numbers and strings: the anchor and the momentum are in the run's log, unsent progress is in the model. Swarms without a log
(`SoloSwarm`) add their own state with tensors. The keys never vary, as torch.distributed.checkpoint needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...collectives.errors import OutOfDateError, StateError
from ..rounds.schedule import Counted

VERSION = 1


@dataclass(slots=True)
class Totals:
    """Counters over the life of an attachment, across resumes."""

    rounds: int = 0  # decided while one's own contribution was in question
    counted: int = 0
    uncounted: int = 0
    open: int = 0  # deadlines passed
    steps: int = 0
    skipped_steps: int = 0
    samples_counted: int = 0
    samples_dropped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved attachment: where it was (run, round and digest of its anchor) and what was under way."""

    run: str
    round: int
    digest: str
    unsent: int  # samples carried into the live parameters from earlier boundaries
    frozen: int  # samples of a contribution that was undecided
    since: Counted  # since the last boundary
    elapsed_s: float  # since the last boundary
    totals: Totals

    @property
    def progress(self) -> int:
        """Samples that are in the live parameters and in no contribution."""
        return self.unsent + self.since.samples

    def pack(self) -> dict[str, Any]:
        """As a dict of numbers and strings."""
        return {"version": VERSION, **asdict(self)}


def unpack(state: Mapping[str, Any]) -> Saved:
    """The inverse of `Saved.pack`. Raises StateError for anything else."""
    try:
        if int(state["version"]) != VERSION:
            raise StateError(f"the saved state has version {state['version']}, this program reads {VERSION}")
        since = Counted(*(int(state["since"][field.name]) for field in fields(Counted)))
        totals = Totals(**{field.name: state["totals"][field.name] for field in fields(Totals)})
        return Saved(
            run=str(state["run"]),
            round=int(state["round"]),
            digest=str(state["digest"]),
            unsent=int(state["unsent"]),
            frozen=int(state["frozen"]),
            since=since,
            elapsed_s=float(state["elapsed_s"]),
            totals=totals,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"this is no saved state of an attachment: {error!r}", hint="Pass what attachment.state_dict() returned."
        ) from None


def is_current(saved: Saved, run: str, round_: int, digest: str) -> bool:
    """Whether the run still has the anchor of ``saved``; False when it has moved on since.

    Raises OutOfDateError when the two cannot be related: another run, a run that is behind the saved state, or another anchor in
    the same round. A log is never rewound.
    """
    if saved.run != run:
        raise OutOfDateError(f"the saved state is of run {saved.run}, this is run {run}", hint="Join the run it was saved in.")
    if saved.round > round_:
        raise OutOfDateError(
            f"the saved state is of round {saved.round}, the run is at round {round_}",
            why="The run lost its newer state, or this node has not caught up.",
            hint="Wait until the node has caught up, or train on without loading this state.",
        )
    if saved.round == round_ and saved.digest != digest:
        raise OutOfDateError(
            f"round {round_} has anchor {digest[:12]}, the saved state {saved.digest[:12]}",
            why="It was saved on a branch that the run has left.",
            hint="Train on without loading this state.",
        )
    return saved.round == round_
