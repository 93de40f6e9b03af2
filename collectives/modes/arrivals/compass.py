"""FedCompass' scheduler (Li et al., ICLR 2024, arXiv 2309.14675): members get as many inner steps
as let a group of them arrive together.

A state machine: it is told who arrived and what time it is, and says what is to be merged and who
makes how many steps. Contributions are opaque to it. In a simulation arrivals drive it
(`optim.federated.simulation`), in a run the entries of the log (`grouping`). Two ways in
which the public implementation loses updates are closed: a timer that races the last arrival cannot
merge a group twice, since both are one event here; and of a member that is late twice between two
merges both contributions count, where a buffer by member keeps one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...errors import ConfigError
from ...identifiers import PeerId

Work = TypeVar("Work")


@dataclass(frozen=True, slots=True)
class MergedContribution(Generic[Work]):
    """One contribution of a merge. ``staleness``: outer steps since its base anchor."""

    peer: PeerId
    staleness: int
    work: Work


@dataclass(frozen=True, slots=True)
class Decision(Generic[Work]):
    """One outer step with ``parts`` (none: no step), and then ``orders``: who gets the anchor and
    makes how many inner steps, in this order.
    """

    parts: tuple[MergedContribution[Work], ...]
    orders: tuple[tuple[PeerId, int], ...]


@dataclass(slots=True)
class _Member(Generic[Work]):
    started: float
    steps: int
    version: int
    speed: float | None = None  # seconds a step, a mean over its returns; None before the first
    group: int | None = None
    waiting: bool = False


@dataclass(slots=True)
class _Group(Generic[Work]):
    expected: float
    latest: float
    pending: set[PeerId] = field(default_factory=set)
    # With the version each was made on.
    arrived: list[tuple[PeerId, int, Work]] = field(default_factory=list)


class Compass(Generic[Work]):
    """Groups of members, and when each is merged.

    ``least``, ``most``: inner steps a turn. ``slack``: how much longer than planned a group waits
    for its last. ``keep``: share of the newest in the mean of a member's speed. ``first``: steps of
    a member's first turn, by which its speed is measured; None: ``most``, as in the paper, which
    leaves the first contribution of a slow member far behind. `due` says when `tick` must be called
    next.
    """

    def __init__(
        self,
        least: int = 20,
        most: int = 100,
        slack: float = 1.5,
        keep: float = 0.9,
        first: int | None = None,
    ) -> None:
        if not 0 < least <= most or not slack >= 1 or not 0 < keep <= 1:
            raise ConfigError(
                f"FedCompass: {least} to {most} steps, slack {slack}, keep {keep}",
                why="1 <= least <= most, slack >= 1, 0 < keep <= 1",
            )
        if first is not None and not 0 < first <= most:
            raise ConfigError(
                f"FedCompass: {first} steps in a first turn", key="first", why=f"from 1 to {most}"
            )
        self._least, self._most, self._slack, self._keep, self._first = (
            least,
            most,
            slack,
            keep,
            first or most,
        )
        self._members: dict[PeerId, _Member[Work]] = {}
        self._groups: dict[int, _Group[Work]] = {}
        self._late: list[tuple[PeerId, int, Work]] = []
        self._named = self.version = 0

    @property
    def due(self) -> float | None:
        """When the next group has waited long enough; None while no group waits."""
        return min((group.latest for group in self._groups.values()), default=None)

    def join(self, peer: PeerId, now: float) -> list[Decision[Work]]:
        """A member that is not known, or has been away: its speed is to be measured."""
        before = self.gone(peer, now)
        self._members[peer] = _Member(now, self._first, self.version)
        return [*before, Decision((), ((peer, self._first),))]

    def arrived(self, peer: PeerId, work: Work, now: float) -> list[Decision[Work]]:
        """A member's contribution. Groups whose time is over are merged before. Raises ConfigError
        for one that was given no steps.
        """
        before = self.tick(now)
        member = self._members.get(peer)
        if member is None or member.waiting:
            raise ConfigError(f"{peer} contributes without having been given steps", key="peer")
        first = member.speed is None
        self._measured(peer, (now - member.started) / member.steps)
        mine = (peer, member.version, work)
        group = None if member.group is None else self._groups.get(member.group)
        if group is not None:
            group.pending.discard(peer)
            group.arrived.append(mine)
            member.waiting = True
            return before if group.pending else [*before, *self._merge(member.group, now)]
        if first:
            parts = self._step([mine])
        else:
            self._late.append(mine)
            parts = ()
        return [*before, Decision(parts, self._orders([peer], now))]

    def gone(self, peer: PeerId, now: float) -> list[Decision[Work]]:
        """A member that is known to be away: its group does not wait for it."""
        before = self.tick(now)
        member = self._members.pop(peer, None)
        group = None if member is None or member.group is None else self._groups.get(member.group)
        if member is None or group is None:
            return before
        group.pending.discard(peer)
        return before if group.pending else [*before, *self._merge(member.group, now)]

    def tick(self, now: float) -> list[Decision[Work]]:
        """Merge the groups whose latest arrival has passed; what comes of the others of them later
        is late. An arrival at that moment is in time.
        """
        over = [number for number, group in self._groups.items() if group.latest < now]
        return [decision for number in over for decision in self._merge(number, now)]

    def _merge(self, number: int | None, now: float) -> list[Decision[Work]]:
        assert number is not None
        group = self._groups.pop(number)
        if not group.arrived:  # nobody came in time: what was late waits for a group that does
            return []
        parts = self._step([*group.arrived, *self._late])
        self._late = []
        back = [peer for peer, _, _ in group.arrived if self._waits(peer, number)]
        return [Decision(parts, self._orders(back, now))]

    def _measured(self, peer: PeerId, speed: float) -> None:
        """Seconds a step of a turn that is over."""
        member = self._members[peer]
        member.speed = (
            speed if member.speed is None else (1 - self._keep) * member.speed + self._keep * speed
        )

    def _waits(self, peer: PeerId, number: int) -> bool:
        member = self._members.get(peer)
        return member is not None and member.waiting and member.group == number

    def _step(
        self, entries: Iterable[tuple[PeerId, int, Work]]
    ) -> tuple[MergedContribution[Work], ...]:
        parts = tuple(
            MergedContribution(peer, self.version - version, work)
            for peer, version, work in entries
        )
        self.version += 1
        return parts

    def _orders(self, peers: Iterable[PeerId], now: float) -> tuple[tuple[PeerId, int], ...]:
        """Steps for members that are free, the fastest first: it is they who open groups that the
        others can join.
        """
        free = sorted(peers, key=lambda peer: (self._speed(peer), peer))
        return tuple((peer, self._assign(peer, now)) for peer in free)

    def _speed(self, peer: PeerId) -> float:
        speed = self._members[peer].speed
        assert speed is not None
        return speed

    def _assign(self, peer: PeerId, now: float) -> int:
        member, speed = self._members[peer], self._speed(peer)
        number, steps = self._joinable(speed, now)
        if number is None:
            steps = self._opened(speed, now)
            number, self._named = self._named, self._named + 1
            self._groups[number] = _Group(now + steps * speed, now + self._slack * steps * speed)
        self._groups[number].pending.add(peer)
        member.group, member.steps, member.started, member.version, member.waiting = (
            number,
            steps,
            now,
            self.version,
            False,
        )
        return steps

    def _joinable(self, speed: float, now: float) -> tuple[int | None, int]:
        """The group that gives a member of this speed most to do until it arrives."""
        best, most = None, 0
        for number, group in self._groups.items():
            steps = _floor((group.expected - now) / speed)
            if self._least <= steps <= self._most and steps > most:
                best, most = number, steps
        return best, most

    def _opened(self, speed: float, now: float) -> int:
        """Steps of a member that joins no group: so many that it comes when a group of faster ones
        will be back from the turn after this one.
        """
        found: list[int] = []
        for number, group in self._groups.items():
            peers = [
                *group.pending,
                *(peer for peer, _, _ in group.arrived if self._waits(peer, number)),
            ]
            if now < group.latest and peers:
                back = group.latest + self._most * min(self._speed(peer) for peer in peers)
                found.append(_floor((back - now) / speed))
        within = [steps for steps in found if steps <= self._most]
        return max(self._least, *within) if within else self._most


def _floor(steps: float) -> int:
    return math.floor(steps + 1e-9)
