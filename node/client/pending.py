"""What `contribute` and `all_reduce` return."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ...collectives.errors import AtollError
from ...collectives.swarm import Outcome
from ..shared_memory import received
from .link import Call

if TYPE_CHECKING:
    from torch import Tensor

    from .memory import Grid, ReductionMemory


class Waiter(Protocol):
    """The part of a swarm that a pending result needs."""

    def take_in(self) -> None:
        """Process what has come from the node, without waiting."""
        ...

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait for ``ready()``, for the time to pass, or for the node to be lost, whichever is first."""
        ...

    def still_open(self) -> Outcome:
        """An "open" outcome that says why."""
        ...


class Ticket:
    """A frozen contribution, until the node says what became of it (a Pending[Outcome]). It survives the node.

    ``wait`` returns "open" when the time is up, and at once when the node is lost: the contribution may still be counted, so
    the ticket stays undecided until the next node has looked into the run's log.
    """

    def __init__(self, swarm: Waiter, cid: bytes) -> None:
        self.cid = cid
        self.outcome: Outcome | None = None
        self.call: Call | None = None
        self._swarm = swarm

    def resolved(self) -> bool:
        """Whether the fate is known; looks at nothing new."""
        return self.outcome is not None or self.refusal() is not None

    def refusal(self) -> AtollError | None:
        """The error with which the node refused it, if it did; a lost connection is not a refusal."""
        return self.call.error if self.call is not None and self.call.refused else None

    def done(self) -> bool:
        """See Pending. Cheap: one look at the socket."""
        if not self.resolved():
            self._swarm.take_in()
        return self.resolved()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """See Pending. Raises only when the node refused the contribution."""
        self._swarm.wait_until(self.resolved, timeout_s)
        refusal = self.refusal()
        if refusal is not None and self.outcome is None:
            raise refusal
        return self.outcome or self._swarm.still_open()


class ReduceTicket:
    """A free-standing reduction (a Pending[Outcome]). A lost node ends it as "open": its votes do not survive a node."""

    def __init__(
        self, swarm: Waiter, memory: ReductionMemory, grid: Grid, flat: Tensor, lost: Callable[[], bool], close: Callable[[], None]
    ) -> None:
        self.outcome: Outcome | None = None
        self.call: Call | None = None
        self._swarm = swarm
        self._memory = memory
        self._grid = grid
        self._flat = flat
        self._result: tuple[int, int] | None = None  # number and descriptor of its memory, until the result is decoded
        self._lost = lost
        self._close = close
        self._open = True

    def resolve(self, outcome: Outcome, number: int, fds: list[int]) -> None:
        """The node's last word."""
        if fds:
            self._result = (number, received(fds, 1)[0])
        self.outcome = outcome

    def resolved(self) -> bool:
        """Whether the result is final; looks at nothing new."""
        return self.outcome is not None or self._lost() or (self.call is not None and self.call.refused)

    def done(self) -> bool:
        """See Pending."""
        if not self.resolved():
            self._swarm.take_in()
        return self.resolved()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """See Pending; the first wait that sees "committed" writes the mean into the caller's tensor."""
        self._swarm.wait_until(self.resolved, timeout_s)
        if self.outcome is None:
            if self.call is not None and self.call.refused and self.call.error is not None:
                self._finish()
                raise self.call.error
            return self._swarm.still_open()
        if self._result is not None:
            (number, fd), self._result = self._result, None
            self._memory.result(number, fd, self._grid).decode(self._flat)
        self._finish()
        return self.outcome

    def _finish(self) -> None:
        if self._open:
            self._open = False
            self._close()

    def __del__(self) -> None:
        if self._result is not None:  # nobody waited for it
            os.close(self._result[1])
