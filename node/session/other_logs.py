"""The door at which a mode adds logs beside the one of a run: other implementation
`node.modes.operations`. The session hands on by the log's name what is not its own log's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...collectives.errors import LocalProtocolError
from ...collectives.group import Entry
from ...collectives.identifiers import PeerId
from ...collectives.messages import Envelope

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.codecs.encoded import EncodedVector
    from ...collectives.swarm import Call
    from .session import Session

PREFIX = "op"  # how the name of an operation's log begins


def is_operation(log: str) -> bool:
    """Whether a log is one of an operation."""
    return log.partition("/")[0] == PREFIX


class OtherLogs:
    """None: messages of other logs are dropped. Methods take `now` in seconds and do not block."""

    @property
    def under_way(self) -> bool:
        """Whether something of them is not decided yet."""
        return False

    def on_message(self, now: float, peer: PeerId, envelope: Envelope) -> None:
        """A control message that is not of the run's log. Raises RemoteProtocolError."""

    def on_exchange(self, now: float, event: Any) -> bool:
        """An event of the data plane; whether it is of one of these logs."""
        return False

    def result_arrived(self, now: float, entry: Entry, data: memoryview) -> None:
        """Fetched result bytes of an entry that is not of the run's log."""

    def find(self, name: bytes) -> tuple[Entry, memoryview] | None:
        """An entry of these logs by its hash, with its result bytes, if both are here."""
        return None

    def detach(self, now: float) -> None:
        """The script is gone."""

    def tick(self, now: float) -> None:
        """Repair loss; forget what is over."""

    def drop_all(self) -> None:
        """The end of the session: the data plane lets go of what it holds for them."""


@runtime_checkable
class Calls(Protocol):
    """Other logs that a script may open: free-standing operations."""

    def prepare(self, now: float, call: Call, numel: int) -> Any:
        """An `Operation`: its configuration and shape are fixed. Raises NotEnoughPeersError
        while this peer is not a member, ConfigError, and LocalProtocolError when it was called
        already, otherwise by other members, or when too many are under way.
        """
        ...

    def start(
        self, now: float, call: Call, numel: int, vector: Tensor | EncodedVector, cid: bytes
    ) -> None:
        """Call it with ``vector`` of its shape, untouched until OperationDone or `abandon`."""

    def abandon(self, now: float, op_id: str) -> str:
        """The caller no longer waits, and the operation goes on. Returns why it is open."""
        ...

    def next_number(self, name: str, least: int) -> int:
        """Of a series of operations: the first number, ``least`` or more, that is not used."""
        ...


def calls_of(session: Session) -> Calls:
    """What a session's script calls. Raises LocalProtocolError where it takes part in nothing."""
    found = session.operations
    if not isinstance(found, Calls):
        raise LocalProtocolError("this member takes part in no free-standing operations")
    return found
