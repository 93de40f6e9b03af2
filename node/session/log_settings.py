"""What the settings of a run say of one of its logs (`composing.log_settings_of`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...collectives.group import TopologyKind
from ...collectives.layout import Layout
from ...collectives.round_settings import SampleSettings


@dataclass(frozen=True, slots=True)
class LogSettings:
    """``codec``: by which chunks are as long as they are; ``codec_of``: a model's codec, or a
    mixture of them, as text. ``rounds``: after which the run is done; None: no end. ``lying``: how
    many members may do anything. ``coordinator``: one member adds up all of a round. ``sample``:
    who takes part in a round. ``by_work``: rounds end when each site's work is done. ``spare``:
    what part of the time rounds may wait for a thin link. ``evaluations``: how many readings in a
    row speak against averaging; 0: members do not evaluate.

    ``partial``: rounds are of whoever has come; ``meets``: members do something together before the
    log is given anything.
    """

    codec: str
    codec_of: Callable[[Layout], str]
    reducer: str = "mean"
    plan: TopologyKind = "butterfly"
    rounds: int | None = None
    lying: int = 0
    coordinator: bool = False
    sample: SampleSettings | None = None
    by_work: bool = False
    spare: float = 0.0
    evaluations: int = 0
    partial: bool = False
    meets: bool = False
