"""One call of the system refused with one errno to a real node, as it starts, is joined to a run,
trains, and ends.

Of each case: the node lives (or, where it starts, says why not), nothing is called a defect that
is none, and no silence is longer than `SILENT_S`: either it goes on, or says or names why not.
Afterwards, with nothing refused any more, rounds count everybody again.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bad_input_kit import LAYOUT, Run, Told, atoll, new_home, new_run
from refusing_kit import Refusing
from torch import Tensor

from atoll.collectives.errors import AtollError
from atoll.node import join
from atoll.node.client.pending import Ticket
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient, RunSwarm

FILES = (
    *("open", "create", "mkdir", "rename", "unlink", "fsync", "fdatasync", "write", "ftruncate"),
    *("fallocate", "mmap", "flock", "statvfs", "read"),
)
SOCKETS = ("socket", "socket_unix", "socketpair", "bind", "listen", "accept", "connect", "send")
OTHERS = ("memfd_create", "epoll", "pipe", "thread")
ERRORS = {
    **dict.fromkeys(FILES, (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE, errno.EROFS)),
    **dict.fromkeys(SOCKETS, (errno.EMFILE, errno.ENOBUFS, errno.EPERM, errno.ENOMEM)),
    **dict.fromkeys(OTHERS, (errno.EMFILE, errno.ENOMEM, errno.EPERM, errno.ENOSYS)),
    "thread": (errno.EAGAIN, errno.EPERM),
    "flock": (errno.ENOLCK, errno.ENOSYS, errno.EIO),
    "read": (errno.EIO, errno.ESTALE),
    "send": (errno.ENOBUFS, errno.EPERM, errno.ENOMEM),
}
PHASES = ("start", "join", "running", "stop")
NODE = "atoll.node --"
TURN_S = 0.2
SHARED = 20  # cases that one run sees
REFUSED_S, SILENT_S, BACK_S = 4.0, 15.0, 45.0
UP = (
    *("up", "--background", "--listen", "/ip4/127.0.0.1/tcp/0"),
    *("--no-lan-discovery", "--no-port-mapping", "--no-dht"),
)
WORDS = ("defect of atoll", "Traceback", "E000", "E142")


@dataclass
class Found:
    """What went wrong in one case; nothing where ``faults`` is empty."""

    phase: str
    call: str
    error: str
    faults: list[str] = field(default_factory=list[str])
    refused: int = 0

    def judge(self, words: str) -> None:
        """Look for what must never be said."""
        for word in WORDS:
            if word in words:
                at = words.index(word)
                self.faults.append(f"says {word}: {words[max(0, at - 200) : at + 1500]}")


def cases(phase: str, calls: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Each call with each errno; to read is refused to a running node only: without it no
    interpreter starts.
    """
    for call, errors in ERRORS.items():
        if (not calls or call in calls) and not (phase == "start" and call in ("open", "read")):
            for error in errors:
                yield call, error


def starting(call: str, error: int, folder: Path) -> Found:
    """`atoll up` under a refusal from the first call on."""
    found = Found("start", call, errno.errorcode[error])
    system, home = Refusing(folder, NODE), folder / "home"
    home.mkdir()
    system.refuse(call, error, count=1_000_000)
    begun = time.monotonic()
    try:
        told = atoll(home, *UP, **system.environ)
    except subprocess.TimeoutExpired as late:
        found.faults.append(f"neither up nor refused within {late.timeout:.0f} s")
        system.allow()
        atoll(home, "down")
        return found
    words = told.out + told.err
    quiet_s = time.monotonic() - begun
    if quiet_s > SILENT_S + 15.0 and "still starting" not in words:
        found.faults.append(f"silent for {quiet_s:.0f} s")
    found.judge(words)
    found.refused = 1_000_000 - system.left()
    system.allow()
    if told.status == 0:
        if atoll(home, "status").status != 0:
            found.faults.append("came up and is gone")
        atoll(home, "down")
    elif "E161" in words and "E50" not in words:  # else its own word, by way of the log
        found.faults.append(f"ended without a word of its own: {words[-400:]}")
    return found


def _fill(out: Tensor) -> None:
    out.fill_(1.0)


class Contributing:
    """A thread that contributes to a swarm as fast as it can."""

    def __init__(self, swarm: RunSwarm) -> None:
        self.swarm, self.counted = swarm, 0
        self.together = 0  # how many were counted in its newest round
        self.errors: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        ticket: Ticket | None = None
        while not self._over.is_set():
            try:
                ticket = ticket or self.swarm.contribute(samples=1, write=_fill)
                outcome = ticket.wait(60.0)
                if outcome.status == "open":  # its node went away, or it waits for others
                    time.sleep(0.05)
                    continue
                self.together = len(outcome.contributors) if outcome.counted else 0
                self.counted += outcome.counted
                ticket = None
                time.sleep(TURN_S)  # who fetches the state follows
            except AtollError as error:
                if self._over.is_set():
                    return
                if ticket is not None and ticket.resolved():  # refused: it says so again and again
                    ticket = None
                self.errors.append(f"{error.code} {error.message}")
                time.sleep(0.5)

    def end(self) -> None:
        """Contribute no more, and close the swarm."""
        self._over.set()
        self.swarm.close()


def until(condition: Callable[[], Any], within_s: float) -> bool:
    """Whether it came to hold."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Training:
    """Two members that contribute as fast as they can; the first one's node is refused things."""

    def __init__(self, folder: Path) -> None:
        self.system = Refusing(folder, NODE)
        os.environ.update(self.system.environ)  # of the first one's node; this process is no node
        self.run: Run = new_run(folder)
        self.members = [self.run.organiser()]
        for name in self.system.environ:
            del os.environ[name]
        self.members.append(self.run.member("b"))
        self.scripts = [Contributing(member.swarm) for member in self.members]

    @property
    def errors(self) -> list[str]:
        """What either script was told."""
        return [error for script in self.scripts for error in script.errors]

    def until_rounds(self, count: int, within_s: float) -> bool:
        """Whether so many more rounds counted each of the two."""
        goal = [script.counted + count for script in self.scripts]
        return until(
            lambda: all(s.counted >= g for s, g in zip(self.scripts, goal, strict=True)), within_s
        )

    def trouble(self) -> str:
        """What status names, "[]" for nothing."""
        return troubles(self.run.home)

    def end(self) -> None:
        """End both."""
        for script in self.scripts:
            script.end()


def troubles(home: Path) -> str:
    """What a node's status names, "[]" for nothing."""
    try:
        with NodeClient.connect(find_paths(home)) as client:
            status = client.status()
    except (AtollError, OSError) as error:
        return f"no status: {error}"
    run = (status["runs"] or [{}])[0]
    found = [*(status.get("troubles") or ()), run.get("trouble"), run.get("waiting")]
    return json.dumps([each for each in found if each])[:300]


def running(training: Training, call: str, error: int) -> Found:
    """A few seconds of refusals in the middle of rounds."""
    found = Found("running", call, errno.errorcode[error])
    pid, size = training.members[0].pid, len(training.members[0].log())
    for script in training.scripts:
        script.errors.clear()
    training.system.refuse(call, error, count=1_000_000)
    quiet_s, end = 0.0, time.monotonic() + REFUSED_S
    while time.monotonic() < end:
        if not training.until_rounds(1, 1.0):
            quiet_s += 1.0
    if quiet_s >= REFUSED_S - 1.0 and training.trouble() == "[]":
        time.sleep(SILENT_S - REFUSED_S)
        if training.trouble() == "[]":
            found.faults.append(f"no round and no word for {SILENT_S:.0f} s")
    found.refused = 1_000_000 - training.system.left()
    training.system.allow()
    if not training.until_rounds(2, BACK_S):
        found.faults.append(
            f"no rounds {BACK_S:.0f} s after it: {training.trouble()}; told {training.errors[-3:]}; "
            f"the log's end {training.members[0].log()[-3000:]}"
        )
    if not Path(f"/proc/{pid}").exists():
        found.faults.append("the node ended")
    found.judge(training.members[0].log()[size:] + " ".join(training.errors))
    return found


class Node:
    """A node started by `atoll up`, to which calls can be refused."""

    def __init__(self, folder: Path) -> None:
        self.home = new_home(folder / "home")
        self.system = Refusing(folder, NODE)
        self.up()

    def up(self) -> Told:
        """Start it."""
        told = atoll(self.home, *UP, **self.system.environ)
        if told.status == 0:
            with NodeClient.connect(find_paths(self.home)) as client:
                self.pid = client.node.pid
        return told

    @property
    def lives(self) -> bool:
        """Whether its process is there."""
        with suppress(OSError):
            return ") Z " not in Path(f"/proc/{self.pid}/stat").read_text()
        return False

    def log(self) -> str:
        """All that it wrote."""
        folder = find_paths(self.home).log_dir
        return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))


class Hosting:
    """An organiser that trains, and whose run others join."""

    def __init__(self, folder: Path) -> None:
        self.run = new_run(folder)
        self.member = self.run.organiser()
        self.script = Contributing(self.member.swarm)

    def alone(self) -> bool:
        """Whether nobody else is a member."""
        return self.member.state()["quorum"]["members"] == 1

    def end(self) -> None:
        """End it."""
        self.script.end()


def _together(hosting: Hosting, swarm: RunSwarm) -> bool:
    """Whether a round counts the organiser and this one."""
    script = Contributing(swarm)
    try:
        return until(lambda: script.counted and script.together >= 2, BACK_S)
    finally:
        script.end()


class _Entering(threading.Thread):
    """A script that joins a run with a node, and opens the model."""

    def __init__(self, run: str, home: Path) -> None:
        super().__init__(daemon=True)
        self._run, self._home = run, home
        self.swarm: RunSwarm | None = None
        self.error, self.said = "", list[str]()
        self.start()

    def run(self) -> None:
        """See the class."""
        try:
            swarm = join(
                self._run,
                home=self._home,
                private=False,
                progress=lambda stage, done, total: self.said.append(f"{stage} {done}"),
            )
            try:
                swarm.open(LAYOUT, lambda initial: initial.zero_()).release()
            except BaseException:
                swarm.close()
                raise
            self.swarm = swarm
        except AtollError as error:
            self.error = f"{error.code} {error.message} ({error.why})"
        except Exception as error:
            self.error = f"Traceback of {error!r}"


def joining(hosting: Hosting, call: str, error: int, folder: Path) -> Found:
    """A node is up, and a script joins a run by an invite, while a call is refused to the node."""
    found = Found("join", call, errno.errorcode[error])
    node = Node(folder)
    try:
        size = len(node.log())
        node.system.refuse(call, error, count=1_000_000)
        entering, begun = _Entering(hosting.run.invite(), node.home), time.monotonic()
        entering.join(REFUSED_S)
        heard = len(entering.said)
        if entering.is_alive():
            entering.join(SILENT_S - REFUSED_S)
        if entering.is_alive() and len(entering.said) == heard and troubles(node.home) == "[]":
            found.faults.append(f"no word for {SILENT_S:.0f} s but {entering.said}")
        time.sleep(max(0.0, REFUSED_S - (time.monotonic() - begun)))
        found.refused = 1_000_000 - node.system.left()
        node.system.allow()
        entering.join(BACK_S)
        if entering.is_alive():
            found.faults.append(f"not joined {BACK_S:.0f} s after it: {entering.said[-3:]}")
        elif entering.swarm is None:  # it has said why, and is asked again
            again = _Entering(hosting.run.invite(), node.home)
            again.join(BACK_S)
            entering.swarm = again.swarm
            if again.swarm is None:
                found.faults.append(f"cannot join after it: {again.error or again.said[-3:]}")
        if entering.swarm is not None and not _together(hosting, entering.swarm):
            found.faults.append(f"no round counts it: {troubles(node.home)}")
        if not node.lives:
            found.faults.append("the node ended")
        found.judge(node.log()[size:] + entering.error)
    finally:
        node.system.allow()
        atoll(node.home, "down")
        until(hosting.alone, BACK_S)  # two that did not take their leave would be a majority
    return found


class Stopping:
    """A node with a script that trains beside an organiser; it is ended, and started again."""

    def __init__(self, folder: Path) -> None:
        self.hosting = Hosting(folder)
        (folder / "stopped").mkdir()
        self.node = Node(folder / "stopped")
        self.script = self.enter(self.hosting.run.invite())

    def enter(self, run: str) -> Contributing:
        """Join, and contribute until a round counts both."""
        entering = _Entering(run, self.node.home)
        entering.join(BACK_S)
        assert entering.swarm is not None, (entering.error, entering.said[-3:])
        script = Contributing(entering.swarm)
        assert until(lambda: script.together >= 2, BACK_S), script.errors
        return script

    def end(self) -> None:
        """End all."""
        self.script.end()
        atoll(self.node.home, "down")
        self.hosting.end()


def stopping(stopped: Stopping, call: str, error: int) -> Found:
    """`atoll down` while a call is refused to the node; then it is started again, and trains on."""
    found, node = Found("stop", call, errno.errorcode[error]), stopped.node
    size, begun = len(node.log()), time.monotonic()
    node.system.refuse(call, error, count=1_000_000)
    told = atoll(node.home, "down")
    took_s = time.monotonic() - begun
    if told.status != 0 or node.lives:
        found.faults.append(f"did not end: {told}")
    if took_s > SILENT_S:
        found.faults.append(f"ended after {took_s:.0f} s")
    found.refused = 1_000_000 - node.system.left()
    node.system.allow()
    found.judge(told.out + told.err + node.log()[size:] + " ".join(stopped.script.errors))
    stopped.script.end()
    if atoll(node.home, "status").status != 3:
        found.faults.append("status finds a node that is gone")
    told = node.up()
    if told.status != 0:
        found.faults.append(f"does not start again: {told.err[-400:]}")
        return found
    try:
        stopped.script = stopped.enter(stopped.hosting.run.signed.run_id)
    except AssertionError as wrong:
        found.faults.append(f"no rounds after it: {wrong} {troubles(node.home)}")
    return found


class Playing:
    """Cases of one phase, one after another, below ``folder``: what they share goes on until one
    went wrong.
    """

    def __init__(self, phase: str, folder: Path) -> None:
        self._phase, self._folder, self._number = phase, folder, 0
        self._shared: Training | Hosting | Stopping | None = None
        self._played = 0

    def __enter__(self) -> Playing:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shared is not None:
            self._shared.end()

    def play(self, call: str, error: int) -> Found:
        """One case."""
        if self._phase == "start":
            return starting(call, error, self._new_folder())
        shared = self._shared = self._shared or self._prepared()
        if isinstance(shared, Training):
            found = running(shared, call, error)
        elif isinstance(shared, Stopping):
            found = stopping(shared, call, error)
        else:
            found = joining(shared, call, error, self._new_folder())
        self._played += 1
        if found.faults or self._played >= SHARED:
            self._shared, self._played = None, 0
            shared.end()
        return found

    def _prepared(self) -> Training | Hosting | Stopping:
        folder = self._new_folder()
        if self._phase == "join":
            return Hosting(folder)
        if self._phase == "stop":
            return Stopping(folder)
        training = Training(folder)
        assert training.until_rounds(3, 120.0), training.errors
        return training

    def _new_folder(self) -> Path:
        self._number += 1
        folder = self._folder / f"{self._phase}{self._number}"
        folder.mkdir()
        return folder
