"""Robust rules against references, their (f, kappa) inequality, and that nothing can make them
hang, overwrite or disagree with themselves.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import robust_reference as reference
import torch
from compiled_kit import compiled
from house import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.collectives.api import RULES as collective_rules
from atoll.collectives.errors import ConfigError, NotEnoughPeersError
from atoll.security.rule_names import BY_COORDINATE as PLAN_BY_COORDINATE
from atoll.security.rule_names import BY_GRAM as PLAN_BY_GRAM
from atoll.security.rules import RULES, STEPS, WorkerMomentum, aggregate
from atoll.security.rules.aggregate import BY_COORDINATE, BY_GRAM
from atoll.security.rules.before import arc, bucketing, clip_in_place, clipping, nnm
from atoll.security.rules.centre import Radius, centred_clip, clip_once, geometric_median
from atoll.security.rules.coordinate import _sorted_mean
from atoll.security.rules.gram import combine, distances, gram, mix, mixed_gram, squares
from atoll.security.rules.native import Kernel, load
from atoll.security.rules.networks import network
from atoll.security.rules.numbers import eigen, product, top_direction
from atoll.security.rules.selection import krum, mda, multi_krum

EXACT = (
    "median",
    "trimmed_mean",
    "meamed",
    "krum",
    "multi_krum",
    "mda",
    "monna",
)  # the result is a known function of the rows
KINDS = ("normal", "ties", "outliers", "scales", "close", "same")


def make(kind: str, n: int, f: int, d: int, seed: int) -> torch.Tensor:
    """n rows of d, of which the first f (a middle one, too) may be wild."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, d))
    if kind == "ties":
        rows = rng.integers(-2, 3, (n, d)).astype(float)
    elif kind == "outliers":
        rows[:f] = rows[:f] * 10.0 ** rng.integers(2, 30, (f, 1))
    elif kind == "scales":
        rows = rows * 10.0 ** rng.integers(-6, 7, d)
    elif kind == "close":
        rows = 1000 + rows  # near each other, far from the origin
    elif kind == "same":
        rows[f:] = rows[-1]
    return torch.from_numpy(rows.astype(np.float32))


Case = tuple[str, int, int, int, int]


def cases() -> Iterator[Case]:
    """(kind, n, f, d, seed): six kinds; scalars and longer; no, some and as many hostile rows as
    can be.
    """
    seed = 0
    for kind in KINDS:
        for n in (3, 4, 5, 7, 8, 9):
            for f in sorted({0, 1, max(0, (n - 3) // 2), (n - 1) // 2}):
                for d in (1, 2, 7, 40):
                    seed += 1
                    yield kind, n, f, d, seed


CASES = list(cases())


def share(step: int) -> pytest.MarkDecorator:
    """Every ``step``-th case by default; all of them among the slow tests."""
    return pytest.mark.parametrize(
        "chosen",
        [
            pytest.param(CASES[::step], id="some"),
            pytest.param(CASES, id="all", marks=pytest.mark.slow),
        ],
    )


def least_rows(rule: str, f: int) -> int:
    return 2 * f + (3 if rule in ("krum", "multi_krum") else 1)


def size_of(rows: torch.Tensor, f: int) -> float:
    """What errors are measured with: the largest value among the honest rows."""
    return max(float(rows[f:].abs().max()), 1e-12)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 300
    assert {d for _, _, _, d, _ in CASES} >= {1}
    assert any(2 * f + 1 == n for _, n, f, _, _ in CASES)


def test_a_name_is_of_a_function_and_of_a_row_in_each_page() -> None:
    """`collectives/swarm.py` has the names; what stands elsewhere is missed here."""
    assert collective_rules == (*PLAN_BY_COORDINATE, *PLAN_BY_GRAM)
    assert tuple(BY_COORDINATE) == PLAN_BY_COORDINATE
    assert tuple(BY_GRAM) == PLAN_BY_GRAM
    for name in collective_rules:
        for page in ("docs/internals/protocol/robust-rules.md", "docs/operating/hostile.md"):
            assert f"`{name}`" in (ROOT / page).read_text(encoding="utf-8"), (name, page)


@pytest.mark.parametrize("rule", EXACT)
def test_a_rule_agrees_with_its_reference(rule: str) -> None:
    for kind, n, f, d, seed in CASES:
        if n < least_rows(rule, f):
            continue
        rows = make(kind, n, f, d, seed)
        before = rows.clone()
        found = aggregate(rows, rule, f)
        expected = getattr(reference, rule)(rows.double().numpy(), f)
        assert torch.equal(rows, before)
        wild = rule == "monna" or (
            rule == "mda" and f and 2 * f + 1 == n
        )  # MoNNA's own row is among the hostile ones here
        unit = max(size_of(rows, f), np.abs(expected).max() if wild else 0.0)
        assert np.abs(found.value.numpy() - expected).max() <= 2e-6 * unit, (kind, n, f, d, seed)


@share(4)
def test_the_geometric_median_is_the_minimum(chosen: list[Case]) -> None:
    for kind, n, f, d, seed in chosen:
        rows = make(kind, n, f, d, seed)
        x = rows.double().numpy()
        unit = size_of(rows, f)
        weights = geometric_median(gram(rows), f)
        assert weights.min() >= 0
        assert math.isclose(weights.sum(), 1, rel_tol=1e-12)
        mine = aggregate(rows, "geometric_median", f).value.double().numpy()
        rng = np.random.default_rng(seed)
        honest = x[f:] if kind == "outliers" else x
        far = sum(float(np.linalg.norm(row)) for row in x)
        for step in (1e-3, 1e-2, 0.1, 1.0):
            other = mine + step * unit * rng.standard_normal(d)
            assert (
                reference.geometric_loss(x, mine)
                <= reference.geometric_loss(x, other) + 1e-6 * unit * n + 1e-12 * far
            )
        assert np.abs(mine).max() <= 30 * max(unit, float(np.abs(honest).max()))


@share(3)
def test_centred_clipping_ends_at_its_fixed_point(chosen: list[Case]) -> None:
    for kind, n, f, d, seed in chosen:
        rows = make(kind, n, f, d, seed)
        x = rows.double().numpy()
        radius = (
            0.5 * float(np.linalg.norm(x, axis=1).max()) if kind == "scales" else 0.3
        )  # in steps of far less than that it would not come far
        residual = np.abs(
            reference.clipping_residual(x, centred_clip(gram(rows), f, radius=radius) @ x, radius)
        ).max()
        assert residual <= 1e-4 * radius * n + 1e-12 * np.abs(x[f:]).max(), (kind, n, f, d)


@share(2)
def test_caf_agrees_with_its_reference(chosen: list[Case]) -> None:
    compared, more = 0, [(kind, n, f, d, seed + 1000) for kind, n, f, d, seed in chosen]
    for kind, n, f, d, seed in chosen if len(chosen) < len(CASES) else [*chosen, *more]:
        if kind in ("ties", "same", "scales"):
            continue  # several directions of one variance: any of them will do
        rows = make(kind, n, f, d, seed)
        if kind == "outliers":
            rows = rows.clamp(
                -1e6, 1e6
            )  # beyond, the reference's covariance has lost the honest rows
        expected = reference.caf(rows.double().numpy(), f)
        assert np.abs(aggregate(rows, "caf", f).value.numpy() - expected).max() <= 2e-3 * size_of(
            rows, f
        ), (kind, n, f, d, seed)
        compared += 1
    assert compared > (75 if len(chosen) < len(CASES) else 300)


@pytest.mark.parametrize(
    "seeds", [pytest.param(2, id="some"), pytest.param(26, id="all", marks=pytest.mark.slow)]
)
def test_flag_agrees_with_its_reference(seeds: int) -> None:
    for seed, kind, n, d in itertools.product(
        range(seeds), ("normal", "outliers"), (4, 7), (1, 12, 40)
    ):
        rows = make(kind, n, 1, d, seed)
        expected = reference.flag(rows.double().numpy(), 1, (n + 1) // 2, 10)
        assert np.abs(aggregate(rows, "flag", 1).value.numpy() - expected).max() <= 2e-3 * size_of(
            rows, 1
        ), (seed, kind, n, d)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 3.4e38])
def test_the_least_and_the_largest_that_float32_has_make_no_infinity(
    rule: str, size: float
) -> None:
    rows = make("normal", 9, 2, 12, 5)
    rows[:2] = size
    found = aggregate(rows, rule, 2, mine=8).value
    assert bool(found.isfinite().all())
    assert float((found - rows[2:].mean(0)).norm()) < 3 * float(
        (rows[2:] - rows[2:].mean(0)).norm(dim=1).max()
    )


@share(3)
def test_steps_agree_with_their_references(chosen: list[Case]) -> None:
    for kind, n, f, d, seed in chosen:
        rows = make(kind, n, f, d, seed)
        before, x, products = rows.clone(), rows.double().numpy(), gram(rows)
        norms = np.diagonal(products)
        for mixing, expected in (
            (nnm(products, f), reference.nnm(x, f)),
            (clipping(norms, 0.7), reference.clip(x, 0.7)),
            (arc(norms, f), reference.arc(x, f)),
            (bucketing(n, 2, random.Random(seed)), reference.bucketing(x, 2, seed)),
        ):
            found = mix(rows, mixing).double().numpy()
            unit = np.maximum(np.abs(expected).max(axis=1), np.finfo(np.float32).tiny)
            assert (
                np.abs(found - expected).max(axis=1) <= 4e-6 * unit + 1e-5 * np.abs(x[f:]).max()
            ).all(), (kind, n, f, d, seed)
        assert torch.equal(rows, before)


def test_bucketing_takes_each_row_once() -> None:
    for n, size in ((1, 1), (7, 2), (8, 2), (9, 4), (5, 9)):
        mixing = bucketing(n, size, random.Random(n))
        assert mixing.shape == (-(-n // size), n)
        assert ((mixing > 0).sum(axis=0) == 1).all()
        assert np.allclose(mixing.sum(axis=1), 1)
        assert np.array_equal(mixing, bucketing(n, size, random.Random(n)))


# ---- the (f, kappa) inequality: |F(x) - mean of S|^2 <= kappa * mean over S of |x_i - mean of
# S|^2, for any honest S of n - f

KAPPA = {
    "trimmed_mean": lambda n, f: 6 * f / (n - 2 * f) * (1 + f / (n - 2 * f)),
    "median": lambda n, f: 4 * (1 + f / (n - 2 * f)) ** 2,
    "geometric_median": lambda n, f: 4 * (1 + f / (n - 2 * f)) ** 2,
    "krum": lambda n, f: 6 * (1 + f / (n - 2 * f)),
}


@given(
    rule=st.sampled_from(sorted(KAPPA)),
    n=st.integers(3, 14),
    share=st.floats(0, 1),
    d=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    attack=st.sampled_from(["far", "near", "mean", "copy", "spread"]),
    mixed=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_the_inequality_of_robust_averaging(
    rule: str, n: int, share: float, d: int, seed: int, attack: str, mixed: bool
) -> None:
    f = round(share * ((n - 1) // 2))
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, d)).astype(np.float32)
    mean, spread = rows[f:].mean(axis=0), rows[f:].std(axis=0)
    rows[:f] = {
        "far": np.full(d, 1e12),
        "near": mean - 1.5 * spread,
        "mean": -3 * mean,
        "copy": rows[-1],
        "spread": 10.0 ** rng.integers(-3, 6, (f, 1)) * rng.standard_normal((f, d)),
    }[attack]
    honest = rows[f:].astype(np.float64)
    options = (
        {"neighbours": n - f - 1} if rule == "krum" else {}
    )  # the count for which the bound is proven
    found = (
        aggregate(torch.from_numpy(rows), rule, f, before=["nnm"] if mixed else [], options=options)
        .value.double()
        .numpy()
    )
    error = float(((found - honest.mean(axis=0)) ** 2).sum())
    variance = float(((honest - honest.mean(axis=0)) ** 2).sum(axis=1).mean())
    kappa = KAPPA[rule](n, f)
    bound = 8 * f / (n - f) * (kappa + 1) if mixed else kappa
    assert error <= bound * variance * (1 + 1e-4) + 1e-9


# ---- hostile input, bits, bounds


@pytest.mark.parametrize("rule", RULES)
def test_one_far_row_neither_hangs_nor_moves_a_rule(rule: str) -> None:
    for far in (1e6, 3e38):
        rows = make("normal", 7, 3, 33, 5)
        rows[1] = far
        for f in (1, 2):
            value = aggregate(rows, rule, f, mine=6).value
            assert value.abs().max() <= 6


@given(
    rule=st.sampled_from(RULES),
    before=st.sampled_from([(), ("nnm",), ("arc",), ("clipping", "nnm")]),
    rows=arrays(
        np.float32,
        st.tuples(st.integers(5, 9), st.integers(1, 4)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
)
@settings(max_examples=100, deadline=None)
def test_a_rule_ends_with_numbers_whatever_finite_rows_it_is_given(
    rule: str, before: tuple[str, ...], rows: Any
) -> None:
    given_, kept = torch.from_numpy(rows), rows.copy()
    found = aggregate(given_, rule, 1, before=before, mine=1)
    assert bool(found.value.isfinite().all())
    assert found.weights is None or bool(np.isfinite(found.weights).all())
    assert np.array_equal(rows.view(np.int32), kept.view(np.int32))


@pytest.mark.parametrize("rule", RULES)
def test_all_zero_and_all_equal_rows_have_an_aggregate(rule: str) -> None:
    for row in (torch.zeros(5), torch.tensor([3e38, -3e38, 1e-30, 0.0, 1.0])):
        rows = row.repeat(7, 1)
        assert torch.allclose(aggregate(rows, rule, 2).value, row, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_left_out_and_named(rule: str, bad: float) -> None:
    rows = make("normal", 9, 0, 21, 3)
    without = torch.cat([rows[:4], rows[5:]])
    rows[4, 20] = bad
    found = aggregate(rows, rule, 2)
    assert found.dropped == (4,)
    assert torch.equal(found.value, aggregate(without, rule, 1).value)
    assert found.weights is None or found.weights[4] == 0
    rows[5:7, 0] = bad
    with pytest.raises(NotEnoughPeersError, match="3 of 9"):
        aggregate(rows, rule, 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [[], ["nnm"], ["arc", "nnm"], ["clipping"], ["bucketing"]])
def test_inputs_stay_and_bits_repeat(rule: str, steps: list[str]) -> None:
    if rule == "monna" and steps == ["bucketing"]:
        return
    rows = make("outliers", 12, 2, 500, 1)
    before = rows.clone()
    results = [
        aggregate(rows, rule, 1, before=steps, rng=random.Random(1), mine=11).value
        for _ in range(2)
    ]
    assert torch.equal(*results)
    assert torch.equal(rows, before)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Of what members must agree on: results by coordinate, weighted sums, distances from a row. (A
    Gram matrix is calculated once and sent.)
    """
    rows, threads = make("outliers", 12, 2, 300_000, 1), torch.get_num_threads()
    weights = np.random.default_rng(1).standard_normal(12)
    try:
        found: list[list[torch.Tensor]] = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(
                [rule(rows, 3) for rule in BY_COORDINATE.values()]
                + [combine(rows, weights), torch.from_numpy(squares(rows, rows[3]))]
            )
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("rule", sorted(BY_COORDINATE))
def test_rules_by_coordinate_work_on_any_range(rule: str) -> None:
    rows = make("outliers", 9, 3, 70_000, 2)
    whole = BY_COORDINATE[rule](rows, 3)
    parts = [
        BY_COORDINATE[rule](rows[:, a:b], 3) for a, b in ((0, 1), (1, 40_000), (40_000, 70_000))
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(
        aggregate(rows, rule, 3, before=["clipping"], longest=1e30).value, whole
    )  # chunk by chunk, nothing clipped


@pytest.mark.parametrize("rule", sorted(BY_GRAM))
def test_rules_of_whole_rows_work_on_gram_matrices_of_parts(rule: str) -> None:
    rows = make("normal", 9, 2, 3000, 4)
    products = gram(rows[:, :1000]) + gram(rows[:, 1000:])
    weights = BY_GRAM[rule](products, 2)
    assert np.allclose(weights, BY_GRAM[rule](gram(rows), 2), atol=1e-7)
    parts = torch.cat([combine(rows[:, :1000], weights), combine(rows[:, 1000:], weights)])
    assert torch.equal(parts, combine(rows, weights))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_states_its_bound_on_f(rule: str) -> None:
    for f in (1, 2, 3):
        least = least_rows(rule, f)
        aggregate(make("normal", least, 0, 3, f), rule, f)
        with pytest.raises(NotEnoughPeersError, match=f"at least {least} rows, got {least - 1}"):
            aggregate(make("normal", least - 1, 0, 3, f), rule, f)
    with pytest.raises(ConfigError):
        BY_GRAM[rule](np.eye(3), -1) if rule in BY_GRAM else aggregate(
            torch.zeros(3, 1), "median", -1 if rule else 0, before=["nope"]
        )


def test_settings_that_cannot_be_are_refused() -> None:
    rows = make("normal", 30, 0, 3, 1)
    products = gram(rows)
    for wrong in (
        lambda: aggregate(rows, "mode", 1),
        lambda: aggregate(rows, "median", 1, before=["nap"]),
        lambda: aggregate(rows.double(), "median", 1),
        lambda: aggregate(rows[:0], "median", 0),
        lambda: aggregate(rows, "median", 1, before=["bucketing"]),
        lambda: mda(products, 14),
        lambda: krum(products, 1, neighbours=29),
        lambda: multi_krum(products, 1, chosen=30),
        lambda: centred_clip(products, 1, radius=0.0),
        lambda: clipping(np.ones(3), math.nan),
        lambda: bucketing(3, 0, random.Random(0)),
        lambda: WorkerMomentum(1.0),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert set(STEPS) == {"nnm", "bucketing", "clipping", "arc"}


def test_krum_with_the_other_count_of_neighbours() -> None:
    rows = make("normal", 7, 0, 4, 9)
    order = reference.krum_order(rows.double().numpy(), 3, 3)
    assert krum(gram(rows), 3, neighbours=3).argmax() == order[0]  # 2f + 1 rows are enough for it
    assert set(np.flatnonzero(multi_krum(gram(rows), 3, neighbours=3, chosen=4))) == set(order[:4])


# ---- the parts


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The compiled kernel."""
    return Kernel(compiled("atoll.security.rules._native", tmp_path_factory.mktemp("native")))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 64])
def test_compiled_or_not_the_bits_are_the_same(kernel: Kernel, n: int) -> None:
    f = (n - 1) // 3
    for kind in ("outliers", "ties"):
        wide = make(kind, n, f, 401, n)
        for rows in (wide, wide[:, 3:68], wide[:, :64], wide[:, 7:8]):
            for low, high, window in (((n - 1) // 2, n // 2 + 1, 0), (f, n - f, 0), (f, n - f, f)):
                fast, plain = (
                    _sorted_mean(rows, low, high, window, None, with_) for with_ in (kernel, None)
                )
                assert torch.equal(fast.view(torch.int32), plain.view(torch.int32))
            for origin in (None, rows[n // 2]):
                assert np.array_equal(squares(rows, origin, kernel), squares(rows, origin, None))
            longest = float(np.sort(np.sqrt(squares(rows)))[n // 2])
            clipped = [rows.clone(), rows.clone(), mix(rows, clipping(squares(rows), longest))]
            clip_in_place(clipped[0], longest, kernel)
            clip_in_place(clipped[1], longest, None)
            assert all(
                torch.equal(one.view(torch.int32), clipped[2].view(torch.int32))
                for one in clipped[:2]
            )
    a, b = np.random.default_rng(n).standard_normal((2, n, n))
    for left, right in ((a, b), (a.T, b), (a[: n // 2], b), (a, b[:, :1])):
        assert np.array_equal(product(left, right, kernel), product(left, right, None))


def test_a_library_that_is_none_is_no_kernel(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    (tmp_path / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert load(tmp_path) is None


@pytest.mark.parametrize("n", range(1, 33))
def test_a_network_sorts_and_a_shorter_one_does_what_it_is_for(n: int) -> None:
    f = (n - 1) // 3
    columns = np.random.default_rng(n).integers(0, 9, (n, 200))
    for labels in (tuple(range(1, n + 1)), tuple(1 if f <= i < n - f else 0 for i in range(n))):
        rows = [*columns]
        for i, j, low, high in network(labels):
            a, b = rows[i], rows[j]
            rows[i], rows[j] = (
                (np.minimum(a, b) if low else a * 0 - 99),
                (np.maximum(a, b) if high else a * 0 - 99),
            )
        wanted = [i for i, label in enumerate(labels) if label]
        assert np.array_equal(
            np.sort([rows[i] for i in wanted], axis=0), np.sort(columns, axis=0)[wanted]
        )
        if len(set(labels)) == n:
            assert np.array_equal(rows, np.sort(columns, axis=0))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
def test_eigenvectors(n: int) -> None:
    square = np.random.default_rng(n).standard_normal((n, n))
    a = square @ square.T
    values, vectors = eigen(a)
    assert np.allclose(values, np.linalg.eigvalsh(a)[::-1], rtol=1e-10, atol=1e-12)
    assert np.allclose(vectors @ np.diag(values) @ vectors.T, a, atol=1e-11 * np.abs(a).max())
    most, direction = top_direction(a)
    assert math.isclose(most, values[0], rel_tol=1e-6)
    assert np.allclose(np.abs(direction @ vectors[:, 0]), 1, atol=1e-4)


def test_distances_of_rows_that_lie_close_together_far_from_the_origin() -> None:
    rows = 1e4 + torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    rows[3] = rows[0]
    found, expected = distances(gram(rows)), reference.apart(rows.double().numpy()) ** 2
    assert found[0, 3] == 0
    assert np.allclose(found, expected, rtol=1e-4)
    assert np.allclose(squares(rows, rows[2]), expected[2], rtol=1e-6)
    mixing = nnm(gram(rows), 2)
    assert np.allclose(mixed_gram(gram(rows), mixing), gram(mix(rows, mixing)), rtol=1e-6)


def test_one_step_of_clipping_and_the_radius() -> None:
    rows = torch.tensor([[3.0, 0.0], [0.0, 0.5], [0.0, -40.0]])
    value = combine(rows, clip_once(squares(rows), 1, radius=1.0))
    assert torch.allclose(value, torch.tensor([1 / 3, -0.5 / 3]))
    radius = Radius(2)
    assert radius() is None
    for scale in (1.0, 2.0, 8.0):
        radius.saw(gram(scale * torch.eye(3)), np.array([1.0, 0.0, 0.0]))
    assert radius() == pytest.approx(2.0 * math.sqrt(2))  # the lower median of the last two


def test_worker_momentum() -> None:
    momentum = WorkerMomentum(0.9)
    gradient = torch.tensor([1.0, -2.0])
    first = momentum(gradient).clone()
    assert torch.allclose(first, 0.1 * gradient)
    assert torch.allclose(momentum(gradient), 0.19 * gradient)
    assert torch.equal(gradient, torch.tensor([1.0, -2.0]))
    with pytest.raises(ConfigError):
        momentum(torch.zeros(3))
