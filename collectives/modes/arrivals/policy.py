"""The arrival policy of a log whose rounds do not wait for everybody."""

from __future__ import annotations

from ...arrivals import ArrivalSettings
from ...identifiers import PeerId
from ...round.arrival_policy import ArrivalPolicy, Ripeness, RoundArrivals
from ...round.log import Log
from .dynamic_steps import OwnSteps
from .gathering import is_ripe, window_s
from .grouping import Grouping


class PartialArrivals(ArrivalPolicy):
    """By ``settings``; what members' turns follow from is in the log."""

    waits_for_some = True

    def __init__(self, settings: ArrivalSettings, entries: Log) -> None:
        self._settings = settings
        groups, dynamic = settings.groups, settings.dynamic
        self._grouping = Grouping(groups, entries) if groups is not None else None
        self._own_steps = OwnSteps(dynamic, entries) if dynamic is not None else None
        self.in_groups = groups is not None

    def follow(self, now: float) -> None:
        """Groups and numbers of steps follow from the entries."""
        if self._grouping is not None:
            self._grouping.follow(now)
        if self._own_steps is not None:
            self._own_steps.follow()

    def steps(self, peer: PeerId) -> int:
        """By its group, or by its speed."""
        if self._grouping is not None:
            return self._grouping.steps(peer)
        return 0 if self._own_steps is None else self._own_steps.steps(peer)

    def elapsed_s(self, now: float) -> float | None:
        """Groups are waited for by the log's time."""
        return None if self._grouping is None else self._grouping.elapsed_s(now)

    def look(self, now: float, gathered: RoundArrivals) -> Ripeness:
        """Groups that are ready make the round; or so many contributions, or a period that is
        over.
        """
        if self._grouping is not None:
            return self._look_at_groups(self._grouping, now, gathered)
        if gathered.first_at is None or not is_ripe(
            self._settings,
            now,
            born=gathered.born,
            first_at=gathered.first_at,
            there=len(gathered.there),
            awaited=len(gathered.awaited),
        ):
            return Ripeness()  # somebody of those that were enough may have died
        enough_at = now if gathered.enough_at is None else gathered.enough_at
        window = self._settings.window
        if window is None or not gathered.awaited:
            return Ripeness(now, enough_at)
        over = now - enough_at >= window_s(window, gathered.lags)
        return Ripeness(now if over else None, enough_at)

    def _look_at_groups(self, grouping: Grouping, now: float, gathered: RoundArrivals) -> Ripeness:
        """When somebody of a group that is ready dies, the round waits for another group."""
        due = grouping.ready(gathered.there, gathered.awaited, now)
        ripe_at = now if gathered.ripe_at is None else gathered.ripe_at
        return Ripeness(ripe_at if due else None, None, due)
