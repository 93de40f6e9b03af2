"""The node: implements `control.service.NodeService` over its runs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import trio

from ...collectives.errors import (
    AtollError,
    ConfigError,
    NetworkError,
    RecertifyError,
    StorageError,
    SwarmClosedError,
)
from ...collectives.identifiers import PeerId, RunId
from ...collectives.layout import Layout
from ...security.identity import Identity
from ..control import protocol as p
from ..control.calls import CallTable, answers, does
from ..control.protocol import JoinRequest, RunInfo
from ..control.requests import ConnectionRequests
from ..control.service import ProgressSink
from ..home.memory_use import resident_bytes
from ..home.paths import Paths, write_atomic
from ..home.private_files import remove_file
from ..manifest import SignedManifest, decode_signed, list_runs, load_run
from ..manifest.presets import averaging_text
from ..net.network import PeerNetwork
from ..net.transport.addresses import at_home
from ..run.clocks import wrong_clock
from ..run.events import NodeAddressesEvent, NodeFailedEvent, PeerPathEvent, RunEvent
from ..run.invite import parse_invite
from ..run.registry import MODES
from ..run.standing import Standing, forget_standing, load_standing, save_standing, standing_by
from ..session.fragments import Whole
from .context import NodeContext
from .idle import JoinedScript
from .links import Links
from .run import RunService
from .scripts import AttachedScript
from .showing import show_founded
from .subscribers import Subscribers
from .troubles import described
from .views import finished, sealed

QUIET_S = 8.0  # then it says what came of the addresses
MANIFEST_PATIENCE_S = 20.0  # how long `join` waits for a member to hand over the manifest
POLL_S = 0.1
CLOCK_S = 600.0  # how often peers are asked what time it is
REFUSED_S = 5.0  # a member that refuses us may have been the wrong one to ask
FOUND_PATIENCE_S = 1.5  # how long the organiser looks for members before it founds its run
DRAIN_S = 30.0
DISK_S = 5.0  # how long the end waits for a round while the disk refuses what a vote needs
LEAVE_S = 5.0  # how long a private node waits to be let go: without a quorum it never is
# How long a script waits for its node to become a member before it trains anyway.
ADMISSION_PATIENCE_S = 10.0


LEFT = "left"
"""A file in a run's folder: it was left, and this node does not enter it again until somebody joins
it.
"""


def left(run_id: RunId, name: str) -> SwarmClosedError:
    """What a script of a run that was left is told."""
    again = f"atoll join {run_id[:8]}"
    return SwarmClosedError(
        f"this node has left run {name or run_id}; `{again}` brings it back",
        code="E162",
        hint=f"Back in: {again}",
    )


class Node:
    """All runs of this node. Lives in the trio thread of the node process."""

    def __init__(
        self, context: NodeContext, *, private: bool, parent_pid: int, drain_s: float = DRAIN_S
    ) -> None:
        """``drain_s``: how long it may take to end before whatever is open is left."""
        self.context, self._drain_s = context, drain_s
        self.links = Links(context.network, context.engine)
        self.peer: PeerId = context.identity.peer
        context.network.looks.otherwise = show_founded(context.paths, self.peer, LEFT)
        self.private, self.parent_pid = private, parent_pid
        self.by_id: dict[RunId, RunService] = {}
        self.ending = trio.Event()
        self.end_now = False
        self._started = time.time()
        # By run, the process of the script that is attached, or about to be.
        self._scripts: dict[RunId, int] = {}
        self._ended: dict[RunId, RunService] = {}  # on their way out
        self.error: AtollError | None = None  # the node itself cannot go on
        self.troubles: list[StorageError] = []  # files that belong to no run
        self._subscribers = Subscribers()
        self.calls = CallTable(
            answers(p.Status, self.status, p.Document),
            answers(p.Runs, self.runs, lambda id_, rows: p.Document(id_, {"runs": rows})),
            answers(p.Peers, self.peers, lambda id_, rows: p.Document(id_, {"peers": rows})),
            answers(p.Ping, self.links.ping, p.Document),
            answers(p.Check, self.links.check, p.Document),
            does(p.Leave, self.leave),
            answers(p.Recertify, self.recertify, p.Document),
            answers(p.BeginRun, self.begin, p.Document),
            answers(p.Pause, self.pause, p.Document),
            answers(p.ReadBans, self.read_bans, p.Document),
            does(p.Down, self.down),
        )

    @property
    def identity(self) -> Identity:
        return self.context.identity

    @property
    def paths(self) -> Paths:
        return self.context.paths

    # ---- events
    def publish(self, event: RunEvent) -> None:
        """Tell subscribers, of whom the slow lose events, counted; what concerns a run goes into
        its diary.
        """
        event = event if event.at else msgspec.structs.replace(event, at=time.time())
        self._subscribers.publish(event)
        run = self.by_id.get(RunId(event.run))
        if (
            run is not None and run.manifest is not None
        ):  # of what was never entered nothing is kept
            run.diary.write(event)
            run.judged(event)

    def subscribe(self) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """Events from now on."""
        return self._subscribers.subscribe()

    # ---- views
    async def status(self) -> dict[str, Any]:
        """Answer `protocol.Status`."""
        await trio.lowlevel.checkpoint()
        return {
            "schema": 1,
            "peer": self.peer,
            "private": self.private,
            "parent_pid": self.parent_pid,
            "addresses": self.context.network.addresses(),
            "uptime_s": round(time.time() - self._started, 1),
            "memory_bytes": resident_bytes(),
            "lane_bytes": {
                path: {"sent": sent, "received": received}
                for path, (sent, received) in self.context.engine.totals_by_path().items()
            },
            "network": self.context.network.status(),
            "runs": [self._row(run) for run in self.by_id.values()],
            "troubles": [described(error) for error in self.troubles],
        }

    async def runs(self) -> list[dict[str, Any]]:
        await trio.lowlevel.checkpoint()
        return [self._row(run) for run in self.by_id.values()]

    def _row(self, run: RunService) -> dict[str, Any]:
        attached = self._scripts.get(run.run_id)
        joined = {*run.idle.processes, *(() if attached is None else (attached,))}
        told = msgspec.structs.replace(
            run.status(), script_pid=attached, script_pids=sorted(joined)
        )
        return msgspec.to_builtins(told)

    async def peers(self, run: str) -> list[dict[str, Any]]:
        await trio.lowlevel.checkpoint()
        return await self.links.of(self._find(run).peers())

    async def find_run(self, run: str) -> RunInfo:
        """A run that this node is in, or one that is stored here and is entered now. Raises
        SwarmClosedError (E162) for one that was left.
        """
        await trio.lowlevel.checkpoint()
        try:
            found = self._find(run)
        except ConfigError:
            signed = load_run(self.paths, run) if run else self._only_stored()
            if signed is None or signed.run_id in self.by_id:
                raise
            if self._left_file(signed.run_id).exists():
                raise left(signed.run_id, signed.open().name) from None
            found = await self._enter(
                signed.run_id, signed.organiser, signed, load_standing(self.paths, signed.run_id)
            )
        if (
            found.error is not None and found.signed is not None
        ):  # what it failed of may be mended by now
            found = await self._enter(
                found.run_id,
                found.organiser,
                found.signed,
                load_standing(self.paths, found.run_id),
            )
        await found.known.wait()
        if found.error is not None:
            raise found.error
        return self._info(found)

    def _only_stored(self) -> SignedManifest | None:
        stored = list(list_runs(self.paths, []).values())
        return stored[0] if len(stored) == 1 else None

    def _find(self, run: str) -> RunService:
        named = [
            r
            for r in self.by_id.values()
            if not run or r.run_id.startswith(run) or (r.manifest and r.manifest.name == run)
        ]
        if len(named) == 1:
            return named[0]
        known = ", ".join(sorted(self.by_id)) or "none"
        if run:
            what = f"no single run is called {run!r} here"
        else:
            what = (
                f"this node is in {len(self.by_id)} runs, and none was named"
                if self.by_id
                else "this node is in no run"
            )
        raise ConfigError(
            what,
            why=f"Runs of this node: {known}",
            hint=(
                "Join one: atoll join INVITE, or ATOLL_INVITE=INVITE for a script      Start one: "
                "atoll new RUN.toml      See them: atoll ls"
            ),
        )

    def _info(self, run: RunService) -> RunInfo:
        assert run.manifest is not None
        return RunInfo(
            run.run_id,
            run.manifest.name,
            self.peer,
            run.manifest.settings(),
            max(0, run.whole.completed if run.whole else 0),
        )

    # ---- joining and leaving
    def _left_file(self, run_id: RunId) -> Path:
        return self.paths.run_dir(run_id) / LEFT

    async def join(self, request: JoinRequest, progress: ProgressSink) -> RunInfo:
        """Enter a run by invite or by manifest."""
        named: Sequence[str] = ()
        earlier = None
        if request.invite:
            invite = parse_invite(request.invite, now_s=time.time())
            named = invite.bootstrap
            standing = standing_by(invite, invite.certify(self.identity, time.time()))
            earlier = load_standing(self.paths, invite.run_id)
            save_standing(self.paths, invite.run_id, standing)
            remove_file(self._left_file(invite.run_id))
            run = await self._enter(invite.run_id, invite.organiser, None, standing)
        elif request.manifest:
            signed = decode_signed(request.manifest)
            remove_file(self._left_file(signed.run_id))
            run = await self._enter(
                signed.run_id, signed.organiser, signed, load_standing(self.paths, signed.run_id)
            )
        else:
            raise ConfigError("neither an invite nor a manifest was given")
        if run.signed is None:
            progress("asking members for the run's manifest", 0, 0)
        with trio.move_on_after(MANIFEST_PATIENCE_S):
            with trio.move_on_after(QUIET_S):
                await run.known.wait()
            if not run.known.is_set():
                progress(f"nobody has answered yet: {self._tried()}", 0, 0)
            await run.known.wait()
        if run.error is not None:
            if run.signed is None:  # else it stays, for `atoll status` to show what is wrong
                self._drop(run)
                forget_standing(self.paths, run.run_id, earlier)
            raise run.error
        if run.manifest is None:
            error = run.refusal() or await self._wrong_clock() or self._nobody_answered(run, named)
            if hearsay := run.hearsay():
                error.why = (
                    f"{error.why} Who nobody knows to be a member said something: {hearsay}."
                )
                error.annotate()
            self._drop(run, error)  # others may wait for it, too
            forget_standing(self.paths, run.run_id, earlier)
            raise error
        return self._info(run)

    async def _enter(
        self, run_id: RunId, organiser: PeerId, signed: SignedManifest | None, standing: Standing
    ) -> RunService:
        """The run, if this node is in it; else, and when it failed, it is entered as soon as its
        last life is over.
        """
        run = self.by_id.get(run_id)
        if run is not None and run.error is not None:
            self._drop(run)
        while (ended := self._ended.get(run_id)) is not None:
            await ended.ended.wait()
            if self._ended.get(run_id) is ended:
                del self._ended[run_id]
        return self._begin(run_id, organiser, signed, standing)

    def _begin(
        self, run_id: RunId, organiser: PeerId, signed: SignedManifest | None, standing: Standing
    ) -> RunService:
        run = self.by_id.get(run_id)
        if run is None:
            stored = list_runs(self.paths, []).get(run_id)
            self.context.network.add_bootstrap(standing.bootstrap)
            run = self.by_id[run_id] = RunService(
                self.context,
                run_id,
                organiser,
                signed or stored,
                standing.certificate,
                seeding=not self.private,
            )
            self.context.nursery.start_soon(run.run)
        return run

    def resume(self, run_id: RunId, signed: SignedManifest) -> None:
        """Enter a run of the last life again, unless it was left."""
        if not self._left_file(run_id).exists():
            self._begin(run_id, signed.organiser, signed, load_standing(self.paths, run_id))

    async def watch_clock(self) -> None:
        """Ask peers now and then what they say of this machine's clock; a wrong one is a trouble of
        every run.
        """
        while True:
            await trio.sleep(CLOCK_S)
            if (error := await self._wrong_clock()) is not None:
                for run in self.by_id.values():
                    run.troubles.tell(error)

    async def _wrong_clock(self) -> AtollError | None:
        """E120, where the peers that are connected agree on it: members may be there and refused
        for their records' times.
        """
        asked = await self.links.check("")
        return wrong_clock([row["ahead_s"] for row in asked["clock"]])

    def _tried(self) -> str:
        """What came of each address from which the node starts."""
        bootstrap = self.context.network.status()["bootstrap"]
        found = "; ".join(f"{peer[-8:]}: {state}" for peer, state in bootstrap.items())
        return found or "no address was given"

    def _nobody_answered(self, run: RunService, named: Sequence[str]) -> AtollError:
        bootstrap, tried = self.context.network.status()["bootstrap"], self._tried()
        if any(state == "connected" for state in bootstrap.values()):
            return _no_member(run, self.context.network)
        if run.organiser == self.peer:
            return NetworkError(
                f"nobody knows run {run.run_id}: {tried}",
                code="E110",
                why="This is your own run, and nothing of it is stored here.",
                hint=(
                    "Start another member first: its node hands over the run. If there never was "
                    "one: atoll new RUN.toml"
                ),
            )
        which = (
            f"none of {len(bootstrap)} bootstrap addresses answered"
            if len(bootstrap) > 1
            else "the bootstrap address did not answer"
        )
        why, hint = (
            "The machines of the invite are off, unreachable, or their addresses changed.",
            "Ask any member for a fresh one: atoll invite new",
        )
        if at_home(named):
            why = (
                "The invite names addresses of a private network only: on another one they lead "
                "nowhere. Or that machine is off."
            )
            hint = (
                "On the machine that made it: atoll netcheck says how to be reached from "
                "elsewhere. Then a fresh one: atoll invite new"
            )
        return NetworkError(
            (
                f"{which} in {MANIFEST_PATIENCE_S:g} s ({tried}); this is not a "
                "ban and your key is fine"
            ),
            code="E110",
            why=why,
            hint=hint,
        )

    def _drop(self, run: RunService, why: AtollError | None = None) -> None:
        run.stop(why)
        if self.by_id.get(run.run_id) is run:
            del self.by_id[run.run_id]
            self._ended[run.run_id] = run

    async def leave(self, run: str, now: bool = False) -> None:
        """Answer `protocol.Leave`."""
        service = self._find(run)
        if not now:
            await self._depart(service, DRAIN_S)
        service.presence.left()
        self._drop(service, left(service.run_id, service.manifest.name if service.manifest else ""))
        write_atomic(self._left_file(service.run_id), b"")

    async def recertify(self, run: str, without: Sequence[PeerId]) -> dict[str, Any]:
        """Answer `protocol.Recertify`."""
        service = self._find(run)
        if service.whole is None and service.error is None:
            raise RecertifyError("the run's state is not here yet")
        recertify = MODES.load("sealing.recertifying", "recertify", key="recertify")
        recertify(service.driven.sessions, trio.current_time(), without)
        service.wake()
        return sealed(service) or {"removed": list(without), "awaited": []}

    async def begin(self, run: str) -> dict[str, Any]:
        """Answer `protocol.BeginRun`."""
        await trio.lowlevel.checkpoint()
        service = self._find(run)
        start, manifest = service.start, service.manifest
        missing = max(0, start.wanted - start.there)
        least = manifest.secure.threshold if manifest is not None and manifest.secure else 0
        lacking = max(0, least - start.there) if start.wanted else 0
        answer = {"run_id": service.run_id, "begun": start.now(), "missing": missing}
        return answer | {"lacking": lacking}

    async def pause(self, run: str, paused: bool = True) -> dict[str, Any]:
        """Answer `protocol.Pause`."""
        await trio.lowlevel.checkpoint()
        service = self._find(run)
        changed = service.pause.say(paused)
        return {"run_id": service.run_id, "paused": service.pause.why, "changed": changed}

    async def fetch_base(self, run: str, progress: ProgressSink) -> dict[str, Any]:
        """Have members send the files of the run's pretrained model that this machine lacks."""
        service = self._find(run)
        await service.known.wait()
        if service.error is not None:
            raise service.error
        if service.base is None:
            raise ConfigError(f"run {service.run_id} has no pretrained model", code="E415")
        fetching = service.base.begin(trio.current_time())
        service.wake()
        try:
            while not fetching.over and service.error is None:
                progress(*fetching.progress)
                await trio.sleep(POLL_S)
        finally:
            service.base.end()
        if (error := service.error or fetching.error) is not None:
            raise error
        return fetching.document()

    async def read_bans(self, run: str) -> dict[str, Any]:
        """Answer `protocol.ReadBans`."""
        banning = self._find(run).banning
        await banning.reload()
        return {"banned": {peer: banning.lists.why(peer) for peer in sorted(banning.lists.peers)}}

    async def _depart(self, service: RunService, patience_s: float) -> None:
        session = service.whole
        if session is None or service.error is not None:
            return
        service.guard(lambda: session.detach(trio.current_time()))
        service.guard(lambda: session.leave(trio.current_time()))
        with trio.move_on_after(patience_s):
            while {self.peer} < set(
                session.config_peers()
            ) and service.decidable:  # the last one stays in the log as a member
                service.wake()
                await trio.sleep(POLL_S)

    def down(self, now: bool = False) -> None:
        self.end_now = self.end_now or now
        self.ending.set()

    async def drain(self) -> None:
        """Leave nothing half done: frozen contributions are decided, then the runs end.

        A private node leaves the configurations, since its script may never come back and the
        others must not wait for its vote; a daemon stays a member for its return.
        """
        if not self.end_now:
            leave_s = min(LEAVE_S, self._drain_s / 4) if self.private else 0.0
            begun = trio.current_time()
            with trio.move_on_after(self._drain_s - leave_s):
                while any(self._may_decide(run, begun) for run in self.by_id.values()):
                    await trio.sleep(POLL_S)
            if self.private:
                async with trio.open_nursery() as nursery:
                    for run in self.by_id.values():
                        nursery.start_soon(self._depart, run, leave_s)
        if self.private:  # what its script died of is told before nobody is left to tell it
            async with trio.open_nursery() as nursery:
                for run in self.by_id.values():
                    nursery.start_soon(run.presence.buried, LEAVE_S)
        if self.context.notifier is not None:
            await self.context.notifier.settled(LEAVE_S)
        for run in list(self.by_id.values()):
            run.stop()

    def _may_decide(self, run: RunService, begun: float) -> bool:
        """Whether the end of this node waits for a run's contribution to be decided. Where the disk
        refuses what a vote needs, hardly for long: the script keeps it, and offers it again.
        """
        refused = run.troubles.storage_fails and trio.current_time() - begun > DISK_S
        return run.undecided and not refused

    # ---- scripts
    def expect_script(self, run_id: RunId, pid: int) -> JoinedScript:
        """A script has joined a run and is to attach."""
        run = self.by_id.get(run_id)
        if run is None:
            return JoinedScript(None, pid, lambda: None)
        run.idle.joined(trio.current_time(), pid)
        run.wake()
        return JoinedScript(run.idle, pid, run.wake)

    async def open_script(
        self,
        run_id: str,
        layout: Layout,
        pid: int,
        events: ConnectionRequests,
        progress: ProgressSink,
    ) -> AttachedScript:
        """Attach a script once the state is here or this member surely founds the run."""
        run = self.by_id.get(RunId(run_id))
        if run is not None and run.error is not None:
            raise run.error
        if run is None or run.whole is None:
            raise ConfigError(
                f"this node is not in run {run_id}", hint="Join it first: atoll join INVITE"
            )
        if (attached := self._scripts.get(run.run_id)) is not None:
            raise ConfigError(
                f"a script is attached to run {run_id} already",
                why=f"It is process {attached}: this one." if attached == pid else "",
                hint=(
                    "close() the swarm that it has joined with before: another cell, or a function "
                    "that an exception has ended."
                    if attached == pid
                    else "One script a node. A second peer: give it its own ATOLL_HOME."
                ),
            )
        self._scripts[run.run_id] = pid

        def ended(farewell: str | None = None) -> None:
            if self._scripts.pop(run.run_id, None) is not None:
                # a private node ends because its script did
                node_ends = self.ending.is_set() and not self.private
                run.presence.ended(pid, farewell, node_ends=node_ends)

        try:
            founding = await self._await_state(run, progress)
            script = AttachedScript(run, layout, events, founding=founding, ended=ended)
        except BaseException:
            ended()
            raise
        run.wake()
        run.standstill.begin(trio.current_time(), pid)
        run.presence.attached(pid, averaging=averaging_text(run.manifest) if run.manifest else "")
        try:
            if not founding and not finished(
                run
            ):  # its model is the run's: only now a private node asks to be let in
                await self._await_admission(run.whole, progress)
        except BaseException:
            script.detached(None)
            raise
        return script

    async def _await_state(self, run: RunService, progress: ProgressSink) -> bool:
        """Wait for the state; True: there is none and this member founds the run."""
        session = run.whole
        assert session is not None
        since = trio.current_time()
        while session.phase != "running":
            waited_s = trio.current_time() - since
            if (
                session.phase == "seeking"
                and waited_s > REFUSED_S
                and (refusal := run.refusal()) is not None
            ):
                raise refusal
            alone = not self.context.network.members(run.run_id)
            silent = session.phase == "seeking" and alone and waited_s > REFUSED_S
            progress(
                *(
                    ("finding members: nobody who knows the run answers yet", 0, 0)
                    if silent
                    else run.chronicle.progress
                )
            )
            if (
                self.peer == run.organiser
                and session.phase == "seeking"
                and waited_s > FOUND_PATIENCE_S * (1 if alone else 4)
            ):
                lost = run.lost
                if not lost:
                    return True
                if alone and waited_s > 4 * FOUND_PATIENCE_S:
                    raise lost[0].lost()
            await trio.sleep(POLL_S)
            if run.error is not None:
                raise run.error
        return False

    async def _await_admission(self, whole: Whole, progress: ProgressSink) -> None:
        sessions = whole.sessions
        if sessions[0].admission.probation or not sessions[0].admission.may_enter():
            return  # it takes rounds, or never comes
        waited = False
        with trio.move_on_after(
            ADMISSION_PATIENCE_S
        ):  # what is trained before cannot be counted in the round that is open
            while not all(session.machine and session.machine.is_member for session in sessions):
                waited = True
                progress("waiting to be admitted", 0, 0)
                await trio.sleep(POLL_S / 2)
            if waited:
                progress("admitted: a member of the run from now on", 0, 0)

    @property
    def plain_lanes(self) -> bool:
        """Whether the manifests of all its runs (as far as they are known, and at least one) want
        lanes that are not encrypted.
        """
        known = [run.manifest for run in self.by_id.values() if run.manifest is not None]
        return bool(known) and not any(manifest.lanes.encrypt for manifest in known)

    # ---- inputs from network and engine
    def on_link(self, peer: PeerId, up: bool) -> None:
        for run in self.by_id.values():
            run.on_link(peer, up)

    def on_gone(self, peer: PeerId) -> None:
        """The process behind a connection that ended is no more."""
        for run in self.by_id.values():
            run.on_gone(peer)

    def on_addresses(self) -> None:
        """This node can be reached elsewhere than before."""
        self.publish(NodeAddressesEvent(addresses=tuple(self.context.network.addresses())))
        for run in self.by_id.values():
            run.guard(lambda run=run: run.announce(trio.current_time()))
            run.wake()

    def on_path(self, peer: PeerId, path: str) -> None:
        """A peer is connected in another way than before; "": no more."""
        of = [run.run_id for run in self.by_id.values() if peer in run.members]
        for run_id in of or [""]:
            self.publish(PeerPathEvent(run=run_id, peer=peer, path=path))

    def on_refused(self, topic: str, peer: PeerId, code: str, reason: str) -> None:
        """A peer does not admit us."""
        run = self.by_id.get(RunId(topic))
        if run is not None:
            run.on_refused(peer, code, reason)

    def fail(self, error: AtollError) -> None:
        """The node cannot go on: it ends, with this error."""
        self.error = self.error or error
        self.publish(NodeFailedEvent.of(error))
        self.down(now=True)

    def on_exchange(self, event: object) -> None:
        """An event of the engine."""
        for run in self.by_id.values():
            run.on_exchange(event)


def _no_member(run: RunService, network: PeerNetwork) -> NetworkError:
    """A bootstrap node answers, but no member gave the manifest: what is known of why."""
    members = [peer for peer, _ in network.members(run.run_id)]
    strange = network.uncertified(run.run_id)
    strangers = (
        (
            f" {strange} peers announce themselves in it without a certificate of its "
            "organiser, and were not asked."
        )
        if strange
        else ""
    )
    if members:
        there = sum(map(network.connected, members))
        why = (
            (
                f"{len(members)} members are announced, of which {there} are connected: none has "
                "handed over the manifest yet."
            )
            if there
            else (
                f"{len(members)} members are announced, and none could be reached: they are off, "
                "or no way leads to them from here."
            )
        )
        hint = "Try again in a minute. What is in the way: atoll netcheck"
    else:
        why = (
            "The bootstrap node answers, but knows of no member of the run: its members are off, "
            "elsewhere, or nobody has joined it yet."
        )
        hint = (
            "On the organiser's machine: atoll status, then atoll join RUN (where it "
            "was only made: atoll new)"
        )
    return NetworkError(
        f"no member of run {run.run_id} answered in {MANIFEST_PATIENCE_S:g} s",
        code="E113",
        why=why + strangers,
        hint=hint,
    )
