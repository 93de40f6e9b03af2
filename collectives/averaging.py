"""The mean over many members in steps among few: lines of a grid, or pairs. Each step is one
operation of a group (`groups.py`).

    averaged = average(swarm, tensor, op_id="step 17").wait()

Of 200 members on a grid of 20 x 10 each has lanes to 28 others instead of 199.

Every step takes the mean weighted by what each value stands for by then, so that groups of unequal
size, and members that are lost, do not bend the result: on a grid a member goes on with the mean of
its line and the *sum* of the line's weights, and lines that meet later hold different members'
values. On a full grid where all are counted the result is the mean of all, everywhere, after the
last dimension.

**What is missing where members are lost.** Of N members with the same weight, let each miss each of
D steps with probability p, on its own. A value gets into its line with probability 1 - p, and on
from each step into the next one where the member that carries it took part in both: Q = (1 - p)^(2
D - 1) of all values are in a result. The mean of n out of N values errs by sqrt((N - n) / (n (N -
1))) of their standard deviation (drawing without replacement), here with n = Q N: `expected_error`.
`Averaged.residual` is the same with the n that was seen.

**Pairs.** Members 2^k in number form a hypercube, a grid of k dimensions of two. Others are paired
anew at random in every step, and go on with the mean weight, as in gossip: a value may be in a
result twice. With ``plan="gossip"`` pairs are drawn anew whatever the number of members: what
`optim/lab/gossip` trains with. Where N members are split at random into r groups of given sizes,
each group taking its mean, the squared distance from the mean of all falls by (r - 1) / (N - 1) on
average: a group's mean over M values drawn without replacement has the variance s^2 / M * (N - M) /
(N - 1), and the mean of that over all members is s^2 (r - 1) / (N - 1). (Moshpit SGD, arXiv
2103.03239, has (r - 1) / N + r / N^2 for its random splits.)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, log2, prod, sqrt
from typing import TYPE_CHECKING, Any, Literal

from .api import call_of, lost_by
from .awaiting import awaited, warn_of_dropped
from .errors import AtollError, LocalProtocolError
from .group import MAX_MEMBERS
from .groups import MAX_DIMENSIONS, grid_dims, is_cube
from .outcomes import Outcome, Status
from .plain import (
    DEVICES,
    agreed,
    check_swarm,
    flat_of,
    kind_of,
    operate,
    patience,
    plainly,
    whole,
)
from .script_swarm import Call, Operating, Swarm
from .series import NumberedName
from .target import Target

if TYPE_CHECKING:
    from torch import Tensor

MAX_STEPS = 16
MAX_WEIGHT = 1 << 24
# Weights of pairs are multiples of it at first, and may be halved in every step.
HALVED = 1 << MAX_STEPS
LARGEST = (1 << 48) - 1


@dataclass(frozen=True, slots=True)
class Averaged:
    """What became of an average. It is common to the members of a group of the last step, bit for
    bit; others may hold other bits.

    ``committed``: the tensor holds the mean of what was counted; a step that stayed open left
    something out. ``open``: no step was decided, or the caller cancelled, and the tensor is as it
    was.
    """

    status: Status
    steps: tuple[Outcome, ...]
    """One outcome for each dimension or pair: whose values this member's group averaged, with the
    weight that each stood for by then (of pairs: times 65536). A step that is committed and not
    ``counted`` was decided before this member came to it, or without its value: it went on with the
    mean of the result and its own value, by their weights."""
    members: int
    """In the configuration; 0 where no step was decided."""
    weight: int | None
    """What the result stands for: the sum of the weights that are in it, each once. None where that
    cannot be known: of pairs of a number that is no power of two, or when the configuration changed
    under way."""
    exact: bool
    """Whether it is proven to be the mean of all members of the configuration, but for rounding by
    the codec. Never proven with weights.
    """
    residual: float | None
    """The expected distance from the mean of all members' values, in standard deviations of these.
    None where it cannot be known: with weights, or of pairs that were drawn, where this member's
    stayed without the other. (Of losses in others' pairs nobody hears.)"""


def average(
    swarm: Swarm,
    tensor: Tensor,
    *,
    op_id: str,
    plan: Literal["grid", "pairwise", "gossip"] = "grid",
    dims: int | Sequence[int] | None = None,
    rounds: int | None = None,
    weight: int | None = None,
    deadline_s: float = 60.0,
    codec: str = "",
    everyone: bool = False,
) -> Averaging:
    """Mean over the members that call it, step by step, in place when committed: float32,
    contiguous, CPU or GPU.

    ``dims``: of the grid; a number of dimensions (2) has sizes made for the configuration.
    ``rounds``: of pairs (as many as make a hypercube); ``gossip`` draws each of them anew, also
    where a hypercube could be had. ``weight``: None (each value counts alike;
    `Averaged.exact` can be told) or what the tensor counts; all callers give one or none does.
    Every step has its share of ``deadline_s``. A step after the first begins when the handle is
    looked at. Raises what `Swarm.operate` raises.
    """
    import torch

    check_swarm(swarm)
    if isinstance(op_id, NumberedName):
        raise LocalProtocolError(
            "an average takes no numbered() name: it is several operations",
            hint="name it by swarm.next_number() or the run's round yourself",
        )
    target = Target(tensor, torch.float32, devices=DEVICES)
    if (
        plan not in ("grid", "pairwise", "gossip")
        or (rounds is not None and plan == "grid")
        or (dims is not None and plan != "grid")
    ):
        raise LocalProtocolError(
            "average knows plan='grid' with dims=, plan='pairwise' and 'gossip' with rounds=, not "
            f"{plan!r} with dims={dims}, rounds={rounds}"
        )
    if weight is not None and not 1 <= whole(weight, "weight") < MAX_WEIGHT:
        raise LocalProtocolError(f"average of weight {weight}: at least 1, below {MAX_WEIGHT}")
    deadline_s = call_of(op_id, "mean", deadline_s, everyone).deadline_s
    members = len(swarm.members())
    groups = _lines(dims, members) if plan == "grid" else _pairs(rounds, members, plan == "gossip")
    tag, own = (
        kind_of(tensor, "mean:" if weight is None else "weighted:", DEVICES),
        (weight or 1) * (1 if plan == "grid" else HALVED),
    )
    calls = [
        call_of(
            f"{op_id}/{step}",
            "mean",
            deadline_s / len(groups),
            everyone,
            weight=1,
            codec=codec,
            tag=tag,
            group=group,
        )
        for step, group in enumerate(groups)
    ]
    vanished = lost_by(swarm, op_id, target.flat, codec)
    return Averaging(swarm, target, calls, plan, own, weight is None, vanished)


def _lines(dims: int | Sequence[int] | None, members: int) -> list[str]:
    """Names of the groups of a grid, the last coordinate first: then what stands in a row that is
    not full is in the others' columns.
    """
    sizes = [whole(size, "a size of dims") for size in dims] if isinstance(dims, Sequence) else None
    count = len(sizes) if sizes is not None else 2 if dims is None else whole(dims, "dims")
    name = f"d{count}" if sizes is None else "x".join(map(str, sizes))
    if not 1 <= count <= MAX_DIMENSIONS:
        raise LocalProtocolError(f"a grid of {count} dimensions; 1 to {MAX_DIMENSIONS}")
    if sizes is not None and (min(sizes) < 1 or prod(sizes) < members):
        raise LocalProtocolError(
            f"{members} members on a grid of {name}",
            hint="leave dims out: it is made for the members there are",
        )
    return [f"{name}.{axis}" for axis in reversed(range(count))]


def _pairs(rounds: int | None, members: int, drawn: bool) -> list[str]:
    count = max(1, ceil(log2(max(1, members)))) if rounds is None else whole(rounds, "rounds")
    if not 1 <= count <= MAX_STEPS:
        raise LocalProtocolError(f"{count} rounds of pairs; 1 to {MAX_STEPS}")
    first = (MAX_MEMBERS - 1).bit_length() if drawn else 0  # beyond any hypercube's dimensions
    return [f"p{first + number}" for number in range(count)]


def pair_name() -> str:
    """The group of pairs that are drawn anew for each operation."""
    return _pairs(1, 1, True)[0]


class Averaging:
    """An average under way (a Pending[Averaged]). Threads, ``await`` and the warning are those of a
    `Handle`.
    """

    _dropped = False  # nobody has taken the result yet

    def __init__(
        self,
        swarm: Swarm,
        target: Target,
        calls: Sequence[Call],
        plan: str,
        weight: int,
        plain: bool,
        vanished: float = 0.0,
    ) -> None:
        self._swarm, self._target = swarm, target
        self._value = flat_of(target.flat.clone(), devices=DEVICES)
        self._calls, self._plan, self._weight, self._plain = calls, plan, weight, plain
        self._vanished = vanished  # in the first step; the others are of what came of it
        self._steps: list[Outcome] = []
        self._cancelled = self._missed = False
        self._going_on = threading.RLock()  # any thread may look
        self._operating: Operating | None = self._begin()
        self._dropped = True

    def done(self) -> bool:
        """Whether the result is here, and in the tensor; or `wait` would raise. Begins the next
        step where one is over.
        """
        with self._going_on:
            while (operating := self._under_way()) is not None:
                if not operating.done():
                    return False
                try:
                    self._take(operating, operating.wait(0.0))
                except AtollError:
                    return True  # which `wait` raises
            with suppress(AtollError):  # which `wait` raises
                self._conclude()
            return True

    def wait(self, timeout_s: float | None = None) -> Averaged:
        """The result, or what is known after at most ``timeout_s`` seconds (then "open"). May be
        called again, by several threads. The tensor is written by the first `wait` or `done` that
        sees "committed"."""
        self._dropped, timeout_s = False, patience(timeout_s)
        while True:
            with self._going_on:
                if (operating := self._under_way()) is None:
                    return self._conclude()
            outcome = operating.wait(timeout_s)
            with self._going_on:
                if operating is self._operating:  # else another thread has gone on from there
                    if not operating.done():
                        return self._result("open")
                    self._take(operating, operating.wait(0.0))
            timeout_s = None if timeout_s is None else max(0.0, timeout_s - outcome.elapsed_s)

    def _conclude(self) -> Averaged:
        committed = not self._cancelled and any(
            outcome.status == "committed" for outcome in self._steps
        )
        if committed and self._value is not self._target.flat:
            self._target.check()
            with plainly():
                self._target.flat.copy_(self._value)
            self._value = self._target.flat
        self._dropped = False
        return self._result("committed" if committed else "open")

    def cancel(self) -> None:
        """Give up: no more steps, and `wait` says "open", in whatever thread, unless it is over.
        What the others counted before stays counted.
        """
        with self._going_on:
            self._dropped = False
            if self._operating is not None or len(self._steps) < len(self._calls):
                self._cancelled = True
            if self._operating is not None:
                self._operating.cancel()

    def __await__(self) -> Generator[Any, Any, Averaged]:
        """The result, as of a `Handle`: other tasks run meanwhile."""
        return awaited(self).__await__()

    def __del__(self) -> None:
        if self._dropped and not sys.is_finalizing():
            warn_of_dropped(self._calls[0].op_id.removesuffix("/0"))

    # ---- steps
    def _begin(self) -> Operating:
        import msgspec

        known = [outcome.config for outcome in self._steps if outcome.config]
        call = msgspec.structs.replace(
            self._calls[len(self._steps)],
            weight=min(self._weight, LARGEST),
            under=known[-1] if known else "",
        )
        return operate(self._swarm, call, self._value)

    def _take(self, operating: Operating, outcome: Outcome) -> None:
        """One step is over: go on with its mean and what that stands for, or with one's own where
        it stayed open. Raises LocalProtocolError, now and whenever it is asked again, where others
        have called something else.
        """
        agreed(outcome)
        value, weight, missed = self._value, self._weight, self._missed
        if outcome.status == "committed":
            total, step = sum(share.samples for share in outcome.contributors), len(self._steps)
            with plainly():
                if outcome.counted:
                    operating.copy_into(value)
                else:
                    value = mixed(operating, value, weight / (weight + total))
                    total += weight
            taken = len(outcome.contributors) + (not outcome.counted)
            missed |= taken < len(operating.members)
            weight = total if self._disjoint(outcome.members, step) else total // taken
        if not self._steps:
            outcome = replace(outcome, vanished=self._vanished)
        # In one line: an exception before it has all of it done again, one after it nothing.
        self._value, self._weight, self._missed, self._steps, self._operating = (
            *(value, weight, missed, [*self._steps, outcome]),
            None,
        )
        operating.release()
        self._under_way()

    def _under_way(self) -> Operating | None:
        """The present step; begins it if none has begun. None: all is over."""
        while self._operating is None and len(self._steps) < len(self._calls):
            if self._cancelled:
                break
            try:
                self._operating = self._begin()
            except AtollError as error:
                # the node is gone, or this peer no member any more: nobody's fault but this step's
                self._steps.append(Outcome("open", 0, reason=error.message))
        return self._operating

    def _disjoint(self, members: int, step: int) -> bool:
        """Whether what meets in a step is of different members: what it stands for adds up."""
        return self._plan == "grid" or (
            self._plan == "pairwise" and is_cube(members) and 1 << step < members
        )

    # ---- the result
    def _result(self, status: Status) -> Averaged:
        decided = [outcome for outcome in self._steps if outcome.status == "committed"]
        members = decided[-1].members if decided else 0
        weight = self._standing(decided, members) if decided else None
        exact = self._plain and status == "committed" and weight == members
        return Averaged(
            status,
            tuple(self._steps),
            members,
            weight,
            exact,
            self._residual(decided, members, weight),
        )

    def _standing(self, decided: Sequence[Outcome], members: int) -> int | None:
        distinct = (
            self._covers(members)
            if self._plan == "grid"
            else members == 1 or self._disjoint(members, len(self._steps) - 1)
        )
        if not distinct or len({outcome.config for outcome in decided}) > 1:
            return None
        return self._weight // (1 if self._plan == "grid" else HALVED)

    def _covers(self, members: int) -> bool:
        """Whether the grid has room for all: else each of its groups is everybody."""
        name = self._calls[0].group.partition(".")[0]
        return name[0] == "d" or prod(int(size) for size in name.split("x")) >= members

    def _residual(
        self, decided: Sequence[Outcome], members: int, weight: int | None
    ) -> float | None:
        if not decided or not self._plain:
            return None
        if weight is not None:
            return drawn_error(weight, members)
        if self._plan == "grid" or self._missed:
            return None
        groups = (members + 1) // 2
        return sqrt(((groups - 1) / (members - 1)) ** len(decided))


def mixed(operating: Operating, value: Tensor, share: float) -> Tensor:
    """The mean of ``value`` (float32, contiguous), which counts ``share``, and of a result that was
    decided without it: for a caller that came late, the mean that it would have had.
    """
    result = value.new_empty(value.shape)
    operating.copy_into(result)
    return result.mul_(1 - share).add_(value, alpha=share)


def drawn_error(drawn: float, members: int) -> float:
    """Standard error of the mean of ``drawn`` of ``members`` values, without replacement, in
    standard deviations of these.
    """
    return sqrt(max(0.0, (members - drawn) / (drawn * (members - 1)))) if members > 1 else 0.0


def expected_error(members: int, dims: Sequence[int] | None = None, *, churn: float = 0.0) -> float:
    """Root mean square error of an average on a grid (default: of two dimensions), in standard
    deviations of the members' values, where every member misses every step with probability
    ``churn``. Derived at the top of this module."""
    dims = tuple(dims) if dims is not None else grid_dims(members)
    return drawn_error(members * (1 - churn) ** (2 * len(dims) - 1), members)
