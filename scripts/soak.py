#!/usr/bin/env python3
"""Hours of a swarm's life in minutes: real peers train a toy while one of them is killed, stopped,
sent away or joined every few seconds.

All peers run on loopback, each a script with its node. The founder is stopped, but never killed:
its processes, and those of other peers that live through most of the run, are watched for growth.
Afterwards the same swarm trains undisturbed for as many rounds (no longer than the first run took),
for the loss to compare with.

rounds             rounds that the swarm committed, as its members saw them
faults             how many of each kind struck
stuck              times no round came for 30 s, the first minute aside
digests_equal      every round had one anchor, the same for everybody who told of it
rss_growth_mib, fd_growth   of the watched process that grew most, from the second to the last
                            window (each 15 % of the run); runs has them all
loss, loss_fault_free       of the last anchors; loss_ratio is one by the other
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "bench"))  # helpers of the measurements

import psutil
from _bench import emit, progress
from _kits import PARTS, Peer, Peers

SCRIPT = Path(__file__).with_name("_soak_peer.py")
PAUSE_S = (5.0, 15.0)  # between faults
GONE_S = (1.0, 6.0)  # how long a fault lasts, or a peer that was killed is away
STUCK_S, EARLY_S = 30.0, 60.0
READY_S = 300.0  # for a start on a busy machine
BACK_S = 60.0  # a peer that is not in a round again by then counts as stuck
SAMPLE_S = 2.0
WINDOW = 0.15
KINDS = ("kill", "stop", "leave", "join")
MANIFEST = """
schema = 1
name = "soak"
[model]
entry = "local:soak"
[train]
sync_every = 15
method = "diloco"
[train.outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.6
[exchange]
codec = "int8"
[checkpoint]
every = 20
"""


@dataclass
class Chronicle:
    """What the peers told, and how their processes grew."""

    digests: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    samples: dict[int, list[tuple[float, int, int]]] = field(
        default_factory=dict[int, list[tuple[float, int, int]]]
    )
    faults: Counter[str] = field(default_factory=Counter[str])
    stuck: int = 0
    last_round_at: float = field(default_factory=time.monotonic)
    top: int = 0

    def round(self, round_: int, digest: str) -> None:
        """A peer has the anchor of a round."""
        self.digests.setdefault(round_, set()).add(digest)
        if round_ > self.top:
            self.top, self.last_round_at = round_, time.monotonic()

    def sample(self, pids: list[int]) -> None:
        """Resident memory and descriptors of processes."""
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                self.samples.setdefault(pid, []).append(
                    (time.monotonic(), process.memory_info().rss, process.num_fds())
                )

    def growth(self, began: float, ended: float) -> list[dict[str, Any]]:
        """Of each process that lived through most of the run: MiB and descriptors in each window of
        it, the first one left out, and what they grew from the second to the last."""
        window, found = WINDOW * (ended - began), list[dict[str, Any]]()
        for pid, rows in self.samples.items():
            windows = [
                [row for row in rows if 0 <= row[0] - began - at * window < window]
                for at in range(1, round(1 / WINDOW))
            ]
            windows.append([row for row in rows if ended - window <= row[0] <= ended])
            if windows[0] and windows[-1]:
                mib = [
                    round(statistics.median(row[1] for row in rows) / 2**20, 1)
                    for rows in windows
                    if rows
                ]
                fds = [round(statistics.median(row[2] for row in rows)) for rows in windows if rows]
                found.append(
                    {
                        "pid": pid,
                        "mib": mib,
                        "fds": fds,
                        "grew_mib": round(mib[-1] - mib[0], 1),
                        "grew_fds": fds[-1] - fds[0],
                    }
                )
        return found


class Soak:
    """A swarm and its troubles."""

    def __init__(self, folder: Path, peers: int, seed: int) -> None:
        self.folder, self.peers, self.rng = folder, peers, random.Random(seed)
        self.chronicle = Chronicle()
        self.swarm = Peers(folder, peers, 0, SCRIPT, manifest=MANIFEST, ready_s=READY_S)
        self.rounds_of = dict.fromkeys(self.swarm.all, 0)  # rounds told since the last fault of it
        self.losses: list[dict[str, Any]] = []
        self._later: list[tuple[float, Any]] = []
        self._sampled_at = 0.0
        self._made = peers

    # ---- what happens
    def hear(self, wait_s: float) -> None:
        """Take in what the peers say for a while; wake and start again whoever is due."""
        until = time.monotonic() + wait_s
        while True:
            quiet = True
            for peer in list(self.swarm.all):
                with contextlib.suppress(queue.Empty):
                    self._take(peer, peer.expect_any(0.0))
                    quiet = False
            now = time.monotonic()
            due = [action for at, action in self._later if at <= now]
            self._later = [(at, action) for at, action in self._later if at > now]
            for action in due:
                action()
            if now - self._sampled_at > SAMPLE_S:
                self._sampled_at = now
                self.chronicle.sample(
                    [
                        pid
                        for peer in self.swarm.all
                        for pid in (peer.process.pid, peer.node_pid)
                        if pid
                    ]
                )
            if now >= until:
                return
            if quiet:
                time.sleep(0.02)

    def _take(self, peer: Peer, line: dict[str, Any]) -> None:
        peer.node_pid = line.get("node_pid") or peer.node_pid
        if line["event"] == "round":
            self.chronicle.round(line["round"], line["digest"])
            self.rounds_of[peer] = self.rounds_of.get(peer, 0) + (
                line["status"] == "committed" and line["counted"]
            )
        elif line["event"] == "loss":
            self.losses.append(line)

    def whole(self) -> bool:
        """Whether everybody is back from the last fault, and counted."""
        return not self._later and all(self.rounds_of.get(peer, 0) >= 1 for peer in self.swarm.all)

    # ---- troubles
    def strike(self) -> None:
        """One fault of a random kind."""
        kind = self.rng.choice(KINDS)
        if kind == "join" and len(self.swarm.all) > self.peers:
            kind = "leave"
        victims = self.swarm.all if kind == "stop" else self.swarm.all[1:]
        victim, part = self.rng.choice(victims), self.rng.choice(PARTS)
        gone_s = self.rng.uniform(*GONE_S)
        self.chronicle.faults[kind] += 1
        progress(
            f"{kind}{'' if kind == 'join' else f' {victim.name}'}{f' ({part})' if kind in ('kill', 'stop') else ''} at round {self.chronicle.top}"
        )
        if kind == "join":
            name, self._made = f"p{self._made}", self._made + 1
            self._add(Peer(name, self.folder / name, self.swarm.invite, 0, script=SCRIPT))
            return
        self.rounds_of[victim] = 0
        if kind == "stop":
            victim.signal(part, signal.SIGSTOP)
            self._after(gone_s, lambda: victim.signal(part, signal.SIGCONT))
        elif kind == "kill":
            victim.signal(part, signal.SIGKILL)
            if part != "node":
                self._after(gone_s, lambda: self._restart(victim))
        else:
            victim.say(do="end")
            fresh = len(self.swarm.all) > self.peers
            self._after(
                gone_s, (lambda: self._remove(victim)) if fresh else (lambda: self._restart(victim))
            )

    def _after(self, seconds: float, action: Any) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def _add(self, peer: Peer) -> None:
        self.swarm.all.append(peer)
        self.rounds_of[peer] = 0

    def _remove(self, peer: Peer) -> None:
        peer.end()
        self.swarm.all.remove(peer)
        self.rounds_of.pop(peer, None)

    def _restart(self, peer: Peer) -> None:
        if peer.process.poll() is None:
            peer.end()
        peer.start()
        self.rounds_of[peer] = 0

    def mind(self) -> None:
        """Count a time without rounds as stuck, once."""
        if time.monotonic() - self.chronicle.last_round_at > STUCK_S:
            self.chronicle.stuck += 1
            self.chronicle.last_round_at = time.monotonic()
            progress(f"STUCK at round {self.chronicle.top}")

    def churn(self, seconds: float) -> None:
        """Trouble for so long; one fault ends before the next begins, so that a majority is always
        well.
        """
        began = time.monotonic()
        due, waited = began + min(EARLY_S, seconds) / 4, began
        while time.monotonic() - began < seconds:
            self.hear(0.2)
            self.mind()
            now = time.monotonic()
            if now >= due and self.whole():
                self.strike()
                due, waited = now + self.rng.uniform(*PAUSE_S), now
            elif now - waited > BACK_S:
                lagging = [peer.name for peer in self.swarm.all if self.rounds_of.get(peer, 0) < 1]
                self.chronicle.stuck += 1
                waited = now
                progress(
                    f"STUCK: {', '.join(lagging)} not back after {BACK_S:g} s (round {self.chronicle.top})"
                )

    def calm(self, rounds: int, seconds: float) -> None:
        """No trouble until so many rounds are committed, or the time is over."""
        until = time.monotonic() + seconds
        while self.chronicle.top < rounds and time.monotonic() < until:
            self.hear(0.2)
            self.mind()

    def loss(self) -> float:
        """Of the founder's newest anchor."""
        self.losses.clear()
        self.swarm.all[0].say(do="loss")
        until = time.monotonic() + STUCK_S
        while not self.losses:
            if time.monotonic() > until:
                raise AssertionError(f"p0 does not tell its loss:\n{self.swarm.all[0].log()}")
            self.hear(0.1)
        return float(self.losses[0]["loss"])

    def end(self) -> None:
        """End everybody."""
        self.swarm.end()


def run(options: argparse.Namespace, folder: Path) -> int:
    """Both runs, and the figures."""
    seconds = options.minutes * 60
    progress(f"{options.peers} peers, {options.minutes:g} minutes of churn (seed {options.seed})")
    soak = Soak(folder / "churn", options.peers, options.seed)
    try:
        began = time.monotonic()
        soak.churn(seconds)
        ended = time.monotonic()
        loss, chronicle = soak.loss(), soak.chronicle
    finally:
        soak.end()
    watched = chronicle.growth(began, ended)
    progress(
        "grew, of those that lived through it: "
        + ", ".join(f"{one['grew_mib']} MiB and {one['grew_fds']} descriptors" for one in watched)
    )
    differing = sorted(round_ for round_, digests in chronicle.digests.items() if len(digests) > 1)
    progress(
        f"{chronicle.top} rounds, {sum(chronicle.faults.values())} faults, {len(differing)} rounds with different anchors, loss {loss:.4f}; "
        "now without faults"
    )
    twin = Soak(folder / "twin", options.peers, options.seed)
    try:
        twin.calm(chronicle.top, seconds)
        loss_fault_free, twin_rounds = twin.loss(), twin.chronicle.top
    finally:
        twin.end()
    emit(
        "soak",
        vars(options),
        [{"faults": dict(chronicle.faults), "twin_rounds": twin_rounds, "watched": watched}],
        rounds=chronicle.top,
        faults=sum(chronicle.faults.values()),
        stuck=chronicle.stuck,
        digests_equal=not differing,
        differing=differing[:20],
        rss_growth_mib=max((one["grew_mib"] for one in watched), default=None),
        fd_growth=max((one["grew_fds"] for one in watched), default=None),
        watched=len(watched),
        loss=round(loss, 5),
        loss_fault_free=round(loss_fault_free, 5),
        loss_ratio=round(loss / loss_fault_free, 4),
        round_s=round((ended - began) / max(1, chronicle.top), 3),
    )
    return 0


def main() -> int:
    """Exit code: 0 measured, 1 not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of churn (default 30)")
    parser.add_argument(
        "--peers", type=int, default=5, help="4 to 6 (default 5); one more may join"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults' choice (default 0)")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the folder with the peers' files and logs, and say where it is",
    )
    options = parser.parse_args()
    if options.minutes <= 0 or options.peers < 4:
        parser.error("--minutes is positive, --peers at least 4")
    folder = Path(tempfile.mkdtemp(prefix="atoll-soak-"))
    for name in ("churn", "twin"):
        (folder / name).mkdir()
    try:
        return run(options, folder)
    except AssertionError as error:
        progress(f"cannot measure: {error}")
        return 1
    finally:
        if options.keep:
            progress(f"files and logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
