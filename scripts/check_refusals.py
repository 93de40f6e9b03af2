#!/usr/bin/env python
"""Refuse one system call after another to a node, as it starts, trains, is joined and ends, and
look at what it does and says.

    ./scripts/check_refusals.py                       every case
    ./scripts/check_refusals.py --phase running --call fsync

Of each case: the node lives (or, where it starts, says why not), nothing is called a defect that
is none, and no silence is longer than 15 s: either rounds go on, or status names a trouble. After
it, rounds count everybody again. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kits")]

from bad_input_kit import Run, atoll, new_run  # noqa: E402
from refusing_kit import Refusing  # noqa: E402
from torch import Tensor  # noqa: E402

from atoll.collectives.errors import AtollError  # noqa: E402
from atoll.node.client.pending import Ticket  # noqa: E402

FILES = (
    *("open", "create", "mkdir", "rename", "unlink", "fsync", "fdatasync", "write", "ftruncate"),
    *("fallocate", "mmap", "flock", "statvfs"),
)
SOCKETS = ("socket", "socket_unix", "socketpair", "bind", "listen", "accept", "connect")
OTHERS = ("memfd_create", "epoll", "pipe", "thread")
ERRORS = {
    **dict.fromkeys(FILES, (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE, errno.EROFS)),
    **dict.fromkeys(SOCKETS, (errno.EMFILE, errno.ENOBUFS, errno.EPERM, errno.ENOMEM)),
    **dict.fromkeys(OTHERS, (errno.EMFILE, errno.ENOMEM, errno.EPERM, errno.ENOSYS)),
    "thread": (errno.EAGAIN, errno.EPERM),
    "flock": (errno.ENOLCK, errno.ENOSYS, errno.EIO),
}
NODE = "atoll.node --"
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


def cases(phase: str, calls: list[str]) -> Iterator[tuple[str, int]]:
    """Each call with each errno; to read a file is refused to a running node only: without it no
    interpreter starts.
    """
    for call, errors in ERRORS.items():
        if (not calls or call in calls) and (phase, call) != ("start", "open"):
            for error in errors:
                yield call, error


def starting(call: str, error: int, folder: Path) -> Found:
    """`atoll up` under a refusal from the first call on."""
    found = Found("start", call, errno.errorcode[error])
    system, home = Refusing(folder, NODE), folder / "home"
    home.mkdir()
    system.refuse(call, error)
    begun = time.monotonic()
    told = atoll(home, *UP, **system.environ)
    if time.monotonic() - begun > SILENT_S + 15.0:
        found.faults.append(f"silent for {time.monotonic() - begun:.0f} s")
    words = told.out + told.err
    found.faults += [f"says {word}: {words[-300:]}" for word in WORDS if word in words]
    if told.status == 0:
        system.allow()
        if atoll(home, "status").status != 0:
            found.faults.append("came up and is gone")
        atoll(home, "down")
    elif "E161" in words and "E50" not in words:  # else its own word, by way of the log
        found.faults.append(f"ended without a word of its own: {words[-400:]}")
    return found


def _fill(out: Tensor) -> None:
    out.fill_(1.0)


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
        self.counted = [0, 0]
        self.errors: list[str] = []
        self._over = threading.Event()
        for number in range(2):
            threading.Thread(target=self._work, args=(number,), daemon=True).start()

    def _work(self, number: int) -> None:
        swarm = self.members[number].swarm
        ticket: Ticket | None = None
        while not self._over.is_set():
            try:
                ticket = ticket or swarm.contribute(samples=1, write=_fill)
                self.counted[number] += ticket.wait(60.0).counted
                ticket = None
            except AtollError as error:  # and the contribution is undecided still
                self.errors.append(f"{error.code} {error.message}")
                time.sleep(0.5)

    def until_rounds(self, count: int, within_s: float) -> bool:
        """Whether so many more rounds counted each of the two."""
        goal, until = [n + count for n in self.counted], time.monotonic() + within_s
        while any(n < g for n, g in zip(self.counted, goal, strict=True)):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def trouble(self) -> str:
        """What status names, "" for nothing."""
        try:
            status = self.members[0].status()
        except (AtollError, OSError) as error:
            return f"no status: {error}"
        found = [*(status.get("troubles") or ()), (status["runs"] or [{}])[0].get("trouble")]
        waiting = (status["runs"] or [{}])[0].get("waiting")
        return json.dumps([each for each in (*found, waiting) if each])[:300]

    def end(self) -> None:
        """End both."""
        self._over.set()
        for member in self.members:
            member.swarm.close()


def running(training: Training, call: str, error: int) -> Found:
    """A few seconds of refusals in the middle of rounds."""
    found = Found("running", call, errno.errorcode[error])
    pid, size = training.members[0].pid, len(training.members[0].log())
    training.errors.clear()
    training.system.refuse(call, error, count=1_000_000)
    quiet_s, until = 0.0, time.monotonic() + REFUSED_S
    while time.monotonic() < until:
        if not training.until_rounds(1, 1.0):
            quiet_s += 1.0
    if quiet_s >= REFUSED_S - 1.0 and training.trouble() == "[]":
        time.sleep(SILENT_S - REFUSED_S)
        if training.trouble() == "[]":
            found.faults.append(f"no round and no word for {SILENT_S:.0f} s")
    found.refused = 1_000_000 - training.system.left()
    training.system.allow()
    if not training.until_rounds(2, BACK_S):
        found.faults.append(f"no rounds {BACK_S:.0f} s after it: {training.trouble()}")
    if not Path(f"/proc/{pid}").exists():
        found.faults.append("the node ended")
    words = training.members[0].log()[size:] + " ".join(training.errors)
    found.faults += [f"says {word}: {_near(words, word)}" for word in WORDS if word in words]
    return found


def _near(words: str, word: str) -> str:
    at = words.index(word)
    return words[max(0, at - 200) : at + 1500]


def main() -> int:
    """1 where a case went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", choices=("start", "running"), action="append")
    parser.add_argument("--call", action="append", default=[])
    options = parser.parse_args()
    phases, found = options.phase or ["start", "running"], list[Found]()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        if "start" in phases:
            for number, (call, error) in enumerate(cases("start", options.call)):
                folder = Path(name, f"start{number}")
                folder.mkdir()
                found.append(_said(starting(call, error, folder)))
        if "running" in phases:
            training, number = None, 0
            for call, error in cases("running", options.call):
                if training is None:
                    folder = Path(name, f"running{(number := number + 1)}")
                    folder.mkdir()
                    training = Training(folder)
                    assert training.until_rounds(3, 120.0), training.errors
                found.append(_said(running(training, call, error)))
                if found[-1].faults:
                    training.end()
                    training = None
            if training is not None:
                training.end()
    wrong = [each for each in found if each.faults]
    print(
        json.dumps(
            {
                "cases": len(found),
                "wrong": [f"{each.phase} {each.call} {each.error}" for each in wrong],
                "never_refused": sum(e.phase == "running" and not e.refused for e in found),
                "wall_s": round(time.monotonic() - begun, 1),
            }
        )
    )
    return bool(wrong)


def _said(found: Found) -> Found:
    print(
        f"{found.phase} {found.call} {found.error}: {'; '.join(found.faults) or 'well'}", flush=True
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
