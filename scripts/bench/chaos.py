#!/usr/bin/env python3
"""Minutes of chaos at real peers: killed, dead for good, homes deleted, homes from a backup, twins,
and at last the founder's death.

    scripts/bench/chaos.py --minutes 10 --peers 5

Each peer is a script that trains a toy, with its node, on loopback. A fault strikes once everybody
is back from the last one and was counted, so a quorum that holds a state always lives: no time
between two rounds may be longer than --silence. A member that is dead for good, and one whose home
was deleted, is replaced by a peer with a new key. After four fifths of the time the founder dies
for good; from then on nobody can join by its invite, and faults are those after which a peer comes
back by itself. Exit code: 0 where all was kept, 1 not.

faults             how many of each kind struck
happened           of each fault, when it struck, whom, and whether it was seen to its end (a
                   backup's home is in place, twins were found)
longest_silence_s  between two rounds, as the members told of them; silences: those longer than
                   --silence, each with what had struck last and, so that want of processor time is
                   told from a stall: ``load``; ``held_s``, the most that any node's control loop
                   was ready to run and did not get a core in that time, and its longest single wait
                   between two looks (``held_once_s``); ``answers``, how long each node took to
                   answer for its status meanwhile, and what it said that it waits for
not_back           peers that no round counted within 60 s of their start, or that did not start
                   within 300 s
digests_equal      every round had one anchor, the same for everybody who told of it
twins_found_s      after how long, since the copy's node answers, both had stopped with E308; null
                   where they had not within 30 s
double_votes       rounds and ballots in which two copies of a home voted for different entries
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from _bench import ROOT, emit, progress
from _kits import PARTS, Peer, twins

sys.path.append(str(ROOT / "scripts"))

from soak import BACK_S, READY_S, SCRIPT, Soak

KINDS = ("kill", "death", "home", "backup", "twin")
LATER = ("kill", "backup")  # once the founder is dead
COMMON = "kill"  # soak.py has it by the hundred: it strikes once the others have
PAUSE_S = (1.0, 4.0)  # between everybody's return and the next fault
GONE_S = (0.5, 5.0)
OLD_S = (4.0, 15.0)  # how old a backup is when it comes back
FOUND_S = 30.0  # for twins to be found
FOUNDER_UNTIL = 0.8  # of the time
ASK_AFTER = 1 / 3  # of --silence: then every node is asked what it waits for


class Held:
    """How long the main threads of nodes, which run their control loops, were ready and had no
    core, since the last round.
    """

    def __init__(self) -> None:
        self.waited, self.longest_s = dict[int, float](), 0.0
        self._at = dict[int, float]()

    def begin(self) -> None:
        """There was a round."""
        self.waited, self.longest_s = {}, 0.0

    def look(self, pids: Iterable[int]) -> None:
        """Take the kernel's figures; nothing where it has none."""
        for pid in pids:
            try:
                total_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            except (OSError, IndexError, ValueError):
                continue
            more_s = total_s - self._at.get(pid, total_s)
            self._at[pid] = total_s
            self.waited[pid] = self.waited.get(pid, 0.0) + more_s
            self.longest_s = max(self.longest_s, more_s)


class Chaos(Soak):
    """A swarm, and what happens to it."""

    def __init__(self, folder: Path, peers: int, seed: int, silence_s: float) -> None:
        super().__init__(folder, peers, seed)
        self.silence_s = silence_s
        self.longest_s = 0.0
        self.silences, self.not_back = list[dict[str, Any]](), list[str]()
        self.found_s, self.double_votes = list[float | None](), 0
        self.last, self.founder_lives = "start", True
        self.aside = list[Peer]()  # twins
        self.happened = list[dict[str, Any]]()
        self.began = time.monotonic()
        self.held = Held()
        self.answers = dict[str, dict[str, Any]]()  # of the silence that lasts, by peer
        self.ready_at = 0.0  # when a peer had started last

    def _take(self, peer: Peer, line: dict[str, Any]) -> None:
        if line["event"] == "ready":
            self.ready_at = time.monotonic()
        super()._take(peer, line)

    # ---- what is watched
    def watch(self, seconds: float, quiet: bool = False) -> None:
        """Hear the peers for a while, and measure the time without a round; not while it is still
        ``quiet``.
        """
        top, at = self.chronicle.top, self.chronicle.last_round_at
        self.hear(seconds)
        now = time.monotonic()
        self.held.look(peer.node_pid for peer in self.swarm.all)
        if quiet:
            self.chronicle.last_round_at = now
            self.held.begin()
            return
        came = self.chronicle.top > top
        gap_s = (self.chronicle.last_round_at if came else now) - at
        self.longest_s = max(self.longest_s, gap_s)
        if gap_s > ASK_AFTER * self.silence_s and not came and not self.answers:
            self._ask_all()
        if gap_s > self.silence_s:
            if not self.silences or self.silences[-1]["round"] != top:
                self.silences.append({"round": top, "after": self.last})
                progress(f"SILENCE after {self.last}, at round {top}")
            self.silences[-1] |= {
                "seconds": round(gap_s, 1),
                "load": round(os.getloadavg()[0], 1),
                "held_s": round(max(self.held.waited.values(), default=0.0), 1),
                "held_once_s": round(self.held.longest_s, 1),
                "answers": dict(self.answers),
            }
        if came:
            self.answers = {}
            self.held.begin()

    def _ask_all(self) -> None:
        """Ask every node, in threads of their own, what it waits for; how long it takes to answer
        is what its control loop is busy for.
        """
        answers = self.answers = {peer.name: {} for peer in self.swarm.all}

        def one(peer: Peer) -> None:
            began = time.monotonic()
            status = twins.ask(peer, "status")
            answers[peer.name] = {
                "seconds": round(time.monotonic() - began, 2),
                **({k: status.get(k) for k in ("phase", "round", "waiting")} if status else {}),
            }

        for peer in self.swarm.all:
            threading.Thread(target=one, args=(peer,), daemon=True).start()

    def play(self, seconds: float) -> None:
        """Chaos for so long, from the first round that counts everybody on."""
        began = time.monotonic()
        while not self.whole():
            self.watch(0.2, quiet=True)
            if time.monotonic() - began > 2 * BACK_S:
                raise AssertionError("no first round that counts everybody")
        began = waited = self.began = time.monotonic()
        due = began + self.rng.uniform(*PAUSE_S)
        while time.monotonic() - began < seconds:
            self.watch(0.2)
            now = time.monotonic()
            if self._later or now < due:
                continue
            if self.whole():
                self.strike_one(now - began > FOUNDER_UNTIL * seconds)
                due = waited = time.monotonic() + self.rng.uniform(*PAUSE_S)
            elif now - max(waited, self.ready_at) > (BACK_S if self.ready_at > waited else READY_S):
                waited = now
                names = [peer.name for peer in self.swarm.all if self.rounds_of.get(peer, 0) < 1]
                self.not_back += names
                progress(f"NOT BACK after {self.last}: {', '.join(names)}")
        until = time.monotonic() + BACK_S
        while not self.whole() and time.monotonic() < until:
            self.watch(0.2)

    # ---- what happens
    def strike_one(self, late: bool) -> None:
        """One fault; once it is ``late``, the founder's death."""
        if late and self.founder_lives:
            self.founder_lives = False
            self.last = "death of the founder"
            self.chronicle.faults[self.last] += 1
            self._note()
            return self._lose(self.swarm.all[0])
        kinds = KINDS if self.founder_lives else LATER
        struck = {k: self.chronicle.faults[k] + (k == COMMON) for k in kinds}
        kind = self.rng.choice([k for k in kinds if struck[k] == min(struck.values())])
        any_peer = kind in LATER and self.founder_lives
        victim = self.rng.choice(self.swarm.all[0 if any_peer else self.founder_lives :])
        self.last = f"{kind} {victim.name}"
        self.chronicle.faults[kind] += 1
        self._note()
        self.rounds_of[victim] = 0
        gone_s = self.rng.uniform(*GONE_S)
        if kind == "kill":
            part = self.rng.choice(PARTS)
            victim.signal(part, signal.SIGKILL)
            if part != "node":  # a script starts another node
                self._after(gone_s, partial(self._restart, victim))
        elif kind in ("death", "home"):
            self._lose(victim)
            if kind == "home":
                shutil.rmtree(victim.home)
                self._note(deleted=victim.name)
            self._after(gone_s, self._join)
        elif kind == "backup":
            copy = self._copy(victim, "backup")
            self._after(self.rng.uniform(*OLD_S), partial(self._bring_back, victim, copy, gone_s))
        else:
            self._twin(victim)
        return None

    def _note(self, **more: Any) -> None:
        """What struck, or (``more``) how it ended."""
        at_s = round(time.monotonic() - self.began, 1)
        self.happened.append({"at_s": at_s, "round": self.chronicle.top, "what": self.last, **more})
        progress(f"{at_s:5.1f} s, round {self.chronicle.top}: {self.last} {more or ''}")

    def _copy(self, peer: Peer, what: str) -> Path:
        copy = self.folder / f"{peer.name}-{what}-{sum(self.chronicle.faults.values())}"
        _steadily(lambda: twins.copy_home(peer, copy), copy)
        return copy

    def _kill(self, peer: Peer) -> None:
        peer.signal("both", signal.SIGKILL)
        peer.process.wait(10)

    def _lose(self, peer: Peer) -> None:
        self._kill(peer)
        self.swarm.all.remove(peer)
        self.rounds_of.pop(peer, None)

    def _join(self) -> None:
        name, self._made = f"p{self._made}", self._made + 1
        self._add(Peer(name, self.folder / name, self.swarm.invite, 0, script=SCRIPT))

    def _bring_back(self, peer: Peer, copy: Path, gone_s: float) -> None:
        self._kill(peer)
        shutil.rmtree(peer.home)
        copy.rename(peer.home)
        self._note(restored=peer.name)
        self._after(gone_s, partial(self._restart, peer))

    # ---- twins
    def _twin(self, victim: Peer) -> None:
        home = self._copy(victim, "twin")
        twin = Peer(home.name, home, victim.run, 0, script=SCRIPT)
        self.aside.append(twin)
        self._after(1.0, partial(self._look, victim, twin, time.monotonic(), False))

    def _look(self, victim: Peer, twin: Peer, began: float, up: bool) -> None:
        now = time.monotonic()
        if not up and twins.ask(twin, "status") is not None:
            began, up = now, True  # until then it has said nothing to anybody
        found = [twins.trouble(peer) for peer in (victim, twin)] == ["E308", "E308"]
        if not found and now - began < (FOUND_S if up else READY_S):
            return self._after(0.5, partial(self._look, victim, twin, began, up))
        self.found_s.append(round(now - began, 1) if found else None)
        self._note(found_s=self.found_s[-1])
        self._lose(victim)
        self._kill(twin)
        self.double_votes += len(twins.double_votes(victim.home, twin.home))
        self._after(0.0, self._join)
        return None

    def end(self) -> None:
        """End everybody."""
        for twin in self.aside:
            if twin.process.poll() is None:
                self._kill(twin)
        super().end()


def _steadily(copy: Callable[[], None], to: Path) -> None:
    """A file may go while a living home is copied: again, then."""
    for last in (False, False, True):
        try:
            return copy()
        except (OSError, shutil.Error):
            shutil.rmtree(to, ignore_errors=True)
            if last:
                raise
    return None


def run(options: argparse.Namespace, folder: Path) -> int:
    """The chaos, and its figures."""
    progress(f"{options.peers} peers, {options.minutes:g} minutes of chaos (seed {options.seed})")
    chaos = Chaos(folder, options.peers, options.seed, options.silence)
    try:
        began = time.monotonic()
        chaos.play(options.minutes * 60)
        seconds = time.monotonic() - began
    finally:
        chaos.end()
    differing = sorted(r for r, digests in chaos.chronicle.digests.items() if len(digests) > 1)
    emit(
        "chaos",
        vars(options),
        [{"seconds": round(seconds, 1)}],
        rounds=chaos.chronicle.top,
        faults=dict(sorted(chaos.chronicle.faults.items())),
        happened=chaos.happened,
        longest_silence_s=round(chaos.longest_s, 1),
        silences=chaos.silences,
        not_back=chaos.not_back,
        digests_equal=not differing,
        differing=differing[:20],
        twins_found_s=chaos.found_s,
        double_votes=chaos.double_votes,
    )
    kept = not (chaos.silences or chaos.not_back or differing or chaos.double_votes)
    return 0 if kept and None not in chaos.found_s else 1


def main() -> int:
    """Exit code: 0 all was kept, 1 not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of chaos (default 10)")
    parser.add_argument("--peers", type=int, default=5, help="at least 4 (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults' choice (default 0)")
    parser.add_argument(
        "--silence", type=float, default=15.0, help="seconds between two rounds (default 15)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the peers' files and logs")
    options = parser.parse_args()
    if options.minutes <= 0 or options.peers < 4:
        parser.error("--minutes is positive, --peers at least 4")
    folder = Path(tempfile.mkdtemp(prefix="atoll-chaos-"))
    try:
        return run(options, folder)
    except AssertionError as error:
        progress(f"cannot play: {error}")
        return 1
    finally:
        if options.keep:
            progress(f"files and logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
