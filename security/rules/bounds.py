"""What every rule asks of its input: a bound on f, whole rows, finite numbers.

n rows, of which f may be anything (Byzantine). A rule states how many rows it needs for an f; fewer
are a `NotEnoughPeersError`, since f comes from the run's recipe and n from who turned up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...collectives.errors import ConfigError, NotEnoughPeersError

MAX_ROWS = 4096  # what is quadratic in the rows stays below 128 MiB


def need(rule: str, n: int, f: int, least: int) -> None:
    """Raises NotEnoughPeersError where n rows are fewer than ``least``, ConfigError where f or n is
    no such number.
    """
    if f < 0:
        raise ConfigError(
            f"{rule}: f is {f}",
            key="f",
            why="it counts the rows that may be hostile",
            hint="use 0 or more",
        )
    if n > MAX_ROWS:
        raise ConfigError(
            f"{rule}: {n} rows, at most {MAX_ROWS}",
            why="the work grows with the square of the rows",
        )
    if n < max(least, 1):
        raise NotEnoughPeersError(
            f"{rule} with f = {f} needs at least {max(least, 1)} rows, got {n}",
            why="fewer do not outvote the hostile ones",
            hint="wait for more members, or found the run with a smaller f",
        )


def positive(rule: str, key: str, value: float) -> float:
    """``value`` itself; raises ConfigError unless it is a positive number."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{rule}: {key} is {value}", key=key, why="it must be a positive number")
    return value


def check_rows(rows: Tensor) -> None:
    """Raises ConfigError unless rows are float32 (n, d), n, d ≥ 1, each row contiguous."""
    if (
        rows.dtype != torch.float32
        or rows.ndim != 2
        or 0 in rows.shape
        or (rows.shape[1] > 1 and rows.stride(1) != 1)
    ):
        raise ConfigError(
            f"rows are {rows.dtype} {tuple(rows.shape)}",
            why="rules take float32 (rows, elements), each row contiguous",
        )


def finite_rows(rows: Tensor) -> list[int]:
    """Indices of the rows without NaN and infinity. One pass: a sum is finite only if its terms
    are; only an overflow looks twice.
    """
    sums = rows.sum(1)
    return [
        i
        for i, total in enumerate(sums.tolist())
        if math.isfinite(total) or bool(torch.isfinite(rows[i]).all().item())
    ]
