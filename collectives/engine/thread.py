"""The engine: one thread that drives one `Exchange` over lanes."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import LocalProtocolError, NetworkError, RemoteProtocolError
from ..exchange import (
    CommandFailed,
    Exchange,
    ExchangeEvent,
    LaneDown,
    LanesWanted,
    LaneUp,
    PeerFault,
)
from ..group import Plan
from ..identifiers import PeerId
from ..pace import Pace
from ..record_layer import PLAIN, LaneKeys
from ..reduce import FindReducer
from ..reducers import REDUCERS
from .bucket import Bucket
from .lane import REPLACED, Lane, PeerFaultError
from .losses import LANES, Losses
from .meter import LaneCounters, Meter, read_socket
from .plain import PlainLane
from .poller import READ, WRITE, make_poller
from .proxy import EngineExchange
from .settings import EngineSettings, begin_bbr, tune
from .width import Width, first

IDLE_S = 5.0
LOOK_S = 0.02  # the longest without a look at the sockets, however much else there is to do
LONG_BYTES = 1 << 20  # of long records that are received one after another while other lanes wait
# Commands that change no memory, whatever is being sent from it.
HARMLESS = ("report", "report_blob", "sync")


@dataclass(frozen=True, slots=True)
class LaneStats:
    """Bytes on a lane since it was added, record layer included, and what it is."""

    path: str
    up: bool
    bytes_sent: int
    bytes_received: int


class EngineThread:
    """Runs an `Exchange` over lanes in a thread of its own, until `stop`. A context manager.

    ``emit`` and ``result_buffer`` are called in the engine's thread: they must hand over quickly
    and not wait for the engine. Everything else may be called from any thread. ``exchange`` takes
    the commands. While any engine lives, the interpreter's switch interval is small.
    """

    def __init__(
        self,
        me: PeerId,
        *,
        emit: Callable[[ExchangeEvent], None],
        result_buffer: Callable[[Plan], memoryview] | None = None,
        reducers: FindReducer = REDUCERS.get,
        settings: EngineSettings | None = None,
    ) -> None:
        self.me = me
        self.settings = settings or EngineSettings()
        self.exchange = EngineExchange(self._submit)
        self._emit = emit
        self._core = Exchange(
            me,
            emit=emit,
            result_buffer=result_buffer,
            reducers=reducers,
            eager=False,
            clock=time.monotonic,
            resend_after_s=lambda: max(self.settings.resend_after_s, 2 * self.rtt_s),
            lead=lambda: self.meter.lead,
            beside=self._offload,
        )
        self._commands: deque[tuple[str, tuple[Any, ...], dict[str, Any]]] = deque()
        self._lanes: dict[tuple[PeerId, int], Lane] = {}
        self._numbers = itertools.count(1)
        self._order: list[Lane] = []
        self._poller = make_poller()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._stopping = False
        self._ended = False
        self.meter = Meter(self.settings.max_up, self.settings.max_down)
        self._limits = Bucket(self.settings.max_up), Bucket(self.settings.max_down)
        self._measured_at = 0.0
        self.losses = Losses()
        self._widths: dict[PeerId, Width] = {}
        self._many: dict[PeerId, bool] = {}  # with bbr: whether several lanes are wanted
        self._closed_bytes = dict[str, tuple[int, int]]()  # of lanes that are no more, by path
        self._totals_lock = threading.Lock()
        self._lock = threading.Lock()  # no command may slip in behind the last look at the queue
        self._thread = threading.Thread(
            target=self._main, name=f"atoll-engine-{me[-8:]}", daemon=True
        )

    # ---- any thread

    def start(self) -> None:
        """Start the thread. Once."""
        self._thread.start()

    def stop(self) -> None:
        """Close all lanes and end the thread; returns when it has ended. Idempotent. Not from
        inside ``emit``.
        """
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._release()

    def __enter__(self) -> EngineThread:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def add_lane(
        self, peer: PeerId, sock: socket.socket, keys: LaneKeys, path: str, index: int = 0
    ) -> int:
        """Use a connected stream socket (TCP, or one end of a bridged pair) as a lane to ``peer``;
        the engine owns it from now on.

        `LaneUp` follows when the other end has proved that it holds the keys. Lanes to one peer
        with several indices share the work: each takes the next record when it has room. The lane
        with the same index is closed once the new one is up, and loses nothing. Returns its number,
        by which `LaneDown` tells it from those before and after it.
        """
        number = next(self._numbers)
        self._submit("+lane", peer, sock, keys, path, number, index)
        return number

    def drop_lane(self, peer: PeerId, keep: int = 0) -> None:
        """Close all lanes to ``peer`` but those of the first ``keep`` indices; `LaneDown` follows
        for each.
        """
        self._submit("-lane", peer, keep)

    @property
    def first_lanes(self) -> int:
        """How many lanes to a peer to begin with; `LanesWanted` says when to change that."""
        return first(bbr=self.settings.bbr)

    def drop_plain_lanes(self) -> None:
        """Close all lanes that are not encrypted; `LaneDown` follows for each."""
        self._submit("-plain")

    def sync(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted so far has been run. False after ``timeout_s`` or when
        the engine has ended.
        """
        done = threading.Event()
        self._submit("sync", done)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (
            not done.is_set() and self.alive and (deadline is None or time.monotonic() < deadline)
        ):
            done.wait(
                0.05 if deadline is None else max(0.0, min(0.05, deadline - time.monotonic()))
            )
        return done.is_set()

    def stats(self) -> dict[PeerId, LaneStats]:
        """Traffic of the present lanes, all lanes to a peer together."""
        found: dict[PeerId, LaneStats] = {}
        for lane in list(self._order):
            last = found.get(lane.peer, LaneStats(lane.path, False, 0, 0))
            sent, received = (
                last.bytes_sent + lane.bytes_sent,
                last.bytes_received + lane.bytes_received,
            )
            found[lane.peer] = LaneStats(last.path, last.up or lane.up, sent, received)
        return found

    def totals(self) -> tuple[int, int]:
        """Bytes (sent, received) over all lanes ever, record layer included. Never falls."""
        counts = self.totals_by_path().values()
        return sum(sent for sent, _ in counts), sum(received for _, received in counts)

    def totals_by_path(self) -> dict[str, tuple[int, int]]:
        """`totals` of the lanes of each path, such as ``direct``."""
        with self._totals_lock:
            found = dict(self._closed_bytes)
            for lane in self._order:
                sent, received = found.get(lane.path, (0, 0))
                found[lane.path] = sent + lane.bytes_sent, received + lane.bytes_received
            return found

    @property
    def pace(self) -> Pace:
        """How fast this node's links are, as far as it is measured."""
        return self.meter.pace._replace(silences=self.losses.silences)

    @property
    def rtt_s(self) -> float:
        """The round-trip time to the furthest peer of a lane, as `pace` has it."""
        return self.meter.rtt_s

    def notify(self, event: threading.Event) -> None:
        """Set ``event`` when everything submitted so far has been run; never, when the engine ends
        before.
        """
        self._submit("sync", event)

    def _submit(self, name: str, *args: Any, **options: Any) -> None:
        with self._lock:
            if not self._ended:
                self._commands.append((name, args, options))
            elif name == "+lane":
                args[1].close()
        self._wake()

    def _offload(self, work: Callable[[], Callable[[], None]]) -> None:
        """Do in a thread of its own what would keep heartbeats waiting, then what it returns in the
        engine's.
        """

        def run() -> None:
            try:
                done = work()
            except Exception as error:  # a defect: the session is told as of a command's
                done = partial(_throw, error)
            self._submit("finish", done)

        threading.Thread(target=run, name="atoll-weigh", daemon=True).start()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._wake_in.send(b"\0")

    # ---- the engine's thread

    def _main(self) -> None:
        _switch_interval(self.settings.switch_interval_s)
        try:
            self._loop()
        except Exception as error:  # a defect: tell the session, then let the interpreter print it
            self._emit(CommandFailed("engine", str(error), error))
            raise
        finally:
            for lane in list(self._order):
                self._close(lane, "engine stopped")
            self._release()
            _switch_interval(None)

    def _release(self) -> None:
        with self._lock:
            self._ended = True
        for name, args, _ in self._commands:
            if name == "+lane":
                args[1].close()
        self._commands.clear()
        for end in (self._wake_out, self._wake_in):
            end.close()
        self._poller.close()

    def _loop(self) -> None:
        self._poller.watch(self._wake_out.fileno(), READ)
        now = checked = looked = time.monotonic()
        while not self._stopping:
            while self._commands:
                self._run(*self._commands.popleft())
            moved = False
            for lane in tuple(self._order):
                if lane.can_write and (not lane.dry or self._core.has_more(lane.peer)):
                    moved |= self._step(lane, lane.send, now)
            enough = LONG_BYTES if len(self._order) > 1 else 0
            for lane in tuple(self._order):
                if lane.can_read:
                    moved |= self._step(lane, partial(lane.receive, enough=enough), now)
            moved |= self._core.work()
            if len(self._order) > 1:
                self._order.append(self._order.pop(0))
            if not moved or now - looked > LOOK_S:
                self._wait(now, moved)
                looked = now
            previous, now = now, time.monotonic()
            if (
                now - previous > self.settings.dead_after_s / 2
            ):  # we were stopped, not they: their bytes are still in the kernel
                for lane in self._order:
                    lane.heard_at += now - previous
            if now - checked > self.settings.beat_s / 4:
                checked = now
                self._check(now)
                if self.meter.due(now):
                    self._measure(now)

    def _wait(self, now: float, moved: bool) -> None:
        """Look at the sockets; with nothing ``moved``, until there is something to do."""
        up_s, down_s = self._limits[0].wait_s(now), self._limits[1].wait_s(now)
        for lane in self._order:
            self._poller.watch(
                lane.fd,
                (0 if down_s or lane.ended else READ)
                | (WRITE if lane.wants_write and not up_s else 0),
            )
        timeout = min(
            [
                self.settings.beat_s / 2 if self._order else IDLE_S,
                *(wait_s for wait_s in (up_s, down_s) if wait_s),
            ]
        )
        for fd, ready in self._poller.wait(
            0 if moved or self._commands or self._stopping else timeout
        ):
            if fd == self._wake_out.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
                continue
            for lane in self._order:
                if lane.fd == fd:
                    lane.can_read = lane.can_read or bool(ready & READ)
                    lane.can_write = lane.can_write or bool(ready & WRITE)

    def _check(self, now: float) -> None:
        """Heartbeats, and lanes that fell silent."""
        for lane in tuple(self._order):
            lossy_s = self.losses.silences.get(lane.peer, 0.0)
            if not lane.up and now - lane.opened_at > self.settings.hello_s + lossy_s:
                self._close(lane, f"no authentic record within {self.settings.hello_s} s")
            elif (
                lane.up
                and not lane.ended
                and now - lane.heard_at > max(self.settings.dead_after_s, lossy_s)
            ):
                self._close(lane, f"silent for {now - lane.heard_at:.1f} s")
            elif now - lane.spoke_at >= self.settings.beat_s:
                lane.beat()

    def _measure(self, now: float) -> None:
        """Read what the lanes have carried. Where the kernel does not tell, a lane whose socket is
        full counts as busy.
        """
        readings: dict[int, LaneCounters] = {}
        for lane in self._order:
            if lane.wants_write:
                lane.waited_s += now - self._measured_at
            reading = readings[lane.number] = read_socket(lane.sock) or LaneCounters(
                lane.bytes_sent, lane.bytes_received, lane.waited_s, 0.0
            )
            if lane.way.read(reading) and self.settings.bbr:
                begin_bbr(lane.sock)
        self._measured_at = now
        self.meter.read(now, readings)
        self.losses.read((lane.peer, lane.number, readings[lane.number]) for lane in self._order)
        if self.settings.bbr:
            for peer in {lane.peer for lane in self._order}:
                many = self.losses.many(peer)
                if many != self._many.get(peer, False):
                    self._many[peer] = many
                    self._emit(LanesWanted(peer, LANES if many else self.first_lanes))
        else:
            for peer in {lane.peer for lane in self._order}:
                width = self._widths.setdefault(peer, Width())
                if width.read(
                    now,
                    {
                        lane.number: readings[lane.number]
                        for lane in self._order
                        if lane.peer == peer and lane.up
                    },
                ):
                    self._emit(LanesWanted(peer, width.wanted))

    def _step(self, lane: Lane, action: Callable[[Exchange, float], bool], now: float) -> bool:
        was_up = lane.up
        try:
            moved = action(self._core, now)
        except PeerFaultError as error:
            self._emit(PeerFault(lane.peer, error.message))
            self._close(lane, error.message)
            return True
        except (NetworkError, RemoteProtocolError) as error:
            self._close(lane, error.message)
            return True
        if lane.up and not was_up:
            self._core.lane_up(lane.peer, lane.number)
            self._emit(LaneUp(lane.peer, lane.path))
            for old in self._beside(lane):
                try:
                    old.retire()
                except NetworkError as error:
                    self._close(old, error.message)
        return moved

    def _beside(self, lane: Lane) -> list[Lane]:
        """Lanes whose place this one takes."""
        return [
            other
            for other in self._order
            if (other.peer, other.index) == (lane.peer, lane.index) and other is not lane
        ]

    def _run(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if name not in HARMLESS:
            for lane in self._order:
                lane.keep()
        try:
            if name == "+lane":
                self._add(*args)
            elif name == "-lane":
                self._drop(*args)
            elif name == "-plain":
                for lane in [lane for lane in self._order if lane.plain]:
                    self._close(lane, "not encrypted")
            elif name == "sync":
                args[0].set()
            elif name == "finish":
                args[0]()
            else:
                getattr(self._core, name)(*args, **options)
        except (
            Exception
        ) as error:  # the thread outlives a command that is wrong; whoever gave it is told
            self._emit(CommandFailed(name, str(error), error))

    def _drop(self, peer: PeerId, keep: int) -> None:
        for lane in [lane for lane in self._order if lane.peer == peer and lane.index >= keep]:
            self._close(lane, "dropped")
        if not keep:
            self._widths.pop(peer, None)
            self._many.pop(peer, None)
            self.losses.forget(peer)

    def _add(
        self, peer: PeerId, sock: socket.socket, keys: LaneKeys, path: str, number: int, index: int
    ) -> None:
        old = self._lanes.get((peer, index))
        if old is not None and old.up:
            old.leaving = True
        elif old is not None:
            self._close(old, REPLACED)
        try:
            if peer == self.me:
                raise LocalProtocolError("a lane to oneself")
            tune(sock, self.settings)
            make = PlainLane if keys.cipher == PLAIN else Lane
            lane = make(peer, sock, keys, path, time.monotonic(), number, index, self._limits)
        except Exception:
            sock.close()
            raise
        self._lanes[peer, index] = lane
        self._order.append(lane)

    def _close(self, lane: Lane, reason: str) -> None:
        if lane not in self._order:
            return
        if self._lanes.get((lane.peer, lane.index)) is lane:
            del self._lanes[lane.peer, lane.index]
        with self._totals_lock:
            sent, received = self._closed_bytes.get(lane.path, (0, 0))
            self._closed_bytes[lane.path] = (
                sent + lane.bytes_sent,
                received + lane.bytes_received,
            )
            self._order.remove(lane)
        self._poller.forget(lane.fd)
        lane.close()
        self._core.lane_down(lane.peer, lane.number)
        self._emit(LaneDown(lane.peer, reason, lane.number))
        for old in self._beside(lane):
            if old.ended and not old.retired:  # it waited for this one
                self._close(old, REPLACED)


_interval_lock = threading.Lock()
_interval_saved: list[float] = []


def _throw(error: Exception) -> None:
    raise error


def _switch_interval(seconds: float | None) -> None:
    """Set the interpreter's switch interval for one more engine; None: for one less. The last one
    restores it.
    """
    with _interval_lock:
        if seconds is not None:
            _interval_saved.append(sys.getswitchinterval())
            sys.setswitchinterval(min(seconds, sys.getswitchinterval()))
        else:
            saved = _interval_saved.pop()
            if not _interval_saved:
                sys.setswitchinterval(saved)
