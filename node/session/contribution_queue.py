"""What the attached script has offered, in order: one contribution at a time is given to the open
round.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from ...collectives.errors import LocalProtocolError
from ...collectives.group import Reading
from . import events as ev

if TYPE_CHECKING:
    from .session import Session

Given = tuple[bytes, int, Tensor, Reading]
"""cid, samples, vector, and what the script says of it."""


class ContributionQueue:
    """Contributions of the script, in order; the first may be frozen for the open round."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: deque[tuple[Given, int | None]] = deque()
        self.aside = False
        """Whether nobody is to wait for this member while it has offered nothing."""
        self._held_until = 0.0

    def put(self, given: Given, base: int | None, now: float, hold_s: float) -> None:
        """The script offers another one, made on the anchor of round ``base`` if it says so. One of
        no samples only waits for the round's end. For ``hold_s`` seconds it waits for others to end
        the round.

        Raises LocalProtocolError for one of no samples where all members take part."""
        machine = self._session.machine
        if given[1] < 1 and (machine is None or machine.shape.sample is None):
            raise LocalProtocolError(
                "a contribution of no samples to a run in which all members take part"
            )
        self._waiting.append((given, base))
        self.aside, self._held_until = hold_s > 0, now + hold_s

    def forget(self) -> None:
        """The script is gone; another one says anew whether it is waited for."""
        self.aside = False

    @property
    def waits(self) -> bool:
        """Whether there is any."""
        return bool(self._waiting)

    def head(self, cid: bytes) -> Tensor | None:
        """The vector of the first one, if that is ``cid``."""
        given = self._waiting[0][0] if self._waiting else None
        return given[2] if given is not None and given[0] == cid else None

    @property
    def _takes_part(self) -> bool:
        """Whether this member was sampled for the open round."""
        machine = self._session.machine
        return machine is None or machine.takes_part

    def take(self) -> Given:
        """Give up the first one: it is decided or refused."""
        return self._waiting.popleft()[0]

    def _is_held(self, now: float) -> bool:
        """Whether it waits for another member to end the open round."""
        machine = self._session.machine
        if not self.aside or machine is None or now >= self._held_until:
            return False
        return machine.open.first_ready_at is None

    def first(self, now: float = math.inf) -> Given | None:
        """The first one, which stays; None where there is none. One that comes too late is refused;
        one of a member that takes no part in the round waits until that is over, one that is held
        until another member ends the round."""
        if not self._waiting:
            return None
        (given, base), session, why = self._waiting[0], self._session, ""
        at, rounds = session.completed, session.settings.rounds
        if base is not None and base != at:
            why = f"it was made on the anchor of round {base}, the run is at {at}"
        elif rounds is not None and at >= rounds:
            why = f"the run is complete after {rounds} rounds"
        elif self._takes_part and not given[1]:
            why = "it was made to wait for a round in which this member takes part"
        if not why:
            return given if self._takes_part and not self._is_held(now) else None
        self._waiting.popleft()
        return session.ports.emit(ev.ContributionRefused(given[0], why))
