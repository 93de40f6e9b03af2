"""Sequential gradient coding by selective repetition (SR-SGC: Krishnan, Ebrahimi and Khisti, ICLR
2023, arXiv 2211.13802, algorithm 1): the sum of job t may come B rounds after round t, so bursts of
stragglers cost repetition and not redundancy.

Each round t starts job t. A worker's task of a job is its row of a gradient code for s missing. Who
straggled in round t - B repeats that job's task in round t, if the job still lacks results;
everybody else works on job t. A pattern of stragglers in which any W consecutive rounds see at most
``distinct`` different ones, each for B rounds in a row at most, is tolerated with

    s = ceil(B * distinct / (W - 1 + B)),    W = x B + 1,

where plain gradient coding needs s = ``distinct``: a load of (s + 1) / n instead of
(distinct + 1) / n.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class SelectiveRepetition:
    """Which job each worker does in each round, and which job is complete. Ask for `tasks`, then
    say with `step` who returned.

    >>> code = SelectiveRepetition(workers=4, burst=1, window=2, distinct=1)
    >>> code.tasks()                                    # worker -> job
    {0: 0, 1: 0, 2: 0, 3: 0}
    >>> code.step(returned=[0, 1, 2])                   # 3 straggles: job 0 is complete without it
    {0: frozenset({0, 1, 2})}

    Args:
        workers: n.
        burst: B, and the delay: job t is complete after round t + B.
        window: W, one more than a multiple of B.
        distinct: how many different stragglers any W consecutive rounds may see.
    """

    workers: int
    burst: int
    window: int
    distinct: int
    _round: int = 0
    _results: dict[int, set[int]] = field(default_factory=dict)
    """By open job: who returned its task."""

    def __post_init__(self) -> None:
        if self.burst < 1 or self.window <= self.burst or (self.window - 1) % self.burst:
            raise ValueError("window is a multiple of burst, plus one")
        if not 0 <= self.distinct < self.workers:
            raise ValueError("fewer distinct stragglers than workers")

    @property
    def stragglers(self) -> int:
        """s of the gradient code whose tasks are handed out."""
        return -(-self.burst * self.distinct // (self.window - 1 + self.burst))

    @property
    def load(self) -> float:
        """The share of all data that a worker computes in a round."""
        return (self.stragglers + 1) / self.workers

    def tasks(self) -> dict[int, int]:
        """Worker -> job, for the coming round."""
        now, old = self._round, self._round - self.burst
        tasks = dict.fromkeys(range(self.workers), now)
        lacking = self.workers - self.stragglers - len(self._results.get(old, ()))
        if old >= 0 and lacking > 0:
            late = [i for i in range(self.workers) if i not in self._results[old]]
            tasks.update(dict.fromkeys(late[:lacking], old))
        return tasks

    def step(self, returned: Collection[int]) -> dict[int, frozenset[int]]:
        """Ends a round in which these workers returned; job -> whose results it has, for the jobs
        that became complete.

        A set of fewer than n - s is not returned: that job stays open until its delay is over, and
        ``overdue`` names it.
        """
        tasks = self.tasks()
        self._results[self._round] = set()
        complete: dict[int, frozenset[int]] = {}
        enough = self.workers - self.stragglers
        for worker in sorted(set(returned)):
            job = tasks[worker]
            have = self._results.get(job)
            if have is not None and len(have) < enough:
                have.add(worker)
                if len(have) == enough:
                    complete[job] = frozenset(have)
        self._round += 1
        return complete

    def missing(self, job: int) -> int:
        """How many results the job lacks; 0 where it is complete."""
        return max(0, self.workers - self.stragglers - len(self._results.get(job, ())))

    def overdue(self) -> tuple[int, ...]:
        """Jobs whose delay is over and that lack results: the pattern was worse than tolerated."""
        last = self._round - 1 - self.burst
        return tuple(job for job in sorted(self._results) if job <= last and self.missing(job))

    def forget(self, job: int) -> None:
        """A job that was complete, or whose rest was waited for: its record is dropped."""
        self._results.pop(job, None)
