"""Steps of an optimizer on gradients that were stepped already: a Trainer's own, after that of its
training_step and zero_grad(). They move nothing, and are none.
"""

from __future__ import annotations


class SecondSteps:
    """Of one attachment. That such a step comes after each with gradients tells it from training
    that has stopped, whose steps are counted, and told of as no progress.
    """

    def __init__(self) -> None:
        self._graded = False  # the step under way has gradients
        self._without = 2  # steps without any, since one that had some
        self._recur = False

    def stepping(self, *, graded: bool) -> None:
        """An optimizer steps, with gradients or without."""
        self._graded |= graded

    def ends_empty(self) -> bool:
        """The step is over: whether it is a second one."""
        self._recur |= self._graded and self._without == 1
        self._without = 0 if self._graded else self._without + 1
        self._graded = False
        return self._recur and self._without == 1
