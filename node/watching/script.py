"""What is noted of this machine's script: whether it is there, makes steps, and reads other data
than other members do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import trio

from ...collectives.identifiers import PeerId
from ..run.events import DataOrderEvent
from ..run.same_order import SameOrder, said_by, shows_order
from ..service.outside import ScriptTurn
from .idle import Idle, JoinedScript
from .presence import ScriptPresence
from .standstill import Standstill

if TYPE_CHECKING:
    from ..service.run import RunService


class ScriptWatcher:
    """Of one run. Implements `service.outside.ScriptWatch`."""

    def __init__(self, run: RunService) -> None:
        self._run = run
        self.idle = Idle(run.run_id, run.node.publish)
        self.presence = ScriptPresence(run)
        self._standstill = Standstill(run.run_id, run.node.publish)
        self._same_order = SameOrder(run.run_id)

    @property
    def same_order(self) -> Mapping[PeerId, int]:
        return self._same_order.equal

    def expect(self, pid: int) -> JoinedScript:
        self.idle.joined(trio.current_time(), pid)
        self._run.wake()
        return JoinedScript(self.idle, pid, self._run.wake)

    def attached(self, pid: int, averaging: str) -> None:
        self._standstill.begin(trio.current_time(), pid)
        self.presence.attached(pid, averaging=averaging)

    def ended(self, pid: int, farewell: str | None, *, node_ends: bool) -> None:
        self.presence.ended(pid, farewell, node_ends=node_ends)

    def note_turn(self, turn: ScriptTurn) -> None:
        """What the turn means for who may be called idle, or still."""
        now = trio.current_time()
        match turn:
            case "may train":
                self.idle.attached(now)
            case "gives":
                self.idle.over()
            case "waits":
                self._standstill.wait()
            case "asks":
                self._standstill.sign(now)
            case "is gone":
                self.idle.over()
                self._standstill.end()
                self._same_order.forget()

    def note_report(
        self,
        metrics: Mapping[str, float],
        first_batch: tuple[int, bytes] | None,
        read: Sequence[bytes],
    ) -> None:
        for content in read:
            self._same_order.read(content)
        if first_batch is not None:
            self._compare(*first_batch)
        if isinstance(step_s := metrics.get("step_s"), int | float):
            self._standstill.stepped(trio.current_time(), float(step_s))
            self.idle.over()

    def _compare(self, round_: int, digest: bytes) -> None:
        run, session = self._run, self._run.session
        if session is None or run.terms is None or not shows_order(run.terms.settings):
            return
        session.membership.announce(trio.current_time(), first_batch=(round_, digest))
        before = set(self._same_order.equal)
        self._same_order.begun(round_, digest)
        self._same_order.look(said_by(session.membership, session.config_peers()))
        if (equal := dict(self._same_order.equal)).keys() != before:
            run.node.publish(DataOrderEvent(run=run.run_id, equal={**equal}))

    def left(self) -> None:
        self.presence.left()

    async def buried(self, patience_s: float) -> None:
        await self.presence.buried(patience_s)

    def look(self, now: float) -> None:
        """Time has passed."""
        self.idle.look(now)
        self._standstill.look(now)
