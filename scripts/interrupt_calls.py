#!/usr/bin/env python
"""Interrupt every public call of a script at random instants, with real nodes.

A script of a run of two nodes makes calls of all kinds; SIGINT, SIGALRM and exceptions that another
thread sets come at random instants of them, and of joining, attaching and closing. What is called
afterwards must be right, or an error that says why; in the end no more descriptors are open than
before. The last line of stdout is one JSON object; exit status 1 where something was wrong.

    scripts/interrupt_calls.py --interrupts 20000
    scripts/interrupt_calls.py --interrupts 20000 --keep FILE   # goes on where FILE says it ended
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from ctypes import c_ulong, py_object, pythonapi
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

import torch  # noqa: E402
from _bench import emit, progress  # noqa: E402
from bad_input_kit import atoll  # noqa: E402

from atoll.collectives import api  # noqa: E402
from atoll.collectives.averaging import average  # noqa: E402
from atoll.collectives.errors import AtollError, SwarmClosedError  # noqa: E402
from atoll.collectives.layout import make_layout  # noqa: E402
from atoll.node import join  # noqa: E402
from atoll.node.client import eager, reattach  # noqa: E402
from atoll.node.joining import RunSwarm  # noqa: E402
from atoll.optim import attach  # noqa: E402

LONGEST_S = 6e-3  # until an interrupt, of a call
LONGEST_JOIN_S = 0.1  # of joining and attaching
JOINS = 40  # one turn of so many is one of joining
PATIENCE_S = 60.0
LONGEST_TURN_S = 600.0
TURNS_TOLD = 250  # after so many turns descriptors are counted, without a swarm
RUN = """
schema = 1
name = "cut"
[model]
entry = "local:cut"
[train]
sync_every = 2
"""


class Stop(BaseException):
    """What interrupts; nothing in the product catches it by name."""


class Wrong(AssertionError):
    """A result that is not right."""


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interrupts", type=int, default=2000, help="in all, those of FILE too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what was played, to go on from")
    return parser.parse_args()


@contextlib.contextmanager
def two_nodes(folder: Path) -> Generator[tuple[Path, str]]:
    """Two nodes in one run: the home of the one that the script uses, and the run's invite."""
    homes, invite = [folder / "a", folder / "b"], ""
    try:
        for home in homes:
            home.mkdir(mode=0o700)
            told = atoll(home, "up", "--background", "--listen", "/ip4/127.0.0.1/tcp/0")
            if told.status:
                raise RuntimeError(told.err)
            if invite:
                atoll(home, "join", invite, "--json")
            else:
                (folder / "run.toml").write_text(RUN)
                made = atoll(home, "new", str(folder / "run.toml"), "--json")
                invite = json.loads(made.out)["invite"]
        yield homes[0], invite
    finally:
        for home in homes:
            atoll(home, "down", "--now")


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


class Script:
    """The script that is interrupted: its swarm, and calls of every kind with values of their own."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.rng, self.numbers = home, random.Random(seed), itertools.count()
        self.swarm: RunSwarm = self.enter()
        self.joined: RunSwarm | None = None
        self.tag = f"{os.getpid()} {time.time_ns()}"
        self.calls: dict[str, Callable[[], None]] = {
            name.removeprefix("_call_"): getattr(self, name)
            for name in dir(self)
            if name.startswith("_call_")
        }

    def enter(self) -> RunSwarm:
        swarm = join("cut", home=self.home, private=False, progress=lambda *_: None)
        swarm.open(make_layout([("w", (4,))]), _zero).release()
        return swarm

    def fresh(self) -> tuple[str, float]:
        """A name and a value that no other call has."""
        number = next(self.numbers)
        return f"{self.tag}/{number}", float(number % 100_000 + 1)

    def right(self, found: Any, expected: Any, what: str) -> None:
        if found != expected:
            raise Wrong(f"{what}: {found}, where {expected} is right")

    def _call_reduce(self) -> None:
        name, value = self.fresh()
        mine = torch.full((self.rng.choice((1, 5, 3000)),), value)
        outcome = api.all_reduce(self.swarm, mine, op_id=name, op="sum", deadline_s=20).wait(20)
        self.right(set(mine.tolist()), {value}, f"a sum ({outcome})")

    def _call_poll(self) -> None:
        name, value = self.fresh()
        mine = torch.full((7,), value, dtype=torch.float64)
        handle = api.all_reduce(self.swarm, mine, op_id=name, op="max", deadline_s=20)
        while not handle.done():
            pass
        self.right(mine.tolist(), [value] * 7, "a maximum")

    def _call_cancel(self) -> None:
        name, value = self.fresh()
        mine = torch.full((7,), value)
        handle = api.all_reduce(self.swarm, mine, op_id=name, deadline_s=20)
        handle.cancel()
        handle.wait(20)
        self.right(mine.tolist(), [value] * 7, "a mean that was cancelled")

    def _call_drop(self) -> None:
        name, value = self.fresh()
        api.all_reduce(self.swarm, torch.full((7,), value), op_id=name, deadline_s=20)

    def _call_two(self) -> None:
        pairs = [(*self.fresh(), torch.empty(3)) for _ in range(2)]
        handles = list[Any]()
        for name, value, mine in pairs:
            mine.fill_(value)
            handles.append(api.all_reduce(self.swarm, mine, op_id=name, deadline_s=20))
        for handle, (_, value, mine) in reversed([*zip(handles, pairs, strict=True)]):
            handle.wait(20)
            self.right(mine.tolist(), [value] * 3, "one of two")

    def _call_gather(self) -> None:
        name, value = self.fresh()
        found = api.all_gather(self.swarm, torch.tensor([value]), op_id=name, deadline_s=20)
        tensors = found.wait(20).tensors
        self.right([t.tolist() for t in tensors.values()], [[value]] * len(tensors), "a gather")

    def _call_broadcast(self) -> None:
        name, value = self.fresh()
        mine = torch.tensor([value])
        api.broadcast(self.swarm, mine, root=self.swarm.peer, op_id=name, deadline_s=20).wait(20)
        self.right(mine.tolist(), [value], "a broadcast")

    def _call_scatter(self) -> None:
        name, value = self.fresh()
        mine = torch.full((9,), value)
        found = api.reduce_scatter(self.swarm, mine, op_id=name, deadline_s=20).wait(20)
        if found.values is not None:
            self.right(set(found.values.tolist()), {value}, "a share")

    def _call_modular(self) -> None:
        name, value = self.fresh()
        mine = torch.full((3,), int(value))
        api.modular_sum(self.swarm, mine, op_id=name, deadline_s=20).wait(20)
        self.right(mine.tolist(), [int(value)] * 3, "a modular sum")

    def _call_average(self) -> None:
        name, value = self.fresh()
        mine = torch.full((3,), value)
        average(self.swarm, mine, op_id=name, dims=1, deadline_s=20).wait(20)
        self.right(mine.tolist(), [value] * 3, "an average")

    def _call_state(self) -> None:
        name, value = self.fresh()
        found = api.check_state(self.swarm, {"a": torch.tensor([value])}, op_id=name, deadline_s=20)
        self.right(found.wait(20).differing, {}, "a check")

    def _call_barrier(self) -> None:
        api.barrier(self.swarm, op_id=self.fresh()[0], deadline_s=20).wait(20)

    def _call_buffer(self) -> None:
        name, value = self.fresh()
        mine = self.swarm.buffer(64)
        mine.fill_(value)
        api.all_reduce(self.swarm, mine, op_id=name, deadline_s=20).wait(20)
        self.right(set(mine.tolist()), {value}, "a buffer")

    def _call_small(self) -> None:
        swarm, (name, _) = self.swarm, self.fresh()
        self.right(swarm.next_number(name), 0, "the number of a series")
        if swarm.peer not in {view.peer for view in swarm.members()}:
            raise Wrong("the script's own member is none")
        swarm.report({"loss": 1.0})
        swarm.tallies(0)
        _ = swarm.closing, swarm.paused, swarm.trouble

    def _call_anchor(self) -> None:
        view, found = self.swarm.anchor(), torch.empty(4)
        try:
            view.copy_into(found)
        finally:
            view.release()

    def _call_contribute(self) -> None:
        ticket = self.swarm.contribute(samples=1, write=_zero)
        ticket.wait(20)

    def joining(self) -> None:
        """The swarm is closed, joined anew, attached to, trained with, and closed."""
        self.swarm.close()
        with join("cut", home=self.home, private=False, progress=lambda *_: None) as swarm:
            self.joined = swarm  # an exception in the end of the block leaves it to the script
            only = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(4))})
            optimizer = torch.optim.SGD(only.parameters(), lr=0.0)
            sync = attach(only, optimizer, swarm, batch_size=1)
            for _ in range(3):
                only["w"].sum().backward()
                optimizer.step()
            sync.log(loss=1.0)

    def mend(self) -> None:
        """The script goes on after an interrupt: there is a swarm, and what is called is right."""
        until = time.monotonic() + PATIENCE_S
        if self.joined is not None:
            self.joined.close()
            self.joined = None
        while True:
            try:
                if self.swarm._closed:  # pyright: ignore[reportPrivateUsage]
                    self.swarm = self.enter()
                self.swarm.anchor().release()
                name, value = self.fresh()
                mine = torch.full((5,), value)
                handle = api.all_reduce(self.swarm, mine, op_id=name, op="sum", deadline_s=20)
                outcome = handle.wait(20)
                self.right(mine.tolist(), [value] * 5, f"what is called afterwards ({outcome})")
                if outcome.status == "committed":
                    return
            except SwarmClosedError:
                time.sleep(0.01)
            except AtollError as error:
                if "script is attached" not in error.message and not error.retryable:
                    raise
                gc.collect()  # a swarm that nobody holds
                time.sleep(0.01)
            if time.monotonic() > until:
                raise Wrong(f"no call is committed any more: {self.swarm.trouble}")


@contextlib.contextmanager
def alarm(number: int, after_s: float) -> Generator[None]:
    """SIGALRM or SIGINT, after a while; the handler raises."""

    def ring(*_: Any) -> None:
        raise Stop

    before = signal.signal(number, ring)
    if number == signal.SIGALRM:
        signal.setitimer(signal.ITIMER_REAL, after_s)
    timer = threading.Timer(after_s, os.kill, (os.getpid(), number))
    try:
        if number != signal.SIGALRM:
            timer.start()
        yield
    finally:
        while True:
            try:  # what rings here has rung too late
                signal.setitimer(signal.ITIMER_REAL, 0)
                timer.cancel()
                if timer.ident is not None:
                    timer.join()
                signal.signal(number, signal.SIG_IGN)
                break
            except Stop:
                pass
        signal.signal(number, before)


def interrupted(call: Callable[[], None], way: str, after_s: float) -> str:
    """How an interrupted call ended: "cut", "over" (before the interrupt), "error"."""
    if way == "set":
        return _set(call, after_s)
    number = signal.SIGALRM if way == "alarm" else signal.SIGINT
    try:
        with alarm(number, after_s):
            call()
    except Stop:
        return "cut"
    except (AtollError, RuntimeError):
        return "error"
    return "over"


def _set(call: Callable[[], None], after_s: float) -> str:
    """An exception that another thread sets."""
    found, wrong = ["over"], list[BaseException]()

    def work() -> None:
        try:
            try:
                call()
            except Stop:
                found[0] = "cut"
            except (AtollError, RuntimeError):
                found[0] = "error"
            except AssertionError as error:
                wrong.append(error)
        except Stop:
            found[0] = "cut"

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(after_s)
    if thread.is_alive():
        pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread.ident or 0), py_object(Stop))
    thread.join()
    if wrong:
        raise wrong[0]
    return found[0]


def open_fds() -> int:
    """How many descriptors are open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def targets() -> dict[str, int]:
    """What they lead to, without the numbers of sockets and pipes: how many of each kind."""
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]] += 1
    return dict(sorted(found.items()))


def least_fds(at_most: int) -> int:
    """How many are open once all that ends has ended."""
    until = time.monotonic() + PATIENCE_S
    while (found := open_fds()) > at_most and time.monotonic() < until:
        time.sleep(0.1)
    return found


@dataclass
class Played:
    """What was played so far, in one start of the script or several."""

    turns: int = 0
    came: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    def save(self, path: Path) -> None:
        """Whole, or not at all."""
        whole = path.with_name(f"{path.name}.new")
        whole.write_text(json.dumps(vars(self)))
        whole.replace(path)


def kept(path: Path | None) -> Played:
    """What a file says was played; nothing without one."""
    if path is None or not path.exists():
        return Played()
    told: dict[str, Any] = json.loads(path.read_text())
    return Played(told["turns"], told["came"], Counter(told["ended"]), told["wrong"])


def play(script: Script, interrupts: int, seed: int, played: Played, keep: Path | None) -> None:
    """Until so many interrupts came. A turn's draws follow from its number."""
    while played.came < interrupts:
        faulthandler.dump_traceback_later(LONGEST_TURN_S, exit=True)  # rather than hang
        rng = random.Random(f"{seed}/{played.turns}")
        joins = rng.random() < 1 / JOINS
        name, call = ("joining", script.joining) if joins else rng.choice([*script.calls.items()])
        way = rng.choice(("alarm", "int", "set"))
        after_s = rng.uniform(0, LONGEST_JOIN_S if joins else LONGEST_S)
        try:
            how = interrupted(call, way, after_s)
            played.ended[f"{name} {how}"] += 1
            played.came += how != "over"
            script.mend()
        except Wrong as error:
            played.wrong.append(f"{name}, {way} after {1e3 * after_s:.2f} ms: {error}")
            progress(played.wrong[-1])
        played.turns += 1
        if played.turns % TURNS_TOLD == 0:
            script.swarm.close()
            gc.collect()
            progress(f"{played.came} interrupts; open without a swarm: {targets()}")
            script.mend()
            if keep is not None:
                played.save(keep)


def main() -> int:
    """Exit status."""
    asked, began = options(), time.monotonic()
    warnings.simplefilter("ignore", RuntimeWarning)  # of dropped handles
    logging.getLogger("atoll").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    sys.unraisablehook = lambda _: None  # an exception in a finaliser goes no further
    reattach.FIRST_DELAY_S = 0.002
    played = kept(asked.keep)
    wrong, earlier = list[str](), played.came
    with tempfile.TemporaryDirectory(prefix="atoll-cut-") as folder:
        with two_nodes(Path(folder)) as (home, _):
            script, interval = Script(home, asked.seed), sys.getswitchinterval()
            for call in (*script.calls.values(), script.joining):
                call()
                script.mend()
            script.swarm.close()
            before = open_fds()
            script.mend()
            play(script, asked.interrupts, asked.seed, played, asked.keep)
            script.mend()
            script.swarm.close()
            after, left = least_fds(before), targets()
            with eager.eager():
                pass  # whoever leaves mends what an interrupted one has left
            if sys.getswitchinterval() != interval:
                wrong.append(f"the switch interval is {sys.getswitchinterval()}")
    if after > before:
        wrong.append(f"{after - before} descriptors more than before: {left}")
    if asked.keep is not None:
        played.wrong += wrong
        played.save(asked.keep)
        wrong = []
    wrong = [*played.wrong, *wrong]
    emit(
        "interrupt_calls",
        {"interrupts": asked.interrupts, "seed": asked.seed},
        wrong[:20],
        came=played.came,
        earlier=earlier,
        ended=dict(sorted(played.ended.items())),
        wrong=len(wrong),
        descriptors=[before, after],
        wall_s=round(time.monotonic() - began, 1),
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
