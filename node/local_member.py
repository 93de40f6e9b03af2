"""LocalMember: the Swarm that a script of a LocalSwarm sees. Every wait passes the baton, so virtual time goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import cast

import torch
from torch import Tensor

from ..collectives.codec import decode_chunks, get_codec
from ..collectives.errors import AtollError, LocalProtocolError, SwarmClosedError
from ..collectives.identifiers import PeerId, RunId
from ..collectives.layout import Layout
from ..collectives.swarm import Outcome, PeerView, RunSettings
from ..optim.solo import Lease
from .session import events as ev
from .session.replica import ModelReplica, PlainSlots
from .simulation.process import NodeProcess, Place
from .simulation.stage import Actor

LEAVE_S = 120.0


class LocalPending:
    """A contribution or an operation, until it is decided (a Pending[Outcome])."""

    def __init__(
        self, member: LocalMember, since: float, on_late: Callable[[], None] | None = None, deadline_s: float | None = None
    ) -> None:
        self.outcome: Outcome | None = None
        self.since = since
        self._member, self._on_late, self._deadline = member, on_late, None if deadline_s is None else since + deadline_s

    def done(self) -> bool:
        """Whether it is decided."""
        return self.outcome is not None

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """The outcome; an open one after ``timeout_s`` virtual seconds, or when the operation's own deadline has passed."""
        member = self._member
        if self._deadline is not None:
            left = max(0.0, self._deadline - member.clock())
            timeout_s = left if timeout_s is None else min(timeout_s, left)
        member.wait(lambda: self.outcome is not None, timeout_s)
        if self.outcome is None and self._deadline is not None and member.clock() >= self._deadline:
            self.outcome = member.still_open("the deadline passed")
            if self._on_late is not None:
                self._on_late()
        return self.outcome or member.still_open("not decided yet")


class LocalMember:
    """See `collectives.swarm.Swarm`. Beyond it: ``index``, `clock` and `sleep` in virtual seconds."""

    def __init__(self, place: Place, peer: PeerId, index: int, rng: Random) -> None:
        self.peer, self.index = peer, index
        self.run_id: RunId = place.run_id
        self.settings: RunSettings = place.settings
        self.closing = 0
        self.reports: list[dict[str, float]] = []
        self._place, self._rng = place, rng
        self._process: NodeProcess | None = None
        self._actor: Actor | None = None
        self._layout: Layout | None = None
        self._pending: tuple[bytes, LocalPending] | None = None
        self._operations: dict[str, tuple[bytes, LocalPending, Tensor]] = {}
        self._closed = False
        self._frozen = False

    # ---- between script and world
    def bind(self, process: NodeProcess, actor: Actor) -> None:
        """The node and the thread of this script."""
        self._process, self._actor = process, actor

    def lost(self) -> None:
        """The node was killed, and this script with it."""
        self._closed, self._process = True, None

    def freeze(self, frozen: bool) -> None:
        """Stop the script, or let it go on."""
        self._frozen = frozen
        if self._actor is not None:
            self._actor.frozen = frozen
            self._actor.poke()

    def hear(self, event: object) -> None:
        """An event of the session."""
        match event:
            case ev.RoundCommitted(cid=cid) if self._pending is not None and self._pending[0] == cid:
                pending = self._pending[1]
                self._pending = None
                pending.outcome = Outcome(
                    "committed",
                    event.round,
                    event.contributors,
                    event.counted,
                    event.lost,
                    *self._traffic(),
                    elapsed_s=self.clock() - pending.since,
                )
            case ev.ContributionRefused(cid=cid) if self._pending is not None and self._pending[0] == cid:
                pending = self._pending[1]
                self._pending = None
                pending.outcome = Outcome("committed", self._node().session.completed, reason=f"refused: {event.reason}")
            case ev.RoundClosing():
                self.closing = max(self.closing, event.round)
            case ev.OperationDone() if event.op_id in self._operations:
                self._operation_done(event)
            case _:
                pass
        if self._actor is not None:
            self._actor.poke()

    def wait(self, until: Callable[[], bool], timeout_s: float | None) -> bool:
        """Pass the baton until ``until()`` or the time has passed."""
        assert self._actor is not None
        return self._actor.wait(until, timeout_s)

    def clock(self) -> float:
        """Virtual seconds."""
        return self._place.world.now

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass: the script is busy with something else than optimizer steps."""
        assert self._actor is not None
        self._actor.sleep(seconds)

    def still_open(self, reason: str) -> Outcome:
        """An outcome that is none yet."""
        return Outcome("open", self._node().session.completed + 1 if self._process else 0, reason=reason)

    def _node(self) -> NodeProcess:
        if self._closed or self._process is None:
            raise SwarmClosedError("this swarm was closed")
        return self._process

    def _traffic(self) -> tuple[int, int]:
        network = self._place.network
        return network.bytes_sent.get(self.peer, 0), network.bytes_received.get(self.peer, 0)

    # ---- Swarm
    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> Lease:
        """See Swarm."""
        node = self._node()
        session = node.session
        with node.alive():
            known = session.attach(self.clock(), layout)
            if not known and session.machine is None and self.peer == self._place.organiser:
                values = torch.zeros(layout.numel)
                initial(values)
                session.found(self.clock(), layout, values)
        self.wait(lambda: session.phase == "running" or self._closed, None)
        with self._node().alive():
            session.attach(self.clock(), layout)  # now that the run's model is known, it must be this one
        self._layout = layout
        return self.anchor()

    def anchor(self) -> Lease:
        """See Swarm."""
        session = self._node().session
        replica = cast(ModelReplica, session.replica)
        if self._layout is None:
            raise LocalProtocolError("open() the run first")
        slots = cast(PlainSlots, replica.slots)
        assert slots.current is not None
        return Lease(slots.tensor(slots.current).clone(), session.rounds(replica.generation), lambda: None)

    def contribute(self, *, samples: int, write: Callable[[Tensor], None], base: int | None = None) -> LocalPending:
        """See Swarm."""
        node = self._node()
        if self._layout is None:
            raise LocalProtocolError("open() the run first")
        if self._pending is not None:
            raise LocalProtocolError("a contribution is still undecided", hint="wait() for it, or try again when it is done()")
        if samples < 1:
            raise LocalProtocolError(f"a contribution of {samples} samples")
        vector = torch.zeros(self._layout.numel)
        write(vector)
        cid, pending = self._rng.randbytes(16), LocalPending(self, self.clock())
        self._pending = (cid, pending)
        with node.alive():
            node.session.contribute(self.clock(), cid, samples, vector, base)
        return pending

    def all_reduce(self, flat: Tensor, *, weight: int, op_id: str, deadline_s: float) -> LocalPending:
        """See Swarm."""
        node = self._node()
        if flat.dtype != torch.float32 or not flat.is_contiguous() or not flat.numel() or weight < 1:
            raise LocalProtocolError("all_reduce takes a non-empty float32 tensor, contiguous and on the CPU, and a weight of at least 1")
        codec, cid = self.settings.codec, self._rng.randbytes(16)

        def late() -> None:
            self._operations.pop(op_id, None)
            with self._node().alive():
                self._node().session.operations.abandon(self.clock(), op_id)

        if op_id in self._operations:
            raise LocalProtocolError(f"operation {op_id!r} is under way", hint="wait() for it; give every all_reduce its own op_id")
        pending = LocalPending(self, self.clock(), late, deadline_s)
        self._operations[op_id] = (cid, pending, flat)  # `start` may tell at once what the others have reduced
        try:
            with node.alive():
                node.session.operations.start(self.clock(), op_id, weight, flat.detach().view(-1).clone(), cid, codec)
                node.session.settle(self.clock())
        except AtollError:
            self._operations.pop(op_id, None)
            raise
        return pending

    def _operation_done(self, event: ev.OperationDone) -> None:
        cid, pending, flat = self._operations.pop(event.op_id)
        codec = get_codec(event.codec)
        for _ in decode_chunks(codec, event.result, flat.numel(), event.chunk_elements, flat.detach().view(-1)):
            pass
        pending.outcome = Outcome(
            "committed", 1, event.contributors, event.cid == cid, (), *self._traffic(), elapsed_s=self.clock() - pending.since
        )

    def members(self) -> Sequence[PeerView]:
        """See Swarm."""
        session, now, views = self._node().session, self.clock(), list[PeerView]()
        for peer in session.config_peers():
            record = session.membership.record(peer)
            round_ = session.completed if peer == self.peer else max(0, record.round - 1) if record else 0
            path = "self" if peer == self.peer else "direct"
            views.append(PeerView(peer, round_, session.membership.live(now, peer), path, peer == session.organiser))
        return views

    def report(self, metrics: Mapping[str, float]) -> None:
        """See Swarm. Kept in ``reports``."""
        self.reports.append({name: float(value) for name, value in metrics.items()})

    def leave(self) -> None:
        """See Swarm."""
        node = self._node()
        with node.alive():
            node.session.leave(self.clock())
        self.wait(lambda: self._closed or self.peer not in node.session.config_peers(), LEAVE_S)

    def close(self) -> None:
        """See Swarm. The node goes on seeding until all scripts have ended."""
        if not self._closed and self._process is not None:
            with self._process.alive():
                self._process.session.detach(self.clock())
        self._closed = True
