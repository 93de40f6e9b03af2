"""Small float64 matrices with the same bits on every machine.

Weights decide what a whole model becomes, and several members calculate them from one Gram matrix.
So here are only operations that IEEE 754 rounds exactly (+ - * / sqrt), elementwise and in a fixed
order: no BLAS, no LAPACK, no numpy reduction, whose order depends on the processor.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from .native import KERNEL, Kernel

Matrix = NDArray[np.float64]  # (n, n) where nothing else is said
Vector = NDArray[np.float64]  # (n,)
SWEEPS = 40  # of Jacobi rotations; ten are usual
SQUARINGS = 12  # as many as 4096 steps of a power iteration


def total(x: Matrix) -> Vector:
    """Sums along the last axis, added up as a tree whose shape follows from the length alone."""
    while (length := x.shape[-1]) > 1:
        half = (length + 1) // 2
        folded = x[..., :half].copy()
        folded[..., : length - half] += x[..., half:]
        x = folded
    return x[..., 0]


def product(a: Matrix, b: Matrix, compiled: Kernel | None = KERNEL) -> Matrix:
    """a (m, k) times b (k, n), added up in the order of k."""
    if compiled is not None:
        return compiled.product(a, b)
    out = np.zeros((a.shape[0], b.shape[1]))
    term = np.empty_like(out)
    for column, row in zip(a.T[:, :, None], b, strict=True):
        out += np.multiply(column, row, out=term)
    return out


def uniform(n: int, chosen: list[int]) -> Vector:
    """Equal weights of the chosen of n rows, 0 of the others."""
    out = np.zeros(n)
    out[chosen] = 1 / len(chosen)
    return out


def nearest(distances: Vector, count: int) -> list[int]:
    """Indices of the ``count`` smallest values in ascending order of the index; among equals the
    lower index.
    """
    return sorted(np.argsort(distances, kind="stable")[:count].tolist())


def top_direction(a: Matrix) -> tuple[float, Vector]:
    """Largest eigenvalue of a positive semidefinite a and its unit eigenvector, by squaring a until
    nothing else is left of it.

    Where the largest is shared, some unit vector of its space.
    """
    trace = float(total(np.diagonal(a)))
    if trace <= 0:
        return 0.0, np.zeros(len(a))
    power = a / trace
    for _ in range(SQUARINGS):
        power = product(power, power)
        power = (power + power.T) / (2 * total(np.diagonal(power)))
        if total(np.diagonal(power) ** 2) + 2 * _upper(power) >= 1 - 1e-10:
            # the eigenvalues of `power` add up to 1; that their squares do means that there is one
            break
    column = power[:, int(np.argmax(np.diagonal(power)))]
    vector = column / np.sqrt(total(column * column))
    for _ in range(4):
        vector = total(a * vector)
        vector = vector / np.sqrt(total(vector * vector))
    return max(0.0, float(total(vector * total(a * vector)))), vector


def _upper(a: Matrix) -> float:
    """Sum of the squares above the diagonal of a symmetric a."""
    return float(total(total(a * a)) - total(np.diagonal(a) ** 2)) / 2


def eigen(a: Matrix) -> tuple[Vector, Matrix]:
    """Eigenvalues of a symmetric a, descending, and its eigenvectors as columns, by Jacobi
    rotations of disjoint pairs at once.
    """
    n = len(a)
    size = n + n % 2
    work, vectors = np.zeros((size, size)), np.eye(size)
    work[:n, :n] = (a + a.T) / 2
    for _ in range(SWEEPS):
        if (
            np.abs(work - np.diag(np.diagonal(work))).max()
            <= 2.0**-53 * np.abs(np.diagonal(work)).max()
        ):
            break
        for first, second in _tournament(size):
            cosine, sine = _rotation(work, first, second)
            _rotate(work.T, first, second, cosine, sine)
            _rotate(work, first, second, cosine, sine)
            _rotate(vectors.T, first, second, cosine, sine)
            work[first, second] = work[second, first] = 0.0
    values = np.diagonal(work)[:n]  # the pad of an odd n is never rotated
    order = np.argsort(-values, kind="stable")
    return values[order], vectors[:n, :n][:, order]


def _rotation(
    a: Matrix, first: NDArray[np.intp], second: NDArray[np.intp]
) -> tuple[Vector, Vector]:
    """Cosine and sine that make a[first, second] zero (Golub and Van Loan, section 8.5)."""
    across = a[first, second]
    still = across == 0
    with np.errstate(over="ignore"):
        theta = (a[second, second] - a[first, first]) / np.where(still, 1.0, 2 * across)
        tangent = np.where(theta < 0, -1.0, 1.0) / (np.abs(theta) + np.sqrt(theta * theta + 1))
    tangent = np.where(still, 0.0, tangent)
    cosine = 1 / np.sqrt(tangent * tangent + 1)
    return cosine, tangent * cosine


def _rotate(
    a: Matrix, first: NDArray[np.intp], second: NDArray[np.intp], cosine: Vector, sine: Vector
) -> None:
    """Rows ``first`` and ``second`` of a, turned in place."""
    x, y = a[first], a[second]
    a[first] = cosine[:, None] * x - sine[:, None] * y
    a[second] = sine[:, None] * x + cosine[:, None] * y


@cache
def _tournament(size: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Everybody meets everybody once: size - 1 rounds of size / 2 pairs."""
    players, rounds = list(range(size)), []
    for _ in range(size - 1):
        pairs = [(players[i], players[size - 1 - i]) for i in range(size // 2)]
        rounds.append(
            (np.array([min(pair) for pair in pairs]), np.array([max(pair) for pair in pairs]))
        )
        players = [players[0], players[-1], *players[1:-1]]
    return rounds
