"""What `contribute` and `operate` return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...collectives.errors import AtollError, LocalProtocolError
from ...collectives.identifiers import PeerId
from ...collectives.outcomes import Outcome
from ..control.descriptors import Descriptor, received
from ..control.protocol import Done
from .eager import eager
from .link import PendingAnswer
from .memory import copy_range

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.codecs.encoded import EncodedVector
    from .memory import ReductionMemory, VectorEncoding
    from .swarm import RunClient


class Hooks(NamedTuple):
    """What a reduction needs of its connection."""

    lost: Callable[[], bool]
    close: Callable[[], None]
    cancel: Callable[[], None]
    settled: Callable[[bool], None] = lambda committed: None
    """Before its caller hears that the operation is over, or gives it up: what was given is the
    caller's again.
    """


class Ticket:
    """A frozen contribution, until the node says what became of it (a Pending[Outcome]). It
    survives the node.

    ``wait`` returns "open" when the time is up, and at once when the node is lost: the contribution
    may still be counted, so the ticket stays undecided until the next node has looked into the
    run's log.
    """

    def __init__(self, swarm: RunClient, cid: bytes) -> None:
        self.cid = cid
        self.outcome: Outcome | None = None
        self.call: PendingAnswer[Done] | None = None
        self._swarm = swarm

    def resolved(self) -> bool:
        """Whether the fate is known; looks at nothing new."""
        return self.outcome is not None or self.refusal() is not None

    def refusal(self) -> AtollError | None:
        """The node's error if it refused; a lost connection is not a refusal."""
        return self.call.error if self.call is not None and self.call.refused else None

    def done(self) -> bool:
        """Cheap: one look at the socket."""
        if not self.resolved():
            self._swarm.take_in()
        return self.resolved()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Raises only when the node refused the contribution."""
        self._swarm.wait_until(self.resolved, timeout_s)
        refusal = self.refusal()
        if refusal is not None and self.outcome is None:
            raise refusal
        return self.outcome or self._swarm.still_open()


class ReduceTicket:
    """A free-standing operation (an Operating). A lost node ends it as "open": its votes do not
    survive a node.

    It is made before the node is asked, and `opened` with the node's answer. One that nobody holds
    any more is closed with the next call of its connection (`Attached.operations`).
    """

    def __init__(self, swarm: RunClient, memory: ReductionMemory, hooks: Hooks, op_id: str) -> None:
        self.outcome: Outcome | None = None
        self.call: PendingAnswer[Done] | None = None
        self.op_id, self.numel = op_id, 0
        self.members: tuple[PeerId, ...] = ()
        self._swarm, self._memory, self._hooks = swarm, memory, hooks
        self._chunking: VectorEncoding | None = None
        # Number and descriptor of the result's memory, until it is mapped.
        self._fd: tuple[int, int | Descriptor] | None = None
        self._result: EncodedVector | None = None
        self._settled = False
        self._settling = threading.RLock()  # each thread of the script may wait
        self._open = True

    def opened(self, chunking: VectorEncoding, members: tuple[PeerId, ...]) -> None:
        """The node has opened it: how its vectors are encoded, and who its members are."""
        self._chunking, self.numel, self.members = chunking, chunking.numel, members

    def resolve(self, outcome: Outcome, number: int, fds: Sequence[Descriptor]) -> None:
        """The node's last word."""
        if fds:
            self._fd = (number, received(fds, 1)[0])
        self.outcome = outcome

    def resolved(self) -> bool:
        """Whether the result is final; looks at nothing new."""
        return (
            self.outcome is not None
            or self._hooks.lost()
            or (self.call is not None and self.call.refused)
        )

    def done(self) -> bool:
        if not self.resolved():
            self._swarm.take_in()
        return self.resolved() and self._settle()

    def _settle(self) -> bool:
        with self._settling:
            if not self._settled:  # again, if an exception ends it
                self._hooks.settled(self.outcome is not None and self.outcome.status == "committed")
                self._settled = True
        return True

    def wait(self, timeout_s: float | None = None) -> Outcome:
        self._swarm.wait_until(self.resolved, timeout_s)
        if self.resolved():
            self._settle()
        if (
            self.outcome is None
            and self.call is not None
            and self.call.refused
            and self.call.error is not None
        ):
            self.release()
            raise self.call.error
        return self.outcome or self._swarm.still_open()

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        """Raises LocalProtocolError when there is no result, or after `release`."""
        with eager():
            self._copy_into(destination, start)

    def _copy_into(self, destination: Tensor, start: int) -> None:
        if self._fd is not None and self._chunking is not None:
            self._result = self._memory.result(*self._fd, self._chunking)
            self._fd = None
        if self._result is None or start < 0 or start + destination.numel() > self.numel:
            raise LocalProtocolError(
                f"no elements [{start}, {start + destination.numel()}) of a result"
            )
        copy_range(self._result, destination, start)

    def release(self) -> None:
        self._fd = self._result = None
        self._settle()
        if self._open:
            self._hooks.close()  # again, if an exception ends it
            self._open = False

    def cancel(self) -> None:
        if self._open and not self.resolved():
            self._hooks.cancel()
