"""One run at a node: it drives the run's Session with the node's network, engine, files and clock."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from ...collectives.errors import AtollError, ConfigError, NotAdmittedError, StateError, StorageError, VersionMismatchError
from ...collectives.group import Plan
from ...collectives.identifiers import PeerId, RunId
from ...optim.outer import effective_outer
from ..invite import check_token
from ..manifest import Manifest, SignedManifest, decode_signed, save_run
from ..net.addresses import split_peer
from ..quorum import quorum_of
from ..session import Session
from ..session import events as ev
from ..shared_memory import AnchorSlots
from ..storage import RunFiles
from .asking import Asking
from .context import NodeContext
from .phases import Phases
from .ports import RunPorts
from .timings import Timings
from .troubles import Troubles, coded, described, removed_here

log = logging.getLogger("atoll")

ASK_MANIFEST, MANIFEST = b"?", b"C"
SEEKING: tuple[str, int, int] = ("finding members", 0, 0)
HISTORY = 256  # committed rounds kept for status


@dataclass(frozen=True, slots=True)
class RunFailed:
    """For listeners: the run does not go on at this node."""

    error: AtollError


class RunService:
    """One run. Owned by the node's service; everything happens in its trio thread."""

    def __init__(
        self, node: NodeContext, run_id: RunId, organiser: PeerId, signed: SignedManifest | None, token: bytes, *, seeding: bool = True
    ) -> None:
        """``seeding``: take part also while no script is attached."""
        self.node, self.run_id, self.organiser, self.seeding = node, run_id, organiser, seeding
        self.signed, self.token = signed, token
        self.manifest: Manifest | None = None
        self.session: Session | None = None
        self.storage: RunFiles | None = None
        self.ports: RunPorts | None = None
        self.known = trio.Event()  # the manifest is known and the session runs
        self.error: AtollError | None = None
        self.listeners: list[Callable[[object], None]] = []
        self.metrics: dict[str, float] = {}
        self.rounds: list[dict[str, Any]] = []
        self.operation: dict[str, Any] | None = None  # the free-standing one decided last
        self.progress = SEEKING
        self.refusals: dict[PeerId, tuple[str, str]] = {}
        self.troubles = Troubles(run_id, node.publish)
        self.phases = Phases(run_id, node.publish)
        self.timings = Timings(run_id, node.publish, self._lane_bytes)
        self.ended = trio.Event()  # `run` has returned, and everything of the run is closed
        self._asking = Asking(random.Random(node.rng.random()))
        self._slots: AnchorSlots | None = None
        self._wake = trio.Event()
        self._scope = trio.CancelScope()
        self._laned: set[PeerId] = set()
        self._traffic_before = self._node_traffic()

    # ---- life
    async def run(self) -> None:
        """Take part in the run until `stop`. Whatever fails ends this run only, never the node: `error` says why."""
        try:
            with self._scope:
                try:
                    await self._take_part()
                except* Exception as group:
                    self.fail(group)
        finally:
            await self._close()
            self.ended.set()

    async def _take_part(self) -> None:
        self.node.network.on_message(self.run_id, self._on_message, self._greet, self._admit)
        self.node.network.announce_run(self.run_id)
        if self.signed is None:
            await self._fetch_manifest()
        self._begin()
        assert self.ports is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.ports.worker)
            await self._drive()

    async def _close(self) -> None:
        network = self.node.network
        network.withdraw_run(self.run_id)
        with trio.move_on_after(1) as scope:
            scope.shield = True
            await network.close_topic(self.run_id)
        try:
            if self.session is not None:
                self.session.drop()
            if self.storage is not None:
                self.storage.close()
        except Exception as error:  # a full disk, most likely: the next life finds what was written before
            self.troubles.tell(coded(error, f"closing run {self.run_id}"))
        if self._slots is not None:
            self._slots.close()

    @property
    def undecided(self) -> bool:
        """Whether a contribution is frozen in an open round that can be decided."""
        machine = self.session.machine if self.session and self.error is None else None
        return machine is not None and machine.contribution is not None and self.decidable

    @property
    def decidable(self) -> bool:
        """Whether waiting for a decision makes sense: the run goes on here, and it is not known that too few members are there."""
        quorum = None if self.error else quorum_of(self.peers())
        return self.error is None and (quorum is None or quorum["held"])

    def stop(self, why: AtollError | None = None) -> None:
        """End this run at this node; its script is told ``why``."""
        if why is not None:
            self.error = why
            self.known.set()
            for listener in list(self.listeners):
                listener(RunFailed(why))
        self._scope.cancel()

    def fail(self, error: BaseException) -> None:
        """This run cannot go on at this node. Its script is told and may enter it again; the node lives on."""
        if self.error is not None:
            return
        self.error = coded(error, f"run {self.run_id}")
        self.troubles.tell(self.error)
        self.node.publish({"event": "run.failed", "run": self.run_id, **described(self.error)})
        self.stop(self.error)

    def guard(self, act: Callable[[], object]) -> None:
        """Do something with the session: what the disk refuses is trouble and will be tried again; anything else ends this run."""
        if self.error is not None:
            return
        try:
            act()
        except StorageError as error:
            self.troubles.tell(error)
        except Exception as error:
            self.fail(error)

    async def _fetch_manifest(self) -> None:
        while self.signed is None:
            wake = self._wake = trio.Event()
            known = [peer for peer, _ in self.node.network.members(self.run_id)]
            for peer in self._asking.whom(trio.current_time(), known):
                self.node.network.send(self.run_id, peer, ASK_MANIFEST)
            with trio.move_on_at(self._asking.again_at):
                await wake.wait()

    def _begin(self) -> None:
        assert self.signed is not None
        self.manifest = self.signed.open()
        if self.manifest.lanes.encrypt:
            self.node.engine.drop_plain_lanes()  # made for other runs: encrypted ones take their place
        folder = save_run(self.node.paths, self.signed)
        settings = self.manifest.settings()
        self.storage = RunFiles(
            folder, run_id=self.run_id, outer=effective_outer(settings), slots=self.slots, trouble=self.troubles.tell,
            me=self.node.identity.peer, organiser=self.organiser, founded=self.node.paths.founded_file(self.run_id),
            first_life=int(time.time()),
        )  # fmt: skip
        self.ports = RunPorts(self, self.storage)
        now = trio.current_time()
        self.session = Session(
            run=self.run_id, me=self.node.identity.peer, organiser=self.organiser, settings=settings, ports=self.ports,
            rng=random.Random(self.node.rng.random()), now=now, unix_offset_s=time.time() - now,
            checkpoint_every=self.manifest.checkpoint.every, seeding=self.seeding, site=self.node.site,
            branch_after_s=self.manifest.branch_after_s,
        )  # fmt: skip
        self.session.membership.announce(now, addresses=tuple(split_peer(address)[1] for address in self.node.network.addresses()))
        self.session.start(now)
        if self.session.machine is not None and self.session.phase != "running":
            self.storage.check()
        if self.session.recertifying.removed:
            raise removed_here()
        self.known.set()

    async def _drive(self) -> None:
        session = self.session
        assert session is not None
        while True:
            wake = self._wake = trio.Event()
            self._tend_lanes()
            with trio.move_on_at(max(session.next_due(), trio.current_time() + 0.001)):
                await wake.wait()
            self.guard(self._look)

    def _look(self) -> None:
        session, now = self.session, trio.current_time()
        assert session is not None
        session.add_contacts(now, [peer for peer, _ in self.node.network.members(self.run_id)])
        for peer, addresses in session.membership.moved().items():  # so that members find one another without any bootstrap
            self.node.network.add_addresses(peer, addresses)
        if now >= session.next_due():
            session.tick(now)

    def wake(self) -> None:
        """Look at the session's timers again."""
        self._wake.set()

    def _tend_lanes(self) -> None:
        """Keep a lane to every member of the configuration, and to where our state comes from."""
        session = self.session
        assert session is not None
        assert self.manifest is not None
        wanted = {peer for peer in session.config_peers() if peer != self.node.identity.peer}
        for peer in wanted - self._laned:
            self.node.network.ensure_lane(peer, self.manifest.lanes.per_peer)
        self._laned |= wanted

    # ---- network
    def _greet(self, peer: PeerId) -> bytes:
        return self.token

    def _admit(self, peer: PeerId, greeting: bytes) -> bool:
        member = self.session is not None and peer in self.session.config_peers()
        open_to_all = self.manifest is not None and self.manifest.join.policy == "open"
        if peer == self.organiser or member or open_to_all:
            return True
        check_token(greeting, run_id=self.run_id, organiser=self.organiser, now_s=time.time())
        return True

    def on_refused(self, peer: PeerId, code: str, reason: str) -> None:
        """A member does not let us in."""
        self.refusals[peer] = (code, reason)
        known = {member for member, _ in self.node.network.members(self.run_id)}
        if self.signed is None and known <= self.refusals.keys() and (error := self.refusal()) is not None:
            self.fail(error)
        self._asking.refused(peer)
        self.wake()

    def refusal(self) -> AtollError | None:
        """Why members do not let us in, as an error."""
        for peer, (code, reason) in self.refusals.items():
            if code == "E140":
                return VersionMismatchError(
                    f"{peer[-8:]} refuses: {reason}", peer=peer, why="The two come from different versions of atoll.",
                    hint="pip install -U atoll, then: atoll down && atoll up",
                )  # fmt: skip
            if code in ("E201", "E202"):
                return NotAdmittedError(
                    f"{peer[-8:]} refuses: {reason}", code=code, peer=peer, why="The invite is too old, or not of this run's organiser.",
                    hint="Ask a member for a new one: atoll invite new",
                )  # fmt: skip
        return None

    def _on_message(self, peer: PeerId, data: bytes) -> None:
        kind = data[:1]
        if kind == ASK_MANIFEST:
            if self.signed is not None:
                self.node.network.send(self.run_id, peer, MANIFEST + self.signed.encode())
        elif kind == MANIFEST:
            if self.signed is None:
                self._take_manifest(data[1:])
        elif self.session is not None:
            self._input(lambda session, now: session.on_message(now, peer, data))

    def _take_manifest(self, data: bytes) -> None:
        try:
            signed = decode_signed(data)
            if signed.run_id != self.run_id or signed.organiser != self.organiser:
                raise ConfigError("not the manifest of this run")
            signed.open()
        except AtollError as error:
            self.troubles.tell(error)
            return
        self.signed = signed
        self.wake()

    def on_link(self, peer: PeerId, up: bool) -> None:
        """A connection came or went."""
        if self.session is not None:
            self._input(lambda session, now: session.on_link(now, peer, up))

    def on_gone(self, peer: PeerId) -> None:
        """The process behind a connection that ended is no more."""
        if self.session is not None:
            self._input(lambda session, now: session.on_gone(now, peer))

    def on_exchange(self, event: object) -> None:
        """An event of the engine (of any run: the session knows its own)."""
        self.phases.on_exchange(trio.current_time(), event)
        self._input(lambda session, now: session.on_exchange(now, event))

    def _input(self, handle: Callable[[Session, float], None]) -> None:
        session = self.session
        if session is not None:
            self.guard(lambda: handle(session, trio.current_time()))
            self.wake()

    # ---- memory
    def slots(self, numel: int) -> AnchorSlots:
        """The run's anchor slots, made once there is a state; before, for the script that would found the run."""
        if self._slots is not None and self._slots.current is None and self._slots.numel != numel:
            self._slots.close()  # an earlier script would have founded it with another model
            self._slots = None
        if self._slots is None:
            self._slots = AnchorSlots(numel, folder=self.node.paths.run_dir(self.run_id))
        return self._slots

    def result_buffer(self, plan: Plan, nbytes: int) -> memoryview:
        """Where a plan's result is received (called in the engine thread)."""
        if self.storage is not None and plan.log.startswith("main/"):
            try:
                return self.storage.allocate(nbytes)
            except StorageError as error:  # reduce for the others; this member votes once the bytes can be kept
                self.troubles.tell(error)
        return memoryview(bytearray(nbytes))

    # ---- traffic
    def traffic(self) -> tuple[int, int]:
        """Bytes (sent, received) since this run was entered: lanes with their encryption, and control messages. Lanes belong to the
        node: where it is in several runs, each shows the traffic of all."""
        sent, received = self._node_traffic()
        return sent - self._traffic_before[0], received - self._traffic_before[1]

    def _lane_bytes(self) -> dict[PeerId, tuple[int, int]]:
        return {peer: (lane.bytes_sent, lane.bytes_received) for peer, lane in self.node.engine.stats().items()}

    def _node_traffic(self) -> tuple[int, int]:
        lanes, control = self.node.engine.totals(), self.node.network.traffic()
        return lanes[0] + control[0], lanes[1] + control[1]

    # ---- events
    def note_operation(self, operation: dict[str, Any]) -> None:
        """A free-standing operation of the script is decided."""
        self.operation = operation
        self.node.publish({"event": "operation.committed", "run": self.run_id, **operation})

    def on_event(self, event: object) -> None:
        """An event of the session."""
        match event:
            case ev.PlanTaken():
                self.phases.planned(trio.current_time(), event)
                self.timings.planned(event)
            case ev.Timed():
                self.timings.timed(trio.current_time(), event)
            case ev.RoundCommitted():
                self.rounds = [*self.rounds[-HISTORY:], self._describe(event)]
                self.troubles.clear()
                kind = "round.committed" if event.contributors else "entry.committed"  # the latter at most changes who is a member
                self.node.publish({"event": kind, "run": self.run_id, **self.rounds[-1]})
            case ev.BranchBegun():
                log.warning("run %s: no quorum; going on without certainty with %d of its members", self.run_id, len(event.members))
                self.node.publish({"event": "branch.begun", "run": self.run_id, "members": list(event.members), "round": event.round})
            case ev.BranchAdvanced():
                shares = {share.peer: share.samples for share in event.contributors}
                self.node.publish({"event": "round.uncertified", "run": self.run_id, "round": event.round, "contributors": shares})
            case ev.BranchEnded():
                if event.lost:
                    log.warning(
                        "run %s: %d contributions without certainty are lost (%d samples)", self.run_id, len(event.lost), event.samples
                    )
                told = {"adopted": event.adopted, "lost": len(event.lost), "lost_samples": event.samples}
                self.node.publish({"event": "branch.ended", "run": self.run_id, **told})
            case ev.Recertified():
                log.warning("run %s: entry %d is recertified without %d members", self.run_id, event.entry, len(event.removed))
                self.node.publish({"event": "entry.recertified", "run": self.run_id, "entry": event.entry, "removed": list(event.removed)})
            case ev.Removed():
                self.fail(removed_here())
            case ev.StateProgress():
                self.progress = ("fetching state", event.have, event.total)
                self.node.publish({"event": "state.progress", "run": self.run_id, "have": event.have, "total": event.total})
            case ev.StateReady():
                self.progress = ("ready", 1, 1)
                self.node.publish({"event": "state.ready", "run": self.run_id, "round": event.round})
            case ev.StateRoot():
                if self.rounds and self.rounds[-1]["entry"] == event.entry:
                    self.rounds[-1]["state_root"] = event.root.hex()
                self.node.publish({"event": "state.root", "run": self.run_id, "entry": event.entry, "root": event.root.hex()})
            case ev.PeerMisbehaved():
                self.node.publish({"event": "peer.misbehaved", "run": self.run_id, "peer": event.peer, "reason": event.reason})
            case ev.AnotherHistory():
                if (twice := self._founded_twice()) is not None:
                    self.troubles.tell(twice)
            case ev.StateDiverged():
                self.node.publish({"event": "state.diverged", "run": self.run_id, "entry": event.entry})
            case _:
                pass
        for listener in list(self.listeners):
            listener(event)

    def _founded_twice(self) -> StateError | None:
        """Somebody is on another history of this run: a trouble for as long as it is so."""
        foreign = sorted(self.session.membership.foreign) if self.session else []
        if not foreign:
            return None
        who = f"{', '.join(peer[-8:] for peer in foreign)} {'is' if len(foreign) == 1 else 'are'}"
        return StateError(
            f"{who} on another history of this run; it was founded twice", code="E305",
            why="The organiser's node had lost the run's state and founded it again. The two never meet: each trains without the other.",
            hint="Choose one. On every machine of the other: atoll down, move the run's folder away, atoll up, join again.",
        )  # fmt: skip

    def _describe(self, event: ev.RoundCommitted) -> dict[str, Any]:
        return {
            "round": event.round,
            "entry": event.entry,
            "contributors": {share.peer: share.samples for share in event.contributors},
            "members": list(event.config),
            "lost": list(event.lost),
            "counted": event.counted,
            "elapsed_s": round(event.elapsed_s, 4),
            "at": time.time(),
            "bytes_sent": self.traffic()[0],
            "bytes_received": self.traffic()[1],
        }

    # ---- views
    def status(self) -> dict[str, Any]:
        """JSON-able."""
        session = self.session
        config = session.config_peers() if session else []
        fetching = session is not None and session.phase == "fetching"
        last = next((row for row in reversed(self.rounds) if row["contributors"]), None)
        trouble = self.error or self.troubles.current or (self.storage.unsaved if self.storage else None) or self._founded_twice()
        return {
            "run_id": self.run_id,
            "name": self.manifest.name if self.manifest else "",
            "organiser": self.organiser,
            "phase": "failed" if self.error else session.phase if session else "seeking",
            "round": session.completed if session else -1,
            "entry": session.round if session else -1,
            "rounds": self.manifest.train.rounds if self.manifest else None,
            "members": config,
            "member": self.node.identity.peer in config,
            "quorum": None if self.error else quorum_of(self.peers()),
            "branch": self._branch(),
            "seal": self.sealed(),
            "script": bool(session and session.script),
            "progress": ["waiting for the state", 0, 0] if fetching and self.progress == SEEKING else list(self.progress),
            "metrics": dict(self.metrics),
            "last_round": last,
            "last_operation": self.operation,
            "bytes_sent": self.traffic()[0],
            "bytes_received": self.traffic()[1],
            "refused": {peer: list(why) for peer, why in self.refusals.items()},
            "trouble": described(trouble) if trouble else None,
            "troubles": self.troubles.past(),
        }

    def sealed(self) -> dict[str, Any] | None:
        """Without whom the open round is being recertified, and whose answers the organiser waits for; None where it is not."""
        view = self.session.recertifying.view() if self.session is not None else None
        return None if view is None else {"removed": list(view.removed), "awaited": list(view.awaited)}

    def _branch(self) -> dict[str, Any]:
        """Rounds in the anchor that are uncertified, with whom; and what branches have cost this member so far."""
        if self.session is None:
            return {"rounds": 0, "members": [], "lost": 0, "lost_samples": 0}
        branching = self.session.branching
        branch, record = branching.branch, branching.record
        members = [who.peer for who in branch.machine.config] if branch is not None else []
        return {"rounds": branching.rounds, "members": members, "lost": record.lost, "lost_samples": record.lost_samples}

    def peers(self) -> list[dict[str, Any]]:
        """JSON-able, one a member or known peer. ``live`` and ``round`` are None where this node cannot tell."""
        session, me, now = self.session, self.node.identity.peer, trio.current_time()
        if session is None:
            return []
        lanes = self.node.network.status()["lanes"]
        membership = session.membership
        records = {record.peer: record for record in membership.records()}
        config = session.config_peers()
        listed: Sequence[PeerId] = list(dict.fromkeys([*config, *records]))
        return [
            {
                "peer": peer,
                "you": peer == me,
                "member": peer in config,
                "organiser": peer == self.organiser,
                "live": session.others.there(now, peer),
                "other_history": peer in membership.foreign,
                "path": "self" if peer == me else lanes.get(peer, ""),
                "round": (records[peer].round or None) if peer in records else None,
                "addresses": list(records[peer].addresses) if peer in records else [],
            }
            for peer in listed
        ]
