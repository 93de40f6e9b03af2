#!/usr/bin/env python3
"""What it costs a node to be looked at: three real peers train, and one of them is shown as a page
and asked for its metrics, turn about with being left alone; and how long a recorded run of many
members takes to play again.

In a looked turn a client asks the page's server as the page's script does, and Prometheus' path is
read every --scrape-s. In a closed turn the page's server runs and nobody asks it. Beside the
processor time of node and page stands that of another node of the same run, which nobody looks at:
what it takes more or less in a turn is the machine's noise. The last line of stdout is one JSON
object.

    scripts/bench/bench_look.py --seconds 60 --turns 2 --members 64 --rounds 1000
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from _bench import FailedError, emit, progress
from _kits import TESTS as _  # noqa: F401  (the kits of tests/ can be imported from here on)
from cli_kit import ATOLL, LISTEN, atoll
from look_kit import RUN, made_up, page

from atoll.collectives.telemetry import PHASES
from atoll.node.look.source import Replay
from atoll.node.run import diary
from atoll.node.run.events import read_event

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAUSE_S = 0.25  # of the page's script, between two questions
WARM_S = 5.0  # after a page was opened or closed, before a turn counts
MANIFEST = """
schema = 1
name = "looked"
[model]
entry = "local:x"
[train]
sync_every = 20
start_with = 3
"""
SCRIPT = """
import time, torch
from atoll.node import join
from atoll.optim import attach
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with join() as swarm:
    sync = attach(model, optimizer, swarm, batch_size=8)
    while not sync.done:
        loss = model(torch.randn(8, 256)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        sync.log(loss=loss)
        time.sleep({step_s})
"""


def cpu_s(pid: int) -> float:
    """Processor time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


class RunningPeers:
    """A node and a script each; the first one has made the run and serves metrics."""

    def __init__(self, folder: Path, round_s: float) -> None:
        script, manifest = folder / "train.py", folder / "run.toml"
        script.write_text(SCRIPT.replace("{step_s}", str(round_s / 20)))
        manifest.write_text(MANIFEST)
        self.homes = [folder / name for name in ("one", "two", "three")]
        self.nodes, self._scripts = list[int](), list[subprocess.Popen[bytes]]()
        self.port, invite = _free_port(), ""
        for home in self.homes:
            more = ("--metrics", f":{self.port}") if not self.nodes else ()
            self.nodes.append(atoll(home, "up", "--background", *LISTEN, *more)["pid"])
            if invite:
                run = {"ATOLL_INVITE": invite}
            else:
                invite = atoll(home, "new", str(manifest))["invite"]
                run = {"ATOLL_RUN": "looked"}
            with (home / "script.log").open("wb") as log:
                self._scripts.append(
                    subprocess.Popen(
                        [ATOLL[0], str(script)],
                        env={**os.environ, "ATOLL_HOME": str(home), **run},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )

    def until(self, round_: int) -> None:
        """Wait for a round with all of them."""
        ends = time.monotonic() + 180
        while self.status().get("round", 0) < round_:
            if time.monotonic() > ends:
                raise FailedError(f"no round {round_} after 180 s: {self.status()}")
            threading.Event().wait(0.5)

    def status(self) -> dict[str, Any]:
        """The run at the first node."""
        return next(iter(atoll(self.homes[0], "status")["runs"]), {})

    def events(self) -> list[dict[str, Any]]:
        """What the first node has written of the run."""
        (file,) = self.homes[0].glob("state/runs/*/events.jsonl")
        lines = [json.loads(line) for line in file.read_bytes().splitlines()]
        return [line for line in lines if "event" in line]

    def close(self) -> None:
        """End all."""
        for script in self._scripts:
            script.send_signal(signal.SIGINT)
        for script in self._scripts:
            script.wait(100)
        for home in self.homes[: len(self.nodes)]:
            atoll(home, "down")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def asking(ask: Callable[[], None], pause_s: float) -> Generator[list[int]]:
    """``ask`` again and again, in a thread; how often so far."""
    ended, count = threading.Event(), [0]

    def run() -> None:
        while not ended.is_set():
            ask()
            count[0] += 1
            ended.wait(pause_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()


def as_the_page(address: str) -> Callable[[], None]:
    """One question of the page's script after the other, on one connection."""
    parts = urlsplit(address)
    line = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    have = {"changes": 0, "rounds": 0, "lines": 0}

    def ask() -> None:
        query = "&".join(f"{key}={value}" for key, value in have.items())
        line.request("GET", f"/api/run?{query}", headers={"X-Atoll-Token": parts.fragment})
        told = json.loads(line.getresponse().read())
        have["changes"] = told["changes"]
        have["rounds"] = told["rounds"]["first"] + len(told["rounds"]["round"])
        have["lines"] = told["lines"]["first"] + len(told["lines"]["rows"])

    return ask


def scrape(port: int) -> None:
    """What Prometheus asks."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    line.request("GET", "/metrics")
    answer = line.getresponse()
    if answer.status != 200 or b"atoll_round" not in answer.read():
        raise FailedError("no metrics")
    line.close()


def turn(peers: RunningPeers, kind: str, seconds: float, scrape_s: float) -> dict[str, Any]:
    """One turn: ``alone``, ``looked`` or ``closed``."""
    with ExitStack() as stack:
        pages = list[int]()
        asked = scraped = [0]
        if kind != "alone":
            address, pid = stack.enter_context(page_of(peers.homes[0]))
            pages = [pid]
            if kind == "looked":
                asked = stack.enter_context(asking(as_the_page(address), PAUSE_S))
                scraped = stack.enter_context(asking(lambda: scrape(peers.port), scrape_s))
            else:  # it was open once; a while after that the node is asked no more
                with asking(as_the_page(address), PAUSE_S):
                    threading.Event().wait(2.0)
                threading.Event().wait(20.0)
        threading.Event().wait(WARM_S)
        pids = {"node": peers.nodes[0], "other_node": peers.nodes[1]}
        pids |= {"page": pages[0]} if pages else {}
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        began, at, questions, scrapes = time.monotonic(), time.time(), asked[0], scraped[0]
        threading.Event().wait(seconds)
        took = time.monotonic() - began
        share = {name: (cpu_s(pid) - before[name]) / took for name, pid in pids.items()}
        until = time.time()
        rounds = [
            event
            for event in peers.events()
            if event.get("event") == "round.committed" and at <= event["at"] <= until
        ]
        return {
            "turn": kind,
            "seconds": round(took, 1),
            "core_percent": {name: round(100 * value, 3) for name, value in share.items()},
            "questions": asked[0] - questions,
            "scrapes": scraped[0] - scrapes,
            "rounds": len(rounds),
            "lost": sum(len(event["contributors"]) < 3 or not event["counted"] for event in rounds),
        }


@contextmanager
def page_of(home: Path) -> Generator[tuple[str, int]]:
    """A page's address and the process that serves it."""
    with page("ui", "looked", home=home) as address:
        port = urlsplit(address).port
        yield address, _listener(int(port or 0))


def _listener(port: int) -> int:
    """The process of this user that listens at a port of loopback."""
    wanted = f"0100007F:{port:04X}"
    inodes = {
        f"socket:[{line.split()[9]}]"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1] == wanted and line.split()[3] == "0A"
    }
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(fd) in inodes for fd in folder.iterdir()):
                return int(folder.parent.name)
        except OSError:
            continue
    raise FailedError(f"nobody listens at port {port}")


def written(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A made-up event with all that a node tells beside it: times of all members in all phases."""
    told = {"run": RUN, "round": event.get("round"), "at": event["at"]}
    match event["event"]:
        case "reduction.timed":
            times = dict.fromkeys(event["contributors"], 0.123456)
            for phase in ("reduce", "gather", "decide"):
                yield {"event": "round.phase", "log": "main/looked", "phase": phase, **told}
            yield event | {"phases": dict.fromkeys(PHASES, times)}
        case "round.committed":
            reach = {"reachable": len(event["members"]), "members": len(event["members"])}
            yield event | {"reach": {**reach, "needed": 33, "held": True}}
            yield {"event": "state.root", "root": "5f68abef" * 8, "entry": event["entry"], **told}
        case _:
            yield event


def replay(members: int, rounds: int) -> dict[str, Any]:
    """Seconds until a recorded run is in the picture, file and all."""
    with tempfile.TemporaryDirectory() as folder:
        diary.MAX_BYTES = 1 << 40  # all rounds are kept, which else begin to go after 32 MB
        writer = diary.Diary(Path(folder), RUN, lambda: "looked")
        for event in made_up(rounds, members):
            for one in written(event):
                writer.write(read_event(one))
        writer.close()
        took, busy = list[float](), list[float]()
        for _ in range(3):
            began, before = time.perf_counter(), time.process_time()
            with Replay([Path(folder)]) as source:
                took.append(time.perf_counter() - began)
                busy.append(time.process_time() - before)
            if source.view.taken != rounds or source.view.skipped:
                raise FailedError(f"{source.view.taken} of {rounds} rounds are in the files")
        files = [file.stat().st_size for file in Path(folder).iterdir()]
    return {
        "replay_s": round(median(took), 2),
        "replay_cpu_s": round(median(busy), 2),  # what it takes of a machine that has other work
        "replay_runs": [round(each, 2) for each in took],
        "replay_bytes": sum(files),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=2, help="of each kind; 0: the replay only")
    parser.add_argument("--round-s", type=float, default=2.0, help="how long a round trains")
    parser.add_argument("--scrape-s", type=float, default=15.0)
    parser.add_argument("--members", type=int, default=64, help="of the recorded run")
    parser.add_argument("--rounds", type=int, default=1000, help="of the recorded run")
    given = parser.parse_args()
    # A shell script's background job ignores Ctrl-C, and so would the peers that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found, turns = replay(given.members, given.rounds), list[dict[str, Any]]()
    progress(f"replay: {found}")
    if given.turns:
        with tempfile.TemporaryDirectory() as folder:
            peers = RunningPeers(Path(folder), given.round_s)
            try:
                peers.until(3)
                for _ in range(given.turns):
                    for kind in ("alone", "looked", "closed"):
                        turns.append(turn(peers, kind, given.seconds, given.scrape_s))
                        progress(json.dumps(turns[-1]))
            finally:
                peers.close()
        found |= figures(turns)
    emit("look", vars(given), turns, **found)


def figures(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Percent of a core: what a turn's node takes beyond that of an alone turn, the page included,
    and how much the node that nobody looks at moved meanwhile.
    """

    def of(kind: str, *names: str) -> float:
        return median(
            sum(row["core_percent"].get(name, 0.0) for name in names)
            for row in turns
            if row["turn"] == kind
        )

    alone = of("alone", "node")
    return {
        "node_alone_percent": round(alone, 3),
        "looked_percent": round(of("looked", "node", "page") - alone, 3),
        "looked_page_percent": round(of("looked", "page"), 3),
        "looked_noise_percent": round(of("looked", "other_node") - of("alone", "other_node"), 3),
        "closed_node_percent": round(of("closed", "node") - alone, 3),
        "closed_page_percent": round(of("closed", "page"), 3),
        "closed_noise_percent": round(of("closed", "other_node") - of("alone", "other_node"), 3),
        "rounds": sum(row["rounds"] for row in turns),
        "rounds_lost": sum(row["lost"] for row in turns),
    }


if __name__ == "__main__":
    main()
