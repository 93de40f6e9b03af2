"""The numbers of a part: its aggregate by centred clipping, residuals of contributions to it, and
how far rounding may go.

At the fixed point v of centred clipping the clipped residuals (x_i - v) min(1, radius / |x_i - v|)
add up to zero, so their projections on any direction do. A v that is not it leaves a sum R whose
projection on a direction that was unknown when v was fixed is about |R|.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..rules.centre import centred_clip
from ..rules.gram import gram
from .messages import Vector

ROUNDING = 2.0**-24
# Of float32 above zero: what is nearer to zero than 2^-126 is rounded to a multiple of it.
SMALLEST = 2.0**-149
# Roundings above which something is wrong; what honest peers differ by is below CONVICTED.
ACCUSED = 32.0
CONVICTED = 8.0
NEWTON = 20  # steps at most; two or three are usual, mostly none
CHUNK = 1 << 14  # values of all rows at a time in float64
_LARGEST = float(np.finfo(np.float32).max)


class Residual(NamedTuple):
    """Of one contribution to one part: projection of the clipped residual, norm of the residual."""

    projection: float
    norm: float


def readable(row: Vector) -> Vector:
    """The row itself, or zeros where it holds what is no number."""
    return row if np.isfinite(row).all() else np.zeros_like(row)


def aggregate(rows: Sequence[Vector], radius: float) -> Vector:
    """The fixed point of centred clipping, float32. Added up in float64: the weight of a huge row
    is none of float32.
    """
    stacked = np.stack([readable(row) for row in rows])
    products = gram(torch.from_numpy(stacked))
    weights = _balanced(products, centred_clip(products, 0, radius=radius), radius)
    found = np.empty(stacked.shape[1], np.float32)
    for start in range(0, len(found), CHUNK):
        found[start : start + CHUNK] = weights @ stacked[:, start : start + CHUNK].astype(
            np.float64
        )
    return found


def _balanced(
    products: NDArray[np.float64], weights: NDArray[np.float64], radius: float
) -> NDArray[np.float64]:
    """Weights of the fixed point to within a rounding, by Newton's method from where clipping again
    and again has come to: where all rows are clipped and lie almost in a line it comes near so
    slowly that an honest owner would be taken for a liar."""
    count, best, least = len(weights), weights, float("inf")
    for _ in range(NEWTON):
        centring = np.eye(count) - weights
        between = centring @ products @ centring.T
        lengths = np.sqrt(np.maximum(np.diagonal(between), 0.0))
        shares = radius / np.maximum(lengths, radius)
        left = np.sqrt(max(0.0, float(shares @ between @ shares)))
        centre = np.sqrt(max(0.0, float(weights @ products @ weights)))
        if left < least:
            best, least = weights, left
        if left <= count * ROUNDING * (centre + radius) / 4:
            break
        bent = np.where(lengths > radius, shares / np.maximum(lengths, radius) ** 2, 0.0)
        inverse = np.linalg.pinv(shares.sum() * np.eye(count) - bent[:, None] * between)
        step = inverse @ shares
        found = weights + step - weights * step.sum()
        if not np.isfinite(found).all():
            break
        weights = found
    return best


def residual(
    row: Vector, centre: Vector, direction: NDArray[np.float64], radius: float
) -> Residual:
    """What a contributor says of its part, in float64."""
    deviation = readable(row).astype(np.float64) - centre
    norm = float(np.sqrt(np.dot(deviation, deviation)))
    return Residual(
        float(np.dot(direction, deviation)) * min(1.0, radius / max(norm, radius)),
        min(norm, _LARGEST),
    )


def differs(reported: Residual, found: Residual, radius: float, roundings: float) -> bool:
    """Whether a residual that was said is not the one found, by more than so many roundings."""
    limit, least = roundings * ROUNDING, roundings * SMALLEST
    return (
        abs(reported.projection - found.projection)
        > limit * (radius + abs(found.projection)) + least
        or abs(reported.norm - found.norm) > limit * found.norm + least
    )


def impossible(reported: Residual, reach: float, radius: float) -> bool:
    """Whether no vector has this residual; ``reach``: norm of the direction."""
    most = min(reported.norm, radius) * reach * (1 + ACCUSED * ROUNDING) + ACCUSED * SMALLEST * (
        1 + reach
    )
    return reported.norm < 0 or abs(reported.projection) > most


def unbalanced(reported: Sequence[Residual], centre: Vector, radius: float) -> bool:
    """Verification 2: whether the projections do not add up to zero."""
    return abs(sum(each.projection for each in reported)) > ACCUSED * _unit(
        len(reported), centre, radius
    )


def off_centre(rows: Sequence[Vector], centre: Vector, radius: float) -> bool:
    """Whether ``centre`` is not the fixed point of these rows."""
    if not np.isfinite(centre).all():
        return True
    total = np.zeros(len(centre))
    for row in rows:
        deviation = readable(row).astype(np.float64) - centre
        total += deviation * min(
            1.0, radius / max(float(np.sqrt(np.dot(deviation, deviation))), radius)
        )
    return float(np.sqrt(np.dot(total, total))) > CONVICTED * _unit(len(rows), centre, radius)


def sketch_error(reported: Sequence[Residual], found: Sequence[Residual], size: float) -> float:
    """How far the gradient behind ``reported`` is from the recomputed one behind ``found``,
    relative to the latter's norm ``size``: an estimate.

    Projections of a difference on independent directions of variance 1, one for each part, have its
    squared norm as the mean of their squares' sum; clipping brings points no further apart.
    """
    if not size:
        return (
            0.0
            if all(np.isclose(a, b).all() for a, b in zip(reported, found, strict=True))
            else float("inf")
        )
    difference = np.array(reported, np.float64) - np.array(found, np.float64)
    return float(np.sqrt((difference * difference).sum(axis=0).max())) / size


def _unit(rows: int, centre: Vector, radius: float) -> float:
    """About one rounding of a sum of clipped residuals, the centre's own included."""
    wide = centre.astype(np.float64)
    return rows * (
        ROUNDING * (float(np.sqrt(np.dot(wide, wide))) + radius) + SMALLEST * len(centre) ** 0.5
    )
