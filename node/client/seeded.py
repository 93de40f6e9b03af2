"""A run whose node asks for vectors by seed: the client's side of `collectives.seeded`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...collectives.seeded import SeededTask
from ..control import protocol as p
from .eager import eager

if TYPE_CHECKING:
    from torch import Tensor


class SeededWork:
    """What RunSwarm has of `Seeded`."""

    _ready: Callable[..., Any]
    _ask: Callable[..., Any]
    wait_until: Callable[[Callable[[], bool], float | None], None]

    def __init__(self) -> None:
        self._asked = deque[SeededTask]()

    def asked(self, timeout_s: float | None, until: Callable[[], bool]) -> SeededTask | None:
        self._ready()
        self.wait_until(lambda: bool(self._asked) or until(), timeout_s)
        return self._asked.popleft() if self._asked else None

    def begin(self, work: SeededTask, read: Callable[[Tensor], None]) -> bool:
        at = self._ready()
        begun = self._ask(at, p.BeginInterval, work.number)
        if begun.wanted:
            read(at.memory.contribution.tensor())
        return begun.wanted

    def answer(self, work: SeededTask, write: Callable[[Tensor], None], part: int = 0) -> None:
        """An exception in ``write`` leaves the request unanswered."""
        at = self._ready()
        with eager():
            write(at.memory.contribution.tensor())
        self._ask(at, p.Computed, work.number, part)
