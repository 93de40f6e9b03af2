"""What a session's script may call beside the run's rounds: free-standing operations."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...collectives.codecs.encoded import EncodedVector
from ...collectives.errors import LocalProtocolError
from ...collectives.script_swarm import Call
from .session import Session


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
        ...

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
