"""Gradient coding (Tandon, Lei, Dimakis and Karampatziakis 2017, arXiv 1612.03301): n workers, n
parts of the data, and any n - s workers suffice for the exact sum of the gradients of all parts.

A code is a matrix B of n rows: worker i computes the gradients of the parts j with B[i, j] != 0,
which are s + 1, and sends one vector, B[i] @ gradients. For every set of n - s workers there are
weights a with a @ B = (1, ..., 1), so a @ results is the sum.

    code = fractional_repetition(workers=6, stragglers=2)
    sent = {i: code.encode(i, gradients) for i in present}
    total = code.decode(sent)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ByPart = Mapping[int, NDArray[np.floating]] | NDArray[np.floating]
"""Arrays of one shape, by their number; as one array, the first axis is the number."""

WORST_CONDITION = 1e6
"""Of the equations of a decoding. The condition of cyclic codes grows with n and s; beyond this,
float64 no longer returns the six digits that a float32 gradient has."""
RESIDUAL = 1e-8


@dataclass(frozen=True)
class GradientCode:
    """Who computes the gradients of which parts, and how their sum comes back from n - s workers.
    `fractional_repetition` and `cyclic` make codes.

    >>> import numpy as np
    >>> code = fractional_repetition(workers=6, stragglers=2)
    >>> code.parts(0), code.load
    ((0, 1, 2), 0.5)
    >>> gradients = np.arange(12.0).reshape(6, 2)       # of six parts, two elements each
    >>> sent = {i: code.encode(i, gradients) for i in (0, 4, 5)}    # 1, 2 and 3 straggle
    >>> code.decode(sent), gradients.sum(0)
    (array([30., 36.]), array([30., 36.]))

    ``matrix`` is float64 of shape [workers, parts]; ``stragglers`` is s, how many may be missing.
    """

    matrix: NDArray[np.float64]
    stragglers: int

    @property
    def workers(self) -> int:
        """n."""
        return self.matrix.shape[0]

    @property
    def load(self) -> float:
        """The share of all data that a worker computes: (s + 1) / n."""
        return max(len(self.parts(i)) for i in range(self.workers)) / self.matrix.shape[1]

    def parts(self, worker: int) -> tuple[int, ...]:
        """The parts of the data that this worker computes gradients of, in rising order."""
        return tuple(int(j) for j in np.flatnonzero(self.matrix[worker]))

    def encode(self, worker: int, gradients: ByPart) -> NDArray[np.float64]:
        """What the worker sends: the weighted sum of its parts' gradients (each of one shape).

        ``gradients`` is by part, or an array whose first axis is the part; others' are not read.
        """
        first, *rest = self.parts(worker)
        total = self.matrix[worker, first] * np.asarray(gradients[first], np.float64)
        for part in rest:
            total += self.matrix[worker, part] * gradients[part]
        return total

    def weights(self, present: Collection[int]) -> NDArray[np.float64]:
        """Of shape [workers], zero for who is not in ``present``; ``weights @ results`` is the sum.

        Raises:
            ValueError: more than ``stragglers`` are missing and the rest does not suffice, or the
                equations are conditioned worse than ``WORST_CONDITION``.
        """
        who = sorted(set(present))
        if not who or who[0] < 0 or who[-1] >= self.workers:
            raise ValueError(f"workers are 0 to {self.workers - 1}, and at least one")
        rows = self.matrix[who]
        found, _, rank, singular = np.linalg.lstsq(rows.T, np.ones(rows.shape[1]), rcond=1e-12)
        if np.abs(rows.T @ found - 1).max() > RESIDUAL:
            raise ValueError(
                f"{len(who)} of {self.workers} workers do not suffice:"
                f" the code is for {self.stragglers} missing"
            )
        if singular[0] > WORST_CONDITION * singular[rank - 1]:
            raise ValueError("these workers' equations are conditioned too badly for float64")
        weights = np.zeros(self.workers)
        weights[who] = found
        return weights

    def decode(self, sent: Mapping[int, NDArray[np.float64]]) -> NDArray[np.float64]:
        """The sum of all parts' gradients, from what the present workers sent. Raises as
        ``weights``."""
        weights = self.weights(sent.keys())
        return sum(
            (weights[i] * np.asarray(sent[i], np.float64) for i in sorted(sent) if weights[i]),
            start=np.zeros(np.shape(next(iter(sent.values())))),
        )


def fractional_repetition(workers: int, stragglers: int) -> GradientCode:
    """The code whose workers form n / (s + 1) groups over disjoint parts (section 3.1 there).

    A group's members send the same bits, so a sum of one per group is as exact as without a code,
    and a member that differs from its group has made a mistake or lies (DRACO, arXiv 1803.09877).

    Raises:
        ValueError: s + 1 does not divide n.
    """
    _check(workers, stragglers)
    copies = stragglers + 1
    if workers % copies:
        raise ValueError(f"{copies} copies of each part do not divide {workers} workers")
    matrix = np.zeros((workers, workers))
    for worker in range(workers):
        group = worker // copies
        matrix[worker, group * copies : (group + 1) * copies] = 1
    return GradientCode(matrix, stragglers)


def cyclic(workers: int, stragglers: int, rng: np.random.Generator) -> GradientCode:
    """The code in which worker i computes the parts i, ..., i + s modulo n (algorithm 2 there); for
    any n and s < n.

    Every row lies in the null space of an s x n matrix H of Gaussians whose rows sum to 0, so does
    (1, ..., 1), and any n - s rows span that space with probability one. ``rng`` draws H: who
    decodes needs the same seed.
    """
    _check(workers, stragglers)
    if not stragglers:
        return GradientCode(np.eye(workers), 0)
    space = rng.standard_normal((stragglers, workers))
    space[:, -1] = -space[:, :-1].sum(axis=1)
    matrix = np.zeros((workers, workers))
    for worker in range(workers):
        others = [(worker + k) % workers for k in range(1, stragglers + 1)]
        matrix[worker, worker] = 1
        matrix[worker, others] = np.linalg.solve(space[:, others], -space[:, worker])
    return GradientCode(matrix, stragglers)


def _check(workers: int, stragglers: int) -> None:
    if workers < 1 or not 0 <= stragglers < workers:
        raise ValueError(f"0 <= stragglers < workers, not {stragglers} of {workers}")
