"""Rules and steps by name, and a whole aggregation of rows in one process: what the manifest will
name, and what tests and benchmarks call.

aggregate(rows, "trimmed_mean", f=4, before=["nnm"])
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...collectives.errors import ConfigError, NotEnoughPeersError
from .before import arc, bucketing, clipping, nnm
from .bounds import check_rows, finite_rows
from .centre import centred_clip, geometric_median
from .coordinate import meamed, median, trimmed_mean
from .gram import combine, distances, gram, mix, mixed_gram, squares
from .numbers import Matrix, Vector, product
from .selection import krum, mda, monna, multi_krum
from .spectral import caf, flag

CHUNK = 1 << 16  # elements of mixed rows at a time

BY_COORDINATE: dict[str, Callable[..., Tensor]] = {
    "median": median,
    "trimmed_mean": trimmed_mean,
    "meamed": meamed,
}
"""name -> rule(rows, f, out=None) -> result; works on any range of the elements."""

BY_GRAM: dict[str, Callable[..., Vector]] = {
    "krum": krum,
    "multi_krum": multi_krum,
    "mda": mda,
    "geometric_median": geometric_median,
    "centred_clip": centred_clip,
    "caf": caf,
    "flag": flag,
}
"""name -> rule(Gram matrix, f, **options) -> weights."""

RULES = (*BY_COORDINATE, *BY_GRAM, "monna")
STEPS = ("nnm", "bucketing", "clipping", "arc")


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What `aggregate` makes of contributions.

    >>> import torch
    >>> rows = torch.tensor([[1.0, 2.0], [1.2, 2.1], [0.9, 1.9], [1.1, 2.0], [1e6, -1e6]])
    >>> aggregate(rows, "trimmed_mean", f=1).value
    tensor([1.1000, 1.9667])
    >>> aggregate(rows, "krum", f=1).weights            # of one row alone
    array([0., 0., 0., 1., 0.])

    value: float32 (d,). dropped: indices of rows that held NaN or infinity. weights: of all rows,
    None for a rule by coordinate.
    """

    value: Tensor
    dropped: tuple[int, ...]
    weights: Vector | None


def aggregate(
    rows: Tensor,
    rule: str,
    f: int,
    *,
    before: Sequence[str] = (),
    options: Mapping[str, float] | None = None,
    mine: int = 0,
    size: int = 2,
    longest: float = 1.0,
    rng: random.Random | None = None,
) -> Aggregate:
    """``rule`` of rows, after the steps ``before`` in their order. rows: float32 (n, d), not
    modified; at most f of them are hostile.

    Rows with NaN or infinity are hostile: they are left out, and f is less by as many. ``options``
    go to the rule; ``mine`` is MoNNA's own row; size and chance are bucketing's, longest is
    clipping's. Raises NotEnoughPeersError where too few rows are left for f, ConfigError where a
    name or number is wrong.
    """
    if rule not in RULES or any(step not in STEPS for step in before):
        raise ConfigError(
            f"no rule {rule!r} or step in {list(before)}",
            key="rule",
            hint=f"rules: {', '.join(RULES)}; steps: {', '.join(STEPS)}",
        )
    check_rows(rows)
    n = rows.shape[0]
    kept = finite_rows(rows)
    if n - len(kept) > f or not kept:
        raise NotEnoughPeersError(
            f"{n - len(kept)} of {n} rows are not finite, at most {f} may be hostile"
        )
    if len(kept) < n:
        rows, f = rows[kept], f - (n - len(kept))
    mixing, products = _mixed(rows, f, before, size, longest, rng)
    dropped = tuple(i for i in range(n) if i not in kept)
    if rule in BY_COORDINATE:
        return Aggregate(_by_coordinate(BY_COORDINATE[rule], rows, f, mixing), dropped, None)
    if rule == "monna":
        if mine not in kept or "bucketing" in before:
            raise ConfigError(
                "MoNNA needs its own row, finite and not in a bucket with others", key="mine"
            )
        own = kept.index(mine)
        weights = monna(
            squares(rows, rows[own]) if products is None else distances(products)[own], f
        )
    else:
        weights = BY_GRAM[rule](gram(rows) if products is None else products, f, **(options or {}))
    if mixing is not None:
        weights = product(weights[None], mixing)[0]
    of_all = np.zeros(n)
    of_all[kept] = weights
    return Aggregate(combine(rows, weights), dropped, of_all)


def _mixed(
    rows: Tensor,
    f: int,
    before: Sequence[str],
    size: int,
    longest: float,
    rng: random.Random | None,
) -> tuple[Matrix | None, Matrix | None]:
    """The rows after all steps, and their Gram matrix; None and None without steps."""
    if not before:
        return None, None
    products = gram(rows)
    mixing = np.eye(len(products))
    for step in before:
        norms = np.diagonal(products)
        if step == "bucketing":
            if rng is None:
                raise ConfigError(
                    "bucketing without common randomness",
                    key="rng",
                    why="groups that can be foreseen can be filled",
                )
            one = bucketing(len(products), size, rng)
        else:
            one = (
                nnm(products, f)
                if step == "nnm"
                else arc(norms, f)
                if step == "arc"
                else clipping(norms, longest)
            )
        mixing, products = product(one, mixing), mixed_gram(products, one)
    return mixing, products


def _by_coordinate(
    rule: Callable[..., Tensor], rows: Tensor, f: int, mixing: Matrix | None
) -> Tensor:
    if mixing is None:
        return rule(rows, f)
    d = rows.shape[1]
    out = torch.empty(d, dtype=torch.float32, device=rows.device)
    for start in range(0, d, CHUNK):
        rule(mix(rows[:, start : start + CHUNK], mixing), f, out[start : start + CHUNK])
    return out
