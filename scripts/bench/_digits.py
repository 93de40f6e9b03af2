"""The 1,797 digits of 8 x 8 pixels that scikit-learn ships (UCI's optical recognition of
handwritten digits), without scikit-learn.

Its wheel is fetched once with pip and the table taken out; nothing is installed. Test rows: every
fifth, of each class as many.

from _digits import load
"""

from __future__ import annotations

import gzip
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _environment import OUT, Unavailable, set_up
from torch import Tensor

VERSION = "1.7.2"
MEMBER = "sklearn/datasets/data/digits.csv.gz"
FILE = OUT / "digits.csv.gz"
FETCH_S = 300
ROWS, CLASSES, TEST_EVERY = 1797, 10, 5


@dataclass(frozen=True, slots=True)
class Digits:
    """x: float32 (n, 64), from 0 to 1. y: int64 (n,), 0 to 9."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load() -> Digits:
    """The digits, the same rows in the same order on every machine. Raises Unavailable."""
    if not FILE.exists():
        _fetch()
    with gzip.open(FILE, "rt", encoding="ascii") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    if table.shape != (ROWS, 65):
        raise Unavailable(
            f"{FILE} holds {table.shape[0]} rows of {table.shape[1]}, not {ROWS} of 65: remove it"
        )
    x, y = torch.from_numpy(table[:, :64] / 16), torch.from_numpy(table[:, 64].astype(np.int64))
    place = torch.empty(ROWS, dtype=torch.int64)  # of a row among those of its class
    for label in range(CLASSES):
        where = (y == label).nonzero().flatten()
        place[where] = torch.arange(len(where))
    test = place % TEST_EVERY == 0
    return Digits(x[~test], y[~test], x[test], y[test])


def _fetch() -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="atoll-digits-") as folder:
        what = f"scikit-learn {VERSION}"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-input",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            folder,
        ]
        set_up(what, [*pip, f"scikit-learn=={VERSION}"], FETCH_S)
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            raise Unavailable(f"{what}: pip has fetched no wheel")
        with zipfile.ZipFile(wheels[0]) as wheel:
            fresh = FILE.with_suffix(".part")
            fresh.write_bytes(wheel.read(MEMBER))
            fresh.replace(FILE)
