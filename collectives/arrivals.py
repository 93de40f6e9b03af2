"""Rounds that do not wait for everybody: for whom they wait, and what a contribution is worth in
them. Settings only.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class Fading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a contribution moves the anchor: by ``alpha`` a fresh one, less one that is stale,
    never more: ``alpha · s(staleness)``. ``a``, ``b``: of s
    (`optim.federated.arrivals.staleness_factor`); ``a`` None: what is usual."""

    alpha: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    b: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 4


class Groups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Members get as many inner steps as let a group of them arrive together (FedCompass,
    `modes.arrivals.compass`): ``least`` to ``most`` a turn, ``first`` in a member's first. A group
    is waited for ``slack`` times as long as it should take."""

    least: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    most: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    first: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    slack: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.5


class GraceWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a round that has its ``count`` is held open for others that are still training
    (Decoupled DiLoCo's grace window): ``seconds``, or, where that is None, as long as one inner
    step takes the fastest member that is there and so waits.
    """

    seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = 0.0


class DynamicSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each member makes as many inner steps a turn as its speed allows, ``least`` to ``most``
    (DyLU, `modes.arrivals.dynamic_steps`).
    """

    most: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    least: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] = 1


class ArrivalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A round waits for some contributions, not for all members (`modes.arrivals`): for ``count``
    of them (FedBuff), or until ``period_s`` seconds are over, and as many periods more as nobody
    comes (FedFix), or for a group of ``groups`` (FedCompass). One of the three is given.
    ``fading``: what a stale one counts, of FedAsync, where contributions are mixed in, and of
    FedCompass, where they are added.

    ``window``: a round of ``count`` waits on for so long, and what members give are changes of the
    anchor that they began at, added as in any round of DiLoCo (asynchronous DiLoCo); ``dynamic``:
    its members make unequal numbers of steps."""

    count: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    period_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    fading: Fading | None = None
    groups: Groups | None = None
    window: GraceWindow | None = None
    dynamic: DynamicSteps | None = None
