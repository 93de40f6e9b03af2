"""Coded computing of any smooth function, by rational interpolation, with liars located (BACC:
Jahani-Nezhad and Maddah-Ali 2021, arXiv 2009.08327; SBACC: Borah and Harshan 2025, arXiv
2507.01330).

K blocks of data are the values of a rational function u at K points; worker i computes f of *one*
value, u(z_i), as large as a block. f(u(z)) is smooth where f is, so any of the N answers give f of
the blocks approximately, the better the more there are (tests/unit/test_coding.py has figures).

Both kinds of points are Chebyshev's of the first kind, at which a smooth function's high
coefficients in the discrete cosine transform are small: of N answers the N - K' highest are a
syndrome. A wrong answer stands out of it if it is wrong by much more than the approximation is:
what is smaller passes through.

    code = BerrutCode(blocks=4, workers=16)
    answers = {i: f(code.encode(i, data)) for i in range(16)}
    decoded = code.decode(answers, liars=2)  # .values: [4, ...]; .wrong: whom it left out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Blocks = Sequence[NDArray[np.floating]] | NDArray[np.floating]

AT_A_POINT = 1e-12
"""Closer than this, a point is the point: Berrut's formula has 0 / 0 there."""


@dataclass(frozen=True)
class Decoded:
    """What came back of the workers' answers."""

    values: NDArray[np.float64]
    """Of shape [blocks, ...]: about f of each block."""
    wrong: tuple[int, ...]
    """The workers whose answers were left out, in rising order."""


@dataclass(frozen=True)
class BerrutCode:
    """Coded computing of a smooth function f of K blocks by N workers, some of which may be away or
    lie.

    >>> import numpy as np
    >>> code = BerrutCode(blocks=2, workers=16)
    >>> data = np.array([[0.1, 0.2], [0.3, 0.4]])
    >>> answers = {i: np.sin(code.encode(i, data)) for i in range(16)}
    >>> answers[5] += 100                               # a lie
    >>> decoded = code.decode(answers, liars=1)
    >>> decoded.wrong, bool(np.abs(decoded.values - np.sin(data)).max() < 1e-2)
    ((5,), True)

    Args:
        blocks: K.
        workers: N.
        degree: K', how many coefficients f(u(z)) is taken to have. What is above it in an honest
            answer passes for noise, so more blocks or a rougher f want more. Default: half of the
            workers' number, and at least K.
    """

    blocks: int
    workers: int
    degree: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= self.workers:
            raise ValueError("at least one block, and no more than workers")

    @property
    def coefficients(self) -> int:
        """K'."""
        return self.degree or max(self.blocks, self.workers // 2)

    @property
    def most_liars(self) -> int:
        """How many wrong answers can be located if all workers answer: (N - K') / 2."""
        return (self.workers - self.coefficients) // 2

    def encode(self, worker: int, data: Blocks) -> NDArray[np.float64]:
        """The worker's share: u at its point. ``data`` is K arrays of one shape, or one array whose
        first axis is the block."""
        point = chebyshev_points(self.workers)[worker]
        return np.tensordot(_berrut(point, chebyshev_points(self.blocks)), np.asarray(data), 1)

    def decode(self, answers: Mapping[int, NDArray[np.floating]], liars: int = 0) -> Decoded:
        """f of the blocks, from the answers of any of the workers.

        With ``liars`` > 0 as many answers are left out: those that fit least with all others being
        one smooth function.

        Raises:
            ValueError: too few answers to locate so many, or answers of fewer numbers than liars.
        """
        who = sorted(answers)
        if not who or who[0] < 0 or who[-1] >= self.workers:
            raise ValueError(f"workers are 0 to {self.workers - 1}, and at least one")
        values = np.stack([np.asarray(answers[i], np.float64) for i in who])
        points = chebyshev_points(self.workers)[who]
        wrong: set[int] = set()
        if liars:
            if len(who) < self.coefficients + 2 * liars:
                raise ValueError(
                    f"{len(who)} answers: {self.coefficients + 2 * liars} are needed"
                    f" to locate {liars} wrong ones"
                )
            flat = values.reshape(len(who), -1)
            if flat.shape[1] < liars:
                raise ValueError(
                    f"answers of {flat.shape[1]} numbers do not tell {liars} liars apart"
                )
            wrong = set(_outliers(points, flat, self.coefficients, liars))
        kept = [k for k in range(len(who)) if k not in wrong]
        mixing = np.stack([_berrut(a, points[kept]) for a in chebyshev_points(self.blocks)])
        return Decoded(np.tensordot(mixing, values[kept], 1), tuple(who[k] for k in sorted(wrong)))


def chebyshev_points(count: int) -> NDArray[np.float64]:
    """cos((2 i + 1) pi / 2 count), i = 0, ..., count - 1: falling, inside (-1, 1)."""
    return np.cos((2 * np.arange(count) + 1) * np.pi / (2 * count))


def _berrut(at: float, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weights of the values at ``points`` (falling) in Berrut's first interpolant at ``at``."""
    away = at - points
    nearest = int(np.abs(away).argmin())
    if abs(away[nearest]) < AT_A_POINT:
        weights = np.zeros(len(points))
        weights[nearest] = 1
        return weights
    weights = (-1.0) ** np.arange(len(points)) / away
    return weights / weights.sum()


def _outliers(
    points: NDArray[np.float64], values: NDArray[np.float64], degree: int, count: int
) -> list[int]:
    """Indices of the ``count`` rows of ``values`` ([points, numbers]) that fit least with the
    others' being polynomials of ``degree`` coefficients.

    What is orthogonal to all such polynomials is the syndrome. It is a sum of one direction for
    each wrong row, so the wrong rows are those whose directions lie closest to the space of its
    largest singular vectors (MUSIC: Schmidt 1986).
    """
    basis, _ = np.linalg.qr(np.polynomial.chebyshev.chebvander(points, degree - 1), mode="complete")
    directions = basis[:, degree:].T
    space, _, _ = np.linalg.svd(directions @ values, full_matrices=False)
    directions = directions / np.linalg.norm(directions, axis=0)
    near = np.linalg.norm(space[:, :count].T @ directions, axis=0)
    return sorted(int(k) for k in near.argsort()[-count:])
