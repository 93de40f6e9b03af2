"""How long this script's inner steps take, and how busy its GPU is: reported once a minute, for the
node's verdicts on this machine.

The time of a step is that between two steps of one round: waiting for a round, resting and
evaluating between two rounds are not in it. The median of a minute is reported, so that a long
evaluation or checkpoint in between does not count. The clock is read; no device is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

import torch

MINUTE_S = 60.0
MOST = 1024  # steps that a median is taken of


class StepTimes:
    """Of one attachment. ``device``: where the model's parameters are, as asked for once a
    minute.
    """

    def __init__(
        self, clock: Callable[[], float], device: Callable[[], torch.device | None]
    ) -> None:
        self._clock, self._device = clock, device
        self._reported_at = clock()
        self._before: float | None = None  # the step before, of the same round
        self._times = deque[float](maxlen=MOST)
        self._readable = True  # whether the driver says how busy the GPU is

    def step(self) -> dict[str, float]:
        """A step is over. What to report now: nothing but once a minute."""
        now = self._clock()
        if self._before is not None:
            self._times.append(now - self._before)
        self._before = now
        if now - self._reported_at < MINUTE_S or not self._times:
            return {}
        self._reported_at = now
        found = {"step_s": median(self._times), **self._gpu()}
        self._times.clear()
        return found

    def pause(self) -> None:
        """What comes until the next step is not of a step."""
        self._before = None

    def _gpu(self) -> dict[str, float]:
        device = self._device() if self._readable else None
        if device is None or device.type != "cuda":
            return {}
        try:
            return {"gpu_busy": torch.cuda.utilization(device) / 100}
        except Exception:  # no driver library in this environment, or one that knows nothing of it
            self._readable = False
            return {}
