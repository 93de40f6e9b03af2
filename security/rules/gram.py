"""What rules of whole rows know of them: the Gram matrix, a sum over parts of the vectors; and what
becomes of their weights: a weighted sum.

A rule of distances is rule(Gram matrix) -> weights, float64 (n,), and its result is sum of
weights[i] * rows[i]. Members that each hold a range of all rows add up their Gram matrices and so
run the rule exactly, for n^2 numbers of 8 bytes. Products of float32 values are exact in float64,
so near rows keep their distance however far from the origin they lie together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...collectives.errors import ConfigError
from .bounds import check_rows
from .native import KERNEL, STRIP, Kernel
from .numbers import Matrix, Vector, product, total

TILE_VALUES = 1 << 17  # of all rows together in float64: 1 MiB
NOISE = 2.0**-46  # of the two squared norms: squared distances below it are roundings


def gram(rows: Tensor) -> Matrix:
    """Inner products of all rows: float64 (n, n). rows: float32 (n, d), finite, not modified. One
    pass, some 1 MiB beside them.

    Who holds the same range need not get the same last bits on another processor: a part's owner
    calculates and sends them.
    """
    check_rows(rows)
    n, d = rows.shape
    width = max(1, min(d, TILE_VALUES // n))
    tile = torch.empty(n, width, dtype=torch.float64, device=rows.device)
    out = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    for start in range(0, d, width):
        part = tile[:, : min(width, d - start)]
        part.copy_(rows[:, start : start + width])
        out.addmm_(part, part.T)
    products = out.cpu().numpy()
    return (products + products.T) / 2


def squares(rows: Tensor, origin: Tensor | None = None, compiled: Kernel | None = KERNEL) -> Vector:
    """Squared distances of all rows from ``origin`` (none: zero), float64 (n,): for rules that need
    no more. A sum over parts, too.

    rows: float32 (n, d), finite; origin: float32 (d,), contiguous. Neither is modified. Of a row,
    values STRIP apart are added up in their order, and then those STRIP sums.
    """
    check_rows(rows)
    n, d = rows.shape
    if origin is not None:
        check_rows(origin[None])
        if origin.shape != (d,):
            raise ConfigError(f"distances of rows of {d} from a point of {tuple(origin.shape)}")
    if compiled is not None and rows.device.type == "cpu":
        return total(compiled.squares(rows, origin))
    width = max(1, min(-(-d // STRIP), TILE_VALUES // (n * STRIP))) * STRIP
    # The sums so far, and values.
    tile = torch.zeros(n, STRIP + width, dtype=torch.float64, device=rows.device)
    for start in range(0, d, width):
        values = tile[:, STRIP:]
        values[:, d - start :].zero_()
        values = values[:, : d - start].copy_(rows[:, start : start + width])
        if origin is not None:
            values.sub_(origin[start : start + width])
        values.mul_(values)
        # In the axis' order, as another one is contiguous.
        sums = np.add.reduce(tile.cpu().numpy().reshape(n, -1, STRIP), axis=1)
        tile[:, :STRIP] = torch.from_numpy(sums)
    return total(tile[:, :STRIP].cpu().numpy())


def distances(products: Matrix) -> Matrix:
    """Squared distances between all rows, from their Gram matrix; what is rounding noise is 0, so
    that equal rows are.
    """
    norms = np.diagonal(products)
    sums = norms[:, None] + norms
    squared = sums - 2 * products
    squared[squared <= NOISE * sums] = 0.0
    np.fill_diagonal(squared, 0.0)
    return squared


def from_point(products: Matrix, weights: Vector) -> Vector:
    """Squared distances of all rows from the weighted sum of rows."""
    towards = total(products * weights)
    return np.maximum(np.diagonal(products) - 2 * towards + total(weights * towards), 0.0)


def mixed_gram(products: Matrix, mixing: Matrix) -> Matrix:
    """The Gram matrix of mixing @ rows, where mixing is (m, n)."""
    out = product(product(mixing, products), mixing.T)
    return (out + out.T) / 2


def combine(rows: Tensor, weights: Vector, out: Tensor | None = None) -> Tensor:
    """sum of weights[i] * rows[i], float32 (d,). Rows of weight 0 are not read; each product and
    sum is rounded to float32, in order of the rows.
    """
    check_rows(rows)
    n, d = rows.shape
    out = torch.empty(d, dtype=torch.float32, device=rows.device) if out is None else out
    chosen = [(i, float(weights[i])) for i in range(n) if weights[i] != 0]
    width = min(d, 1 << 16)
    scratch = torch.empty(width, dtype=torch.float32, device=rows.device)
    for start in range(0, d, width):
        part = out[start : start + width]
        product_ = scratch[: part.shape[0]]
        if not chosen:
            part.zero_()
        for place, (i, weight) in enumerate(chosen):
            values = rows[i, start : start + width]
            if place == 0:
                torch.mul(values, weight, out=part)
            else:
                part.add_(torch.mul(values, weight, out=product_))
    return out


def mix(rows: Tensor, mixing: Matrix, out: Tensor | None = None) -> Tensor:
    """mixing @ rows, float32 (m, d), where mixing is (m, n). ``out`` must be other memory than
    rows, which are not modified; only where mixing is diagonal, as clipping's, it may be the rows
    themselves."""
    check_rows(rows)
    m, d = mixing.shape[0], rows.shape[1]
    out = torch.empty(m, d, dtype=torch.float32, device=rows.device) if out is None else out
    factors = np.diagonal(mixing)
    if m == rows.shape[0] and not (mixing - np.diag(factors)).any():  # clipping: no sums
        for row, factor, target in zip(rows, factors.tolist(), out, strict=True):
            if factor != 1:
                torch.mul(row, factor, out=target)
            elif out is not rows:
                target.copy_(row)
        return out
    matrix = torch.from_numpy(mixing).to(rows)
    width = max(1, min(d, TILE_VALUES // max(m, rows.shape[0])))
    for start in range(0, d, width):
        torch.mm(matrix, rows[:, start : start + width], out=out[:, start : start + width])
    return out
