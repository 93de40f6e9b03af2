"""A replica that contributes gradients: synchronous training on one large batch, whoever brings
which part of it.

Members accumulate gradients at the anchor, and the run's outer step is the optimizer (DeDLOC, arXiv
2106.10207, with the optimizer's state in the log instead of in every script: who joins has it, and
all have the same bits). The live parameters are the anchor all the time; a gradient of an anchor
that is past is dropped, since it is no part of any large batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...collectives.outcomes import AnchorView
from ...collectives.swarm import RunSettings
from ..model.flat import FlatVector
from ..model.pseudograd import write_pseudo_gradient
from ..model.reconcile import adopt
from ..rounds.replica import OfferedContribution, Replica, ReplicaSwarm

PAST = "their gradients are of an anchor that is past"


class GradientReplica(Replica):
    """See the module. Sums stay on their parameters' devices until they are contributed; 4 bytes a
    parameter there.
    """

    looks_back = False

    def __init__(
        self,
        flat: FlatVector,
        swarm: ReplicaSwarm,
        clock: Callable[[], float],
        dropped: Callable[[int, str], None],
        settings: RunSettings | None = None,
    ) -> None:
        """As for Replica."""
        super().__init__(flat, swarm, clock, dropped, settings)
        # By index of the tensor: samples times gradient, float32.
        self._sums: dict[int, Tensor] = {}

    def forget(self) -> None:
        super().forget()
        self._sums.clear()

    @torch.no_grad()
    def stepped(self, samples: int) -> None:
        """The gradients that lie at the parameters are means over ``samples``."""
        self.unsent += samples
        for index, (spec, tensor) in enumerate(
            zip(self.flat.layout.tensors, self.flat.tensors, strict=True)
        ):
            if spec.role == "parameter" and tensor.grad is not None:
                part = tensor.grad.to_dense().to(torch.float32) * float(samples)
                self._sums[index] = self._sums[index].add_(part) if index in self._sums else part

    def not_finite(self) -> str:
        bad = (
            index for index, total in self._sums.items() if not bool(torch.isfinite(total).all())
        )
        return super().not_finite() or next(
            (f"the gradient of {self.flat.layout.tensors[index].name}" for index in bad), ""
        )

    def collect(self, samples: int) -> None:
        """Nothing: they were counted with their gradients."""

    @torch.no_grad()
    def _write(self, out: Tensor) -> None:
        write_pseudo_gradient(self.flat, self.base, out)  # zeros, but for running statistics
        for index, spec in enumerate(self.flat.layout.tensors):
            if spec.role == "parameter":
                part = out[spec.offset : spec.offset + spec.numel]
                part.zero_()
                if index in self._sums:
                    part.copy_(self._sums[index].reshape(-1)).div_(float(self.unsent))
        self._note_progress(out)
        self.extras.carry_over(out)
        self._sums.clear()

    def _adopt(self, frozen: OfferedContribution, counted: bool, new: AnchorView) -> None:
        self.extras.settle(counted)
        self.frozen = None
        if not counted:
            self._dropped(frozen.samples, PAST)
        self._move(new)

    def _rebase(self, new: AnchorView) -> None:
        if new.round == self.base.round:
            new.release()
        else:
            self._move(new)

    def _move(self, new: AnchorView) -> None:
        lost, self.unsent = self.unsent, 0
        self._sums.clear()
        adopt(self.flat, new)
        self._take(new)
        if lost:
            self._dropped(lost, PAST)

    def _remember(self, frozen: OfferedContribution) -> None:
        """Nothing: the live parameters do not move."""
