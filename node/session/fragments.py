"""A run in fragments: one log for each part of the model, with one membership, one data plane and
the same code for each.

The flat vector is cut between tensors (`collectives.layout.cut`). Each fragment is a `Session` with
a log, a configuration chain, a state and a storage of its own; a member asks to join all of them.
Any number of rounds may be under way, never two of one fragment. Nothing orders the rounds of
different fragments: what a member holds is a cut, {fragment: rounds}, and every fragment's storage
goes back to a state of its own. Free-standing operations are those of the first fragment: its
configuration is theirs.

What the sessions tell comes as `InFragment`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from blake3 import blake3
from torch import Tensor

from ...collectives import exchange as x
from ...collectives import messages as m
from ...collectives.cutting import cut
from ...collectives.errors import ConfigError, LocalProtocolError, StorageError
from ...collectives.exchange import Bounds
from ...collectives.group import LogName
from ...collectives.identifiers import HASH_BYTES, PeerId
from ...collectives.layout import Layout
from ...collectives.messages import Spans
from ..run.inner_doors import InnerDoors
from . import events as ev
from .actions import main_log
from .beginning import check_model
from .budgets import PeerUsage
from .ports import ContentPlane, DataPlane, SessionPorts, Storage
from .session import ROUND, Phase, Session
from .terms import SessionTerms

if TYPE_CHECKING:
    from .session import Session

T = TypeVar("T")


class _EnvelopeHead(msgspec.Struct, frozen=True, array_like=True):
    """The first field of an Envelope."""

    log: LogName


_head = msgspec.msgpack.Decoder(_EnvelopeHead)
PHASES: tuple[Phase, ...] = ("left", "seeking", "fetching", "running")


def fragment_log(run: str, number: int) -> str:
    return f"main/{number}/{run}"[:64]


def logs_of(run: str, fragments: int) -> list[str]:
    """The logs of a run that is cut into so many fragments."""
    return (
        [main_log(run)]
        if fragments == 1
        else [fragment_log(run, number) for number in range(fragments)]
    )


class FragmentContent:
    """Content as one fragment sees it: it has names of its own, since states of two fragments may
    hold the same bytes. Implements `ContentPlane`.
    """

    def __init__(self, plane: ContentPlane, number: int) -> None:
        self._plane = plane
        self._mask = int.from_bytes(
            blake3(f"atoll/fragment/1/{number}".encode()).digest(HASH_BYTES), "big"
        )

    def named(self, name: bytes) -> bytes:
        """The name of content in the shared plane, from the fragment's, or back."""
        return (int.from_bytes(name, "big") ^ self._mask).to_bytes(HASH_BYTES, "big")

    def provide(self, name: bytes, data: memoryview, bounds: Bounds) -> None:
        self._plane.provide(self.named(name), data, bounds)

    def withdraw(self, name: bytes) -> None:
        self._plane.withdraw(self.named(name))

    def send_blob(self, peer: PeerId, name: bytes, spans: Spans) -> None:
        self._plane.send_blob(peer, self.named(name), spans)

    def want(
        self,
        name: bytes,
        destination: memoryview,
        bounds: Bounds,
        hashes: Sequence[bytes],
        sources: Sequence[PeerId],
    ) -> None:
        self._plane.want(self.named(name), destination, bounds, hashes, sources)

    def unwant(self, name: bytes) -> None:
        self._plane.unwant(self.named(name))

    def report_blob(self, name: bytes) -> None:
        self._plane.report_blob(self.named(name))


class FragmentPorts:
    """The driver as one fragment's session sees it. Implements `SessionPorts`."""

    def __init__(self, ports: SessionPorts, storage: Storage, number: int) -> None:
        self._ports, self._number = ports, number
        self.storage: Storage = storage
        self.exchange: DataPlane = ports.exchange
        self.named_content = FragmentContent(ports.content, number)
        self.content: ContentPlane = self.named_content
        self.send, self.pace, self.sign, self.verify = (
            ports.send,
            ports.pace,
            ports.sign,
            ports.verify,
        )
        self.after_sync, self.unread = ports.after_sync, ports.unread

    def offload(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        self._ports.offload(work, done)

    def serve(self, work: Callable[[], T], done: Callable[[float, T], None]) -> bool:
        return self._ports.serve(work, done)

    def persist(self, work: Callable[[], T], done: Callable[[float, T], None]) -> None:
        self._ports.persist(work, done)

    def emit(self, event: object) -> None:
        self._ports.emit(ev.InFragment(self._number, event))


class Fragments:
    """All fragments of a run at one member. Driven like a `Session`."""

    def __init__(
        self,
        terms: SessionTerms,
        *,
        ports: SessionPorts,
        storages: Sequence[Storage],
        rng: Random,
        now: float,
        budgets: PeerUsage | None = None,
    ) -> None:
        """``storages``: one a fragment; that of ``ports`` is not used. Raises ConfigError where
        there is none.
        """
        if not storages:
            raise ConfigError("a run of no fragments", key="fragments")
        if terms.modes.pre_round is not None:
            raise LocalProtocolError("what members do before a round, they do in one piece")
        budgets = budgets or PeerUsage()
        self.ports = [
            FragmentPorts(ports, storage, number) for number, storage in enumerate(storages)
        ]
        self.sessions = list[Session]()
        for number, own in enumerate(self.ports):
            inner = InnerDoors(terms.doors, self._in_first) if number else terms.doors
            self.sessions.append(
                Session(
                    replace(terms, doors=inner),
                    ports=own,
                    rng=rng,
                    now=now,
                    log=fragment_log(terms.run, number),
                    membership=self.sessions[0].membership if number else None,
                    budgets=budgets,
                )
            )
        for session in self.sessions:
            session.sessions = self.sessions
        self._by_log = {session.log: session for session in self.sessions}

    def _in_first(self, peer: PeerId) -> bool:
        return self.sessions[0].in_config(peer)

    # ---- views
    @property
    def phase(self) -> Phase:
        """Where the fragment stands that is behind all others."""
        return PHASES[min(PHASES.index(session.phase) for session in self.sessions)]

    @property
    def cut(self) -> dict[int, int]:
        """Rounds in each fragment's current anchor; -1 before there is a state."""
        return {number: session.completed for number, session in enumerate(self.sessions)}

    @property
    def completed(self) -> int:
        """Rounds in the anchor of the slowest fragment; -1 before all have a state."""
        return min(self.cut.values())

    @property
    def script(self) -> Layout | None:
        """Layout of the first fragment of the attached script's model, if there is one."""
        return self.sessions[0].script

    def config_peers(self) -> list[PeerId]:
        """The members of any fragment's newest configuration."""
        return sorted({peer for session in self.sessions for peer in session.config_peers()})

    def in_config(self, peer: PeerId) -> bool:
        """Whether a peer is a member of any fragment's newest configuration."""
        return any(session.in_config(peer) for session in self.sessions)

    def bounds(self, layout: Layout) -> list[tuple[int, int]]:
        """Which elements of the whole flat vector each fragment holds: [start, stop)."""
        stops, start = list[tuple[int, int]](), 0
        for part in cut(layout, len(self.sessions)):
            stops.append((start, start + part.numel))
            start += part.numel
        return stops

    # ---- life and script
    def start(self, now: float) -> None:
        self._each(lambda session, _: session.start(now))

    def found(self, now: float, layout: Layout, initial: Tensor) -> None:
        """All fragments, each with its part of ``initial``, but those that an earlier life has
        founded before it was killed.
        """
        parts, bounds = cut(layout, len(self.sessions)), self.bounds(layout)
        for number, session in enumerate(self.sessions):
            if session.machine is None:
                session.found(now, parts[number], initial[slice(*bounds[number])])

    def attach(self, now: float, layout: Layout) -> bool:
        """False where some fragment has no state yet."""
        mine = list(zip(self.sessions, cut(layout, len(self.sessions)), strict=True))
        for session, part in mine:  # all of them or none
            if session.replica is not None:
                check_model(part, session.replica.layout)
        self._each(lambda session, number: session.attach(now, mine[number][1]))
        return all(session.replica for session in self.sessions)

    def detach(self, now: float) -> None:
        self._each(lambda session, _: session.detach(now))

    def leave(self, now: float) -> None:
        self._each(lambda session, _: session.leave(now))

    def drop(self) -> None:
        self._each(lambda session, _: session.drop())

    # ---- inputs
    def add_contacts(self, now: float, peers: Iterable[PeerId]) -> None:
        known = list(peers)
        self._each(lambda session, _: session.add_contacts(now, known))

    def on_link(self, now: float, peer: PeerId, up: bool) -> None:
        """Membership is common to all."""
        self.sessions[0].on_link(now, peer, up)

    def on_gone(self, now: float, peer: PeerId) -> None:
        self._each(lambda session, _: session.on_gone(now, peer))

    def on_message(self, now: float, peer: PeerId, data: bytes) -> None:
        """What belongs to a fragment's log goes there, anything else to the first."""
        self._of(data).on_message(now, peer, data)

    def _of(self, data: bytes) -> Session:
        if data[:1] != ROUND or len(data) > m.MAX_MESSAGE_BYTES:
            return self.sessions[0]
        try:
            return self._by_log.get(_head.decode(data[1:]).log, self.sessions[0])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return self.sessions[0]  # which says what is wrong with it

    def on_exchange(self, now: float, event: Any) -> None:
        """Plans and content are known by their names; a fault of a peer is told once."""
        match event:
            case x.BlobProgress() | x.BlobComplete() | x.BadChunk():
                for session, ports in zip(self.sessions, self.ports, strict=True):
                    name = ports.named_content.named(event.name)
                    if name in session.transfer.fetching:
                        session.on_exchange(now, replace(event, name=name))
            case x.ResultComplete() | x.ReductionReport() | x.PartReduced() | x.PartGiven():
                self._each(lambda session, _: session.on_exchange(now, event))
            case x.NonFinite():
                self._giver(event.cid).on_exchange(now, event)
            case _:
                self.sessions[0].on_exchange(now, event)

    def _giver(self, cid: bytes) -> Session:
        owners = [
            s
            for s in self.sessions
            if s.machine and s.machine.contribution and s.machine.contribution[0] == cid
        ]
        return owners[0] if owners else self.sessions[0]

    def tick(self, now: float) -> None:
        self._each(lambda session, _: session.tick(now))

    def next_due(self) -> float:
        return min(session.next_due() for session in self.sessions)

    def _each(self, act: Callable[[Session, int], object]) -> None:
        """Where the disk refuses one, the others go on; then it is raised."""
        failed: StorageError | None = None
        for number, session in enumerate(self.sessions):
            try:
                act(session, number)
            except StorageError as error:
                failed = error
        if failed is not None:
            raise failed


Whole = Session | Fragments
"""A run at one member, in one piece or in several; driven alike."""


def whole_of(
    terms: SessionTerms,
    *,
    ports: SessionPorts,
    storages: Sequence[Storage],
    rng: Random,
    now: float,
    budgets: PeerUsage | None = None,
) -> Whole:
    """A session; or where there are ``storages``, one a fragment, the fragments of a run."""
    if storages:
        return Fragments(terms, ports=ports, storages=storages, rng=rng, now=now, budgets=budgets)
    return Session(terms, ports=ports, rng=rng, now=now, budgets=budgets)
