"""The door at which a run watches the mean of each round before its outer step. The other
implementation is `governing`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .reported import Reported


class MeanVerdict(NamedTuple):
    """What is done about a mean. ``plain``: it is taken as it is, with a rate of 1; ``scales``: by
    what it is multiplied, one after another; ``rate``: a factor of the learning rate;
    ``restart``: momentum begins again at zero.
    """

    plain: bool = False
    scales: tuple[float, ...] = ()
    rate: float = 1.0
    restart: bool = False


AS_IT_IS = MeanVerdict()


class MeanWatch:
    """Nothing is watched. ``numbers``: so many of the state are the watch's, zero at first;
    ``measures``: whether it looks at means at all.
    """

    numbers = 0
    measures = False

    def judge(
        self, numbers: Tensor, norm: float, reported: Reported, entry: int, steps: float
    ) -> MeanVerdict:
        """What to do about the mean of log entry ``entry``, of this norm. ``numbers``: float32
        (numbers,), updated; ``steps``: outer steps before it, as far as they are counted.
        """
        return AS_IT_IS

    def plain_since(self, numbers: Tensor) -> int:
        """The log entry from which on the plain mean is taken; 0: it is not."""
        return 0
