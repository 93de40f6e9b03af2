"""Rules of each coordinate by itself: median, trimmed mean, MeaMed. They work on any range of the
vectors, so on any part of a butterfly.

f < n / 2 rows may be anything. Columns are taken in tiles that fit the processor's cache: the
memory needed beside rows and result is some 2 MiB, whatever d is. Tiles are sorted by a network of
row-wise minima and maxima (networks.py); sums are float64 and in the network's order of rows, so
bits depend neither on tiles nor on threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bounds import check_rows, need
from .native import KERNEL, Kernel
from .networks import flat, network

TILE_VALUES = 1 << 18  # of all rows together: 1 MiB


def median(rows: Tensor, f: int, out: Tensor | None = None) -> Tensor:
    """The middle value, or the mean of the two middle ones. Yin et al. 2018, arXiv 1803.01498.

    rows: float32 (n, d), not modified; n >= 2f + 1, else NotEnoughPeersError. out, and what is
    returned: float32 (d,).
    """
    n = rows.shape[0]
    need("median", n, f, 2 * f + 1)
    return _sorted_mean(rows, (n - 1) // 2, n // 2 + 1, 0, out)


def trimmed_mean(rows: Tensor, f: int, out: Tensor | None = None) -> Tensor:
    """The mean without the f smallest and the f largest values. Yin et al. 2018, arXiv 1803.01498.
    Arguments as for `median`.
    """
    n = rows.shape[0]
    need("trimmed mean", n, f, 2 * f + 1)
    return _sorted_mean(rows, f, n - f, 0, out)


def meamed(rows: Tensor, f: int, out: Tensor | None = None) -> Tensor:
    """The mean of the n - f values nearest to the median. Xie et al. 2018, arXiv 1802.10116.
    Arguments as for `median`.

    Of two values equally far from it on either side the smaller one is nearer.
    """
    n = rows.shape[0]
    need("MeaMed", n, f, 2 * f + 1)
    return _sorted_mean(rows, f, n - f, f, out)


def _sorted_mean(
    rows: Tensor,
    low: int,
    high: int,
    window: int,
    out: Tensor | None,
    compiled: Kernel | None = KERNEL,
) -> Tensor:
    """The mean of the sorted values low to high - 1 and, of ``window`` pairs of a lower and a
    higher value, of the one nearer to the median.

    In ascending order the n - f nearest to the median are neighbours, and among them are all from f
    to n - f - 1. Whether they begin after the s-th value is whether that is farther from the median
    than the one n - f places above it: then this takes its place, for each s < f alone.
    """
    check_rows(rows)
    n, d = rows.shape
    out = torch.empty(d, dtype=torch.float32, device=rows.device) if out is None else out
    middle = ((n - 1) // 2, n // 2)
    labels = [1 if low <= i < high else 0 for i in range(n)]
    if window:
        for i in (*range(low), *range(high, n), *middle):
            labels[i] = i + 2
    steps = network(tuple(labels))
    if compiled is not None and rows.device.type == "cpu" and out.is_contiguous():
        compiled.sorted_mean(rows, flat(steps), low, high, window, out)
        return out
    width = max(1, min(d, TILE_VALUES // (n + 1)))
    scratch = torch.empty(n + 1, width, dtype=torch.float32, device=rows.device)
    sums = torch.empty(2, width, dtype=torch.float64, device=rows.device)
    for start in range(0, d, width):
        part = out[start : start + width]
        length = part.shape[0]
        spare = [row[:length] for row in scratch]
        tile = spare[:n]
        scratch[:n, :length].copy_(rows[:, start : start + length])
        free = spare[n]
        for i, j, lower, upper in steps:
            a, b = tile[i], tile[j]
            if not upper:
                torch.minimum(a, b, out=a)
            elif not lower:
                torch.maximum(a, b, out=b)
            else:
                torch.minimum(a, b, out=free)
                torch.maximum(a, b, out=b)
                tile[i], free = free, a
        acc, centre = sums[0, :length], sums[1, :length]
        acc.zero_()
        for i in range(low, high):
            acc.add_(tile[i])
        if window:
            torch.add(tile[middle[0]].double(), tile[middle[1]], out=centre).mul_(0.5)
        for s in range(window):
            below, above = tile[s], tile[s + n - window]
            acc.add_(torch.where(centre - below > above - centre, above, below))
        part.copy_(acc.div_(high - low + window))
    return out
