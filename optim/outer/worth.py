"""Whether averaging is worth it: a state machine over what members found when they evaluated the
model before and after they adopted a round's result (`group.Evaluated`).

A loss says it, smaller is better. Of each member what counts is a quotient, so that members with
unlike data can be compared: how far the anchor is above the member's own weights, and how far above
both these and the anchor before (`by`). Of several members the median counts, less half of the
range over them (`surely`): one member's weights are better than the mean by chance, and another's
are worse. Where the loss is convex between them a plain mean is not found wanting that way, to
first order in what they differ by. That an anchor is above the one before is no fault of averaging
where the members' own weights are, too: they overfit, or their learning rate is too high.

Averaging speaks against itself

* where an anchor is above both by `WORSE_BY` twice in `WORSE_OF` readings, or by `MUCH_WORSE_BY`
  once;
* where it is above the members' own weights by `BEHIND` so many times in a row as the run says, if
  members evaluate on the same data. Where each has its own, each adoption costs it what it had
  learnt of that, and averaging may be well. Data are the same where all find the same loss of the
  same anchor.

Where ``lying`` members may lie, what counts is what any of them without so many find, at least; and
where any two find unlike losses of an anchor, data are unlike. So a verdict stands only where the
honest members would raise it alone, whatever the others say. A liar can hide that averaging does
not help: it looks as an honest member does whose weights happen to be worse than the mean.

Scripts whose evaluation is not repeatable have no readings (`optim.script.evaluation`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ...collectives.group import Reading

BEHIND = 0.01
WORSE, WORSE_OF, WORSE_BY = 2, 5, 0.05
MUCH_WORSE_BY = 0.25
DRAWN = 5  # members that evaluate in a round, where nobody may lie

Finding = Literal["", "worse", "behind"]


class Worth(NamedTuple):
    """What the members of a round found: ``anchor`` and ``own`` are medians of losses. ``behind``:
    how far the anchor is surely above their own weights, as a share of the larger loss, None where
    they evaluate on unlike data; ``worse``: how far above both these and the anchor before, None
    where too few know that. ``members``: how many told it.
    """

    anchor: float
    own: float
    behind: float | None
    worse: float | None
    members: int


def by(above: float, below: float) -> float:
    """How far one value is above another, as a share of the larger: between -2 and 2.

    >>> by(3.0, 2.0), by(2.0, 3.0), by(-2.0, -3.0), by(0.0, 0.0)
    (0.3333333333333333, -0.3333333333333333, 0.3333333333333333, 0.0)
    """
    size = max(abs(above), abs(below))
    return (above - below) / size if size else 0.0


def surely(values: Sequence[float], lying: int = 0) -> float:
    """The median less half of the range; the least of that over all sets without ``lying`` values:
    those that lack the largest but one and the next ones below it.

    >>> surely([0.25, 0.5, 0.75]), surely([-0.5, 0.25, 0.25]), surely([0.0, 1.0, 1.0, 1.0], lying=1)
    (0.25, -0.125, 0.5)
    """
    ordered = sorted(values)
    kept = [*ordered[: len(ordered) - lying - 1], ordered[-1]]
    return statistics.median(kept) - (kept[-1] - kept[0]) / 2


def drawn(lying: int) -> int:
    """How many members evaluate in a round: enough that most are honest where ``lying`` may lie."""
    return max(DRAWN, 4 * lying + 1)


def worth_of(readings: Sequence[Reading], lying: int = 0) -> Worth | None:
    """What a round's contributors found; None where too few of them say it: one, fewer than three
    and than half, or so few that ``lying`` of them could decide it.
    """
    found = [each for reading in readings if (each := reading.evaluated) is not None]
    least = max(2, min(3, (len(readings) + 1) // 2), 2 * lying + 1)
    if len(found) < least:
        return None
    worse = [
        by(each.anchor, max(each.own, each.before)) for each in found if each.before is not None
    ]
    anchors = [each.anchor for each in found]
    alike = by(max(anchors), min(anchors)) <= BEHIND
    return Worth(
        statistics.median(anchors),
        statistics.median(each.own for each in found),
        surely([by(each.anchor, each.own) for each in found], lying) if alike else None,
        surely(worse, lying) if len(worse) >= least else None,
        len(found),
    )


NUMBERS = 2 + WORSE_OF
"""Of a state: readings in a row with an anchor behind, and with none; the newest readings, newest
first, 1 where the anchor was worse.
"""


def judge(state: list[float], worth: Worth, rounds: int) -> Finding:
    """What follows from one more reading: "worse", "behind", or "" for nothing. ``state``: numbers
    as of `NUMBERS`, zeros at first, updated; ``rounds``: so many in a row are "behind".

    >>> state = [0.0] * NUMBERS
    >>> bad = Worth(anchor=2.2, own=2.0, behind=0.09, worse=0.01, members=3)
    >>> [judge(state, bad, rounds=3) for _ in range(3)]
    ['', '', 'behind']
    """
    behind = worth.behind is not None and worth.behind > BEHIND
    worse = worth.worse is not None and worth.worse > WORSE_BY
    row = state[0] + 1 if behind else 0.0
    calm = 0.0 if behind or worse else state[1] + 1
    newest = [float(worse), *state[2 : 1 + WORSE_OF]]
    state[:] = [row, min(calm, 1e6), *newest]
    if (worth.worse is not None and worth.worse > MUCH_WORSE_BY) or sum(newest) >= WORSE:
        return "worse"
    return "behind" if row >= rounds else ""


def calmed(state: Sequence[float], rounds: int) -> bool:
    """Whether as many readings in a row speak for averaging as have to speak against it."""
    return state[1] >= rounds


def said(worth: Worth, finding: Finding) -> str:
    """A finding in words.

    >>> said(Worth(2.2, 2.0, 0.0909, 0.01, 3), "behind")
    "a round's model is worse than the members' own weights before it: 2.2 and 2 on held-out data"
    """
    before = "the one before and than " if finding == "worse" else ""
    return (
        f"a round's model is worse than {before}the members' own weights before it: "
        f"{worth.anchor:.4g} and {worth.own:.4g} on held-out data"
    )
