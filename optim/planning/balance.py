"""Unequal machines in one synchronous step: how many samples each takes, so that the step is short.

The time of a machine is ``fixed_s`` and ``sample_s`` for each of its samples; its memory holds
``most`` of them. The step ends with the slowest (as in Cephalo, arXiv 2411.01075).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ...collectives.errors import ConfigError

MAX_BATCH = 1 << 22
"""Samples that are shared out one by one, in seconds."""


@dataclass(frozen=True, slots=True)
class Machine:
    """How long one machine takes for a step with n samples: ``fixed_s + n * sample_s`` seconds. Its
    memory holds at most ``most`` of them.

    >>> h100, laptop = Machine(0.01), Machine(0.2, fixed_s=0.1, most=8)
    >>> balance([h100, laptop], 100)
    [96, 4]
    """

    sample_s: float
    fixed_s: float = 0.0
    most: int | None = None

    def seconds(self, samples: int) -> float:
        """Of a step with so many samples; a machine without any takes part in nothing."""
        return self.fixed_s + samples * self.sample_s if samples else 0.0


def balance(machines: Sequence[Machine], batch: int) -> list[int]:
    """The samples of each machine, ``batch`` in all, such that the slowest ends soonest.

    Each sample goes to the machine that would then end first: no other way is shorter, since a
    machine's time only grows with its samples. Raises ConfigError where they do not fit.
    """
    if batch > MAX_BATCH:
        raise ConfigError(
            f"a batch of {batch} samples; at most {MAX_BATCH} can be shared out",
            key="batch",
            hint="Count in larger units, as sequences and not tokens.",
        )
    room = sum(batch if machine.most is None else machine.most for machine in machines)
    if batch < 1 or room < batch:
        raise ConfigError(
            f"a batch of {batch} samples on {len(machines)} machines, which hold {room}",
            key="batch",
            hint="A smaller batch, or several steps before each exchange",
        )
    counts = [0] * len(machines)
    heap = [
        (machine.seconds(1), number)
        for number, machine in enumerate(machines)
        if machine.most is None or machine.most > 0
    ]
    heapq.heapify(heap)
    for _ in range(batch):
        _, number = heap[0]
        counts[number] += 1
        machine = machines[number]
        if machine.most is None or counts[number] < machine.most:
            heapq.heapreplace(heap, (machine.seconds(counts[number] + 1), number))
        else:
            heapq.heappop(heap)
    return counts
