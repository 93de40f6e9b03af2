"""The door at which a run plans its rounds again as they go on, or does without members whose
steps are long. Other implementation: `run_pacing`.
"""

from __future__ import annotations

from collections.abc import Callable

from .replica import Replica


class Pacing:
    """Rounds are as long as the settings say, and everybody is waited for."""

    lag: float | None = None
    """How many inner steps rounds take here, where the run is to know it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    @property
    def steps(self) -> int | None:
        """Inner steps of this round; None: as many as the settings say."""
        return self.replica.steps

    @property
    def delay(self) -> int | None:
        """Inner steps from a contribution to its result, with overlap."""
        return self.replica.settings.delay

    def ends_here(self, elapsed_s: float) -> bool:
        """Whether this member's part of a round that began so long ago is over, since another step
        would end after the round does."""
        return False

    def hold_s(self, steps: int, closing: Callable[[], int], finished: Callable[[], bool]) -> float:
        """For how long what is offered now, after ``steps`` of them, waits for others to end the
        round; 0: it ends it. ``closing``: says the newest round that another member has finished;
        ``finished``: whether all steps of this one are made.
        """
        return 0.0

    def trained(self, steps: int, ahead: int, samples: int, seconds: float) -> None:
        """``steps`` took ``seconds`` without what was waited; ``ahead`` of them were none."""

    def begin(self, now: float) -> None:
        """A round begins."""

    def decided(self, seconds: float) -> None:
        """A round took so long."""
