"""Our robust rules beside byzfl's, which runs in an environment of its own: slow, and skipped where
that cannot be made.
"""

from __future__ import annotations

import itertools
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

sys.path.append(str(ROOT / "scripts" / "bench"))
from rivals._byzfl import Byzfl, Unavailable

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


KINDS = ("normal", "ties", "outliers", "scales", "close")
AMONG_EQUALS = (
    "meamed",
    "krum",
    "multi_krum",
    "mda",
    "monna",
    "nnm",
)  # ours take the lower index or value; byzfl, whatever sorts first


def rows_of(kind: str, n: int, d: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, d))
    if kind == "ties":
        rows = rng.integers(-2, 3, (n, d)).astype(float)
    if kind == "outliers":
        rows[0] *= 1e6
    if kind == "scales":
        rows *= 10.0 ** rng.integers(-3, 4, d)
    if kind == "close":
        rows += 1000
    return torch.from_numpy(rows.astype(np.float32))


def test_the_same_results(byzfl: Byzfl) -> None:
    """Eleven rules and steps on 315 matrices of five kinds, d from a scalar, f up to byzfl's
    largest.
    """
    compared = dict.fromkeys(("rules", "matrices"), 0)
    for seed, (kind, n, d, again) in enumerate(
        itertools.product(KINDS, (5, 8, 11), (1, 3, 30), range(7))
    ):
        rows, f, own = rows_of(kind, n, d, seed), (1, (n - 1) // 2)[again % 2], n - 1
        norms, near = squares(rows), {"neighbours": n - f - 1}  # byzfl's count
        byzfl.ask(rows=rows.tolist())
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
            "clipping": mix(rows, clipping(norms, 2.0)),
        }
        for rule, value in mine.items():
            if kind == "ties" and rule in AMONG_EQUALS:
                continue
            theirs = byzfl.ask(
                rule=rule,
                f=f,
                backend="numpy",
                value=True,
                options={"idx": own} if rule == "monna" else {},
            )["value"]
            error = np.abs(value.double().numpy() - np.array(theirs)).max()
            assert error <= 5e-6 * max(
                1e-6, float(rows[1:].abs().max()), float(np.abs(theirs).max())
            ), (rule, kind, n, f, d)
            compared["rules"] += 1
        compared["matrices"] += 1
    assert compared == {"rules": 315 * 11 - 63 * 6, "matrices": 315}


def test_their_geometric_median_comes_to_ours(byzfl: Byzfl) -> None:
    rows = rows_of("normal", 9, 20, 1)
    byzfl.ask(rows=rows.tolist())
    theirs = byzfl.ask(
        rule="geometric_median", f=4, backend="numpy", value=True, options={"nu": 1e-6, "T": 300}
    )["value"]
    assert (
        np.abs(aggregate(rows, "geometric_median", 4).value.numpy() - np.array(theirs)).max()
        <= 1e-5
    )


def test_their_clipping_comes_to_our_fixed_point(byzfl: Byzfl) -> None:
    rows = rows_of("normal", 9, 20, 2)
    byzfl.ask(rows=rows.tolist())
    theirs = byzfl.ask(
        rule="centred_clip", f=4, backend="numpy", value=True, options={"L": 2000, "tau": 1.5}
    )["value"]
    assert (
        np.abs(
            aggregate(rows, "centred_clip", 4, options={"radius": 1.5}).value.numpy()
            - np.array(theirs)
        ).max()
        <= 1e-5
    )
