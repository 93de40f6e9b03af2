#!/usr/bin/env python3
"""What a fault in the middle of a round costs the survivors, and whether what they commit is right.

Real peers, each a script with its node, train together on hosts of a network laboratory (on
loopback, where none can be built and the fault is one of processes). In every trial a fault strikes
one of them at a phase of a round: as soon as the victim's own node says that it is in the phase.
Which peer that is, its part in the round's plan decides. A trial whose victim was past the phase by
the clock when it was struck is a miss: it is repeated, and counted apart. The first fault of a cell
strikes as the phase begins, the others anywhere in it.

With --all every cell of the table {fault} × {phase} × {target} is run in one life of the swarm:
`table` has these figures for each, and `failing` the reasons, the seed and the logs of those that
did not pass.

trials               trials in which the fault met its phase; `misses` are the others
exact                ... after which every survivor's anchor was, bit for bit, the one that follows
                     from the contributors they name
bit_equal            ... survivors at the same round had the same bits
contributors_right   ... all named the same contributors, with their weights
committed            ... every survivor committed
survivors_counted    ... with every survivor's contribution in it (`planned`: how many the plan
                     counted when it was struck)
next_round_ok        ... the survivors' next round (with the victim, where the fault does not last)
                     and one of all, after its return, were right
kept                 ... a slow peer was still a member when the round was over, in it or left out
                     of it
over_fault_free_s_max  by how much the slowest survivor took longer than in a round without faults
                       (the median of some)
since_fault_s_max    from the fault to the slowest survivor's outcome
extra_s_max          the smaller of the two in each trial, which is held against what is allowed:
                     before the fault, a round may be slow, too
bulk_s               of a round without faults: from the plan to the last byte, at the slowest node
allowed_s            one more bulk time, and half a second for kill and reset, four seconds where
                     silence has to be noticed
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from _bench import CANNOT, emit, progress
from _fault_table import OWNERS, RIGHT, TRIES, Cell, Table, Trial, Tried, cells, summary
from _kits import (
    KINDS,
    NETWORK,
    PARTS,
    PHASES,
    TARGETS,
    Armed,
    Fault,
    Lab,
    LabError,
    Ledger,
    Part,
    Peer,
    Peers,
    Phase,
    Seen,
    Watch,
    fault,
    missing,
)

from atoll.collectives.errors import AtollError

LONG_NAMES = {"reduce-scatter": "reduce", "all-gather": "gather", "decision": "decide"}
NOTICED = ("stop", "blackhole", "slow")  # found out by silence
FAULT_FREE = 5
BEGAN = time.monotonic()
BROKEN = (
    AssertionError,
    AtollError,
    LabError,
)  # a peer does not answer: this is no longer a swarm to measure with


class Bench:
    """A swarm, what its anchor must be, and how long it takes undisturbed."""

    def __init__(self, swarm: Peers) -> None:
        self.swarm = swarm
        self.ledger = Ledger(swarm)
        self.seed = 0
        self.typical_s = self.bulk_s = 0.0
        self.lasts_s: dict[Phase, float] = {}
        self.slow_mbit = 1.0

    def next_seed(self) -> int:
        """Seeds of one trial; other contributions in every one."""
        self.seed += 10_000
        return self.seed

    def warm_up(self) -> None:
        """Until everybody takes part; then the fault-free time."""
        self.ledger.common_round(self.next_seed())
        bulk: list[float] = []
        reduced: list[float] = []
        seen: list[Seen] = []
        with Watch(self.swarm.all, seen.append):
            times: list[float] = []
            for _ in range(FAULT_FREE):
                seed = self.next_seed()
                seen.clear()
                outcomes, elapsed = self.round(seed)
                if self.ledger.take(seed, outcomes).counted == len(self.swarm.all):
                    times.append(elapsed)
                    begins = {
                        p: [s.event["elapsed_s"] for s in list(seen) if s.event.get("phase") == p]
                        for p in PHASES
                    }
                    bulk.append(max(begins["decide"], default=0.0))
                    reduced.append(min(begins["gather"], default=0.0))
        self.typical_s, self.bulk_s = statistics.median(times), statistics.median(bulk)
        self.lasts_s = {
            "reduce": statistics.median(reduced),
            "gather": self.bulk_s - statistics.median(reduced),
            "decide": 0.0,
        }
        moved = 2 * (len(self.swarm.all) - 1) / len(self.swarm.all) * 1.016 * self.swarm.numel
        self.slow_mbit = max(0.1, 0.01 * 8e-6 * moved / self.bulk_s)
        progress(
            f"without faults: {self.typical_s:.3f} s a round, bulk {self.bulk_s:.3f} s; 1 % of a peer's rate is {self.slow_mbit:.2f} Mbit/s"
        )

    def round(self, seed: int, who: list[Peer] | None = None) -> tuple[list[dict[str, Any]], float]:
        """Outcomes of a round, and the seconds to the last of them."""
        began = time.monotonic()
        self.swarm.contribute(seed, who=who)
        outcomes = [peer.expect("outcome", 90) for peer in who or self.swarm.all]
        return outcomes, max(outcome["at"] for outcome in outcomes) - began

    def trial(self, what: Fault) -> dict[str, Any] | None:
        """One fault, and how it was borne; None when it did not strike at all."""
        seed = self.next_seed()
        with Armed(self.swarm, what, slow_mbit=self.slow_mbit) as armed:
            began = time.monotonic()
            self.swarm.contribute(seed, frozen=False)
            outcomes = armed.outcomes()
            if armed.blow is None:
                self.ledger.take(seed, list(outcomes.values()))
                return None
            early = outcomes.pop(armed.blow.victim, None)  # it was struck after it had told
            found = self.ledger.take(seed, list(outcomes.values()))
            end = max(outcome["at"] for outcome in outcomes.values())
            result: dict[str, Any] = {
                "fault": str(what),
                "victim": armed.blow.victim.name,
                "convener": armed.blow.convener == armed.blow.victim.peer,
                "hit": armed.hit,
                "committed": found.committed,
                "exact": found.exact,
                "bit_equal": found.bit_equal,
                "contributors_right": found.contributors_right,
                "survivors_counted": all(
                    peer.peer in outcome["contributors"]
                    for outcome in outcomes.values()
                    for peer in outcomes
                ),
                "planned": armed.blow.planned,
                "counted": found.counted,
                "over_fault_free_s": round(end - began - self.typical_s, 4),
                "since_fault_s": round(end - armed.blow.monotonic, 4),
                "after_s": what.after_s,
            }
            result["extra_s"] = min(result["over_fault_free_s"], result["since_fault_s"])
            result["kept"] = what.kind != "slow" or not armed.expelled()
            result["next_round_ok"] = self._afterwards(armed, early is not None, result)
        return result

    def _afterwards(self, armed: Armed, told: bool, found: dict[str, Any]) -> bool:
        """Whether the next rounds work. Notes in ``found`` how long the victim takes from when it
        may come back: to tell the outcome that it owes ("awake_s"), and until a round counts
        everybody again ("back_s")."""
        others = [peer for peer in self.swarm.all if peer is not armed.victim]
        try:
            if armed.fault.kind not in ("reset", "corrupt"):
                seed = self.next_seed()
                outcomes, _ = self.round(seed, others)
                without = self.ledger.take(seed, outcomes)
                if not (without.committed and without.honest):
                    return False
            began = time.monotonic()
            if not told:
                armed.revive()
            else:
                armed.heal()
            found["awake_s"] = round(time.monotonic() - began, 3)
            self.ledger.common_round(self.next_seed())
            found["back_s"] = round(time.monotonic() - began, 3)
            return True
        except BROKEN as error:
            progress(f"the next round: {error}")
            return False


def attempt(options: argparse.Namespace, bench: Bench, cell: Cell, tried: Tried) -> Trial:
    """One trial of a cell. The first, and one after a miss, strike as the phase begins, the others
    anywhere in it.

    Raises one of BROKEN when the swarm is of no more use.
    """
    in_turn: Sequence[str] = (
        ("node", "script") if cell.kind in ("kill", "stop") else ("both",)
    )  # the others strike a whole peer
    parts = in_turn if options.part == "turn" else (options.part,)
    at_once = not tried.trials or not tried.trials[-1]["hit"]
    after_s = (
        0.0
        if at_once
        else random.Random(f"{cell} {len(tried.trials)}").uniform(
            0.0, 0.6 * bench.lasts_s[cell.phase]
        )
    )
    part = cast("Part", parts[tried.hits % len(parts)])
    what = fault(cell.kind).of(cell.target, part).during(cell.phase, after_s=round(after_s, 4))
    found = next(filter(None, (bench.trial(what) for _ in range(TRIES))), None)
    assert found is not None, f"nobody could be struck: {what}"
    shown = " ".join(f"{key}={value}" for key, value in found.items() if key != "fault")
    progress(f"trial {len(tried.trials) + 1}: {found['fault']}: {shown}")
    allowed_s = bench.bulk_s + (4.0 if cell.kind in NOTICED else 0.5)
    return found | {
        "fault_free_s": round(bench.typical_s, 4),
        "bulk_s": round(bench.bulk_s, 4),
        "allowed_s": round(allowed_s, 4),
    }


def late(options: argparse.Namespace) -> bool:
    """Whether nothing new is to be begun."""
    return options.seconds is not None and time.monotonic() - BEGAN > options.seconds


def one(options: argparse.Namespace, bench: Bench) -> None:
    """All trials of one cell, and the figures."""
    bench.warm_up()
    cell, tried = Cell(options.fault, options.phase, options.target, options.reps), Tried()
    try:
        while not tried.over(cell) and not late(options):
            tried.trials.append(attempt(options, bench, cell, tried))
            assert tried.trials[-1]["next_round_ok"], "the rounds after it did not work"
    except BROKEN as error:
        progress(f"{cell}: {error}")
        costs = {"fault_free_s": bench.typical_s, "bulk_s": bench.bulk_s, "allowed_s": 0.0}
        tried.trials.append(
            {
                "fault": str(cell),
                "hit": True,
                "error": str(error)[:2000],
                **costs,
                **dict.fromkeys(RIGHT, False),
            }
        )
    settings = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
    emit("bench_faults", settings, tried.trials, **summary(tried.trials, cell))


def table(options: argparse.Namespace) -> bool:
    """All cells that are asked for, as far as one life of a swarm takes them, and further with
    another; whether all passed.
    """
    settings = {
        key: value
        for key, value in vars(options).items()
        if key in ("elements", "peers", "mbit", "rtt_ms", "part", "lab")
    }
    found = Table(
        cells(options.fault, options.phase, options.target, options.reps, options.owner_reps),
        settings,
        options.journal,
        options.logs,
    )
    lost = 0  # swarms that never came to a round
    while found.left and lost < TRIES and not late(options):
        with started(options) as bench:
            try:
                bench.warm_up()
            except BROKEN as error:
                progress(f"cannot measure: {error}")
                lost += 1
                continue
            fill(options, bench, found)
    figures = found.figures()
    emit(
        "bench_faults",
        {**settings, "reps": options.reps, "owner_reps": options.owner_reps},
        [],
        **figures,
    )
    return figures["passed"] == figures["cells"]


def fill(options: argparse.Namespace, bench: Bench, found: Table) -> None:
    """Trials of all cells in turn until none is left, the time is over, or the swarm is of no more
    use.
    """
    broken = ""
    while found.left and not broken and not late(options):
        cell = min(found.left, key=lambda left: found.tried(left).hits)
        try:
            trial = attempt(options, bench, cell, found.tried(cell))
            found.add(cell, trial)
            broken = "" if trial["next_round_ok"] else "the rounds after it did not work"
        except BROKEN as error:
            progress(f"{cell}: {error}")
            broken = str(error) or repr(error)
        if broken or found.tried(cell).over(cell):
            found.end(cell, broken, bench.swarm.all, bench.seed)


@contextmanager
def started(options: argparse.Namespace) -> Generator[Bench]:
    """A swarm on hosts of a laboratory, or on loopback; nothing is left of it."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="atoll-faults-", ignore_cleanup_errors=True)
            )
        )
        lab = (
            stack.enter_context(Lab(options.peers, mbit=options.mbit, rtt_ms=options.rtt_ms))
            if options.lab
            else None
        )
        progress(
            f"starting {options.peers} peers {'on hosts of their own' if lab else 'on loopback'}"
        )
        yield Bench(
            stack.enter_context(
                Peers(folder, options.peers, options.elements, hosts=lab.hosts if lab else ())
            )
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="a table of all cells, or of those with this --fault, --phase, --target",
    )
    parser.add_argument(
        "--fault", choices=[kind for kind in KINDS if kind != "lie"], help="default kill"
    )
    parser.add_argument("--phase", choices=[*PHASES, *LONG_NAMES], help="default reduce")
    parser.add_argument(
        "--target", choices=TARGETS, help="the victim's part in the plan (default owner)"
    )
    parser.add_argument(
        "--part",
        choices=[*PARTS, "turn"],
        default="turn",
        help="which of a peer's processes, for kill and stop (default: in turn)",
    )
    parser.add_argument(
        "--reps", type=int, default=5, help="trials that meet their phase (default 5)"
    )
    parser.add_argument(
        "--owner-reps",
        type=int,
        default=OWNERS,
        help=f"with --all: those that kill or stop an owner (default {OWNERS})",
    )
    parser.add_argument(
        "--elements", type=int, default=25_000_000, help="length of the vector (default 25,000,000)"
    )
    parser.add_argument("--peers", type=int, default=4, help="default 4")
    parser.add_argument(
        "--mbit", type=float, default=None, help="rate of each peer's host; default: no limit"
    )
    parser.add_argument(
        "--rtt-ms", type=float, default=0.0, help="round-trip time between hosts (default 0)"
    )
    parser.add_argument(
        "--journal",
        type=Path,
        help="with --all: a file for the trials; those that are in it already are not run again",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="begin no trial later than this; with --all and a --journal, the next call goes on",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="with --all: a folder for the logs of failing cells (default: a new one in /tmp)",
    )
    options = parser.parse_args()
    options.phase = LONG_NAMES.get(options.phase, options.phase)
    if not options.all:
        options.fault, options.phase, options.target = (
            options.fault or "kill",
            options.phase or "reduce",
            options.target or "owner",
        )
    if min(options.reps, options.owner_reps, options.elements) < 1 or options.peers < 3:
        parser.error("--reps, --owner-reps and --elements are at least 1, --peers at least 3")
    return options


def main() -> int:
    """Exit code: 0 measured (with --all: and all cells passed), 1 not, 64 cannot be done here."""
    options = parse()
    reason = missing()
    options.lab = not reason
    if reason and (options.all or options.fault in NETWORK or options.mbit or options.rtt_ms):
        progress(
            f"cannot do {'--all' if options.all else f'--fault {options.fault}'} without a network laboratory: {reason}"
        )
        return CANNOT
    if options.all:
        return 0 if table(options) else 1
    try:
        with started(options) as bench:
            one(options, bench)
    except BROKEN as error:
        progress(f"cannot measure: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
