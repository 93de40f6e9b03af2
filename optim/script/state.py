"""What a checkpoint of an attachment holds, and how an old one relates to the run as it is now.

Numbers and strings: the anchor and the outer state are in the run's log, unsent progress is in the
model. Tensors only where they are nowhere else: the residuals of a run with feedback, worker
momentum, the momentum of what eager members expect, and the own state of swarms without a log
(`SoloSwarm`). The keys never vary in one run, as torch.distributed.checkpoint needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...collectives.errors import OutOfDateError, StateError
from ..rounds.schedule import Counted

VERSION = 3


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
class SavedStrand:
    """A saved strand: where it was (round and digest of its anchor) and what was under way."""

    round: int
    digest: str
    unsent: int  # samples carried into the live parameters from earlier boundaries
    frozen: int  # samples of a contribution that was undecided
    since: Counted  # since the last boundary
    elapsed_s: float  # since the last boundary
    share: float  # of the samples, in the last round that counted; 0: none yet

    @property
    def progress(self) -> int:
        """Samples that are in the live parameters and in no contribution."""
        return self.unsent + self.since.samples


@dataclass(frozen=True, slots=True)
class SavedAttachment:
    """A saved attachment."""

    run: str
    strands: tuple[SavedStrand, ...]
    totals: Totals

    def pack(self) -> dict[str, Any]:
        """As a dict of numbers and strings."""
        strands = {str(index): asdict(strand) for index, strand in enumerate(self.strands)}
        return {
            "version": VERSION,
            "run": self.run,
            "strands": strands,
            "totals": asdict(self.totals),
        }


def unpack(state: Mapping[str, Any], strands: int) -> SavedAttachment:
    """The inverse of `SavedAttachment.pack`. Raises StateError for anything else, also for another
    number of strands.
    """
    try:
        if int(state["version"]) != VERSION:
            raise StateError(
                f"the saved state has version {state['version']}, this program reads {VERSION}"
            )
        if len(state["strands"]) != strands:
            raise StateError(
                f"the saved state is of {len(state['strands'])} fragments, this run has {strands}"
            )
        return SavedAttachment(
            str(state["run"]),
            tuple(_strand(state["strands"][str(index)]) for index in range(strands)),
            Totals(**{field.name: state["totals"][field.name] for field in fields(Totals)}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"this is no saved state of an attachment: {error!r}",
            hint="Pass what attachment.state_dict() returned.",
        ) from None


def _strand(state: Mapping[str, Any]) -> SavedStrand:
    since = Counted(*(int(state["since"][field.name]) for field in fields(Counted)))
    unsent, frozen = int(state["unsent"]), int(state["frozen"])
    return SavedStrand(
        int(state["round"]),
        str(state["digest"]),
        unsent,
        frozen,
        since,
        float(state["elapsed_s"]),
        float(state["share"]),
    )


def is_current(saved: SavedStrand, round_: int, digest: str) -> bool:
    """Whether the run still has the anchor of ``saved``; False when it has moved on since.

    Raises OutOfDateError when the two cannot be related: a run that is behind the saved state, or
    another anchor in the same round. A log is never rewound.
    """
    if saved.round > round_:
        raise OutOfDateError(
            f"the saved state is of round {saved.round}, the run is at round {round_}",
            why="The run lost its newer state, or this node has not caught up.",
            hint="Wait until the node has caught up, or train on without loading this state.",
        )
    if saved.round == round_ and saved.digest != digest:
        raise OutOfDateError(
            f"round {round_} has anchor {digest[:12]}, the saved state {saved.digest[:12]}",
            why="The run was recertified since, from a round before.",
            hint="Train on without loading this state.",
        )
    return saved.round == round_
