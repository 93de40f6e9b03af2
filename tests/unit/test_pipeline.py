"""SkipPipe's schedule: by hand, by its rules, and against all schedules of small pipelines."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from atoll.optim.lab.pipeline import Pipeline, PipelineSchedule, skip_schedule

BATCHES, VISITED, MEMORY, SHARE = 3, 3, 2, 2


def made(sizes: tuple[int, ...], rng: random.Random) -> Pipeline:
    """A pipeline with so many nodes in its stages, and whole seconds."""
    nodes = iter(range(sum(sizes)))
    links = [[0.0] * sum(sizes) for _ in range(sum(sizes))]
    for i, j in itertools.combinations(range(sum(sizes)), 2):
        links[i][j] = links[j][i] = float(rng.randint(1, 9))
    return Pipeline(
        tuple(tuple(itertools.islice(nodes, size)) for size in sizes),
        tuple(float(rng.randint(1, 6)) for _ in range(sum(sizes))),
        tuple(map(tuple, links)),
    )


def routes(pipeline: Pipeline, start: int, visited: int) -> list[tuple[int, ...]]:
    """All paths that the rules allow, as nodes: rising stages, with at most one swap of neighbours
    of which both are visited."""
    found = list[tuple[int, ...]]()
    for chosen in itertools.combinations(range(1, len(pipeline.stages)), visited - 1):
        orders = [list(chosen)]
        for i in range(visited - 2):
            if chosen[i] + 1 == chosen[i + 1]:
                swapped = list(chosen)
                swapped[i : i + 2] = swapped[i + 1], swapped[i]
                orders.append(swapped)
        for order in orders:
            found += [
                (start, *nodes)
                for nodes in itertools.product(*(pipeline.stages[stage] for stage in order))
            ]
    return found


def played(pipeline: Pipeline, paths: tuple[tuple[int, ...], ...], turns: tuple[int, ...]) -> float:
    """Seconds until all are back when nodes serve microbatches in this order."""
    free = Counter[int]()
    at = [0.0] * len(paths)
    done = [0] * len(paths)
    for batch in turns:
        path, step = paths[batch], done[batch]
        node = path[step]
        arrived = at[batch] + (pipeline.links_s[path[step - 1]][node] if step else 0.0)
        at[batch] = free[node] = max(arrived, free[node]) + pipeline.compute_s[node]
        done[batch] += 1
    return max(t + pipeline.links_s[path[-1]][path[0]] for t, path in zip(at, paths, strict=True))


def least(pipeline: Pipeline, starts: tuple[int, ...]) -> float:
    """The best of all paths and all orders."""
    best = float("inf")
    alone = [
        [(played(pipeline, (path,), (0,) * VISITED), path) for path in routes(pipeline, s, VISITED)]
        for s in starts
    ]
    orders = set(itertools.permutations([b for b in range(BATCHES) for _ in range(VISITED)]))
    for chosen in sorted(itertools.product(*alone), key=lambda c: max(seconds for seconds, _ in c)):
        if max(seconds for seconds, _ in chosen) >= best:
            break
        paths = tuple(path for _, path in chosen)
        nodes = Counter(node for path in paths for node in path[1:])
        stages = Counter(
            stage
            for path in paths
            for stage in range(1, len(pipeline.stages))
            if set(pipeline.stages[stage]) & set(path)
        )
        if max(nodes.values()) <= MEMORY and max(stages.values()) <= SHARE:
            best = min(best, min(played(pipeline, paths, turns) for turns in orders))
    return best


def check(
    pipeline: Pipeline, found: PipelineSchedule, visited: int, memory: int, share: int
) -> None:
    """All rules hold, and the seconds are what the visits come to."""
    by_node: dict[int, list[tuple[float, float]]] = {}
    stages = Counter[int]()
    back = list[float]()
    for visits in found.visits:
        assert len({visit.stage for visit in visits}) == len(visits) == visited
        assert visits[0].stage == 0
        falls = [(a.stage, b.stage) for a, b in itertools.pairwise(visits) if b.stage < a.stage]
        assert len(falls) <= 1
        assert all(high == low + 1 for high, low in falls)
        for one, other in itertools.pairwise(visits):
            assert other.start_s >= one.end_s + pipeline.links_s[one.node][other.node]
        for visit in visits:
            assert visit.node in pipeline.stages[visit.stage]
            assert visit.end_s == visit.start_s + pipeline.compute_s[visit.node]
            by_node.setdefault(visit.node, []).append((visit.start_s, visit.end_s))
        stages.update(visit.stage for visit in visits[1:])
        back.append(visits[-1].end_s + pipeline.links_s[visits[-1].node][visits[0].node])
    assert found.seconds == max(back)
    assert all(stages[stage] <= share for stage in stages)
    for node, spans in by_node.items():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert len(spans) <= memory or node in pipeline.stages[0]


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_of_a_small_pipeline_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    pipeline = made((2, 1, 2, 1), rng)
    starts = (0, 0, 1)
    found = skip_schedule(pipeline, starts, VISITED, memory=MEMORY, share=SHARE)
    check(pipeline, found, VISITED, MEMORY, SHARE)
    assert found.best
    assert found.seconds == least(pipeline, starts)


def test_a_slow_link_is_gone_around_and_a_busy_node_waited_for() -> None:
    """Stages {0}, {1}, {2}, of which two are visited; the link from 0 to 1 is slow."""
    links = ((0.0, 9.0, 1.0), (9.0, 0.0, 1.0), (1.0, 1.0, 0.0))
    pipeline = Pipeline(((0,), (1,), (2,)), (1.0, 2.0, 3.0), links)

    def found(count: int, **rules: int) -> tuple[list[list[tuple[int, float, float]]], float]:
        schedule = skip_schedule(pipeline, [0] * count, 2, **rules)
        assert schedule.best
        return (
            [[(v.node, v.start_s, v.end_s) for v in visits] for visits in schedule.visits],
            schedule.seconds,
        )

    assert found(1, memory=1) == ([[(0, 0, 1), (2, 2, 5)]], 6)
    assert found(2, memory=2, share=2) == ([[(0, 0, 1), (2, 2, 5)], [(0, 1, 2), (2, 5, 8)]], 9)
    # each stage has its share of the microbatches, or its node has room for one
    by_turns = ([[(0, 0, 1), (1, 10, 12)], [(0, 1, 2), (2, 3, 6)]], 21)
    assert found(2, memory=2) == found(2, memory=1, share=2) == by_turns


def test_a_larger_pipeline_gets_a_schedule_within_the_rules() -> None:
    pipeline = made((4, 3, 3, 3, 3, 3), random.Random(1))
    starts = [node for node in pipeline.stages[0] for _ in range(2)]
    found = skip_schedule(pipeline, starts, 4, memory=3, most=300)
    check(pipeline, found, 4, 3, 5)
    full = skip_schedule(pipeline, starts, 6, memory=3, most=300)
    check(pipeline, full, 6, 3, 8)
    assert found.seconds < full.seconds


def test_what_does_not_fit_is_refused() -> None:
    pipeline = made((1, 1, 1), random.Random(0))
    for starts, visited, memory, why in (
        ([1], 2, 1, "start in stage 0"),
        ([0], 1, 1, "visits 2 to 3"),
        ([0], 4, 1, "visits 2 to 3"),
        ([], 2, 1, "visits 2 to 3"),
        ([0, 0], 3, 1, "no room for all"),
    ):
        with pytest.raises(ValueError, match=why):
            skip_schedule(pipeline, starts, visited, memory=memory)
