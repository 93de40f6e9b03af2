"""What a session is made of at one member, but for its driver."""

from __future__ import annotations

from dataclasses import dataclass

from ...collectives.identifiers import PeerId, RunId
from ...collectives.round import OPEN, Doors, Timing
from .log_settings import LogSettings
from .modes import PLAIN, Modes


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """The same for all fragments of a run. ``unix_offset_s``: wall clock minus ``now``, at first.
    ``chunk_elements``: None for those that fit the codec. With ``seeding`` this member takes part
    also while no script is attached. ``site``: the label of the place where it is. ``probation``,
    ``per_hour``: see `Admission`. ``doors``: by what peers enter the configuration. ``modes``: what
    the run asks for.
    """

    run: RunId
    me: PeerId
    organiser: PeerId
    settings: LogSettings
    timing: Timing = Timing()
    unix_offset_s: float = 0.0
    checkpoint_every: int = 10
    chunk_elements: int | None = None
    seeding: bool = True
    site: str = ""
    probation: int = 0
    per_hour: int = 0
    doors: Doors = OPEN
    modes: Modes = PLAIN
