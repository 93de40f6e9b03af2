"""Operations that a test decides."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outcomes import Outcome, Share
from atoll.collectives.script_swarm import Call
from atoll.collectives.swarm import RunSettings
from atoll.optim import SoloSwarm

PEER = PeerId("me")


class Deciding:
    """An operation (an Operating) that the test decides. Its result is ``values``."""

    def __init__(self, op_id: str, values: Tensor) -> None:
        self.op_id, self.members, self.numel = op_id, (PEER,), values.numel()
        self.values, self.outcome, self.copied, self.released = values, Outcome("open", 0), 0, False
        self.error: LocalProtocolError | None = None
        self.settled, self.waited_for = threading.Event(), threading.Event()

    def decide(self, status: str = "committed") -> None:
        self.outcome = Outcome(status, 0, (Share(PEER, 1),), True)  # type: ignore[arg-type]
        self.settled.set()

    def done(self) -> bool:
        return self.settled.is_set()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        self.waited_for.set()
        self.settled.wait(timeout_s)
        if self.error is not None:
            raise self.error
        return self.outcome

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        if self.released:
            raise LocalProtocolError("no elements of a result")
        self.copied += 1
        destination.copy_(self.values[start : start + destination.numel()])

    def release(self) -> None:
        self.released = True

    def cancel(self) -> None:
        if not self.settled.is_set():
            self.outcome = Outcome("open", 0, reason="cancelled by its caller")
            self.settled.set()


class Decided(SoloSwarm):
    """Its operations are those that the test decides."""

    def __init__(self) -> None:
        super().__init__(RunSettings(sync_every=1))
        self.operations: list[Deciding] = []

    def operate(self, call: Call, source: Tensor) -> Any:
        self.operations.append(Deciding(call.op_id, source.detach().clone().view(-1) + 1))
        return self.operations[-1]
