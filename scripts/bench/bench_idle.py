#!/usr/bin/env python3
"""What an idle node costs: three real peers on loopback that are members of a run, whose scripts
have died. Percent of a core, and how often a second the node wakes, of two of them; of the third
the calls a second of its loop, which run under Python's profiler.

Checkouts that are to be compared run beside each other, and the same seconds are counted of all of
them, so that what else this machine does, falls on all alike. The last line of stdout is one JSON
object.

    scripts/bench/bench_idle.py --seconds 30 --turns 3 .venv/bin/python BEFORE/.venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from _bench import FailedError, emit, progress

MANIFEST = """
schema = 1
name = "idle"
[model]
entry = "local:x"
[train]
sync_every = 10
"""
SCRIPT = """
import time, torch
from atoll.node import join
from atoll.optim import attach
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with join() as swarm:
    sync = attach(model, optimizer, swarm)
    while not sync.done:
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(0.05)
"""
NODE = "from atoll.node.__main__ import main; main()"
COUNTED = """
import cProfile, json, os, signal
from atoll.node.__main__ import main
profile = cProfile.Profile()
def tell(*_):
    profile.disable()
    calls = {}
    for entry in profile.getstats():
        code = entry.code
        name = code if isinstance(code, str) else f"{code.co_filename}:{code.co_name}"
        calls[name] = calls.get(name, 0) + entry.callcount
    with open(os.environ["CALLS"] + ".new", "w") as file:
        file.write(json.dumps(calls))
    os.replace(os.environ["CALLS"] + ".new", os.environ["CALLS"])
    profile.enable()
signal.signal(signal.SIGUSR1, tell)
profile.enable()
main()
"""
NAMED = 40  # functions of a turn, those that are called most
SETTLE_S = 45.0  # until nothing is left of the rounds and of the scripts' deaths


class IdlePeers:
    """Three nodes of one checkout, whose run has had some rounds; the third one is counted."""

    def __init__(self, python: str, folder: Path, round_: int) -> None:
        self.python, invite = python, ""
        folder.mkdir()
        manifest, script = folder / "run.toml", folder / "train.py"
        manifest.write_text(MANIFEST)
        script.write_text(SCRIPT)
        self.nodes, scripts = list[subprocess.Popen[bytes]](), list[subprocess.Popen[bytes]]()
        self._calls = folder / "calls"
        self._homes = [folder / name for name in ("one", "two", "three")]
        try:
            for home in self._homes:
                home.mkdir()
                code = COUNTED if home.name == "three" else NODE
                self.nodes.append(self._start(home, "-c", code, "--listen", "/ip4/127.0.0.1/tcp/0"))
                self._until(home, lambda told: True)
                run = {"ATOLL_RUN": "idle"} if not invite else {"ATOLL_INVITE": invite}
                invite = invite or self._atoll(home, "new", str(manifest))["invite"]
                scripts.append(self._start(home, str(script), **run))
            for home in self._homes:
                self._until(
                    home, lambda told: any(run.get("round", 0) >= round_ for run in told["runs"])
                )
        except BaseException:
            self.close()
            raise
        finally:
            for each in scripts:
                each.kill()
                each.wait()

    def _start(self, home: Path, *argv: str, **more: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "ATOLL_HOME": str(home), "CALLS": str(self._calls), **more}
        with (home / "out.log").open("ab") as log:
            return subprocess.Popen(
                [self.python, *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _atoll(self, home: Path, *argv: str) -> dict[str, Any]:
        done = subprocess.run(
            [self.python, "-m", "atoll.node.cli", *argv, "--json"],
            env={**os.environ, "ATOLL_HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise FailedError(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def _until(self, home: Path, holds: Any) -> None:
        ends = time.monotonic() + 180
        while time.monotonic() < ends:
            try:
                if holds(self._atoll(home, "status")):
                    return
            except FailedError:
                pass
            threading.Event().wait(0.5)
        raise FailedError((home / "out.log").read_text()[-2000:])

    def read(self) -> dict[str, list[float]]:
        """So far: processor seconds and wakes of the first two nodes."""
        found: dict[str, list[float]] = {"cpu": [], "wakes": []}
        for node in self.nodes[:2]:
            tasks = list(Path(f"/proc/{node.pid}/task").iterdir())
            ran = [int((task / "schedstat").read_text().split()[0]) for task in tasks]
            slept = [
                int(line.split()[1])
                for task in tasks
                for line in (task / "status").read_text().splitlines()
                if line.startswith("voluntary_ctxt_switches")
            ]
            found["cpu"].append(sum(ran) / 1e9)
            found["wakes"].append(sum(slept))
        return found

    def calls(self) -> dict[str, int]:
        """By function: calls of the third node's loop so far."""
        self._calls.unlink(missing_ok=True)
        self.nodes[2].send_signal(signal.SIGUSR1)
        ends = time.monotonic() + 30
        while not self._calls.exists():
            if time.monotonic() > ends:
                raise FailedError("the third node tells no calls")
            threading.Event().wait(0.05)
        found: dict[str, int] = json.loads(self._calls.read_text())
        return found

    def close(self) -> None:
        """End all."""
        for node in self.nodes:
            node.send_signal(signal.SIGINT)
        for node in self.nodes:
            node.wait(60)


def turn(swarms: list[IdlePeers], seconds: float) -> list[dict[str, Any]]:
    """The same seconds of all swarms."""
    calls = [swarm.calls() for swarm in swarms]
    threading.Event().wait(1.0)
    before, began = [swarm.read() for swarm in swarms], time.monotonic()
    threading.Event().wait(seconds)
    after, took = [swarm.read() for swarm in swarms], time.monotonic() - began
    later, found = [swarm.calls() for swarm in swarms], list[dict[str, Any]]()
    for at, swarm in enumerate(swarms):
        rate = {
            key: mean((b - a) / took for a, b in zip(before[at][key], after[at][key], strict=True))
            for key in before[at]
        }
        more = {name: count - calls[at].get(name, 0) for name, count in later[at].items()}
        found.append(
            {
                "python": swarm.python,
                "load": round(os.getloadavg()[0], 1),
                "core_percent": round(100 * rate["cpu"], 3),
                "wakes_a_second": round(rate["wakes"], 1),
                "calls_a_second": round(sum(more.values()) / (took + 1.0)),
                "most_called": {
                    name.rpartition("site-packages/")[2]: round(count / (took + 1.0), 1)
                    for name, count in sorted(more.items(), key=lambda item: -item[1])[:NAMED]
                },
            }
        )
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="one a checkout")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--round", type=int, default=4, help="that all have before scripts die")
    given = parser.parse_args()
    # A shell script's background job ignores Ctrl-C, and so would the peers that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    swarms, turns = list[IdlePeers](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, python in enumerate(given.pythons):
                swarms.append(IdlePeers(python, Path(folder) / str(number), given.round))
                progress(f"{python}: three nodes have had round {given.round}")
            threading.Event().wait(SETTLE_S)
            for _ in range(given.turns):
                for each in turn(swarms, given.seconds):
                    progress(json.dumps({k: v for k, v in each.items() if k != "most_called"}))
                    turns.append(each)
        finally:
            for swarm in swarms:
                swarm.close()
    found = {
        python: {
            key: median(each[key] for each in turns if each["python"] == python)
            for key in ("core_percent", "wakes_a_second", "calls_a_second")
        }
        for python in given.pythons
    }
    emit("idle", vars(given), turns, idle=found)


if __name__ == "__main__":
    main()
