"""What makes a RunSwarm pleasant to write a script with: nothing here asks the node."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from ...collectives.swarm import Spent, Swarm
    from ...optim import Attachment
    from ...optim.data.shard import Shard

    class _Swarm(Swarm, Protocol):
        """What these methods are of."""


class Manners:
    """Methods of a Swarm that are made of its others. What they use of `atoll.optim` loads torch,
    and is loaded when it is used.

    ``spent``: of this member's privacy, as `members` last heard; None in a run without noise.
    """

    spent: Spent | None = None

    def attach(self: _Swarm, model: Any, optimizer: Any, **options: Any) -> Attachment:
        """`atoll.optim.attach(model, optimizer, self, **options)`."""
        from ...optim import attach

        return attach(model, optimizer, self, **options)

    def shard(self: _Swarm, loader: Any) -> Shard:
        """See Swarm."""
        from ...optim.data.shard import Shard

        return Shard(self, loader)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: _Swarm,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the run if all went well, and close."""
        try:
            if kind is None:
                self.leave()
        finally:
            self.close()
