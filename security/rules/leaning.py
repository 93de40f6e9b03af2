"""Who leans: a member whose contributions keep pointing one way, relative to the others', over many
rounds.

No single round shows a small hostile drift; many do, since honest noise points elsewhere in each.
Of each contribution we take its deviation: from the median of the others', by coordinate, made of
length 1. Rounds are cut into windows of equal length, and a member has two figures:

constancy   the mean cosine of the sum of its deviations in a window with their sum in all windows
            before: 0 for noise, 1 for one direction
against     the mean cosine of its deviation with the opposite of what the others did in the same
            round

`Leaning.found` names who is among the f highest of one figure in every window, and above the median
member by `MARGIN` in Fisher's z (atanh of the cosine). Members whose data are alike are
exchangeable, so ranks alone name one of n by chance in at most `chance` of all runs, as far as
windows are independent; the margin makes it fewer. Where data differ, honest deviations are
constant, too: then all figures are high, and only what is more constant yet is named. A single
honest member whose data are unlike all others' leans as an attacker does. So this is a figure for
people, and bans nobody.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...collectives.errors import ConfigError
from .bounds import check_rows

WINDOWS = 8
LEAST_ROUNDS = 5 * WINDOWS
MARGIN = 0.4
HIGHEST = 1 - 1e-9  # a cosine whose z is finite

Who = TypeVar("Who", bound=Hashable)
Rows = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lean(Generic[Who]):
    """One member's figures. ``rounds``: how many of its contributions were looked at. ``leans``:
    which of the figures tell it from the others.
    """

    who: Who
    constancy: float
    against: float
    rounds: int
    leans: tuple[str, ...]


class Leaning(Generic[Who]):
    """Of one run. Give it rounds in their order (`saw`), then ask (`found`). Keeps two float64
    vectors a member, of the elements that it is given.
    """

    def __init__(self, f: int, rounds: int, windows: int = WINDOWS) -> None:
        """f: how many may be hostile; rounds: how many will be given. Raises ConfigError for fewer
        than five a window.
        """
        if rounds < 5 * windows or windows < 2:
            raise ConfigError(
                f"{rounds} rounds in {windows} windows",
                key="rounds",
                why="A direction is told from noise by several rounds in each of several windows.",
                hint=f"At least {5 * windows} rounds",
            )
        self.f, self._windows = f, windows
        self._ends = [rounds * (window + 1) // windows for window in range(windows)]
        self._given = 0
        self._before = dict[Who, Rows]()
        self._sums = dict[Who, Rows]()
        self._against = dict[Who, list[float]]()
        self._rounds = dict[Who, int]()
        self._by_window: dict[str, list[dict[Who, float]]] = {"constancy": [], "against": []}

    def saw(self, who: Sequence[Who], rows: Tensor) -> None:
        """One round: whose contributions, and these, float32 (n, d), finite, n >= 3; always the
        same d elements of them. Rows are not modified.
        """
        check_rows(rows)
        values = rows.numpy().astype(np.float64)
        middle = median_of_others(values)
        deviations = values - middle
        lengths = np.sqrt(np.einsum("ij,ij->i", deviations, deviations))
        others = np.sqrt(np.einsum("ij,ij->i", middle, middle))
        along = np.einsum("ij,ij->i", deviations, middle)
        for i, member in enumerate(who):
            if not lengths[i]:
                continue  # the others' very median points nowhere
            unit = deviations[i] / lengths[i]
            if member in self._sums:
                self._sums[member] += unit
            else:
                self._sums[member] = unit
            self._rounds[member] = self._rounds.get(member, 0) + 1
            cosine = -along[i] / (lengths[i] * others[i]) if others[i] else 0.0
            self._against.setdefault(member, []).append(float(cosine))
        self._given += 1
        if self._given == self._ends[len(self._by_window["against"])]:
            self._close()

    def _close(self) -> None:
        self._by_window["against"].append(
            {who: float(np.mean(of)) for who, of in self._against.items()}
        )
        self._by_window["constancy"].append(
            {
                who: _cosine(total, self._before[who])
                for who, total in self._sums.items()
                if who in self._before
            }
        )
        for who, total in self._sums.items():
            self._before[who] = self._before[who] + total if who in self._before else total
        self._sums, self._against = {}, {}

    def found(self) -> list[Lean[Who]]:
        """Of all members that were there in every window, whoever leans most first."""
        windows = {
            "constancy": self._by_window["constancy"][1:],
            "against": self._by_window["against"],
        }
        there = [
            who
            for who in self._rounds
            if all(who in window for series in windows.values() for window in series)
        ]
        means = {
            name: {who: float(np.mean([window[who] for window in series])) for who in there}
            for name, series in windows.items()
        }
        leans = {who: list[str]() for who in there}
        for name, series in windows.items():
            usual = _z(float(np.median([*means[name].values()]))) if there else 0.0
            for who in there:
                if _z(means[name][who]) - usual >= MARGIN and all(
                    sum(other > window[who] for other in window.values()) < self.f
                    for window in series
                ):
                    leans[who].append(name)
        rows = [
            Lean(
                who,
                means["constancy"][who],
                means["against"][who],
                self._rounds[who],
                tuple(leans[who]),
            )
            for who in there
        ]
        return sorted(
            rows, key=lambda row: (-len(row.leans), -max(row.constancy, row.against), str(row.who))
        )


def chance(n: int, f: int, windows: int = WINDOWS) -> float:
    """How likely it is at most that any of n honest members with data alike is named, of
    independent windows: two figures, one window fewer for the first of them."""
    share = min(1.0, f / n)
    return min(1.0, n * (share ** (windows - 1) + share**windows))


def median_of_others(values: Rows) -> Rows:
    """For each row the median by coordinate of all other rows; values: (n, d), n >= 2 -> (n, d)."""
    n = len(values)
    order = np.argsort(values, axis=0, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(n)[:, None], axis=0)
    sorted_ = np.take_along_axis(values, order, axis=0)
    low, high = (n - 2) // 2, (n - 1) // 2  # of the n - 1 others
    return (
        np.where(rank <= low, sorted_[low + 1], sorted_[low])
        + np.where(rank <= high, sorted_[min(high + 1, n - 1)], sorted_[high])
    ) / 2


def _z(cosine: float) -> float:
    return math.atanh(max(-HIGHEST, min(HIGHEST, cosine)))


def _cosine(a: Rows, b: Rows) -> float:
    length = float(np.sqrt(np.dot(a, a) * np.dot(b, b)))
    return float(np.dot(a, b)) / length if length else 0.0
