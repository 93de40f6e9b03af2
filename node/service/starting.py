"""When a run's first round begins here: `[train] start_with` keeps a script from training until so
many members are there.

It is each node's own affair, and no rule of the log: a member that waits has a script that
contributes nothing yet, which a round may always have. Once a round with contributions is committed
the run has begun, for everybody and for good (docs/internals/protocol/joining.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..run.events import RunBegunEvent, RunStartingEvent
from .facts import peers_of

if TYPE_CHECKING:
    from .run import RunService


class ScriptStart:
    """Of one run at one node. ``waits``: a script is attached and is kept from its first step."""

    def __init__(self, run: RunService) -> None:
        self.waits = False
        self._run = run
        self._begun = False
        self._announced: int | None = None  # members that were there when it was said last

    @property
    def wanted(self) -> int:
        """Members that the first round is to have; 1: whoever is there begins."""
        return self._run.terms.start_with if self._run.terms is not None else 1

    @property
    def there(self) -> int:
        """Members that train and are known to live, this node among them: also before the run is
        founded, when nobody is a member yet.
        """
        run = self._run
        if run.whole is None or not run.whole.config_peers():
            return int(run.roles.get(run.node.identity.peer, "train") == "train")
        return sum(
            each.member and (each.you or each.live is True) and each.role == "train"
            for each in peers_of(run)
        )

    @property
    def begun(self) -> bool:
        """Whether the first round need not be waited for any more. What was found once stays."""
        whole = self._run.whole
        if not self._begun and whole is not None:
            self._begun = self.wanted == 1 or whole.completed > 0 or self.there >= self.wanted
        return self._begun

    def now(self) -> bool:
        """Somebody says that it begins with those who are there; False: it had begun."""
        was, self._begun = self.begun, True
        return not was

    def look(self) -> tuple[int, int]:
        """The script asks whether it may train: (members there, members wanted), or (0, 0) when it
        may. Each change is told as an event.
        """
        if self.begun:
            self.leave()
            return 0, 0
        self.waits, there = True, self.there
        if there != self._announced:
            self._announced = there
            run = self._run
            run.node.publish(RunStartingEvent(run=run.run_id, there=there, wanted=self.wanted))
        return there, self.wanted

    def leave(self) -> None:
        """The script waits no longer: it trains, or is gone."""
        if self.waits and self.begun:
            run = self._run
            run.node.publish(RunBegunEvent(run=run.run_id, there=self.there, wanted=self.wanted))
        self.waits, self._announced = False, None

    def view(self) -> dict[str, int] | None:
        """For status: None where no script waits."""
        if not self.waits or self.begun:
            return None
        return {"there": self.there, "wanted": self.wanted}
