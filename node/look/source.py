"""Where the picture comes from: `Live`, the event file and the node of a home; `Replay`, recorded
files played again. Each folds into a `RunPicture` under a lock, in threads of its own.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ...collectives.errors import AtollError, ConfigError
from ..home.paths import Paths
from ..joining.commands import NodeClient
from ..manifest import Manifest, SignedManifest
from ..run import diary
from ..run.events import ReductionTimedEvent, RunEvent
from ..run.status import read_run_status
from ..views.event_words import Words
from .allowed import allowed_of
from .view import About, RunPicture

STATUS_S = 1.0
PEERS_S = 10.0  # a question about peers pings them
FILE_S, UNWATCHED_FILE_S = 0.5, 2.0
NO_NODE, NOT_IN_IT = "no node is up here", "the node here is not in it"
NOT_RUNNING = "E003"
FIRST_S = 15.0  # for the first answer: a node that is there has one at once, unless it is stopped
AGAIN_S = 2.0  # likewise where nobody had looked for a while
WATCHED_S = 15.0
"""For so long after the last look the node is still asked; with nobody looking, nothing is."""


def about_of(manifest: Manifest, run_id: str) -> About:
    """What the recipe says."""
    return About(
        run_id,
        manifest.name,
        manifest.kind,
        manifest.train.rounds,
        manifest.train.sync_every,
        manifest.exchange.codec,
        manifest.train.overlap,
        manifest.exchange.fragments,
        manifest.parameters,
        manifest.unit,
        allowed_of(manifest),
    )


def in_words() -> Callable[[RunEvent], Iterable[str]]:
    """Events as lines of `atoll events`, without those for tools."""
    words = Words()
    return lambda event: () if event.quiet else words.of(event)


class PictureSource(Protocol):
    """A picture that changes by itself, while it is entered as a context."""

    view: RunPicture
    lock: threading.Lock

    def now(self) -> float:
        """Seconds since 1970, of the picture."""
        ...

    def look(self) -> None:
        """Somebody looks. May wait until the picture is as new as for those who look on."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class _Ended(Exception):
    """The threads are to end."""


class _Threads:
    """What both sources are: threads that end with the context."""

    def __init__(self, view: RunPicture) -> None:
        self.view, self.lock = view, threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except _Ended:
                pass

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Ended

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)


class Live(_Threads):
    """The run ``signed`` at the node of a home, whether that is up or not. The events, and what the
    node says, are in the picture when the context is entered.
    """

    def __init__(self, paths: Paths, signed: SignedManifest) -> None:
        super().__init__(RunPicture(about_of(signed.open(), signed.run_id), in_words()))
        self._paths, self._run_id = paths, signed.run_id
        self._seen = time.monotonic()
        self._looked = threading.Event()
        self._caught_up = threading.Event()
        self._answered, self._asked = threading.Event(), threading.Event()
        self._client: NodeClient | None = None

    def now(self) -> float:
        """By this machine's clock."""
        return time.time()

    def look(self) -> None:
        """The node is asked for some seconds more. Where nobody had looked, what it said then is
        old: wait for its next answer.
        """
        if not self._watched():
            self._answered.clear()
        self._seen = time.monotonic()
        self._looked.set()
        self._answered.wait(AGAIN_S)

    def __enter__(self) -> Self:
        self._start(self._follow)
        self._caught_up.wait(30)
        self._start(self._ask)
        self._answered.wait(FIRST_S)
        return self

    def settle(self) -> None:
        """Wait until the members have been asked how they are reached, too."""
        self._asked.wait(FIRST_S)

    def _follow(self) -> None:
        def wait() -> None:
            self._caught_up.set()
            if not self._watched():
                self._looked.wait(UNWATCHED_FILE_S - FILE_S)
            self._pause(FILE_S)

        for event in diary.follow(self._paths.run_dir(self._run_id), 0.0, wait):
            with self.lock:
                self.view.take(event)
            if self._stop.is_set():
                raise _Ended

    def _ask(self) -> None:
        peers_at, members = -PEERS_S, list[str]()
        while True:
            self._looked.clear()
            if not self._watched():
                self._close()
                while not self._looked.wait(1.0):
                    self._pause(0)
            try:
                status = self._node().status()
                row = next(
                    (r for r in status.get("runs") or () if r.get("run_id") == self._run_id), None
                )
                with self.lock:
                    if row is not None:
                        self.view.take_status(read_run_status(row), status)
                    else:
                        self.view.node_gone(NOT_IN_IT)
                self._answered.set()
                now = time.monotonic()
                if row and (now - peers_at > PEERS_S or row.get("members") != members):
                    peers, peers_at = self._node().peers(self._run_id), now
                    members = list(row.get("members") or ())
                    with self.lock:
                        self.view.take_peers(peers)
            except AtollError as error:
                self._close()
                peers_at = -PEERS_S
                with self.lock:
                    self.view.node_gone(NO_NODE if error.code == NOT_RUNNING else error.message)
            self._answered.set()
            self._asked.set()
            self._pause(STATUS_S)

    def _watched(self) -> bool:
        return time.monotonic() - self._seen <= WATCHED_S

    def _node(self) -> NodeClient:
        if self._client is None:
            self._client = NodeClient.connect(self._paths)
        return self._client

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._looked.set()
        super().__exit__(kind, error, trace)
        self._close()


class Replay(_Threads):
    """A run as it was recorded: a file of events, or a folder with a node's files, for each of some
    peers; the first is who looks. ``speed``: how many seconds of then pass in one of now; None: all
    at once, before the context is entered.
    """

    def __init__(
        self, files: Sequence[Path], speed: float | None = None, manifest: Manifest | None = None
    ) -> None:
        heads = [_head(file) for file in files]
        about = About(str(heads[0].get("run", "")), str(heads[0].get("name", "")))
        if manifest is not None:
            about = about_of(manifest, about.run_id)
        if len({head.get("run") for head in heads}) > 1:
            raise ConfigError("these files are of several runs", hint="One run at a time.")
        super().__init__(RunPicture(about, in_words()))
        self.speed = speed
        self._owners = [_owner(file) for file in files]
        self._files = files
        self.view.me = self._owners[0]
        self._now = 0.0
        self.ended = threading.Event()

    def now(self) -> float:
        """When it happened."""
        return self._now

    def look(self) -> None:
        """Nothing: what was recorded does not depend on it."""

    def __enter__(self) -> Self:
        if self.speed is None:
            self._play()
        else:
            self._start(self._play)
        return self

    def _events(self) -> Iterator[tuple[float, int, RunEvent]]:
        """By time of each; a file's own order where it is not."""

        def of(number: int, file: Path) -> Iterator[tuple[float, int, RunEvent]]:
            for event in _recorded(file):
                yield event.at, number, event

        return heapq.merge(
            *(of(n, file) for n, file in enumerate(self._files)), key=lambda each: each[0]
        )

    def _play(self) -> None:
        started: tuple[float, float] | None = None
        for at, number, event in self._events():
            if self.speed is not None:
                started = started or (at, time.monotonic())
                due = started[1] + (at - started[0]) / self.speed
                while (left := due - time.monotonic()) > 0:
                    self._now = at - left * self.speed
                    self._pause(min(left, 0.1))
            self._now = max(self._now, at)
            with self.lock:
                self.view.take(event, event.by or self._owners[number])
        self.ended.set()


def _recorded(file: Path) -> Iterator[RunEvent]:
    return diary.events(file) if file.is_dir() else diary.recorded(file)


def run_of(file: Path) -> str:
    """The run that a file of events tells of. Raises ConfigError."""
    return str(_head(file).get("run", ""))


def _head(file: Path) -> dict[str, Any]:
    """The file's description in its first line. Raises ConfigError for a file that is none."""
    newest = file / diary.NEWEST if file.is_dir() else file
    try:
        with diary.opened(newest) as lines:
            found = diary.decoded(lines.readline(diary.MAX_LINE))
    except diary.UNREADABLE:
        found = None
    if found is None or found.get("diary") != diary.VERSION:
        raise ConfigError(
            f"{file} is no file of events",
            why="Such a file begins with a line that says diary, run and name.",
            hint="One is events.jsonl in a run's folder.",
        )
    return found


def _owner(file: Path) -> str:
    """Whose file it is: whoever timed its reductions; "" where nobody did."""
    timed = (each.peer for each in _recorded(file) if isinstance(each, ReductionTimedEvent))
    return next(timed, "")
