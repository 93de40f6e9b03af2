"""What a node says of one of its runs: a struct that is filled once (`node.watching.views`), whose
encoding is the run's entry in `atoll status --json`, and which text, page, live view and metrics
read; and the figures among its fields that are shown everywhere in the same way.

A field that people see as a figure is declared here alone: in `RunStatus`, and as a row of
`FIGURES`. Nodes of other versions are asked, too, so each field has the default that it had before
it existed, and `read_run_status` leaves a value of another type out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from ..home.output import bytes_text, span_text
from .events import (
    OperationCommittedEvent,
    RoundCommittedEvent,
    ScriptAnswerEvent,
    ScriptEvaluationEvent,
)
from .rate import TrainingRate


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``round``: rounds in the anchor; of a model in fragments that of the one behind, and
    ``fragments`` has one number each. Seconds and bytes; None or empty: not known, or not of this
    run.
    """

    run_id: str = ""
    name: str = ""
    organiser: str = ""
    phase: str = ""
    round: int = -1
    fragments: Sequence[int] = ()
    entry: int = -1
    rounds: int | None = None
    finished: bool = False
    # Why the run is finished here before its last round.
    over: str = ""
    # Until all rounds are committed, at the pace of the newest ones.
    left_s: float | None = None
    rule: str = "mean"
    lying: int = 0
    secure: Mapping[str, Any] | None = None
    btard: Mapping[str, Any] | None = None
    privacy: Mapping[str, Any] | None = None
    # None only where the run is stored, and the node is not in it.
    members: Sequence[str] | None = None
    unreachable: Sequence[str] = ()
    member: bool = True
    drawn: Sequence[str] = ()
    role: str = "train"
    join: Mapping[str, Any] = {}
    quorum: Mapping[str, Any] | None = None
    seal: Mapping[str, Any] | None = None
    waiting: Mapping[str, Any] | None = None
    starting: Mapping[str, Any] | None = None
    verdicts: Sequence[Mapping[str, Any]] = ()
    paused: str = ""
    idle_s: float | None = None
    unattached: Mapping[str, float] = {}
    # By process: what it does before it attaches, and seconds since it joined.
    preparing: Mapping[str, tuple[str, float]] = {}
    script: bool = False
    # Stage, how much of it is done, and of how much.
    progress: Sequence[Any] = ()
    metrics: Mapping[str, Any] = {}
    last_round: RoundCommittedEvent | None = None
    # What the script here found last of what the model has learned: answers of one round.
    answers: Sequence[ScriptAnswerEvent] = ()
    evaluation: ScriptEvaluationEvent | None = None
    gain: Mapping[str, float | None] | None = None
    rate: TrainingRate | None = None
    part: float | None = None
    last_operation: OperationCommittedEvent | None = None
    timings: Mapping[str, Any] = {}
    bytes_sent: int | None = None
    bytes_received: int | None = None
    disk_bytes: int | None = None
    # Why, where that is known.
    banned: Mapping[str, str | None] = {}
    refused: Mapping[str, Sequence[str]] = {}
    trouble: Mapping[str, Any] | None = None
    troubles: Sequence[Mapping[str, Any]] = ()
    # Of the process that has attached here, and of all that have joined.
    script_pid: int | None = None
    script_pids: Sequence[int] = ()


def read_run_status(document: Mapping[str, Any]) -> RunStatus:
    """The run's entry in a status document of a node of any version. What this version does not
    know, and values of another type, are left out.
    """
    found = dict[str, Any]()
    for field in msgspec.structs.fields(RunStatus):
        if field.name in document:
            with suppress(msgspec.ValidationError):
                found[field.name] = msgspec.convert(document[field.name], field.type)
    return RunStatus(**found)


class Figure(NamedTuple):
    """A number of a run that text, page, live view and metrics show. ``field``: of `RunStatus`;
    ``label``: one word; ``words``: the number for people; ``metric`` and ``about``: its metric,
    which has the number itself; ``keeps``: the field of `Allowed` without which a page or metric
    may not show it.
    """

    field: str
    label: str
    words: Callable[[Any], str]
    metric: str
    about: str
    keeps: str = ""

    def read(self, run: RunStatus) -> Any:
        """The number itself."""
        return getattr(run, self.field)

    def text(self, run: RunStatus) -> str:
        """The number for people; "" where there is none."""
        value = self.read(run)
        return self.words(value) if value else ""


FIGURES = (
    Figure(
        "left_s",
        "left",
        lambda seconds: f"about {span_text(seconds)}, at the present pace",
        "atoll_left_seconds",
        "Until all rounds are committed, at the pace of the newest.",
    ),
    Figure("disk_bytes", "disk", bytes_text, "atoll_disk_bytes", "What the run takes on disk."),
)
