"""What the attached script has offered: one contribution at a time is given to the open round, or
to the branch this member is on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from ...collectives.encoded import why_refused
from ...collectives.errors import LocalProtocolError
from ...collectives.group import Reading
from . import events as ev

if TYPE_CHECKING:
    from .session import Session

Given = tuple[bytes, int, Tensor, Reading]
"""cid, samples, vector, and what the script says of it."""


class Offering:
    """Contributions of the script, in order; the first may be frozen for the open round."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._waiting: deque[tuple[Given, int | None]] = deque()

    def put(self, given: Given, base: int | None) -> None:
        """The script offers another one, made on the anchor of round ``base`` if it says so. One of
        no samples only waits for the round's end.

        Raises LocalProtocolError for one of no samples where all members take part."""
        machine = self.session.machine
        if given[1] < 1 and (machine is None or machine.shape.sample is None):
            raise LocalProtocolError(
                "a contribution of no samples to a run in which all members take part"
            )
        self._waiting.append((given, base))

    @property
    def _takes_part(self) -> bool:
        """Whether this member was drawn for the open round."""
        machine = self.session.machine
        return machine is None or machine.takes_part

    def opened(self, now: float) -> None:
        """A round opened. What was offered to the one before, where that had no contributors,
        stands: it is signed anew, for this one.
        """
        session, machine = self.session, self.session.machine
        if (
            machine is not None
            and machine.contribution is not None
            and self._waiting
            and machine.takes_part
        ):
            cid, _, vector, _ = self._waiting[0][0]
            if cid == machine.contribution[0]:
                session.retaining.offered(cid, vector)
        self.offer(now)

    def offer(self, now: float) -> None:
        """Freeze the first one for the open round, if nothing is."""
        session, machine = self.session, self.session.machine
        if machine is not None and not machine.takes_part:
            self.first()
            machine.set_waiting(bool(self._waiting))
        if session.beforehand is not None:
            return session.beforehand.offer(now)
        if session.branching.active:
            return session.branching.offer(now)
        if (
            machine
            and machine.contribution is None
            and not machine.open.applying
            and (given := self.first()) is not None
        ):
            cid, samples, vector, reading = given
            session.ports.exchange.freeze(session.log, machine.round, cid, vector)
            session.admission.offered(cid, vector)
            session.retaining.offered(cid, vector)
            machine.contribute(now, cid, samples, session.distances.said(reading))
        return None

    def take(self) -> Given:
        """Give up the first one: it is decided, refused, or a branch's from now on."""
        return self._waiting.popleft()[0]

    def take_fresh(self) -> Given | None:
        """The first one, for the branch; None where there is none."""
        return self.take() if self.first() is not None else None

    def first(self) -> Given | None:
        """The first one, which stays; None where there is none. One that comes too late is refused;
        one of a member that takes no part in the round waits until that is over."""
        if not self._waiting:
            return None
        (given, base), session, why = self._waiting[0], self.session, ""
        at, rounds = session.completed, session.settings.rounds
        if base is not None and base != at:
            why = f"it was made on the anchor of round {base}, the run is at {at}"
        elif rounds is not None and at >= rounds:
            why = f"the run is complete after {rounds} rounds"
        elif self._takes_part and not given[1]:
            why = "it was made to wait for a round in which this member takes part"
        if not why:
            return given if self._takes_part else None
        self._waiting.popleft()
        return session.ports.emit(ev.ContributionRefused(given[0], why))

    def refuse(self, now: float, cid: bytes) -> None:
        """The data plane found NaN, infinity, or what its codec cannot hold, in a contribution: it
        is in no round. Why is told once known.
        """
        session, machine, replica = self.session, self.session.machine, self.session.replica
        flat = session.branching.refuse(cid)
        if (
            flat is None
            and machine
            and machine.contribution
            and machine.contribution[0] == cid
            and not session.branching.active
        ):
            machine.contribution, (_, _, flat, _) = None, self.take()
        if flat is not None and machine and replica:
            session.ports.offload(
                lambda: why_refused(flat, replica.layout, machine.shape.codec),
                lambda _, why: session.ports.emit(ev.ContributionRefused(cid, why, unfit=True)),
            )
        else:
            why = "it holds NaN or infinity, or a value too large for its codec"
            session.ports.emit(ev.ContributionRefused(cid, why, unfit=True))
        session.operations.refuse(now, cid)
        session.ports.exchange.release(cid)
