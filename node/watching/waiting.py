"""What a run waits for, as a document for status and events."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ...collectives.errors import AtollError
from ..session.events import Waiting
from ..session.waiting import A_SCRIPT_BEGINS, A_SCRIPT_TRAINS

STORES = ("lacking state", "round under way")
"""What a member waits for that cannot write what it has received."""


def explained(
    waiting: Waiting,
    trouble: AtollError | None,
    scripts: dict[str, tuple[str, float]] | None = None,
) -> Waiting:
    """What is waited for, where this node's disk refuses what must be written (E501), or scripts of
    this machine prepare something (`Idle.preparing`): the session knows of neither.
    """
    if scripts and waiting.what in (A_SCRIPT_BEGINS, A_SCRIPT_TRAINS):
        ((pid, (what, seconds)), *_) = scripts.items()
        said = f"this machine's script: process {pid} {what}, for {seconds:.0f} s"
        return msgspec.structs.replace(waiting, what=said, ends="it attaches")
    if trouble is None or trouble.code != "E501" or waiting.state not in STORES:
        return waiting
    what = "room for what this node must write before it votes"
    return msgspec.structs.replace(waiting, what=what, of=(), ends="its disk takes that")


def document_of(waiting: Waiting, now: float) -> dict[str, Any]:
    """JSON-able; times are since 1970."""
    return {
        "state": waiting.state,
        "what": waiting.what,
        "of": list(waiting.of),
        "ends": waiting.ends,
        "since": round(time.time() - (now - waiting.since), 3),
        "round_open_s": round(waiting.round_open_s, 1),
        "missing": list(waiting.missing),
    }
