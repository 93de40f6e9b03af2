"""What adopting an anchor does to the losses that a script logs: readings from which the node
judges whether averaging helps (`node.run.verdicts`, V10).

A reading is of one member, about one anchor: the loss just before it was adopted, the loss just
after, and how much one step's loss varies. Data and model are the member's own on both sides, so
that members with unlike data can each judge for themselves.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import Any

from torch import Tensor

SIDE = 7
"""Losses on each side of an adoption: their median is the reading."""
SIGMA = 1.4826 / math.sqrt(2)  # of the median distance of two neighbours: one step's deviation


class AdoptionLosses:
    """Keeps the first and the newest losses since the last adoption, on their device, until
    `reading` is asked for. Rounds of fewer than SIDE + 1 losses have no reading.
    """

    def __init__(self) -> None:
        self._first = list[Any]()  # since the last adoption
        self._newest: deque[Any] = deque(maxlen=SIDE)
        # the newest ones when that came; the weights that a member starts from have none before
        self._before: list[Any] | None = []
        self._complete: tuple[list[Any], list[Any]] | None = None
        self._skip = False

    def add(self, loss: Any) -> None:
        """One more loss: a number, or a tensor of one element. The first one after an adoption is
        left out: a script that logs after ``step()`` logs the loss of the step before.
        """
        if self._skip:
            self._skip = False
            return
        if isinstance(loss, Tensor):
            loss = loss.clone()  # whose memory a captured graph fills again
        if len(self._first) < SIDE:
            self._first.append(loss)
        self._newest.append(loss)

    def adopted(self, *, whole: bool) -> None:
        """The member took a new anchor; ``whole``: and left its own weights for it, so that the
        next losses are the anchor's.
        """
        if self._before is not None and len(self._first) == SIDE:
            self._complete = self._before, self._first
        self._before = list(self._newest) if whole and len(self._newest) == SIDE else None
        self._first = []
        self._newest.clear()
        self._skip = True

    def reading(self) -> dict[str, float]:
        """Of the newest adoption that has losses on both sides and was not asked for yet: medians
        before and after, and the standard deviation of one step. Of the weights that the member
        started from, without ``loss_before``. Empty where there is none.
        """
        found, self._complete = self._complete, None
        if found is None:
            return {}
        before, after = ([float(loss) for loss in side] for side in found)
        if not all(map(math.isfinite, before + after)):
            return {}
        steps = [abs(b - a) for side in (before, after) for a, b in pairwise(side)]
        known = {"loss_before": median(before)} if before else {}
        return {**known, "loss_after": median(after), "loss_noise": SIGMA * median(steps)}
