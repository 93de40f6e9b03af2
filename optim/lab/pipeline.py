"""SkipPipe's schedule (Blagoev, Chen and Ersoy 2025, arXiv 2502.19913): which stages of a pipeline
each microbatch visits, at which nodes, and when.

Several nodes hold each stage. A microbatch begins and ends at its node of stage 0, which has the
embedding and the head, and visits only some of the other stages. So a slow link may be gone around,
a busy node be skipped, and a stage that is lost for a while costs no stop. The paper's rules:

* every microbatch visits the same number of stages; they rise, but for at most one that is visited
  right after the one above it (a swap);
* no stage has more than its share of the microbatches, so all learn alike;
* a node works on one microbatch at a time, and holds no more than fit into its memory.

The schedule is of the forward pass. Run backwards in time it is one of the backward pass, as long
as links are alike in both directions.

The search is conflict-based (Sharon et al. 2015), as in the paper: each microbatch takes its
fastest path; where two collide, either one or the other must give way, and both are tried, the
least time first. It ends with the best schedule there is, or with the best of those it saw.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Pipeline", "PipelineSchedule", "skip_schedule"]

ALWAYS = (0.0, math.inf)
Barred = Mapping[tuple[int, int], tuple[tuple[float, float], ...]]
"""By microbatch and node: from when until when that node does not begin with that microbatch."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A model's stages over nodes. Two nodes hold stage 0, one each of the stages 1 and 2, and a
    microbatch from each of the first two visits stage 0 and one other:

    >>> pipeline = Pipeline(((0, 1), (2,), (3,)), (1.0,) * 4, ((0.5,) * 4,) * 4)
    >>> schedule = skip_schedule(pipeline, starts=[0, 1], visited=2, memory=2)
    >>> schedule.seconds == schedule.bound_s
    True

    ``stages``: the nodes of each stage, numbered from 0 through all stages; ``compute_s``: seconds
    of a microbatch at each node; ``links_s``: from each node to each, to send its activations.
    """

    stages: tuple[tuple[int, ...], ...]
    compute_s: tuple[float, ...]
    links_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class StageVisit:
    """A node works on a microbatch from ``start_s`` to ``end_s``."""

    node: int
    stage: int
    start_s: float
    end_s: float


Path = tuple[StageVisit, ...]
Paths = tuple[Path, ...]
Way = tuple[int, Sequence[int], tuple[float, float]]
"""A microbatch, and which nodes do not begin with it, from when until when."""


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """``visits``: of each microbatch, in order; ``seconds``: until the last one is back at its
    first node; ``bound_s``: no schedule takes less than this."""

    visits: tuple[tuple[StageVisit, ...], ...]
    seconds: float
    bound_s: float

    @property
    def best(self) -> bool:
        """Whether it is proven that no schedule takes less."""
        return self.bound_s == self.seconds


def skip_schedule(
    pipeline: Pipeline,
    starts: Sequence[int],
    visited: int,
    *,
    memory: int,
    share: int | None = None,
    most: int = 20_000,
) -> PipelineSchedule:
    """The schedule of microbatches that begin at the nodes ``starts`` of stage 0, in this order.

    Args:
        visited: how many stages each visits, stage 0 counted. The others are skipped.
        memory: microbatches that a node of a later stage takes at most.
        share: microbatches that a later stage takes at most; by default as many as all take where
            they take alike, rounded up.
        most: how many sets of paths are looked at before the best so far is taken.

    Raises:
        ValueError: numbers that do not fit the pipeline; no schedule within the rules.
    """
    nodes = sorted(node for stage in pipeline.stages for node in stage)
    if nodes != list(range(len(pipeline.compute_s))) or not set(starts) <= set(pipeline.stages[0]):
        raise ValueError("every node is in one stage, and microbatches start in stage 0")
    if not 2 <= visited <= len(pipeline.stages) or not starts:
        raise ValueError(f"a microbatch visits 2 to {len(pipeline.stages)} stages, not {visited}")
    if share is None:
        share = -(-len(starts) * (visited - 1) // (len(pipeline.stages) - 1))
    search = _Search(pipeline, tuple(starts), visited, memory, share)
    found = search.in_turn()
    if found is None:
        raise ValueError(f"no room for all: memory {memory}, {share} microbatches a stage")
    longest, _ = search.cost(found)
    alone = [search.path(batch, {}) for batch in search.batches]
    first = tuple(path for path in alone if path)
    seen, queue = 0, list[tuple[float, float, int, Paths, Barred]]()
    heapq.heappush(queue, (*search.cost(first), 0, first, {}))
    while queue and seen < most:
        seconds, _, _, paths, barred = heapq.heappop(queue)
        if seconds >= longest:
            return PipelineSchedule(found, longest, longest)
        ways = search.conflict(paths)
        if not ways:
            return PipelineSchedule(paths, seconds, seconds)
        for batch, nodes, span in ways:
            seen += 1
            narrower = dict(barred)
            _bar(narrower, batch, nodes, span)
            path = search.path(batch, narrower)
            if path:
                changed = (*paths[:batch], path, *paths[batch + 1 :])
                heapq.heappush(queue, (*search.cost(changed), seen, changed, narrower))
    return PipelineSchedule(found, longest, min(longest, queue[0][0]) if queue else longest)


class _Search:
    """What the schedules of one problem are made of."""

    def __init__(
        self, pipeline: Pipeline, starts: tuple[int, ...], visited: int, memory: int, share: int
    ) -> None:
        self.pipeline, self.starts, self.visited = pipeline, starts, visited
        self.memory, self.share = memory, share
        self.batches = range(len(starts))
        # of one node its microbatches are alike: they begin in order, without a pause
        self.begin_s = [
            starts[:batch].count(node) * pipeline.compute_s[node]
            for batch, node in enumerate(starts)
        ]

    def path(self, batch: int, barred: Barred) -> Path | None:
        """The fastest path of one microbatch, as if it were alone; None where there is none."""
        pipeline, first = self.pipeline, self.starts[batch]
        begin = self.begin_s[batch]
        visit = StageVisit(first, 0, begin, begin + pipeline.compute_s[first])
        queue: list[tuple[float, int, bool, Path]] = [(visit.end_s, 0, False, (visit,))]
        known = set[tuple[int, bool, frozenset[int]]]()
        number = 0
        while queue:
            end_s, _, swapped, path = heapq.heappop(queue)
            if path[-1].node == -1:
                return path[:-1]
            stages = frozenset(visit.stage for visit in path)
            if (path[-1].node, swapped, stages) in known:
                continue  # whoever was here sooner can do what this one can
            known.add((path[-1].node, swapped, stages))
            links = pipeline.links_s[path[-1].node]
            if len(path) == self.visited:
                back = StageVisit(-1, 0, end_s, end_s + links[first])
                heapq.heappush(queue, (back.end_s, (number := number + 1), swapped, (*path, back)))
                continue
            for stage, swap in _next_stages(stages, swapped, len(pipeline.stages)):
                for node in pipeline.stages[stage]:
                    start_s = _free(barred.get((batch, node), ()), end_s + links[node])
                    if start_s < math.inf:
                        visit = StageVisit(node, stage, start_s, start_s + pipeline.compute_s[node])
                        number += 1
                        heapq.heappush(queue, (visit.end_s, number, swap, (*path, visit)))
        return None

    def cost(self, paths: Paths) -> tuple[float, float]:
        """Seconds until the last is back, and of all together."""
        links = self.pipeline.links_s
        back = [path[-1].end_s + links[path[-1].node][path[0].node] for path in paths]
        return max(back), sum(back)

    def conflict(self, paths: Paths) -> list[Way]:
        """The ways out of the first thing that the rules forbid: what one microbatch must not do,
        or another one. Empty where nothing is forbidden."""
        by_node: dict[int, list[tuple[float, float, int]]] = {}
        by_stage: dict[int, list[int]] = {}
        for batch, path in enumerate(paths):
            for visit in path[1:]:
                by_node.setdefault(visit.node, []).append((visit.start_s, visit.end_s, batch))
                by_stage.setdefault(visit.stage, []).append(batch)
        for stage, batches in by_stage.items():
            if len(batches) > self.share:
                nodes = self.pipeline.stages[stage]
                return [(batch, nodes, ALWAYS) for batch in batches[: self.share + 1]]
        for node, visits in by_node.items():
            if len(visits) > self.memory:
                return [(batch, [node], ALWAYS) for *_, batch in visits[: self.memory + 1]]
        for node, visits in by_node.items():
            visits.sort()
            for (start, end, one), (later, last, other) in pairwise(visits):
                if later < end:
                    # with both begun in these spans they would overlap: one must begin elsewhere
                    return [(one, [node], (start, last)), (other, [node], (later, end))]
        return []

    def in_turn(self) -> Paths | None:
        """A schedule to begin with: each microbatch gives way to those before it. None where the
        rules leave no room for all.
        """
        barred: dict[tuple[int, int], tuple[tuple[float, float], ...]] = {}
        later_stages = range(1, len(self.pipeline.stages))
        left = {
            stage: min(self.share, self.memory * len(self.pipeline.stages[stage]))
            for stage in later_stages
        }
        held = Counter[int]()
        paths: Paths = ()
        for batch in self.batches:
            path = self._that_leaves_room(batch, barred, left)
            if path is None:
                return None
            paths = (*paths, path)
            for visit in path[1:]:
                left[visit.stage] -= 1
                held[visit.node] += 1
                begun = (visit.start_s - self.pipeline.compute_s[visit.node], visit.end_s)
                span = ALWAYS if held[visit.node] == self.memory else begun
                for later in self.batches[batch + 1 :]:
                    _bar(barred, later, [visit.node], span)
        return paths

    def _that_leaves_room(self, batch: int, barred: Barred, left: Mapping[int, int]) -> Path | None:
        """The fastest path after which the later microbatches can still visit enough stages each:
        r of them can visit v each if the stages have room for them, min(r, room) summed, r v times
        (Gale and Ryser)."""
        others, own = len(self.starts) - batch - 1, dict(barred)
        while path := self.path(batch, own):
            stages = {visit.stage for visit in path[1:]}
            room = {stage: count - (stage in stages) for stage, count in left.items()}
            enough = sum(min(others, count) for count in room.values())
            if min(room.values()) >= 0 and enough >= others * (self.visited - 1):
                return path
            fullest = min(stages, key=lambda stage: left[stage])
            _bar(own, batch, self.pipeline.stages[fullest], ALWAYS)
        return None


def _bar(
    barred: dict[tuple[int, int], tuple[tuple[float, float], ...]],
    batch: int,
    nodes: Iterable[int],
    span: tuple[float, float],
) -> None:
    for node in nodes:
        barred[batch, node] = (*barred.get((batch, node), ()), span)


def _next_stages(stages: frozenset[int], swapped: bool, count: int) -> Iterator[tuple[int, bool]]:
    """Which stages may follow these, and whether the one swap is used up then."""
    highest = max(stages)
    for stage in range(highest + 1, count):
        yield stage, swapped
    if not swapped and highest > 1 and highest - 1 not in stages:
        yield highest - 1, True


def _free(spans: Sequence[tuple[float, float]], at: float) -> float:
    """The first time from ``at`` on that lies in none of the spans [from, until)."""
    for low, high in sorted(spans):
        if low <= at < high:
            at = high
    return at
