"""Our robust rules beside byzfl's, which runs in an environment of its own: slow, and skipped where that cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from house import ROOT

from atoll.security.rules import aggregate
from atoll.security.rules.before import arc, clipping, nnm
from atoll.security.rules.centre import clip_once
from atoll.security.rules.gram import combine, gram, mix, squares

sys.path.append(str(ROOT / "scripts"))
from _byzfl import Byzfl, Unavailable

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def byzfl() -> Iterator[Byzfl]:
    """A process that runs byzfl."""
    try:
        process = Byzfl()
    except Unavailable as error:
        pytest.skip(str(error))
    with process:
        yield process


def rows_of(kind: str, n: int, d: int, seed: int) -> torch.Tensor:
    chance = np.random.default_rng(seed)
    rows = chance.standard_normal((n, d))
    if kind == "outliers":
        rows[0] *= 1e6
    if kind == "scales":
        rows *= 10.0 ** chance.integers(-3, 4, d)
    return torch.from_numpy(rows.astype(np.float32))


def test_the_same_results(byzfl: Byzfl) -> None:
    """540 results: ten rules, three kinds of rows, n, and d from a scalar; with f up to byzfl's largest."""
    compared = 0
    for seed, (kind, n, d) in enumerate((kind, n, d) for kind in ("normal", "outliers", "scales") for n in (5, 8, 11) for d in (1, 3, 30)):
        rows = rows_of(kind, n, d, seed)
        byzfl.ask(rows=rows.tolist())
        for f in (1, (n - 1) // 2):
            near = {"neighbours": n - f - 1}  # byzfl's count
            norms = squares(rows)
            own = n - 1
            mine = {
                "median": aggregate(rows, "median", f).value,
                "trimmed_mean": aggregate(rows, "trimmed_mean", f).value,
                "meamed": aggregate(rows, "meamed", f).value,
                "krum": aggregate(rows, "krum", f, options=near).value,
                "multi_krum": aggregate(rows, "multi_krum", f, options={**near, "chosen": n - f}).value,
                "mda": aggregate(rows, "mda", f).value,
                "monna": aggregate(rows, "monna", f, mine=own).value,
                "clip_once": combine(rows, clip_once(norms, f, radius=100.0)),
                "nnm": mix(rows, nnm(gram(rows), f)),
                "arc": mix(rows, arc(norms, f)),
            }
            for rule, value in mine.items():
                theirs = byzfl.ask(rule=rule, f=f, backend="numpy", value=True, options={"idx": own} if rule == "monna" else {})["value"]
                error = np.abs(value.double().numpy() - np.array(theirs)).max()
                assert error <= 5e-6 * max(1e-6, float(rows[1:].abs().max()), float(np.abs(theirs).max())), (rule, kind, n, f, d)
                compared += 1
        theirs = np.array(byzfl.ask(rule="clipping", f=0, backend="numpy", value=True)["value"])
        assert np.abs(mix(rows, clipping(squares(rows), 2.0)).numpy() - theirs).max() <= 5e-6
    assert compared == 540


def test_their_geometric_median_comes_to_ours(byzfl: Byzfl) -> None:
    rows = rows_of("normal", 9, 20, 1)
    byzfl.ask(rows=rows.tolist())
    theirs = byzfl.ask(rule="geometric_median", f=4, backend="numpy", value=True, options={"nu": 1e-6, "T": 300})["value"]
    assert np.abs(aggregate(rows, "geometric_median", 4).value.numpy() - np.array(theirs)).max() <= 1e-5


def test_their_clipping_comes_to_our_fixed_point(byzfl: Byzfl) -> None:
    rows = rows_of("normal", 9, 20, 2)
    byzfl.ask(rows=rows.tolist())
    theirs = byzfl.ask(rule="centred_clip", f=4, backend="numpy", value=True, options={"L": 2000, "tau": 1.5})["value"]
    assert np.abs(aggregate(rows, "centred_clip", 4, options={"radius": 1.5}).value.numpy() - np.array(theirs)).max() <= 1e-5
