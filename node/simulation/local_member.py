"""LocalMember: the Swarm that a script of a LocalSwarm sees. Every wait passes the baton, so
virtual time goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

import torch
from torch import Tensor

from ...collectives import telemetry
from ...collectives.api import Handle, all_reduce
from ...collectives.codecs.codec import Chunking
from ...collectives.codecs.vanished import vanished_share
from ...collectives.cutting import cut
from ...collectives.errors import AtollError, LocalProtocolError, SwarmClosedError
from ...collectives.group import Evaluated
from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import Layout
from ...collectives.metrics import Warned
from ...collectives.op_names import OWN_NAME
from ...collectives.outcomes import Outcome, Spent, Tally
from ...collectives.plain import buffer_length, placed
from ...collectives.script_swarm import Call, PeerView, Reduction, Shelf
from ...collectives.swarm import RunSettings, sample_count
from ...optim.data.shard import Shard
from ...optim.outer.readings import reading_of
from ...optim.outer.standing import WorthWatch
from ...optim.outer.worth import worth_of
from ...optim.solo import AnchorLease
from ..run.same_order import SameOrder, said_by
from ..session import events as ev
from ..session.calls import calls_of
from ..session.replica import ModelReplica, PlainSlots
from ..session.session import Session
from .process import NodeProcess, Place
from .stage import Actor

LEAVE_S = 120.0
ADMISSION_S = 10.0  # how long a script waits to be a member before it trains anyway, as at a node


class LocalPending:
    """A contribution, until it is decided (a Pending[Outcome])."""

    def __init__(self, member: LocalMember, since: float) -> None:
        self.outcome: Outcome | None = None
        self.since = since
        self._member = member

    def done(self) -> bool:
        return self.outcome is not None

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """The outcome; an open one after ``timeout_s`` virtual seconds."""
        self._member.wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome or self._member.still_open("not decided yet")


class LocalOperating(LocalPending):
    """A free-standing operation (an Operating). Its deadline is looked at by whoever waits, or asks
    whether it is done.
    """

    def __init__(
        self, member: LocalMember, call: Call, cid: bytes, members: tuple[PeerId, ...], numel: int
    ) -> None:
        super().__init__(member, member.clock())
        self.call, self.cid, self.members, self.numel = call, cid, members, numel
        self.op_id = call.op_id
        self.traffic = member.traffic()
        self.result: Tensor | None = None

    def done(self) -> bool:
        self._look()
        return self.outcome is not None

    def _look(self) -> None:
        """At the deadline."""
        if self.outcome is None and self._member.clock() >= self.since + self.call.deadline_s:
            self.outcome = self._member.abandon(self.call.op_id, "the deadline passed")

    def wait(self, timeout_s: float | None = None) -> Outcome:
        member, left = (
            self._member,
            max(0.0, self.since + self.call.deadline_s - self._member.clock()),
        )
        member.wait(
            lambda: self.outcome is not None, left if timeout_s is None else min(timeout_s, left)
        )
        self._look()
        return self.outcome or member.still_open("not decided yet")

    def copy_into(self, destination: Tensor, start: int = 0) -> None:
        if self.result is None:
            raise LocalProtocolError(f"{self.call.name} has no result")
        destination.detach().view(-1).copy_(self.result[start : start + destination.numel()])

    def release(self) -> None:
        self.result = None

    def cancel(self) -> None:
        if self.outcome is None:
            self.outcome = self._member.abandon(self.call.op_id, "cancelled by its caller")


class LocalMember:
    """A `Swarm`. Beyond it: ``index``, `clock` and `sleep` in virtual seconds."""

    def __init__(self, place: Place, peer: PeerId, index: int, rng: Random, shelf: Shelf) -> None:
        self.peer, self.index = peer, index
        self.run_id: RunId = place.run_id
        self.settings: RunSettings = place.settings
        self._closing: dict[int, int] = {}  # by fragment
        self.reports: list[dict[str, float]] = []
        self._refused = Warned("swarm.report()")
        self.same_order = SameOrder(place.run_id)
        self._worth = WorthWatch()
        self._place, self._rng, self._shelf = place, rng, shelf
        self._process: NodeProcess | None = None
        self._actor: Actor | None = None
        self._layout: Layout | None = None
        self._pending: dict[int, tuple[bytes, LocalPending]] = {}  # by fragment
        self._operations: dict[str, LocalOperating] = {}
        # bytes (sent, received) that outcomes of contributions have reported
        self._reported_traffic = (0, 0)
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
        fragment, event = (
            (event.fragment, event.event) if isinstance(event, ev.InFragment) else (0, event)
        )
        cid, pending = self._pending.get(fragment, (None, None))
        asked = self.settings.evaluate
        if isinstance(event, ev.RoundCommitted) and asked is not None:
            worth = worth_of(event.readings, event.lying)
            if worth is not None:
                self._worth.take(fragment, worth, asked.rounds, event.plain_since)
        match event:
            case ev.RoundCommitted() if pending is not None and event.cid == cid:
                del self._pending[fragment]
                pending.outcome = Outcome(
                    "committed",
                    event.round,
                    event.contributors,
                    event.counted,
                    event.lost,
                    *self._since(),
                    elapsed_s=self.clock() - pending.since,
                )
            case ev.ContributionRefused() if pending is not None and event.cid == cid:
                del self._pending[fragment]
                completed = self._session(fragment).completed
                pending.outcome = Outcome(
                    "lost",
                    completed,
                    reason=f"refused: {event.reason}",
                    unfit=event.unfit,
                    over=event.over,
                )
            case ev.Timed():
                telemetry.emit(event.timing)
            case ev.RoundClosing():
                self._closing[fragment] = max(self.fragment_closing(fragment), event.round)
            case ev.OperationDone() | ev.OperationRefused() if event.op_id in self._operations:
                self.ended(self._operations[event.op_id], event)
            case ev.ContributionRefused():
                for running in [
                    running for running in self._operations.values() if running.cid == event.cid
                ]:
                    self.ended(running, None, event.reason)
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
        return Outcome(
            "open", self._node().session.completed + 1 if self._process else 0, reason=reason
        )

    def _session(self, fragment: int) -> Session:
        sessions = self._node().run.sessions
        if not 0 <= fragment < len(sessions):
            raise LocalProtocolError(f"fragment {fragment} of {len(sessions)}")
        return sessions[fragment]

    def _node(self) -> NodeProcess:
        if self._closed or self._process is None:
            raise SwarmClosedError("this swarm was closed")
        return self._process

    def traffic(self) -> tuple[int, int]:
        """Bytes (sent, received) by this member so far."""
        network = self._place.network
        return network.bytes_sent.get(self.peer, 0), network.bytes_received.get(self.peer, 0)

    def _since(self) -> tuple[int, int]:
        """Bytes (sent, received) since the outcome of the contribution before."""
        sent, received = traffic = self.traffic()
        (before, earlier), self._reported_traffic = self._reported_traffic, traffic
        return sent - before, received - earlier

    # ---- Swarm
    def shelf(self) -> Shelf:
        """It outlives this member's processes."""
        return self._shelf

    def open(self, layout: Layout, initial: Callable[[Tensor], None]) -> AnchorLease:
        node = self._node()
        session = node.run
        with node.alive():
            known = session.attach(self.clock(), layout)
            if not known and session.phase == "seeking" and self.peer == self._place.organiser:
                values = torch.zeros(layout.numel, dtype=torch.float32, device="cpu")
                initial(values)
                session.found(self.clock(), layout, values)
        self.wait(lambda: session.phase == "running" or self._closed, None)
        with self._node().alive():
            # Now that the run's model is known, it must be this one.
            session.attach(self.clock(), layout)
        members = [each.machine for each in session.sessions]
        self.wait(
            lambda: (
                self._closed or all(machine is None or machine.is_member for machine in members)
            ),
            ADMISSION_S,
        )
        self._layout = layout
        return self.anchor()

    def anchor(self) -> AnchorLease:
        """Of all fragments; its round is that of the one that is behind."""
        views = [self.fragment_anchor(number) for number in range(self.fragments)]
        whole, start = (
            torch.empty(sum(view.numel for view in views), dtype=torch.float32, device="cpu"),
            0,
        )
        for view in views:
            view.copy_into(whole[start : start + view.numel])
            start += view.numel
        round_, samples = min(view.round for view in views), min(view.samples for view in views)
        return AnchorLease(whole, round_, lambda: None, samples, views[0].lag, views[0].steps)

    def contribute(
        self,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> LocalPending:
        if self.fragments > 1:
            raise LocalProtocolError(
                f"this run is cut into {self.fragments} fragments",
                hint="contribute_fragment() offers one of them",
            )
        return self.contribute_fragment(
            0, samples=samples, write=write, base=base, loss=loss, lag=lag, hold_s=hold_s
        )

    @property
    def holds(self) -> bool:
        """A contribution can wait for others to end the round (``hold_s``)."""
        return True

    @property
    def closing(self) -> int:
        return self.fragment_closing(0)

    @property
    def model_folder(self) -> None:
        """The run ends with this process."""

    @property
    def paused(self) -> str:
        """Never."""
        return ""

    @property
    def averaging(self) -> str:
        """What members' evaluations have against averaging, in words; "" where nothing."""
        return self._worth.standing

    # ---- FragmentSwarm
    @property
    def fragments(self) -> int:
        return self.settings.fragments

    def fragment_anchor(self, fragment: int) -> AnchorLease:
        session = self._session(fragment)
        replica = cast(ModelReplica, session.replica)
        if self._layout is None:
            raise LocalProtocolError("open() the run first")
        slots = cast(PlainSlots, replica.slots)
        assert slots.current is not None
        rounds, samples = session.rounds(replica.generation), session.samples(replica.generation)
        lag, whole = session.lag(replica.generation), slots.tensor(slots.current).clone()
        return AnchorLease(whole, rounds, lambda: None, samples, lag, session.steps)

    def fragment_closing(self, fragment: int) -> int:
        return self._closing.get(fragment, 0)

    def contribute_fragment(
        self,
        fragment: int,
        *,
        samples: int,
        write: Callable[[Tensor], None],
        base: int | None = None,
        loss: float | Evaluated | None = None,
        lag: float | None = None,
        hold_s: float = 0.0,
    ) -> LocalPending:
        node, session = self._node(), self._session(fragment)
        if self._layout is None or session.machine is None:
            raise LocalProtocolError("open() the run first")
        if fragment in self._pending:
            raise LocalProtocolError(
                "a contribution is still undecided",
                hint="wait() for it, or try again when it is done()",
            )
        if (samples := sample_count(samples)) < (1 if self.settings.sample is None else 0):
            raise LocalProtocolError(f"a contribution of {samples} samples")
        vector = torch.zeros(session.machine.shape.numel, dtype=torch.float32, device="cpu")
        write(vector)
        reading = reading_of(
            vector,
            cut(self._layout, self.fragments)[fragment],
            self.settings.effective_outer,
            loss,
            lag,
        )
        cid, pending = self._rng.randbytes(16), LocalPending(self, self.clock())
        self._pending[fragment] = (cid, pending)
        with node.alive():
            session.contribute(self.clock(), cid, samples, vector, base, reading, hold_s)
        return pending

    # ---- Swarm
    def buffer(self, numel: int) -> Tensor:
        """An ordinary tensor. Raises LocalProtocolError as that of a run."""
        return torch.zeros(buffer_length(numel), dtype=torch.float32, device="cpu")

    def vanished(self, flat: Tensor, codec: str) -> float:
        return vanished_share(flat, codec)

    def operate(self, call: Call, source: Tensor) -> LocalOperating:
        node = self._node()
        if source.dtype != torch.float32 or not source.is_contiguous() or not source.numel():
            raise LocalProtocolError(
                f"{call.name} takes a non-empty float32 tensor, contiguous and on the CPU"
            )
        if call.op_id in self._operations:
            raise LocalProtocolError(
                f"{call.name} is under way",
                hint=f"wait() for it. {OWN_NAME}",
            )
        operations, cid = calls_of(node.session), self._rng.randbytes(16)
        operation = operations.prepare(self.clock(), call, source.numel())
        vector = placed(
            source.detach().view(-1).to("cpu", copy=True),
            operation.machine.shape.numel,
            operation.peers,
            self.peer,
        )
        running = self._operations[call.op_id] = LocalOperating(
            self, call, cid, tuple(operation.peers), vector.numel()
        )
        try:  # `start` may tell at once what the others have reduced
            with node.alive():
                operations.start(self.clock(), call, source.numel(), vector, cid)
                node.session.settle(self.clock())
        except AtollError:
            self._operations.pop(call.op_id, None)
            raise
        return running

    def all_reduce(
        self,
        flat: Tensor,
        *,
        op_id: str,
        op: Reduction = "mean",
        weight: int = 1,
        deadline_s: float = 60.0,
        codec: str = "",
        everyone: bool = False,
    ) -> Handle[Outcome]:
        return all_reduce(
            self,
            flat,
            op_id=op_id,
            op=op,
            weight=weight,
            deadline_s=deadline_s,
            codec=codec,
            everyone=everyone,
        )

    def abandon(self, op_id: str, reason: str) -> Outcome:
        """The caller of an operation waits no longer."""
        self._operations.pop(op_id, None)
        if self._closed or self._process is None:
            return self.still_open(f"{reason}: this swarm was closed")
        says = ""
        with self._node().alive():
            says = calls_of(self._node().session).abandon(self.clock(), op_id)
        return self.still_open(f"{reason}: {says}" if says else reason)

    def ended(
        self,
        running: LocalOperating,
        event: ev.OperationDone | ev.OperationRefused | None,
        reason: str = "",
    ) -> None:
        """An operation is over."""
        self._operations.pop(running.call.op_id, None)
        if not isinstance(event, ev.OperationDone):
            outcome = self.still_open(event.reason if event else reason)
            if event is not None:
                outcome = replace(outcome, differs=event.differs, overflows=event.overflows)
            running.outcome = outcome
            return
        running.result = torch.empty(running.numel, dtype=torch.float32, device="cpu")
        for _ in Chunking(event.codec, running.numel, event.chunk_elements).results.decode(
            event.result, running.result
        ):
            pass
        counted, elapsed = event.cid == running.cid, self.clock() - running.since
        sent, received = (
            now - before for now, before in zip(self.traffic(), running.traffic, strict=True)
        )
        running.outcome = Outcome(
            "committed",
            1,
            event.contributors,
            counted,
            (),
            sent,
            received,
            elapsed,
            config=event.config,
            members=event.members,
        )

    def members(self) -> Sequence[PeerView]:
        session, now, views = self._node().session, self.clock(), list[PeerView]()
        at_work = set(session.at_work(now))
        for peer in session.config_peers():
            record = session.membership.record(peer)
            round_ = (
                session.completed
                if peer == self.peer
                else max(0, record.round - 1)
                if record
                else 0
            )
            path = "self" if peer == self.peer else "direct"
            views.append(
                PeerView(
                    peer,
                    round_,
                    session.membership.live(now, peer),
                    path,
                    peer == session.organiser,
                    self.same_order.equal.get(peer, 0),
                    peer in at_work,
                )
            )
        return views

    @property
    def missing(self) -> str:
        """Which sites the open round lacks, in words; "" where none."""
        return self._node().session.waits.look(self.clock()).of_missing

    @property
    def spent(self) -> Spent | None:
        """What this member has spent of its privacy; None in a run without noise."""
        return self._node().session.spending.spent()

    def tallies(self, first: int) -> Sequence[Tally]:
        return self._session(0).tallies(first)

    def next_number(self, name: str, least: int = 0) -> int:
        return calls_of(self._node().session).next_number(name, least)

    def shard(self, loader: Any) -> Shard:
        return Shard(self, loader)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Kept in ``reports``."""
        self.reports.append(self._refused.taken(metrics))

    def first_batch(self, round_: int, digest: bytes) -> None:
        """What a node does with a script's first batch of a round."""
        session = self._node().session
        session.membership.announce(self.clock(), first_batch=(round_, digest))
        self.same_order.begun(round_, digest)
        self.same_order.look(said_by(session.membership, session.config_peers()))

    def read_batch(self, content: bytes) -> None:
        """The same with each batch."""
        self.same_order.read(content)

    def leave(self) -> None:
        node = self._node()
        with node.alive():
            node.run.leave(self.clock())
        self.wait(lambda: self._closed or self.peer not in node.run.config_peers(), LEAVE_S)

    def close(self) -> None:
        """The node goes on seeding until all scripts have ended."""
        if not self._closed and self._process is not None:
            with self._process.alive():
                self._process.run.detach(self.clock())
        self._closed = True
