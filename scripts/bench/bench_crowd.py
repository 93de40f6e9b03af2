#!/usr/bin/env python3
"""What a crowd of idle and slow connections costs a node, and whether a round is lost to it.

Three members of a run, each a node process, commit a round every second. A crowd of strangers comes
to the organiser's node, on one of its doors (libp2p's port, the lanes' port, the control socket)
and in one phase of a conversation: says nothing, or says the rest of a greeting, a handshake, a
stream's protocol or a frame a byte every two seconds. Who is shown out comes again. In every phase:

cpu_share        of a core that the organiser's node takes while the crowd is there, less what the
                 same rounds took without one (`idle_cpu_share`)
arrival_cpu_s    what it took to take the crowd in, all of it, `arrival_s` seconds long
held             how many of the crowd's connections were open at the end, `made` how many it had
                 made until then
rounds, lost     rounds in that time, and those that did not count all three
round_s_max      the slowest of these
newcomer_s       how long a fourth member took, from its start to a round that counted it, with the
                 crowd there
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from _bench import FailedError, emit, progress
from _crowd import ALL, PHASES
from _kits import TESTS  # first: it makes the kits of tests/ importable
from bad_input_kit import Member, new_run
from bad_input_kit import ended as ended_members

from atoll.node.net.transport.addresses import host_and_port, split_peer

PATIENCE_S = 60.0
PACE_S = 1.0

__all__ = ["TESTS"]


def _ones(out: torch.Tensor) -> None:
    out.fill_(1.0)


class Rounds(threading.Thread):
    """Rounds of all members, one a second, until `stop`."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(daemon=True)
        self.members = list(members)
        self.done: list[tuple[float, bool]] = []
        """How long each took, and whether it counted all."""
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            tickets = [m.swarm.contribute(samples=1, write=_ones) for m in self.members]
            outcomes = [ticket.wait(PATIENCE_S) for ticket in tickets]
            took = time.monotonic() - began
            whole = all(
                outcome.counted and len(outcome.contributors) == len(self.members)
                for outcome in outcomes
            )
            self.done.append((took, whole and len({outcome.round for outcome in outcomes}) == 1))
            self._over.wait(max(0.0, PACE_S - took))

    def stop(self) -> None:
        """After the round that is under way."""
        self._over.set()
        self.join()


@contextmanager
def rounds_of(members: Sequence[Member]) -> Generator[Rounds]:
    """Rounds go on meanwhile."""
    rounds = Rounds(members)
    rounds.start()
    try:
        yield rounds
    finally:
        rounds.stop()


class Crowd:
    """The process of a crowd."""

    def __init__(self, order: dict[str, Any]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("_crowd.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """The next thing it says. Raises FailedError when it ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise FailedError("the crowd ended")
        return json.loads(line)

    def go(self) -> int:
        """It goes home; how many connections it made."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        made = self.heard()["made"]
        self.process.wait()
        self.process.stdout.close()
        return int(made)


def cpu(pid: int) -> float:
    """Processor seconds of a process until now."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def doors(member: Member) -> dict[str, Any]:
    """Where its node is knocked at."""
    status = member.status()
    peer, address = split_peer(status["addresses"][0])
    libp2p = host_and_port(address)
    connections = psutil.Process(member.pid).net_connections(kind="tcp")
    listening = {found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN}
    (lanes,) = listening - {libp2p[1]}
    return {
        "libp2p": libp2p,
        "peer": peer,
        "lanes": ("127.0.0.1", lanes),
        "control": str(member.paths.control_socket),
    }


def measure(member: Member, rounds: Rounds, seconds: float) -> dict[str, Any]:
    """So many seconds of its node's life."""
    first, before, began = len(rounds.done), cpu(member.pid), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    share = (cpu(member.pid) - before) / took
    done = rounds.done[first:]
    return {
        "cpu_share": round(share, 4),
        "rounds": len(done),
        "lost": sum(not whole for _, whole in done),
        "round_s_max": round(max((round_s for round_s, _ in done), default=0.0), 3),
    }


def trial(
    phase: str,
    options: argparse.Namespace,
    members: Sequence[Member],
    idle: dict[str, Any],
    join: Any,
) -> dict[str, Any]:
    """One phase. ``idle``: what was measured without a crowd."""
    member = members[0]
    with rounds_of(members) as rounds:
        began, before, first = time.monotonic(), cpu(member.pid), len(rounds.done)
        open_before = len(psutil.Process(member.pid).net_connections(kind="all"))
        crowd = Crowd({"phase": phase, "count": options.connections, **doors(member)})
        try:
            crowd.heard()
            arrival = {
                "arrival_s": round(time.monotonic() - began, 2),
                "arrival_cpu_s": round(cpu(member.pid) - before, 2),
            }
            found = measure(member, rounds, options.seconds)
            held = len(psutil.Process(member.pid).net_connections(kind="all")) - open_before
            found["lost"] = sum(not whole for _, whole in rounds.done[first:])
            rounds.stop()
            newcomer = join(phase) if options.newcomer else None
        finally:
            made = crowd.go()
    found |= {
        "cpu_share": round(found["cpu_share"] - idle["cpu_share"], 4),
        "idle_cpu_share": idle["cpu_share"],
        **arrival,
    }
    return {"phase": phase, **found, "held": held, "made": made, "newcomer_s": newcomer}


def newcomer_of(run: Any, members: Sequence[Member]) -> Any:
    """What joins one more, for as long as it takes to be counted, and says how long that was."""

    def join(name: str) -> float:
        began = time.monotonic()
        with ended_members(newcomer := run.member(f"new-{name}")):
            with rounds_of([*members, newcomer]) as rounds:
                while not any(whole for _, whole in rounds.done):
                    if time.monotonic() - began > PATIENCE_S:
                        raise FailedError(f"nobody can join with the crowd at {name}")
                    time.sleep(0.05)
            took = time.monotonic() - began
            newcomer.swarm.leave()
        return round(took, 2)

    return join


def main() -> int:
    """Exit code: 0 measured, 1 not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument(
        "--seconds",
        type=float,
        default=15.0,
        help="of each measurement, without and with the crowd",
    )
    parser.add_argument(
        "--phases",
        default=",".join([ALL, *PHASES]),
        help=f"of {', '.join(PHASES)}, and {ALL}: a few of each",
    )
    parser.add_argument(
        "--newcomer", action="store_true", help="let one more member join each crowded node"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-crowd-") as folder:
        run = new_run(Path(folder))
        with ended_members(first := run.organiser()):
            with ended_members(second := run.member("b"), third := run.member("c")):
                members = [first, second, third]
                with rounds_of(members) as rounds:
                    while not any(whole for _, whole in rounds.done):
                        time.sleep(0.05)
                    time.sleep(5 * PACE_S)  # what a start costs is not looked at
                    idle = measure(first, rounds, options.seconds)
                found = list[dict[str, Any]]()
                for phase in options.phases.split(","):
                    found.append(trial(phase, options, members, idle, newcomer_of(run, members)))
                    progress(json.dumps(found[-1]))
    emit(
        "bench_crowd",
        vars(options),
        found,
        cpu_share_max=max(row["cpu_share"] for row in found),
        lost=sum(row["lost"] for row in found),
        rounds=sum(row["rounds"] for row in found),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
