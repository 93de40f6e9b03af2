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
from ..control.service import ExpectedScript, ProgressSink
from ..home.paths import Paths, write_atomic
from ..home.private_files import remove_file
from ..run.events import NodeAddressesEvent, NodeFailedEvent, PeerPathEvent, RunEvent
from ..run.invite import parse_invite
from ..run.standing import Standing, forget_standing, load_standing, save_standing, standing_by
from ..session.fragments import Whole
from .context import NodeContext
from .facts import finished, sealed
from .outside import SignedRun
from .run import RunService
from .scripts import AttachedScript
from .subscribers import Subscribers

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


class NobodysScript:
    """A script of a run that this node has left meanwhile. Implements `ExpectedScript`."""

    def prepares(self, what: str) -> None:
        """There is no run to show it in."""

    def gone(self) -> None:
        """Nor to let go of it."""


class Node:
    """All runs of this node. Lives in the trio thread of the node process."""

    def __init__(
        self, context: NodeContext, *, private: bool, parent_pid: int, drain_s: float = DRAIN_S
    ) -> None:
        """``drain_s``: how long it may take to end before whatever is open is left."""
        self.context, self._drain_s = context, drain_s
        self.peer: PeerId = context.identity.peer
        self.private, self.parent_pid = private, parent_pid
        self.by_id: dict[RunId, RunService] = {}
        self.ending = trio.Event()
        self.end_now = False
        # By run, the process of the script that is attached, or about to be.
        self._scripts: dict[RunId, int] = {}
        self._ended: dict[RunId, RunService] = {}  # on their way out
        self.error: AtollError | None = None  # the node itself cannot go on
        self.troubles: list[StorageError] = []  # files that belong to no run
        self._subscribers = Subscribers()
        self.calls = CallTable(
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
        if run is not None and run.terms is not None:  # of what was never entered nothing is kept
            run.watch.note_published(event)

    def subscribe(self) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """Events from now on."""
        return self._subscribers.subscribe()

    # ---- runs
    def script_pid(self, run_id: RunId) -> int | None:
        """The process of the script that is attached, or about to be."""
        return self._scripts.get(run_id)

    async def find_run(self, run: str) -> RunInfo:
        """A run that this node is in, or one that is stored here and is entered now. Raises
        SwarmClosedError (E162) for one that was left.
        """
        await trio.lowlevel.checkpoint()
        try:
            found = self.find(run)
        except ConfigError:
            signed = self.context.manifests.load(run) if run else self._only_stored()
            if signed is None or signed.run_id in self.by_id:
                raise
            if self._left_file(signed.run_id).exists():
                raise left(signed.run_id, self.context.manifests.terms(signed).name) from None
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

    def _only_stored(self) -> SignedRun | None:
        stored = list(self.context.manifests.stored([]).values())
        return stored[0] if len(stored) == 1 else None

    def find(self, run: str) -> RunService:
        """The run of this id, of a unique beginning of it, or of this name; "": the only one.
        Raises ConfigError.
        """
        named = [
            r
            for r in self.by_id.values()
            if not run or r.run_id.startswith(run) or (r.terms and r.name == run)
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
        assert run.terms is not None
        return RunInfo(
            run.run_id,
            run.terms.name,
            self.peer,
            run.terms.settings,
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
            signed = self.context.manifests.decode(request.manifest)
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
                progress(f"nobody has answered yet: {self.context.diagnosis.tried()}", 0, 0)
            await run.known.wait()
        if run.error is not None:
            if run.signed is None:  # else it stays, for `atoll status` to show what is wrong
                self._drop(run)
                forget_standing(self.paths, run.run_id, earlier)
            raise run.error
        if run.terms is None:
            diagnosis = self.context.diagnosis
            error = (
                run.refusal()
                or await diagnosis.wrong_clock()
                or diagnosis.of_silence(run.run_id, run.organiser, named)
            )
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
        self, run_id: RunId, organiser: PeerId, signed: SignedRun | None, standing: Standing
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
        self, run_id: RunId, organiser: PeerId, signed: SignedRun | None, standing: Standing
    ) -> RunService:
        run = self.by_id.get(run_id)
        if run is None:
            stored = self.context.manifests.stored([]).get(run_id)
            self.context.peers.add_bootstrap(standing.bootstrap)
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

    def resume(self, run_id: RunId, signed: SignedRun) -> None:
        """Enter a run of the last life again, unless it was left."""
        if not self._left_file(run_id).exists():
            self._begin(run_id, signed.organiser, signed, load_standing(self.paths, run_id))

    async def watch_clock(self) -> None:
        """Ask peers now and then what they say of this machine's clock; a wrong one is a trouble of
        every run.
        """
        while True:
            await trio.sleep(CLOCK_S)
            if (error := await self.context.diagnosis.wrong_clock()) is not None:
                for run in self.by_id.values():
                    run.troubles.tell(error)

    def _drop(self, run: RunService, why: AtollError | None = None) -> None:
        run.stop(why)
        if self.by_id.get(run.run_id) is run:
            del self.by_id[run.run_id]
            self._ended[run.run_id] = run

    async def leave(self, run: str, now: bool = False) -> None:
        """Answer `protocol.Leave`."""
        service = self.find(run)
        if not now:
            await self._depart(service, DRAIN_S)
        service.watch.script.left()
        self._drop(service, left(service.run_id, service.name))
        write_atomic(self._left_file(service.run_id), b"")

    async def recertify(self, run: str, without: Sequence[PeerId]) -> dict[str, Any]:
        """Answer `protocol.Recertify`."""
        service = self.find(run)
        if service.whole is None and service.error is None:
            raise RecertifyError("the run's state is not here yet")
        self.context.parts.recertify(service.driven.sessions, trio.current_time(), without)
        service.wake()
        return sealed(service) or {"removed": list(without), "awaited": []}

    async def begin(self, run: str) -> dict[str, Any]:
        """Answer `protocol.BeginRun`."""
        await trio.lowlevel.checkpoint()
        service = self.find(run)
        start, terms = service.start, service.terms
        missing = max(0, start.wanted - start.there)
        least = terms.least_masked if terms is not None else 0
        lacking = max(0, least - start.there) if start.wanted else 0
        answer = {"run_id": service.run_id, "begun": start.now(), "missing": missing}
        return answer | {"lacking": lacking}

    async def pause(self, run: str, paused: bool = True) -> dict[str, Any]:
        """Answer `protocol.Pause`."""
        await trio.lowlevel.checkpoint()
        service = self.find(run)
        changed = service.pause.say(paused)
        return {"run_id": service.run_id, "paused": service.pause.why, "changed": changed}

    async def fetch_base(self, run: str, progress: ProgressSink) -> dict[str, Any]:
        """Have members send the files of the run's pretrained model that this machine lacks."""
        service = self.find(run)
        await service.known.wait()
        if service.error is not None:
            raise service.error
        if service.base is None:
            raise ConfigError(f"run {service.run_id} has no pretrained model", code="E415")
        service.base.begin(trio.current_time())
        service.wake()
        try:
            while not (news := service.base.news()).over and service.error is None:
                progress(*news.progress)
                await trio.sleep(POLL_S)
        finally:
            service.base.end()
        if (error := service.error or news.error) is not None:
            raise error
        return dict(news.document)

    async def read_bans(self, run: str) -> dict[str, Any]:
        """Answer `protocol.ReadBans`."""
        banning = self.find(run).banning
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
                    nursery.start_soon(run.watch.script.buried, LEAVE_S)
        for run in list(self.by_id.values()):
            run.stop()

    def _may_decide(self, run: RunService, begun: float) -> bool:
        """Whether the end of this node waits for a run's contribution to be decided. Where the disk
        refuses what a vote needs, hardly for long: the script keeps it, and offers it again.
        """
        refused = run.troubles.storage_fails and trio.current_time() - begun > DISK_S
        return run.undecided and not refused

    # ---- scripts
    def expect_script(self, run_id: RunId, pid: int) -> ExpectedScript:
        """A script has joined a run and is to attach."""
        run = self.by_id.get(run_id)
        return run.watch.script.expect(pid) if run is not None else NobodysScript()

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
                run.watch.script.ended(pid, farewell, node_ends=node_ends)

        try:
            founding = await self._await_state(run, progress)
            script = AttachedScript(run, layout, events, founding=founding, ended=ended)
        except BaseException:
            ended()
            raise
        run.wake()
        run.watch.script.attached(pid, run.terms.averaging if run.terms else "")
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
                    else run.watch.progress
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
        known = [run.terms for run in self.by_id.values() if run.terms is not None]
        return bool(known) and not any(terms.encrypts for terms in known)

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
        self.publish(NodeAddressesEvent(addresses=tuple(self.context.peers.addresses())))
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
