"""The extras that a run's settings ask for: error feedback, worker momentum, outliers, ways back,
and what encoding loses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random

import torch
from torch import Tensor

from ...collectives.outcomes import AnchorView
from ...collectives.swarm import RunSettings
from ..model.accuracy import EVERY, measured_chunking, realised_errors
from ..model.feedback import Feedback
from ..model.momentum import ContributionMomentum
from ..model.vector import ModelVector
from .extras import Extras
from .outliers import NormWatch
from .way_back import WayBack

OUTLIER = (
    "its norm {:.3g} is far above those of rounds before, {:.3g}; the model goes back to the anchor"
)

WAY_BACK = (
    "they lead back to the anchor of round {}, as an earlier checkpoint does that is put into the "
    'model; the model goes to the newest anchor. If that is meant: attachment.moved("why")'
)


class RunExtras(Extras):
    """Those of the replica of one vector. ``feedback``: the residual, None in a run without;
    ``momentum``: of contributions, likewise.
    """

    def __init__(self, flat: ModelVector, settings: RunSettings, *, looks_back: bool) -> None:
        """``looks_back``: the live parameters' progress is all of what was trained from the newest
        anchor.
        """
        self.realised: Mapping[str, float] = {}
        self.feedback = Feedback(flat.layout, settings) if settings.has_feedback else None
        beta = 0.0 if settings.site or settings.sample else settings.worker_momentum
        self.momentum = ContributionMomentum(flat.parameters, beta) if beta else None
        outliers = settings.outliers
        self._flat = flat
        self._norms = NormWatch(outliers) if outliers is not None else None
        # In some runs members contribute in every round whatever they have done, or keep a part of
        # an older anchor.
        sworn = settings.secure or settings.privacy or settings.btard
        watches = looks_back and not sworn and settings.mixing is None
        self._way_back = WayBack(flat, Random(flat.parameters)) if watches else None
        self._chunking = measured_chunking(flat.layout, settings)

    def take_anchor(self, anchor: AnchorView) -> None:
        if self._way_back is not None:
            self._way_back.add(anchor)

    def find_fault(self, base: AnchorView, samples: int, *, whole: bool, ordinary: bool) -> str:
        if self._norms is not None and (why := self._outlier(self._norms, base, samples)):
            return why
        if self._way_back is None or not whole:
            return ""
        round_ = self._way_back.leads_to(jumped=not ordinary)
        return self._flat.agreed("" if round_ is None else WAY_BACK.format(round_))

    def _outlier(self, norms: NormWatch, base: AnchorView, samples: int) -> str:
        """In a job of several ranks each looks at its slices, and all drop what one of them
        finds.
        """
        usual, squares = norms.mean, 0.0
        for segment, live in self._flat.pull():
            anchor = torch.empty(segment.numel, dtype=torch.float32, device="cpu")
            base.copy_into(anchor, segment.start)
            moved = max(0, min(segment.stop, self._flat.parameters) - segment.start)
            length = torch.linalg.vector_norm(anchor.sub_(live)[:moved], dtype=torch.float64)
            squares += float(length) ** 2
        norm = math.sqrt(squares)
        return self._flat.agreed(
            OUTLIER.format(norm, usual) if norms.is_outlier(norm, samples) else ""
        )

    def carry_over(self, out: Tensor) -> None:
        if self.momentum is not None:
            self.momentum.take(out)
        if self.feedback is not None:
            self.feedback.add_to(out)

    def measure(self, out: Tensor, round: int) -> None:
        if self._chunking is not None and (not self.realised or round % EVERY == 0):
            self.realised = realised_errors(self._chunking, out, self._flat.layout)

    def settle(self, counted: bool) -> None:
        if self.momentum is not None:
            self.momentum.settle(counted)
        if self.feedback is not None:
            self.feedback.settle(counted)

    def forget(self) -> None:
        if self.feedback is not None:
            self.feedback.zero()
        if self.momentum is not None:
            self.momentum.settle(False)
