"""What an event of a session means for its run at this node, beside being told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..session import events as ev
from .troubles import doubled_here, other_histories, removed_here

if TYPE_CHECKING:
    from .run import RunService


def react_to(run: RunService, event: object) -> None:
    """End the run, name a trouble or take it back, or hand evidence on."""
    match event:
        case ev.RoundCommitted():
            run.troubles.clear()
        case ev.Removed():
            run.fail(removed_here())
        case ev.Equivocated():
            run.guard(lambda: run.take_proof(event.evidence))
        case ev.AnotherHistory():
            if (twice := other_histories(run.foreign, run.splits)) is not None:
                run.troubles.tell(twice)
        case ev.Doubled():
            run.troubles.tell(doubled_here())
        case _:
            pass
