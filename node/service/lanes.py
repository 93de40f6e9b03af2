"""Which lanes a node keeps open: to every member of a small configuration, in a large one to those
that plans and transfers need.

A lane costs a heartbeat five times a second at both ends and a place in the engine's turn, so that
hundreds of them are not free; and who averages in groups talks with few. In a configuration of at
most KEPT others nothing is waited for: all lanes are open before anybody asks. Beyond that a lane
is opened when a plan or a transfer first names the peer. Those that nobody has used for a while
stay, the KEPT used last; an idle lane that is lost is not made again, so that the other end may let
go of it, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import trio

from ...collectives.exchange import Bounds
from ...collectives.group import Plan
from ...collectives.identifiers import PeerId
from ...collectives.messages import Spans
from ...collectives.trees import parents_of, witnesses_of
from ..session.ports import ContentPlane, DataPlane

KEPT = 32
HOLD_S = 30.0
"""A peer that was asked for something is not idle for so long."""


class LaneKeeper:
    """For all runs of a node. ``keep(peer)`` opens and keeps a lane; ``let_go(peer)`` closes and
    forgets it. Sans I/O.
    """

    def __init__(
        self,
        keep: Callable[[PeerId], None],
        let_go: Callable[[PeerId], None],
        *,
        kept: int | None = None,
        hold_s: float | None = None,
    ) -> None:
        """``kept``, ``hold_s``: KEPT and HOLD_S where they are None."""
        self._keep, self._let_go = keep, let_go
        self.kept, self._hold_s = (
            KEPT if kept is None else kept,
            HOLD_S if hold_s is None else hold_s,
        )
        # Every lane that is wanted or there; used last: last.
        self._used: OrderedDict[PeerId, float] = OrderedDict()
        self._wanted = set[PeerId]()  # ... of which these are to be made again when they are lost
        self._members: dict[str, frozenset[PeerId]] = {}  # of small configurations, by run
        self._busy: dict[Hashable, Collection[PeerId]] = {}  # by what is under way

    def members(self, now: float, run: str, peers: frozenset[PeerId]) -> None:
        """The other members of a run's configuration, as it is now."""
        small = peers if len(peers) <= self.kept else frozenset[PeerId]()
        if self._members.get(run, frozenset[PeerId]()) != small:
            self._members[run] = small
            self._wanted -= small  # this run may want more lanes to a peer than another one
            self._use(now, small)

    def begin(self, now: float, key: Hashable, peers: Collection[PeerId]) -> None:
        """Something is under way with these, until `end`."""
        self._busy[key] = peers
        self._use(now, peers)

    def end(self, now: float, key: Hashable) -> None:
        """It is over."""
        for peer in self._busy.pop(key, ()):
            self._used[peer] = now

    def soon(self, now: float, peers: Collection[PeerId]) -> None:
        """These are about to talk. If they are few, their lanes need not wait for a plan."""
        if len(peers) <= self.kept:
            self._use(now, peers)

    def once(self, now: float, peer: PeerId) -> None:
        """This peer is sent something."""
        self._use(now, (peer,))

    def came(self, now: float, peer: PeerId) -> None:
        """There is a lane now, whoever wanted it."""
        self._used.setdefault(peer, now)

    def keeps(self, peer: PeerId) -> bool:
        """Whether lanes to a peer are wanted."""
        return peer in self._wanted

    def lost(self, now: float, peer: PeerId) -> bool:
        """A lane is gone. Whether it is to be made again: if not, it is forgotten."""
        again = peer in self._wanted and not self._idle(now, peer, self._held())
        if not again:
            self._forget(peer)
        return again

    def left(self, run: str) -> None:
        """The run is no longer here."""
        self._members.pop(run, None)

    def tend(self, now: float) -> None:
        """Let go of lanes that are idle, but for the ``kept`` used last."""
        if len(self._used) <= self.kept:
            return
        held = self._held()
        idle = [peer for peer in self._used if self._idle(now, peer, held)]
        for peer in idle[: max(0, len(idle) - self.kept)]:
            self._forget(peer)

    def _use(self, now: float, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            self._used[peer] = now
            self._used.move_to_end(peer)
            if peer not in self._wanted:
                self._wanted.add(peer)
                self._keep(peer)

    def _held(self) -> set[PeerId]:
        return {peer for peers in (*self._members.values(), *self._busy.values()) for peer in peers}

    def _idle(self, now: float, peer: PeerId, held: Collection[PeerId]) -> bool:
        return peer not in held and now - self._used.get(peer, -1e9) >= self._hold_s

    def _forget(self, peer: PeerId) -> None:
        if self._used.pop(peer, None) is not None:
            self._wanted.discard(peer)
            self._let_go(peer)


def neighbours(plan: Plan, audience: Iterable[PeerId], me: PeerId) -> frozenset[PeerId]:
    """With whom a member exchanges records of a plan whose result goes to ``audience``: those above
    and below it in the tree of any part, and those in whose checks it is."""
    owners, peers = [part.owner for part in plan.parts], [c.member.peer for c in plan.contributors]
    found, everybody = set[PeerId](), {*peers, *audience}
    for owner, parents in zip(owners, parents_of(plan.topology, peers, owners), strict=True):
        if me == owner or me in parents.values():
            found.update(
                peer for peer in everybody if peer != owner and parents.get(peer, owner) == me
            )
        if me != owner:
            found.add(parents.get(me, owner))
        for head, witness in witnesses_of(plan, owner, parents).items():
            if me == witness:
                found.update(
                    (owner, head, *(peer for peer, above in parents.items() if above == head))
                )
            elif me in (owner, head) or parents.get(me) == head:
                found.add(witness)
    return frozenset(found - {me})


class LanedPlane:
    """The data plane of a run, as its sessions command it: a lane is asked for with every command
    that needs one. See `DataPlane`; of content `LanedContent`.
    """

    def __init__(self, plane: DataPlane, lanes: LaneKeeper, me: PeerId) -> None:
        self._plane, self._lanes, self._me = plane, lanes, me
        self.open_round, self.freeze = plane.open_round, plane.freeze
        self.release, self.report = plane.release, plane.report

    def execute(self, plan: Plan, audience: Sequence[PeerId]) -> None:
        if (
            len(audience) > self._lanes.kept
        ):  # else its members are those of a small configuration, or of a group of one
            self._lanes.begin(
                trio.current_time(), (plan.log, plan.round), neighbours(plan, audience, self._me)
            )
        else:
            self._lanes.begin(
                trio.current_time(), (plan.log, plan.round), frozenset(audience) - {self._me}
            )
        self._plane.execute(plan, audience)

    def close_round(self, log: str, round_: int) -> None:
        self._lanes.end(trio.current_time(), (log, round_))
        self._plane.close_round(log, round_)

    def resend_parts(self, peer: PeerId, plan_id: bytes, cid: bytes, spans: Spans) -> None:
        self._lanes.once(trio.current_time(), peer)
        self._plane.resend_parts(peer, plan_id, cid, spans)

    def resend_results(self, peer: PeerId, plan_id: bytes, spans: Spans) -> None:
        self._lanes.once(trio.current_time(), peer)
        self._plane.resend_results(peer, plan_id, spans)


class LanedContent:
    """The same of content. See `ContentPlane`."""

    def __init__(self, plane: ContentPlane, lanes: LaneKeeper, me: PeerId) -> None:
        self._plane, self._lanes, self._me = plane, lanes, me
        self.provide, self.withdraw = plane.provide, plane.withdraw
        self.report_blob = plane.report_blob

    def send_blob(self, peer: PeerId, name: bytes, spans: Spans) -> None:
        self._lanes.once(trio.current_time(), peer)
        self._plane.send_blob(peer, name, spans)

    def want(
        self,
        name: bytes,
        destination: memoryview,
        bounds: Bounds,
        hashes: Sequence[bytes],
        sources: Sequence[PeerId],
    ) -> None:
        self._lanes.begin(trio.current_time(), name, frozenset(sources) - {self._me})
        self._plane.want(name, destination, bounds, hashes, sources)

    def unwant(self, name: bytes) -> None:
        self._lanes.end(trio.current_time(), name)
        self._plane.unwant(name)
