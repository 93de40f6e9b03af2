"""Codes against stragglers and liars: every pattern within their bounds, and refusals beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product

import numpy as np
import pytest

from atoll.optim.lab.coding import (
    BerrutCode,
    GradientCode,
    SelectiveRepetition,
    cyclic,
    fractional_repetition,
)

CODES = {
    "repetition, 6 workers": fractional_repetition(6, 2),
    "cyclic, 6 workers": cyclic(6, 2, np.random.default_rng(0)),
    "cyclic, 7 workers": cyclic(7, 3, np.random.default_rng(1)),
    "no redundancy": cyclic(5, 0, np.random.default_rng(2)),
}


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_any_workers_but_s_give_the_sum_of_all_gradients(code: GradientCode) -> None:
    gradients = np.random.default_rng(3).standard_normal((code.workers, 5))
    sent = {i: code.encode(i, gradients) for i in range(code.workers)}
    for missing in range(code.stragglers + 1):
        for out in combinations(range(code.workers), missing):
            rest = {i: vector for i, vector in sent.items() if i not in out}
            np.testing.assert_allclose(code.decode(rest), gradients.sum(axis=0), atol=1e-12)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_a_worker_computes_s_plus_1_parts_and_reads_no_others(code: GradientCode) -> None:
    for worker in range(code.workers):
        parts = code.parts(worker)
        assert len(parts) == code.stragglers + 1
        own = {part: np.full(3, part, float) for part in parts}
        assert code.encode(worker, own).shape == (3,)
    assert code.load == (code.stragglers + 1) / code.workers


def test_one_missing_too_many_is_refused() -> None:
    code = cyclic(6, 2, np.random.default_rng(0))
    for who in combinations(range(6), 3):
        with pytest.raises(ValueError, match="3 of 6 workers do not suffice: the code is for 2"):
            code.weights(who)
    with pytest.raises(ValueError, match="at least one"):
        code.weights([])
    with pytest.raises(ValueError, match="workers are 0 to 5"):
        code.weights([0, 6])


def test_repetition_gives_more_where_the_missing_are_of_different_groups() -> None:
    code = fractional_repetition(6, 2)
    assert code.weights([0, 5]).tolist() == pytest.approx([1, 0, 0, 0, 0, 1])
    with pytest.raises(ValueError, match="do not suffice"):
        code.weights([0, 1, 2])


@pytest.mark.parametrize(("workers", "stragglers"), [(5, 5), (5, -1), (0, 0)])
def test_codes_that_there_are_not(workers: int, stragglers: int) -> None:
    with pytest.raises(ValueError, match="stragglers < workers"):
        cyclic(workers, stragglers, np.random.default_rng(0))
    with pytest.raises(ValueError, match="do not divide"):
        fractional_repetition(7, 1)


def test_equations_that_float64_cannot_solve_are_refused() -> None:
    rows = np.eye(3)
    rows[2] = [1e-9, 0, 1e-9]
    with pytest.raises(ValueError, match="conditioned too badly"):
        GradientCode(rows, 0).weights([0, 1, 2])


def patterns(
    workers: int, rounds: int, burst: int, window: int, distinct: int
) -> Iterator[tuple[frozenset[int], ...]]:
    """Every sequence of stragglers within the model of the paper: no burst of one worker spans more
    than ``burst`` rounds within ``window``, and a window sees at most ``distinct`` stragglers."""
    sets = [frozenset(c) for k in range(distinct + 1) for c in combinations(range(workers), k)]
    for sequence in product(sets, repeat=rounds):
        spans = [sequence[t : t + window] for t in range(max(1, rounds - window + 1))]
        if all(
            len(frozenset().union(*span)) <= distinct
            and all(
                max(where) - min(where) < burst
                for i in range(workers)
                if (where := [t for t, late in enumerate(span) if i in late])
            )
            for span in spans
        ):
            yield sequence


@pytest.mark.parametrize(
    ("workers", "burst", "window", "distinct", "rounds"),
    [(4, 1, 2, 2, 4), (4, 1, 3, 2, 5), (4, 2, 3, 2, 4), (5, 1, 2, 3, 3)],
)
def test_jobs_are_complete_after_the_delay_for_every_pattern_tolerated(
    workers: int, burst: int, window: int, distinct: int, rounds: int
) -> None:
    played = 0
    for sequence in patterns(workers, rounds, burst, window, distinct):
        plan = SelectiveRepetition(workers, burst, window, distinct)
        nobody = [frozenset[int]()] * burst
        for late in [*sequence, *nobody]:
            plan.step([i for i in range(workers) if i not in late])
            assert not plan.overdue(), sequence
        played += 1
    assert played > 50
    load = SelectiveRepetition(workers, burst, window, distinct).load
    assert load < (distinct + 1) / workers


def test_a_worse_pattern_is_named_and_its_job_can_be_waited_for() -> None:
    plan = SelectiveRepetition(workers=4, burst=1, window=2, distinct=2)
    assert plan.stragglers == 1
    assert plan.step([0]) == {}
    assert plan.tasks() == {0: 1, 1: 0, 2: 0, 3: 1}, "two results are lacking of job 0"
    assert plan.step([0, 3]) == {}
    assert (plan.overdue(), plan.missing(0)) == ((0,), 2)
    plan.forget(0)
    assert plan.overdue() == ()


SMOOTH: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "product": lambda x: x @ x.T,
}


@pytest.mark.parametrize("function", SMOOTH.values(), ids=SMOOTH.keys())
def test_more_workers_come_closer_and_four_times_as_many_as_blocks_suffice_for_a_tenth(
    function: Callable[[np.ndarray], np.ndarray],
) -> None:
    data = np.random.default_rng(1).standard_normal((4, 3, 3))
    true = np.stack([function(block) for block in data])
    errors = []
    for workers in (16, 32, 64):
        code = BerrutCode(4, workers)
        answers = {i: function(code.encode(i, data)) for i in range(workers)}
        got = code.decode(answers).values
        errors.append(np.linalg.norm(got - true) / np.linalg.norm(true))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.1
    assert errors[-1] < 0.025


def test_stragglers_cost_accuracy_and_nothing_else() -> None:
    rng = np.random.default_rng(2)
    data = rng.standard_normal((3, 4))
    code = BerrutCode(3, 24)
    answers = {i: np.tanh(code.encode(i, data)) for i in rng.permutation(24)[:20]}
    got = code.decode(answers).values
    assert np.abs(got - np.tanh(data)).max() < 0.2


@pytest.mark.parametrize("function", SMOOTH.values(), ids=SMOOTH.keys())
def test_as_many_liars_as_the_bound_says_are_located(
    function: Callable[[np.ndarray], np.ndarray],
) -> None:
    rng = np.random.default_rng(1)
    data = rng.standard_normal((4, 3, 3))
    code = BerrutCode(4, 16)
    assert code.most_liars == 4
    honest = {i: function(code.encode(i, data)) for i in range(16)}
    missed = [0] * (code.most_liars + 1)
    for count in range(1, code.most_liars + 1):
        everybody = list(combinations(range(16), count))
        some = rng.choice(len(everybody), min(120, len(everybody)), replace=False)
        for wrong in (everybody[int(i)] for i in some):  # all ones and pairs; of more, some
            sent = honest | {i: honest[i] + 100 * rng.standard_normal((3, 3)) for i in wrong}
            missed[count] += code.decode(sent, liars=count).wrong != wrong
    assert sum(missed[: code.most_liars]) == 0
    # at the bound itself the approximation of a product hides few sets: 26 of all 1,820
    assert missed[code.most_liars] <= (0 if function is np.tanh else 6)


def test_more_liars_than_the_bound_are_refused() -> None:
    code = BerrutCode(4, 16)
    answers = {i: np.zeros(4) for i in range(16)}
    with pytest.raises(ValueError, match="18 are needed to locate 5 wrong ones"):
        code.decode(answers, liars=5)
    with pytest.raises(ValueError, match="of 1 numbers do not tell 4 liars apart"):
        code.decode({i: answer[:1] for i, answer in answers.items()}, liars=4)


def test_a_block_at_a_workers_point_is_that_workers_answer() -> None:
    data = np.arange(3.0)[:, None]
    code = BerrutCode(3, 9)  # the blocks' points are among the workers'
    answers = {i: np.exp(code.encode(i, data)) for i in range(9)}
    np.testing.assert_allclose(code.decode(answers).values, np.exp(data), rtol=1e-12)
