"""A replica of a FedCompass run (arXiv 2309.14675): as many inner steps as let its group arrive
together, which the log says (`collectives.modes.arrivals`).

Whose group was counted without it is late. It does not wait: it offers what it has, takes the
newest anchor and trains on, and what it makes until the offer is counted goes on from the anchor
that counts it; so does who has waited for its group up to the deadline. A round that was decided
meanwhile without it makes both one contribution, the late one and what was trained since, as old as
the late one: nothing is lost, and nothing counts more than it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...collectives.errors import AtollError, ConfigError
from ...collectives.outcomes import AnchorView
from ...collectives.script_swarm import Swarm
from ...collectives.swarm import RunSettings
from ..federated.arrivals import faded
from ..model.flat import FlatVector
from ..model.reconcile import adopt
from ..rounds.replica import OfferedContribution
from ..rounds.replica import WaitedOutcome as Look
from .arriving import ArrivingReplica


class GroupedReplica(ArrivingReplica):
    """See the module. A member says with each contribution how long a step takes it; it has the
    same share as each other.
    """

    def __init__(
        self,
        flat: FlatVector,
        swarm: Swarm,
        clock: Callable[[], float],
        dropped: Callable[[int, str], None],
        settings: RunSettings,
    ) -> None:
        """As for ArrivingReplica. Raises ConfigError for a run without groups."""
        super().__init__(flat, swarm, clock, dropped, settings)
        if self._arrivals.groups is None or self._arrivals.fading is None:
            raise ConfigError("members of this run come in no groups", key="arrivals")
        self._groups, self._fading = self._arrivals.groups, self._arrivals.fading

    @property
    def settled(self) -> bool:
        """Who does not wait hears of the round at its next step."""
        return self.frozen is not None and self.frozen.pending.done()

    def turn(
        self, deadline_s: float, decidable: Callable[[], bool] = lambda: True
    ) -> Iterator[Look]:
        """A turn that is not over is not offered, only looked after."""
        if self.frozen is not None:
            over = self._made >= (self.steps or 1)
            yield (look := self.settle(deadline_s if over else 0.0, decidable))
            if look.outcome.status == "open" or look.outcome.counted:
                return
        yield from super().turn(deadline_s, decidable)

    def _offer(self, deadline_s: float, decidable: Callable[[], bool]) -> Look:
        newest = self.swarm.anchor()
        late = newest.steps == 0
        newest.release()
        look = super()._offer(0.0 if late else deadline_s, decidable)
        return replace(look, waited_s=0.0) if late else look

    def _weighed(self, behind: int) -> float:
        return faded(self._fading, behind) / max(1, len(self._run.members()))

    def _remember(self, frozen: OfferedContribution) -> None:
        """Who does not wait, or has waited for long enough, goes on from the newest anchor."""
        try:
            newest = self.swarm.anchor()
        except AtollError:  # the node was lost: from where it is
            return super()._remember(frozen)
        frozen.own = self._snapshot()
        adopt(self.flat, newest)
        newest.release()
        frozen.snapshot = self._snapshot()
        self.steps = self._groups.most
        return self._begin()

    def _adopt(self, frozen: OfferedContribution, counted: bool, new: AnchorView) -> None:
        if not counted:
            self._restore(frozen)
        super()._adopt(frozen, counted, new)

    def _ordered(self, new: AnchorView) -> None:
        self.steps = new.steps or self._groups.first
        self._begin()
