"""A process a card: the recipe's own is the first card's, and starts and watches the others.

They end with it, however it ends: stdin of each is a pipe that it holds open. If one of them ends
before all are done, so does the first, and says which; the node goes on. Signals are the first
one's: after it has been asked to stop, all make the same last step.

``python -m atoll.node.recipes.finetune.launching`` is another card's process. It reads its job, a
line of JSON, from stdin.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

import msgspec
import torch

from ....collectives.errors import AtollError, ConfigError, StateError
from ...home.ending import GRACE_S
from ...home.interpreter import PYTHON
from ...home.output import Terminal, show_error
from ...manifest import Manifest, why_not_sharded
from ..train import error_record
from .loop import Say
from .sharding import ONE_CARD, Cards, ShardedCards
from .train import MemberJob, train_member

TRIED = 8  # processes without a GPU, where there are not more cores
DEATH_S = 10.0  # in which the first process should notice by itself that another is gone
FOLLOW_S = 2.0  # in which another notices that the first is
ENDING = (signal.SIGINT, signal.SIGTERM)


class _CardJob(msgspec.Struct, frozen=True):
    """What the process of another card is told. ``store``: where all find one another."""

    rank: int
    size: int
    store: str
    member: MemberJob


def devices_for(
    asked: int | None, manifest: Manifest, tell: Callable[[str], None] = lambda line: None
) -> int:
    """How many cards train: as many as are ``asked`` for, else all that torch sees; without a GPU
    as many processes. Where nobody asked and the run cannot be sharded, one, which is told.

    Raises ConfigError where more are asked for than there are, or than the run can use.
    """
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is not None and here and asked > here:
        raise ConfigError(
            f"--devices {asked}, and torch sees {here} here",
            key="devices",
            why="CUDA_VISIBLE_DEVICES says which of a machine's GPUs it sees.",
            hint=f"--devices {here}, or leave it out",
        )
    most = max(TRIED, os.cpu_count() or 1)
    if asked is not None and not here and asked > most:
        raise ConfigError(
            f"--devices {asked}, and torch sees no GPU here",
            key="devices",
            why=f"Without one they are processes, to try it: {most} here at most.",
            hint="Leave it out: one process uses all cores",
        )
    wanted = asked or max(1, here)
    if wanted == 1:
        return 1
    why, cure = why_not_sharded(manifest)
    if not why:
        return wanted
    if asked is None:
        tell(f"one of this machine's {here} GPUs trains, since this run has {why}")
        return 1
    raise ConfigError(
        f"this run cannot be trained by {asked} devices of one machine: it has {why}",
        key="devices",
        why="Several of them hold one model in shards, as one member.",
        hint=f"--devices 1; or its founder makes a run with {cure}",
    )


@contextlib.contextmanager
def cards_of(devices: int, job: MemberJob, say: Say = lambda record: None) -> Generator[Cards]:
    """This process as the first of so many cards, with the others' beside it for as long.

    Raises StateError where one of them ends before; where this process hears nothing of it, since
    it waits for the others, it is ended, and ``say`` hears the error.
    """
    if devices == 1:
        yield ONE_CARD
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    folder = Path(tempfile.mkdtemp(prefix="atoll-cards-"))
    store = folder / "store"
    others = _OtherCards([_CardJob(rank, devices, str(store), job) for rank in range(1, devices)])
    others.watch(lambda lost: _end_now(lost, say, folder))
    try:
        cards = ShardedCards(0, devices, store)
        yield cards
        others.finish()
        cards.close()
    except AtollError:
        raise
    except Exception as error:
        if (lost := others.lost(DEATH_S / 2)) is not None:
            raise lost from error
        raise
    finally:
        others.end()
        shutil.rmtree(folder, ignore_errors=True)


class _OtherCards:
    """The processes of the other cards, as the first one sees them."""

    def __init__(self, jobs: list[_CardJob]) -> None:
        self._jobs, self._finishing = jobs, False
        self._lost: StateError | None = None
        self._heard = threading.Event()  # that one of them is gone
        self._over = threading.Event()
        command = [*PYTHON, "-m", "atoll.node.recipes.finetune.launching"]
        # what asks this process to end goes to the group, and they follow this process
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        self._processes = list[subprocess.Popen[bytes]]()
        try:
            for job in jobs:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr)
                self._processes.append(process)
                _stdin(process).write(msgspec.json.encode(job) + b"\n")
                _stdin(process).flush()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._threads = list[threading.Thread]()

    def watch(self, end: Callable[[StateError], None]) -> None:
        """Call ``end`` where one has ended and this process hears nothing of it for DEATH_S."""
        self._threads = [
            threading.Thread(target=self._watch, args=(job, process, end), daemon=True)
            for job, process in zip(self._jobs, self._processes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """From now on they may end."""
        self._finishing = True

    def lost(self, timeout_s: float) -> StateError | None:
        """What there is to say of one that has ended; None where all are there after so long."""
        self._heard.wait(timeout_s)
        return self._lost

    def end(self) -> None:
        """Let them end, and wait for it."""
        self._over.set()
        self._finishing = True
        until = time.monotonic() + (GRACE_S if self._lost is None else 0)
        for process in self._processes:
            with contextlib.suppress(OSError):
                _stdin(process).close()
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for thread in self._threads:
            thread.join()

    def _watch(
        self, job: _CardJob, process: subprocess.Popen[bytes], end: Callable[[StateError], None]
    ) -> None:
        status = process.wait()
        if self._finishing or self._heard.is_set():
            return
        self._lost = lost = _lost_card(job, status)
        self._heard.set()
        if not self._over.wait(DEATH_S):  # it waits in a collective for what will not come
            for each in self._processes:
                each.kill()
            end(lost)


def _end_now(lost: StateError, say: Say, folder: Path) -> None:
    """From another thread than the one that waits."""
    say(error_record(lost))
    show_error(Terminal(), lost)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(lost.exit_code)


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _lost_card(job: _CardJob, status: int) -> StateError:
    how = f"ended with status {status}: its last lines say why"
    if status < 0:
        with contextlib.suppress(ValueError):
            how = f"was killed by {signal.Signals(-status).name}"
        if -status == signal.SIGKILL:
            how += ", as the system does when memory runs out"
    return StateError(
        f"the process of card {job.rank} (of 0 to {job.size - 1}) {how}",
        why="Each card holds a part of the model, so none of them can go on. The node does.",
        hint=f"atoll join {job.member.run[:8]} goes on from the state that was kept last",
    )


def _follow(stdin: int) -> None:
    """End as soon as the first process has."""
    while os.read(stdin, 4096):
        pass
    os._exit(0)


def main() -> int:
    """One of the other cards."""
    line = bytearray()
    while not line.endswith(b"\n"):  # not by sys.stdin, which would read on
        if not (found := os.read(0, 1)):
            return 0
        line += found
    job = msgspec.json.decode(line, type=_CardJob)
    threading.Thread(target=_follow, args=(0,), name="atoll-first-card", daemon=True).start()
    logging.getLogger("atoll").setLevel(logging.ERROR)  # the first says the same
    try:
        cards = ShardedCards(job.rank, job.size, Path(job.store))
        train_member(job.member, cards)
        cards.close()
    except AtollError as error:
        threading.Event().wait(GRACE_S)  # the first has met it, too, and says it
        show_error(Terminal(), error)
        return error.exit_code
    except Exception:
        threading.Event().wait(FOLLOW_S)  # it may be that the first is gone
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
