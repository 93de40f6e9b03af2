"""The strands of a run: one, or one a fragment where the model is cut; and the anchors of its
fragments as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from ...collectives.group import Evaluated
from ...collectives.layout import Layout
from ...collectives.outcomes import AnchorView, Outcome, Pending
from ...collectives.script_swarm import FragmentSwarm, Swarm
from ...collectives.swarm import RunSettings
from ..model.flat import FlatVector
from .replica import Replica, ReplicaSwarm
from .run_pacing import RunPacing
from .schedule import StepCounter
from .strand import Strand

MakeReplica = Callable[
    [FlatVector, ReplicaSwarm, Callable[[], float], Callable[[int, str], None], RunSettings],
    Replica,
]
"""Makes the replica of one fragment: vector, swarm, clock, what is told of dropped samples, and the
run's settings.
"""


class FragmentLog:
    """One fragment of a swarm as a `replica.ReplicaSwarm`."""

    def __init__(self, swarm: FragmentSwarm, fragment: int) -> None:
        self._swarm, self._fragment = swarm, fragment

    @property
    def holds(self) -> bool:
        """As of `Swarm`, where it has it."""
        return bool(getattr(self._swarm, "holds", False))

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> AnchorView:
        """The fragment's newest anchor; the run is open already."""
        return self._swarm.fragment_anchor(self._fragment)

    def anchor(self) -> AnchorView:
        return self._swarm.fragment_anchor(self._fragment)

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> Pending[Outcome]:
        return self._swarm.contribute_fragment(
            self._fragment,
            samples=samples,
            write=write,
            base=base,
            loss=loss,
            lag=lag,
            hold_s=hold_s,
        )


class Bases:
    """The anchors that a script's fragments started from, as one AnchorView; it is of no round that
    the run was ever at.
    """

    digest = ""

    def __init__(self, views: Sequence[AnchorView]) -> None:
        self._views = views
        self.round, self.numel = (
            min(view.round for view in views),
            sum(view.numel for view in views),
        )
        self.samples, self.lag, self.steps = (
            min(view.samples for view in views),
            views[0].lag,
            views[0].steps,
        )

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        stop, at = start + destination.numel(), 0
        for view in self._views:
            first, last = max(start, at), min(stop, at + view.numel)
            if first < last:
                view.copy_into(destination[first - start : last - start], first - at)
            at += view.numel

    def release(self) -> None:
        """Nothing: the leases are the strands'."""


def make_strands(
    swarm: Swarm,
    flat: FlatVector,
    counter: StepCounter,
    clock: Callable[[], float],
    dropped: Callable[[int, str], None],
    make: MakeReplica = Replica,
    examples: int = 0,
) -> list[Strand]:
    """One strand a fragment of the run, over the parts of ``flat``. ``make``: makes the replica
    that the run's settings ask for. ``examples``: this site's.
    """
    settings = swarm.settings
    if settings.fragments == 1:
        replica = make(flat, swarm, clock, dropped, settings)
        return [Strand(replica, lambda: swarm.closing, counter, clock, 0.0, examples, RunPacing)]
    cut, strands = cast("FragmentSwarm", swarm), list[Strand]()
    for fragment, part in enumerate(flat.cut(settings.fragments)):
        replica = make(part, FragmentLog(cut, fragment), clock, dropped, settings)
        ahead = (settings.fragments - fragment) % settings.fragments / settings.fragments
        strands.append(
            Strand(
                replica,
                lambda fragment=fragment: cut.fragment_closing(fragment),
                counter,
                clock,
                ahead,
                pacing=RunPacing,
            )
        )
    return strands


def enter(swarm: Swarm, flat: FlatVector, strands: list[Strand]) -> None:
    """Open the run with the whole model; its anchor becomes the live parameters."""
    if len(strands) > 1:
        swarm.open(flat.layout, flat.write_initial).release()
    for strand in strands:
        strand.replica.enter()
