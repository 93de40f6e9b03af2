"""Entering a run, the first time and every time after the node was lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...collectives.cutting import cut
from ...collectives.errors import AtollError, ConfigError, NetworkError, SwarmClosedError
from ...collectives.identifiers import RunId
from ...collectives.layout import Layout
from ..control import protocol as p
from ..control.beside import Beside
from .link import NOT_RUNNING, Link
from .memory import RunMemory

if TYPE_CHECKING:
    from torch import Tensor

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 15.0
MOST_LOST = 8  # nodes that may go away while one script enters: then it is perhaps its own fault
Progress = Callable[[str, int, int], None]
GiveUp = Callable[[], bool]
T = TypeVar("T")
StartFrom = Callable[[Path, Layout, "Callable[[Tensor], None]"], "Callable[[Tensor], None]"]
"""Of the folder of a run, its layout, and what writes the script's own parameters."""
NO_PRIVATE_NODE = "E161"


class NodeDial(Protocol):
    """How a script has a node, now and again after it was lost: `node.joining.find.Dial`."""

    def reach(self, give_up: GiveUp | None = None) -> Link: ...
    def lost(self) -> None: ...
    def close(self) -> None: ...
    def run_dir(self, run: RunId) -> Path: ...


class RunEntry:
    """Which run, and how to get into it: ``request`` the first time (or again, when a new node does
    not know the run), else by ``run`` (id, unique prefix, name; "" = the only one)."""

    def __init__(
        self,
        dial: NodeDial,
        request: p.JoinRequest | None,
        run: str = "",
        *,
        start_from: StartFrom = lambda folder, layout, initial: initial,
    ) -> None:
        """``start_from``: what a run begins with whose organiser gave a model to start from."""
        self.dial, self._start_from = dial, start_from
        self._request = request
        self._run = run
        self.was_lost = False  # whether the newest attempt failed because the node went away

    def enter(
        self, progress: Progress | None = None, give_up: GiveUp | None = None
    ) -> tuple[Link, p.RunInfo]:
        """A connection to a node that is in the run. Raises as `dial.reach`, and what the node says
        against it.
        """
        try:
            link = self.dial.reach(give_up)
        except SwarmClosedError as error:  # perhaps one that goes away before it has said hello
            self.was_lost = error.code != NO_PRIVATE_NODE
            raise
        try:
            info = self._info(link, progress, give_up)
        except BaseException:
            self.leave(link)
            raise
        self._run = info.run_id  # from now on by its id
        return link, info

    def leave(self, link: Link) -> None:
        """Close a connection that came to nothing."""
        self.was_lost = link.lost is not None
        link.close()

    def outlive(self, attempt: Callable[[], T], progress: Progress | None) -> T:
        """The answer of ``attempt``, which enters the run or opens it. When the node goes away
        meanwhile, it is made again, up to `MOST_LOST` times, once another one is there.
        """
        lost = 0
        while True:
            self.was_lost = False
            try:
                return attempt()
            except SwarmClosedError as error:
                if not self.was_lost or lost == MOST_LOST:
                    raise
                lost += 1
                self.dial.lost()
                if progress is not None:
                    progress(f"waiting for another node: {error.message}", 0, 0)
            except NetworkError as error:
                if not lost or error.code != NOT_RUNNING:
                    raise
            threading.Event().wait(FIRST_DELAY_S)

    def beginning(
        self, layout: Layout, initial: Callable[[Tensor], None]
    ) -> Callable[[Tensor], None]:
        """What the run begins with, if this script founds it."""
        return self._start_from(self.dial.run_dir(RunId(self._run)), layout, initial)

    def _info(self, link: Link, progress: Progress | None, give_up: GiveUp | None) -> p.RunInfo:
        if self._run or self._request is None:
            try:
                call = link.submit(lambda id_: p.FindRun(id_, self._run, script=True))
                return link.finish(call, timeout_s=None, give_up=give_up).run
            except ConfigError:  # this node is not in the run
                if self._request is None:
                    raise
        request = self._request
        call = link.submit(lambda id_: p.JoinRun(id_, request, script=True), progress)
        return link.finish(call, timeout_s=None, give_up=give_up).run


def open_session(
    link: Link,
    run_id: p.RunId,
    layout: Layout,
    fragments: int,
    progress: Progress | None = None,
    give_up: GiveUp | None = None,
) -> tuple[RunMemory, bool]:
    """Attach to the run: its memory, and whether this script founds it. Waits for the state as long
    as it takes. Raises ConfigError where the model cannot be cut into so many fragments."""
    numels = [part.numel for part in cut(layout, fragments)]
    call = link.submit(lambda id_: p.Open(id_, run_id, layout), progress)
    opened = link.finish(call, timeout_s=None, give_up=give_up)
    return RunMemory(call.fds, numels), opened.founding


class Reattach:
    """A thread that tries ``attempt(give_up)`` from `start` until it succeeds or `stop` is called;
    ``failed`` hears of each failure.
    """

    def __init__(
        self, attempt: Callable[[GiveUp], None], failed: Callable[[AtollError], None]
    ) -> None:
        self._attempt = attempt
        self._failed = failed
        self._stop = threading.Event()
        self._thread = Beside(self._run)

    def start(self) -> None:
        """Begin. Whoever makes it keeps it first: an exception leaves none that nobody can stop."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it tries still."""
        return self._thread.running

    def stop(self) -> None:
        """End it and wait for its end (it looks several times a second)."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._stop.wait(delay_s):
            try:
                self._attempt(self._stop.is_set)
                return
            except AtollError as error:
                self._failed(error)
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
