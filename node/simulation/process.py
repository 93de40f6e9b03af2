"""One life of a node in virtual time: the real Session and the real Exchange on a World and a
Network. No script, no checker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Any, TypeVar, cast

from blake3 import blake3

from ...collectives.errors import StorageError
from ...collectives.exchange import Exchange
from ...collectives.group import Entry
from ...collectives.identifiers import PeerId, RunId
from ...collectives.pace import Lead, Pace
from ...collectives.round import OPEN, Doors, Timing
from ...collectives.simulation import Network, ProcessDied, Timer, World
from ...collectives.swarm import RunSettings
from ...security.identity import Identity
from ..session.barrier import Barrier
from ..session.composing import find_reducers, log_settings_of, modes_of
from ..session.fragments import Whole, whole_of
from ..session.ports import ContentPlane, DataPlane, Storage
from ..session.session import MEMBERSHIP
from ..session.terms import SessionTerms

T = TypeVar("T")
SMALLEST_WAIT_S = 0.001
FAILED_S = 0.5  # a node whose disk failed is started again so long after
MAX_SERVED = 32  # as in a node
UNKNOWN = Pace()


@dataclass(slots=True)
class Place:
    """Where processes live: what all members of one run share."""

    world: World
    network: Network
    peers: Sequence[PeerId]
    run_id: RunId
    organiser: PeerId
    settings: RunSettings
    timing: Timing
    chunk_elements: int | None = None
    checkpoint_every: int = 4
    work_s: float = 0.002  # what offloaded work takes
    sync_s: float = 0.001  # what the medium takes for a sync
    exchange: type[Exchange] = Exchange
    probation: int = 0
    per_hour: int = 0
    doors: Callable[[PeerId], Doors] = lambda peer: OPEN
    # What members have measured of their links.
    paces: dict[PeerId, Pace] = field(default_factory=dict[PeerId, Pace])
    # Of whom, who does not read what is said to it.
    unread: set[tuple[PeerId, PeerId]] = field(default_factory=set[tuple[PeerId, PeerId]])
    sites: Mapping[PeerId, str] = field(default_factory=dict[PeerId, str])
    plot: dict[tuple[str, int, int], dict[bytes, Entry]] = field(
        default_factory=dict[tuple[str, int, int], dict[bytes, Entry]]
    )
    """What liars have proposed, by log, round and ballot: they know of one another."""
    liars: frozenset[PeerId] = frozenset()  # who lies: they know of one another
    # Of a secure run.
    identities: Mapping[PeerId, Identity] = field(default_factory=dict[PeerId, Identity])
    _order: dict[PeerId, int] = field(init=False, default_factory=dict[PeerId, int])

    @property
    def order(self) -> dict[PeerId, int]:
        """The number of each of ``peers``: another object once there are more of them."""
        if len(self._order) != len(self.peers):
            self._order = {peer: number for number, peer in enumerate(self.peers)}
        return self._order


def sign_as(peer: PeerId, payload: bytes) -> bytes:
    """Stands in for Ed25519: cheap, and nobody in a simulation forges it."""
    return blake3(peer.encode() + b"\0" + payload).digest(64)


def verify_as(peer: PeerId, payload: bytes, signature: bytes) -> bool:
    """Whether a signature is `sign_as`'s."""
    return signature == sign_as(peer, payload)


class Input:
    """Around every input of a process: what follows from it happens at its end
    (`NodeProcess.settle`). A trap may end it all.
    """

    __slots__ = ("_process", "_pulled")

    def __init__(self, process: NodeProcess, pulled: bool) -> None:
        self._process, self._pulled = process, pulled

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, StorageError):
            self._process.troubled()
        elif isinstance(error, ProcessDied):
            self._process.killed(error)
        if error is None or isinstance(error, StorageError):
            try:
                self._process.settle(self._pulled)
            except ProcessDied as death:
                self._process.killed(death)
            except StorageError:
                self._process.troubled()
        return error is None or isinstance(error, ProcessDied | StorageError)


class NodeProcess:
    """Drives a Session (or Fragments) and an Exchange; implements `SessionPorts`. After `end`
    nothing of it happens any more.

    ``emit`` hears the session's events, ``died(back_after_s)`` that a trap killed the process
    inside a call.
    """

    def __init__(
        self,
        place: Place,
        peer: PeerId,
        storage: Storage,
        rng: Random,
        *,
        emit: Callable[[object], None],
        died: Callable[[float], None],
        others: Sequence[Storage] = (),
    ) -> None:
        """``others``: storages of the second and all further fragments of a run that is cut into
        fragments.
        """
        self.place, self.peer = place, peer
        self.storage: Storage = storage
        self.world, self.network = place.world, place.network
        self.ended = self.frozen = False
        self.troubles = 0
        self.plane = place.exchange(
            peer,
            emit=lambda event: self._events.append(event),
            reducers=find_reducers(),
            clock=lambda: place.world.now,
            resend_after_s=lambda: 8 * place.timing.pull_s,
            # no limit where nothing is known, as in a node
            lead=lambda: Lead(self.pace().up / place.timing.weight, 0.1),
            beside=lambda work: self.offload(work, lambda _, done: done()),
        )
        self.exchange = cast(DataPlane, self.plane)
        self.content = cast(ContentPlane, self.plane)
        self.barrier = Barrier([storage, *others], self.persist)
        terms = SessionTerms(
            run=place.run_id,
            me=peer,
            organiser=place.organiser,
            settings=log_settings_of(place.settings),
            timing=place.timing,
            checkpoint_every=place.checkpoint_every,
            chunk_elements=place.chunk_elements,
            probation=place.probation,
            per_hour=place.per_hour,
            doors=place.doors(peer),
            modes=modes_of(place.settings, place.identities.get(peer), rng),
            site=place.sites.get(peer, ""),
        )
        self.run: Whole = whole_of(
            terms,
            ports=self,
            storages=[storage, *others] if others else (),
            rng=rng,
            now=place.world.now,
        )
        self.session = self.run.sessions[0]
        self._rng, self._emit, self._died = rng, emit, died
        self._events: deque[Any] = deque()
        self._timer: Timer | None = None
        self._pumps: dict[PeerId, Timer] = {}
        self._jobs: deque[tuple[Callable[[], Any], Callable[[float, Any], None]]] = deque()
        self._served: deque[tuple[Callable[[], Any], Callable[[float, Any], None]]] = deque()
        self._forcing: deque[tuple[Callable[[], Any], Callable[[float, Any], None]]] = deque()
        self._late: list[Callable[[], None]] = []
        self._input, self._hearing = Input(self, True), Input(self, False)

    # ---- life
    def start(self, contacts: Iterable[PeerId]) -> None:
        """The process begins; discovery tells it of ``contacts``."""
        self.network.attach(self.peer, self.deliver)
        with self.alive():
            self.plane.lanes_up(self.place.order.keys())
            self.run.start(self.world.now)
            self.run.add_contacts(self.world.now, contacts)

    def end(self) -> None:
        """The process is gone."""
        self.ended, self.frozen = True, False
        self._late.clear()
        self.network.detach(self.peer)
        for timer in (self._timer, *self._pumps.values()):
            if timer is not None:
                timer.cancel()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True
        self.network.freeze(self.peer)

    def thaw(self) -> None:
        """SIGCONT: what waited for the process happens now."""
        if self.frozen:
            self.frozen = False
            self.network.thaw(self.peer)
            late, self._late = self._late, []
            for action in late:
                self.world.at(self.world.now, action)

    def runs(self, action: Callable[[], None]) -> bool:
        """Whether ``action`` may happen now: not when the process has ended, and at the thaw when
        it is frozen.
        """
        if self.frozen:
            self._late.append(action)
        return not self.ended and not self.frozen

    def alive(self, *, pulled: bool = True) -> Input:
        """Around every input: see `Input`. Without ``pulled`` no records are pulled: for inputs
        that cannot have made any.
        """
        return self._input if pulled else self._hearing

    def settle(self, pulled: bool) -> None:
        """After an input: events are handed over, records pulled, the next tick armed."""
        while self._events:
            self.run.on_exchange(self.world.now, self._events.popleft())
        if not self.ended:
            if pulled and (busy := self.plane.busy - self._pumps.keys()):
                order = self.place.order
                for peer in sorted(busy & order.keys(), key=order.__getitem__):
                    if self.plane.has_more(peer):
                        self._pump(peer)
            timer = self._timer
            # what membership hears changes when it is due itself, and nothing else
            if pulled or timer is None or self.session.membership.next_due() < timer.when:
                self._arm()

    def troubled(self) -> None:
        """The disk refused something: as in a node it is told, and the session tries again."""
        self.troubles += 1
        if not self.ended:
            self._arm()

    def killed(self, death: ProcessDied) -> None:
        """A trap struck inside an input."""
        if not self.ended:
            self._died(death.back_after_s)

    # ---- inputs
    def deliver(self, sender: PeerId, channel: str, payload: Any) -> None:
        """A message or a record arrives."""
        if self.ended:
            return
        with self.alive(pulled=channel != "control" or payload[:1] != MEMBERSHIP):
            if channel == "control":
                self.run.on_message(self.world.now, sender, payload)
            else:
                header, body = payload
                place = self.plane.destination(sender, header)
                if place is not None:
                    place[:] = body
                    self.plane.received(sender, header)

    def link(self, peer: PeerId, up: bool) -> None:
        """The connection to a peer came or went."""
        if self.runs(lambda: self.link(peer, up)):
            with self.alive():
                (self.plane.lane_up if up else self.plane.lane_down)(peer)
                self.run.on_link(self.world.now, peer, up)

    def gone(self, peer: PeerId) -> None:
        """The process of a peer whose connection ended is no more."""
        if self.runs(lambda: self.gone(peer)):
            with self.alive():
                self.run.on_gone(self.world.now, peer)

    def _tick(self) -> None:
        self._timer = None
        if self.runs(self._tick):
            with self.alive():
                self.run.tick(self.world.now)

    def _arm(self) -> None:
        timer, soonest = self._timer, self.world.now + SMALLEST_WAIT_S
        if timer is not None and timer.when <= soonest:
            return
        due = max(self.run.next_due(), soonest)
        if timer is None or due < timer.when:
            if timer is not None:
                timer.cancel()
            self._timer = self.world.at(due, self._tick)

    # ---- records
    def _pump(self, peer: PeerId) -> None:
        """Send what there is for a peer as fast as the link takes it."""
        while (record := self.plane.next_record(peer)) is not None:
            free_at = self.network.send(
                self.peer, peer, "record", (bytes(record.header), bytes(record.payload))
            )
            if free_at > self.world.now:
                self._pumps[peer] = self.world.at(free_at, lambda: self._room(peer))
                return

    def _room(self, peer: PeerId) -> None:
        if self.runs(lambda: self._room(peer)):
            self._pumps.pop(peer, None)
            with self.alive():
                pass

    # ---- SessionPorts
    def send(self, peer: PeerId, data: bytes) -> None:
        """Send a control message, after what it depends on is on the medium."""
        if peer in self.place.order and not self.barrier.hold(lambda _: self._send(peer, data)):
            self._send(peer, data)

    def _send(self, peer: PeerId, data: bytes) -> None:
        self.network.send(self.peer, peer, "control", data)

    def after_sync(self, act: Callable[[float], None]) -> bool:
        return self.barrier.hold(act)

    def persist(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Jobs that wait for the disk, one at a time: each takes as long as the medium takes for a
        sync, and is done at the end of that.
        """
        self._forcing.append((work, done))
        if len(self._forcing) == 1:
            self.world.after(self.place.sync_s, self._force)

    def _force(self) -> None:
        if self.runs(self._force):
            with self.alive():
                work, done = self._forcing[0]
                forced = self._do(work)
                try:
                    done(self.world.now, forced)
                finally:
                    self._forcing.popleft()
                    if self._forcing:
                        self.world.after(self.place.sync_s, self._force)

    def _do(self, work: Callable[[], T]) -> T:
        """What a job raises ends the run, as in a node: nobody knows what is on the medium."""
        try:
            return work()
        except StorageError as error:
            raise ProcessDied(self.peer, FAILED_S) from error

    def offload(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        """Jobs run one at a time, in order; each takes a moment of virtual time, in which other
        things happen.
        """
        self._put(self._jobs, work, done)

    def serve(self, work: Callable[[], T], done: Callable[[float, T], None]) -> bool:
        """As `offload`, in a queue of its own."""
        if len(self._served) > MAX_SERVED:
            return False
        self._put(self._served, work, done)
        return True

    def _put(self, jobs: Any, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        jobs.append((work, done))
        if len(jobs) == 1:
            self._begin(jobs)

    def _begin(self, jobs: Any) -> None:
        work, done = jobs[0]
        # A thread may do the work at once or only at the end: both must be right.
        early = self._rng.random() < 0.5
        result = self._do(work) if early else None
        self.world.after(self.place.work_s, lambda: self._finish(jobs, work, done, early, result))

    def _finish(
        self,
        jobs: Any,
        work: Callable[[], T],
        done: Callable[[float, T], None],
        early: bool,
        result: Any,
    ) -> None:
        if self.runs(lambda: self._finish(jobs, work, done, early, result)):
            with self.alive():
                result = result if early else self._do(work)
                try:
                    done(self.world.now, result)
                finally:
                    jobs.popleft()
                    if jobs:
                        self._begin(jobs)

    def emit(self, event: object) -> None:
        self._emit(event)

    def unread(self, peer: PeerId) -> bool:
        """Whether the peer was made not to read."""
        return (self.peer, peer) in self.place.unread

    def pace(self) -> Pace:
        """What this peer was given as measured."""
        return self.place.paces.get(self.peer, UNKNOWN)

    def sign(self, payload: bytes) -> bytes:
        return sign_as(self.peer, payload)

    def verify(self, peer: PeerId, payload: bytes, signature: bytes) -> bool:
        return verify_as(peer, payload, signature)
