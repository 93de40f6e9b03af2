"""The smallest honest node: one member, a log of its own on disk, the real control server. For
tests of the client.

A round is decided over this member's contribution alone and the outer step is plain SGD with rate
1: anchor ← anchor − contribution. Log and anchor are written before anything is told, so a killed
node comes back where it was.

As a program it takes the arguments of a private node. Files in its home steer it: ``hold``:
contributions stay undecided while it exists; ``mute``: they are decided and logged, but the script
is not told.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from blake3 import blake3

from atoll.collectives.errors import (
    AtollError,
    ConfigError,
    LocalProtocolError,
    ModelMismatchError,
    NotAdmittedError,
)
from atoll.collectives.group import NO_READING, Member, Reading
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.layout import Layout, differences
from atoll.collectives.outcomes import Outcome, Share, Spent, Tally
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.reducers import works_on_bits
from atoll.collectives.script_swarm import Call, PeerView
from atoll.collectives.swarm import RunSettings
from atoll.node.composing.parent import watch_parent
from atoll.node.control import protocol as p
from atoll.node.control.calls import CallTable, answers, does, hears
from atoll.node.control.protocol import JoinRequest, RunInfo, ShowAnswer, ShowEvaluation
from atoll.node.control.requests import ConnectionRequests
from atoll.node.control.server import ControlServer
from atoll.node.control.service import AnchorFacts, ProgressSink, ReduceMemory, reduce_opened
from atoll.node.control.shared_memory import AnchorSlots, PooledBuffer, SharedBuffer
from atoll.node.home.lifecycle import NodeFile, NodeLock
from atoll.node.home.paths import Paths, find_paths
from atoll.node.home.private_node import ParentLink
from atoll.node.modes.operations.naming import spec_of

if TYPE_CHECKING:
    from torch import Tensor

RUN = RunId("a" * 26)
PEER = PeerId("reference")
INVITE = "atoll2:reference"
SETTINGS = RunSettings(sync_every=5, outer=OuterSettings("sgd", 1.0, 0.0), codec="fp32")


def digest(flat: Tensor) -> str:
    """blake3 (hex) of float32 bytes."""
    return blake3(flat.numpy().tobytes()).hexdigest()


class ReferenceRun:
    """The state of the one run: the log (cids), the anchor, what is frozen. Kept in ``home`` if
    there is one.
    """

    def __init__(self, home: Path | None) -> None:
        self.home = home
        self.log: list[str] = []
        self.weights: list[int] = []
        self.layout: Layout | None = None
        self.slots: AnchorSlots | None = None
        self.frozen: tuple[bytes, Tensor, int] | None = None
        self.session: ReferenceSession | None = None
        self.waiting: dict[bytes, ReferenceSession] = {}
        self.hold = False
        self.farewells: list[str | None] = []  # of scripts whose connection has ended
        self.shown: list[ShowAnswer | ShowEvaluation] = []
        self.reads = False  # whether somebody reads contributions after their outcomes
        self.spent: Spent | None = None
        self.begun = True  # else its script is kept from training
        self.paused = ""  # why its script is not to train
        if home is not None and (home / "log.json").exists():
            # not before it is needed: a node that only starts and ends should do so quickly
            import torch

            saved = json.loads((home / "log.json").read_text())
            self.log, self.weights = saved["log"], saved["weights"]
            self._publish(
                torch.frombuffer(bytearray((home / "anchor").read_bytes()), dtype=torch.float32)
            )

    def _publish(self, anchor: Tensor) -> None:
        if self.slots is None:
            self.slots = AnchorSlots(anchor.numel())
        slot = self.slots.next_slot()
        self.slots.tensor(slot).copy_(anchor)
        self.slots.publish(slot, len(self.log), digest(anchor))

    def _save(self, anchor: Tensor) -> None:
        if self.home is not None:
            (self.home / "anchor").write_bytes(anchor.numpy().tobytes())
            (self.home / "log.json").write_text(
                json.dumps({"log": self.log, "weights": self.weights})
            )

    def anchor(self) -> Tensor:
        """A copy of the newest anchor."""
        assert self.slots is not None
        assert self.slots.current is not None
        return self.slots.tensor(self.slots.current.slot).clone()

    def found(self, anchor: Tensor) -> None:
        """Entry 0."""
        self._save(anchor)
        self._publish(anchor)

    def tick(self) -> None:
        """Decide what is frozen, unless it is held."""
        if (
            self.frozen is None
            or self.hold
            or (self.home is not None and (self.home / "hold").exists())
        ):
            return
        (cid, vector, samples), self.frozen = self.frozen, None
        anchor = self.anchor() - vector
        self.log.append(cid.hex())
        self.weights.append(samples)
        self._save(anchor)
        self._publish(anchor)
        self.tell(cid, samples)

    def tell(self, cid: bytes, samples: int = 1) -> None:
        """Whoever asked learns what became of ``cid``."""
        if self.home is not None and (self.home / "mute").exists():
            return
        session = self.waiting.pop(cid, None)
        if session is not None and session.events is not None:
            counted = cid.hex() in self.log
            round_ = self.log.index(cid.hex()) + 1 if counted else len(self.log)
            session.events.decided(
                cid,
                Outcome("committed", round_, (Share(PEER, samples),), True)
                if counted
                else Outcome("lost", 0, reason="it was lost with the node"),
            )


class ReferenceSession:
    """See ScriptSession. It has no buffers, and asks for no vectors."""

    def __init__(self, run: ReferenceRun, layout: Layout, events: ConnectionRequests) -> None:
        self.run = run
        self.events: ConnectionRequests | None = events
        self.founding = run.slots is None
        if run.slots is None:
            run.slots = AnchorSlots(layout.numel)
        self.anchors = [run.slots]
        self.contribution = SharedBuffer(layout.numel * 4)
        self.metrics: dict[str, float] = {}
        self.left = False
        self.reductions: dict[str, tuple[Call, PooledBuffer]] = {}
        self.called: set[str] = set()
        self.calls = CallTable(
            does(p.Contribute, self.contribute),
            answers(p.Reclaim, self.unread, p.Unread),
            does(p.Resume, self.resume),
            answers(p.Members, self.members, lambda id_, told: p.MemberList(id_, *told)),
            answers(p.Tallies, self.tallies, lambda id_, found: p.TallyList(id_, tuple(found))),
            answers(p.Start, self.starts, lambda id_, there: p.Starting(id_, *there)),
            answers(p.Rest, self.rests, p.Resting),
            answers(p.NextNumber, lambda name, least: least, p.Numbered),
            hears(p.Report, self.report),
            hears(p.ShowAnswer, self.show_answer),
            hears(p.ShowEvaluation, self.show_evaluation),
            does(p.Depart, self.leave),
            answers(p.ReduceOpen, self.reduce_open, reduce_opened),
            does(p.ReduceStart, self.reduce_start),
            does(p.ReduceCancel, self.reduce_cancel),
            does(p.ReduceClose, self.reduce_close),
        )

    def facts(self, entry: int, fragment: int = 0) -> AnchorFacts:
        return AnchorFacts(entry, sum(self.run.weights[:entry]))  # nobody joins

    def starts(self, now: bool = False) -> tuple[int, int]:
        self.run.begun = self.run.begun or now
        return (0, 0) if self.run.begun else (1, 2)

    def rests(self) -> str:
        return self.run.paused

    async def found(self) -> None:
        if not self.founding:
            raise LocalProtocolError("the run is founded")
        self.run.found(self.contribution.tensor().clone())
        self.founding = False

    def contribute(
        self,
        cid: bytes,
        samples: int,
        base: int | None = None,
        fragment: int = 0,
        reading: Reading = NO_READING,
        hold_s: float = 0.0,
    ) -> None:
        if self.run.frozen is not None:
            raise LocalProtocolError("one is frozen")
        now = len(self.run.log)
        if base is not None and base != now and self.events is not None:
            self.events.decided(
                cid,
                Outcome("lost", now, reason=f"refused: it was made on the anchor of round {base}"),
            )
            return
        self.run.waiting[cid] = self
        self.run.frozen = cid, self.contribution.tensor(), samples

    def unread(self, fragment: int = 0) -> bool:
        """Whether the node reads nothing of it."""
        return self.run.frozen is None and not self.run.reads

    def resume(self, cid: bytes, fragment: int = 0) -> None:
        self.run.waiting[cid] = self
        if self.run.frozen is None or self.run.frozen[0] != cid:
            self.run.tell(cid)

    def members(self) -> tuple[tuple[PeerView, ...], Spent | None]:
        return (PeerView(PEER, len(self.run.log), True, "self"),), self.run.spent

    def tallies(self, first: int) -> Sequence[Tally]:
        me, samples = Member(PEER, 0), self.run.weights
        return [
            Tally(at, at, ((me, samples[at - 1]),) if at else (), (me,))
            for at in range(first, len(samples) + 1)
        ]

    def report(
        self,
        metrics: Mapping[str, float],
        first_batch: tuple[int, bytes] | None = None,
        read: tuple[bytes, ...] = (),
    ) -> None:
        self.metrics |= metrics

    def show_answer(self, round: int, prompt: str, text: str) -> None:
        self.run.shown.append(p.ShowAnswer(round, prompt, text))

    def show_evaluation(self, round: int, tokens: int, held_out: float) -> None:
        self.run.shown.append(p.ShowEvaluation(round, tokens, held_out))

    async def leave(self) -> None:
        self.left = True

    def reduce_open(self, call: Call, numel: int, buffer: int = 0) -> ReduceMemory:
        if call.op_id in self.called:
            raise LocalProtocolError(f"{call.op_id} was called already")
        shape = spec_of(call, numel).shape((Member(PEER, 0),))
        self.called.add(call.op_id)
        self.reductions[call.op_id] = call, PooledBuffer(4 * shape.numel, None)
        chunking = (shape.codec, shape.chunk_elements, shape.numel)
        return ReduceMemory(self.reductions[call.op_id][1], chunking, (PEER,))

    def reduce_start(self, op_id: str) -> None:
        assert self.events is not None
        call, memory = self.reductions[op_id]
        if call.deadline_s == 0:
            self.events.reduced(op_id, Outcome("open", 0, reason="the deadline passed"))
        elif not call.weight:
            self.events.reduced(
                op_id, Outcome("open", 0, reason="the deadline passed: nobody has given anything")
            )
        elif not works_on_bits(call.reducer) and not bool(memory.tensor().isfinite().all()):
            self.events.reduced(
                op_id, Outcome("open", 0, reason="the tensor holds NaN or infinity")
            )
        elif not self.run.hold:
            self.events.reduced(
                op_id, Outcome("committed", 0, (Share(PEER, call.weight),), True), memory
            )

    def reduce_cancel(self, op_id: str) -> None:
        assert self.events is not None
        if self.run.hold and op_id in self.reductions:
            self.events.reduced(op_id, Outcome("open", 0, reason="cancelled by its caller"))

    def reduce_close(self, op_id: str) -> None:
        if op_id in self.reductions:
            self.reductions.pop(op_id)[1].close()

    def detached(self, farewell: str | None) -> None:
        self.events = None
        self.run.farewells.append(farewell)
        self.run.session = None
        self.contribution.close()


class ReferenceExpected:
    """See ExpectedScript."""

    def __init__(self, service: ReferenceService, pid: int) -> None:
        self.service, self.pid = service, pid

    def prepares(self, what: str) -> None:
        self.service.prepared.append(what)

    def gone(self) -> None:
        self.service.expected.remove(self.pid)


class ReferenceService:
    """See NodeService."""

    peer = PEER

    def __init__(
        self, home: Path | None = None, *, private: bool = False, parent_pid: int = 0
    ) -> None:
        self.private, self.parent_pid = private, parent_pid
        self.run = ReferenceRun(home)
        self.ended = trio.Event()
        self.blocked: trio.Event | None = None  # open_script waits for it
        self.opening = 0
        self.script_pid = 0
        self.expected: list[int] = []  # processes that have joined and are to attach
        self.prepared: list[str] = []  # what they said that they do first
        self.events: list[dict[str, Any]] = [{"n": n} for n in range(3)]
        self.calls = CallTable(
            answers(p.Status, self.status, p.Document),
            answers(p.Runs, self.runs, lambda id_, rows: p.Document(id_, {"runs": rows})),
            answers(p.Peers, self.peers, lambda id_, rows: p.Document(id_, {"peers": rows})),
            answers(p.Ping, self.ping, p.Document),
            answers(p.Check, self.check, p.Document),
            does(p.Leave, self.leave),
            answers(p.BeginRun, self.begin, p.Document),
            answers(p.Pause, self.pause, p.Document),
            does(p.Down, self.down),
        )

    async def status(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "pid": os.getpid(),
            "round": len(self.run.log),
            "frozen": self.run.frozen is not None,
        }

    async def runs(self) -> list[dict[str, Any]]:
        return [{"run": RUN}]

    async def peers(self, run: str) -> list[dict[str, Any]]:
        if run == "defect":
            raise ZeroDivisionError("on purpose")
        if run == "refused":
            raise OSError(errno.EMFILE, "Too many open files")
        if run == "much":
            return [{"peer": "x" * (1 << 20)}]
        await self.find_run(run)
        return [{"peer": PEER}]

    async def ping(self, peer: str) -> dict[str, Any]:
        return {"peer": peer, "path": "direct", "rtt_ms": 1.0, "address": ""}

    async def check(self, bandwidth: str = "") -> dict[str, Any]:
        flow = {
            "peer": bandwidth,
            "path": "direct",
            "up_bytes_per_s": 2_000_000,
            "down_bytes_per_s": 3_000_000,
        }
        return {
            "clock": [{"peer": PEER, "ahead_s": 0.25, "within_s": 0.01}],
            "bandwidth": flow if bandwidth else None,
        }

    def _info(self) -> RunInfo:
        return RunInfo(RUN, "reference", PEER, SETTINGS, len(self.run.log))

    async def join(self, request: JoinRequest, progress: ProgressSink) -> RunInfo:
        if request.invite != INVITE:
            raise NotAdmittedError("this invite opens nothing", hint="Ask for another.")
        progress("finding members", 0, 0)
        return self._info()

    async def fetch_base(self, run: str, progress: ProgressSink) -> dict[str, Any]:
        await self.find_run(run)
        progress("model.safetensors from 1 member", 1, 2)
        return {"folder": "/models", "bytes": 2, "fetched": 1, "from": [PEER]}

    async def find_run(self, run: str) -> RunInfo:
        if run not in ("", RUN, "reference"):
            raise ConfigError(f"no run {run!r}", key="run")
        return self._info()

    def expect_script(self, run_id: RunId, pid: int) -> ReferenceExpected:
        self.expected.append(pid)
        return ReferenceExpected(self, pid)

    async def begin(self, run: str) -> dict[str, Any]:
        await self.find_run(run)
        before, self.run.begun = self.run.begun, True
        return {"run_id": RUN, "begun": not before, "missing": 1}

    async def pause(self, run: str, paused: bool = True) -> dict[str, Any]:
        await self.find_run(run)
        before, self.run.paused = self.run.paused, "paused by its owner" if paused else ""
        return {"run_id": RUN, "paused": self.run.paused, "changed": bool(before) != paused}

    async def leave(self, run: str, now: bool = False) -> None:
        await self.find_run(run)

    def down(self, now: bool = False) -> None:
        self.ended.set()

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async def events() -> AsyncIterator[dict[str, Any]]:
            for event in self.events:
                yield event
            await trio.sleep_forever()

        yield events()

    async def open_script(
        self,
        run_id: str,
        layout: Layout,
        pid: int,
        events: ConnectionRequests,
        progress: ProgressSink,
    ) -> ReferenceSession:
        await self.find_run(run_id)
        if self.run.session is not None:
            raise ConfigError("another script is attached")
        self.script_pid = pid
        if self.blocked is not None:
            self.opening += 1
            try:
                progress("fetching state", 40, 100)
                await self.blocked.wait()
            finally:
                self.opening -= 1
        mine = self.run.layout
        if mine is not None and layout != mine:
            raise ModelMismatchError(
                "your model is not this run's model", why="\n".join(differences(layout, mine))
            )
        self.run.layout = layout
        session = self.run.session = ReferenceSession(self.run, layout, events)
        return session

    async def tick(self) -> None:
        """Rounds, for ever."""
        while True:
            self.run.tick()
            await trio.sleep(0.002)


async def serve(service: ReferenceService, path: Path, started: Any = None) -> None:
    """The node until `down`; ``started(server)`` is called when it listens."""
    server = ControlServer(service, path)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        nursery.start_soon(service.tick)
        if started is not None:
            started(server)
        await service.ended.wait()
        server.announce_end("asked to")
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel()


class Node:
    """The reference node in a thread of this process, at the control socket of a home."""

    def __init__(
        self, home: Path, service: Callable[[], ReferenceService] = ReferenceService
    ) -> None:
        self.paths: Paths = find_paths(home)
        self.paths.ensure()
        self.service: ReferenceService
        self.server: ControlServer
        self.defects: list[Exception] = []
        self._make = service
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self.service = self._make()
        with self._scope:
            await serve(self.service, self.paths.control_socket, self._started)

    def _started(self, server: ControlServer) -> None:
        self.server = server
        server._on_defect = self.defects.append
        self._ready.set()

    def do(self, action: Callable[[], Any]) -> Any:
        """Run something in the node's thread."""
        return trio.from_thread.run_sync(action, trio_token=self._token)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds in the node's thread."""

        async def wait() -> None:
            while not condition():
                await trio.sleep(0.001)

        trio.from_thread.run(wait, trio_token=self._token)

    def stop(self) -> None:
        """End it without a word, as a crash would."""
        if self._thread.is_alive():
            try:
                self.do(self._scope.cancel)
            except trio.RunFinishedError:
                pass
        self._thread.join(60)
        assert not self._thread.is_alive()


async def program(arguments: argparse.Namespace) -> None:
    """A private node, or a daemon without ``--private``."""
    paths = find_paths(arguments.home)
    paths.ensure()
    link = ParentLink(arguments.parent_fd) if arguments.private else None
    lock = None
    try:
        lock = NodeLock.acquire(paths)
        service = ReferenceService(
            paths.data_dir, private=arguments.private, parent_pid=arguments.parent_pid
        )

        def started(server: ControlServer) -> None:
            lock.publish(
                NodeFile(
                    os.getpid(), str(server.path), PEER, arguments.private, arguments.parent_pid
                )
            )
            if link is not None:
                link.ready(server.path)

        async with trio.open_nursery() as nursery:
            if link is not None:

                async def end_with_parent() -> None:
                    await watch_parent(link, arguments.parent_pid)
                    service.ended.set()

                nursery.start_soon(end_with_parent)
            await serve(service, paths.control_socket, started)
            nursery.cancel_scope.cancel()
    except AtollError as error:
        if link is None:
            raise
        link.failed(error)
    finally:
        if lock is not None:
            lock.release()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--parent-pid", type=int, default=0)
    parser.add_argument("--parent-fd", type=int, default=-1)
    parser.add_argument("--home")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    trio.run(program, parser.parse_args())
