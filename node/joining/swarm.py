"""RunSwarm: the Swarm that `join` returns: a run through this machine's node, and what scripts call
beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...collectives.api import Handle, all_reduce
from ...collectives.metrics import Warned
from ...collectives.outcomes import Outcome
from ...collectives.script_swarm import Reduction
from ...optim.model.card import FOLDER
from ..client.eager import eager
from ..client.swarm import RunClient

if TYPE_CHECKING:
    from torch import Tensor

    from ...optim import Attachment
    from ...optim.data.shard import Shard


class RunSwarm(RunClient):
    """This script's place in one run, through this machine's node. `join` makes it, and
    `atoll.optim.attach` takes it; the methods are those of `collectives.swarm.Swarm`.

        with join() as swarm:
            sync = attach(model, optimizer, swarm, batch_size=32)
            loader = swarm.shard(loader)        # the samples that are leased to this member
            ...

    What happens when the node goes away, and which attributes it has: `RunClient`.
    """

    def __init__(self, *entered: Any, **options: Any) -> None:
        """As `RunClient`."""
        super().__init__(*entered, **options)
        self._refused = Warned("swarm.report()")

    def attach(self, model: Any, optimizer: Any, **options: Any) -> Attachment:
        """`atoll.optim.attach(model, optimizer, self, **options)`."""
        from ...optim import attach

        return attach(model, optimizer, self, **options)

    def shard(self, loader: Any) -> Shard:
        from ...optim.data.shard import Shard

        return Shard(self, loader)

    def report(self, metrics: Mapping[str, float]) -> None:
        """A tensor on a device is waited for; what is no number is named once, and left out."""
        super().report(self._refused.taken(metrics))

    @property
    def model_folder(self) -> Path:
        return self.folder / FOLDER

    def vanished(self, flat: Tensor, codec: str) -> float:
        from ...collectives.codecs.vanished import vanished_share

        return vanished_share(flat, codec)

    def all_reduce(
        self,
        flat: Tensor,
        *,
        op_id: str,
        op: Reduction = "mean",
        weight: int = 1,
        deadline_s: float = 60.0,
        codec: str = "",
        everyone: bool = False,
    ) -> Handle[Outcome]:
        """``flat`` is written by the `wait` that first sees "committed"."""
        with eager():
            return all_reduce(
                self,
                flat,
                op_id=op_id,
                op=op,
                weight=weight,
                deadline_s=deadline_s,
                codec=codec,
                everyone=everyone,
            )
