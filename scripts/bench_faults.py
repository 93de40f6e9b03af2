#!/usr/bin/env python3
"""What a fault in the middle of a round costs the survivors, and whether what they commit is right.

Real peers, each a script with its node, train together on hosts of a network laboratory (on loopback, where none can be built and the fault
is one of processes). In every trial a fault strikes one of them at a phase of a round: as soon as the victim's own node says that it is in
the phase. Which peer that is, its part in the round's plan decides. A trial whose victim was past the phase by the clock when it was struck
is a miss: it is repeated, and counted apart.

trials               trials in which the fault met its phase; `misses` are the others
exact                ... after which every survivor's anchor was, bit for bit, the one that follows from the contributors they name
bit_equal            ... survivors at the same round had the same bits
contributors_right   ... all named the same contributors, with their weights
committed            ... every survivor committed
survivors_counted    ... with every survivor's contribution in it
next_round_ok        ... the survivors' next round (with the victim, where the fault does not last) and one of all, after its return, were right
over_fault_free_s_max  by how much the slowest survivor took longer than in a round without faults (the median of some)
since_fault_s_max    from the fault to the slowest survivor's outcome
bulk_s               of a round without faults: from the plan to the last byte, at the slowest node
allowed_s            one more bulk time, and half a second for kill and reset, four seconds where silence has to be noticed
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from _bench import CANNOT, emit, progress
from _kits import KINDS, NETWORK, PARTS, PHASES, TARGETS, Armed, Fault, Lab, Ledger, Part, Peer, Peers, Watch, fault, missing

LONG_NAMES = {"reduce-scatter": "reduce", "all-gather": "gather", "decision": "decide"}
NOTICED = ("stop", "blackhole", "slow")  # found out by silence
RIGHT = ("exact", "bit_equal", "contributors_right", "committed", "survivors_counted", "next_round_ok")
FAULT_FREE = 5
TRIES = 4  # times a trial is repeated when its fault comes too late


class Bench:
    """A swarm, what its anchor must be, and how long it takes undisturbed."""

    def __init__(self, options: argparse.Namespace, swarm: Peers) -> None:
        self.options, self.swarm = options, swarm
        self.ledger = Ledger(swarm)
        self.seed = 0
        self.typical_s = self.bulk_s = 0.0
        self.slow_mbit = 1.0

    def next_seed(self) -> int:
        """Seeds of one trial; other contributions in every one."""
        self.seed += 10_000
        return self.seed

    def warm_up(self) -> None:
        """Until everybody takes part; then the fault-free time."""
        self.ledger.common_round(self.next_seed())
        bulk: list[float] = []
        with Watch(self.swarm.all, lambda seen: bulk.append(seen.event["elapsed_s"]) if seen.event.get("phase") == "decide" else None):
            times: list[float] = []
            for _ in range(FAULT_FREE):
                seed, before = self.next_seed(), len(bulk)
                outcomes, elapsed = self.round(seed)
                if self.ledger.take(seed, outcomes).counted == len(self.swarm.all):
                    times.append(elapsed)
                    bulk[before:] = [max(bulk[before:], default=0.0)]
        self.typical_s, self.bulk_s = statistics.median(times), statistics.median(bulk)
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
            self.swarm.contribute(seed)
            outcomes = armed.outcomes()
            if armed.blow is None:
                self.ledger.take(seed, list(outcomes.values()))
                return None
            early = outcomes.pop(armed.blow.victim, None)  # it was struck after it had told
            found = self.ledger.take(seed, list(outcomes.values()))
            end = max(outcome["at"] for outcome in outcomes.values())
            result: dict[str, Any] = {
                "fault": str(what), "victim": armed.blow.victim.name, "convener": armed.blow.convener == armed.blow.victim.peer, "hit": armed.hit,
                "committed": found.committed, "exact": found.exact, "bit_equal": found.bit_equal, "contributors_right": found.contributors_right,
                "survivors_counted": all(peer.peer in outcome["contributors"] for outcome in outcomes.values() for peer in outcomes),
                "counted": found.counted, "over_fault_free_s": round(end - began - self.typical_s, 4),
                "since_fault_s": round(end - armed.blow.monotonic, 4),
            }  # fmt: skip
            result["next_round_ok"] = self._afterwards(armed, early is not None, result)
        return result

    def _afterwards(self, armed: Armed, told: bool, found: dict[str, Any]) -> bool:
        """Whether the next rounds work. Notes in ``found`` how long the victim takes from when it may come back: to tell the outcome that it
        owes ("awake_s"), and until a round counts everybody again ("back_s")."""
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
        except AssertionError as error:
            progress(f"the next round: {error}")
            return False


def run(options: argparse.Namespace, bench: Bench) -> None:
    """All trials, and the figures."""
    bench.warm_up()
    in_turn = options.fault in ("kill", "stop")  # the others strike a whole peer
    parts = [options.part] if options.part != "turn" else ["node", "script"] if in_turn else ["both"]
    results: list[dict[str, Any]] = []
    hits, attempts = 0, 0
    while hits < options.reps and attempts < options.reps * TRIES:
        part = cast("Part", parts[attempts % len(parts)])
        attempts += 1
        what = fault(options.fault).of(options.target, part).during(options.phase)
        try:
            found = bench.trial(what)
        except AssertionError as error:  # a peer does not answer: this is no longer a swarm to measure with
            progress(f"trial {attempts}: {what}: {error}")
            results.append({"fault": str(what), "hit": True, "error": str(error)[:2000], **dict.fromkeys(RIGHT, False)})
            break
        if found is None:
            progress(f"trial {attempts}: nobody could be struck")
            continue
        results.append(found)
        hits += found["hit"]
        shown = " ".join(f"{key}={value}" for key, value in found.items() if key != "fault")
        progress(f"trial {attempts}: {found['fault']}: {shown}")
    counted = [found for found in results if found["hit"]]
    figures: dict[str, Any] = {key: sum(found[key] for found in counted) for key in RIGHT}
    for key in ("over_fault_free_s", "since_fault_s", "back_s"):
        figures[f"{key}_max"] = max((found.get(key, 0.0) for found in counted), default=None)
    allowed = bench.bulk_s + (4.0 if options.fault in NOTICED else 0.5)
    emit(
        "bench_faults", {**vars(options), "lab": options.lab}, results, trials=len(counted), misses=len(results) - len(counted), **figures,
        fault_free_s=round(bench.typical_s, 4), bulk_s=round(bench.bulk_s, 4), allowed_s=round(allowed, 4),
        within=sum(found.get("over_fault_free_s", float("inf")) <= allowed for found in counted), all_right=all(found["exact"] for found in results),
    )  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=[kind for kind in KINDS if kind != "lie"], default="kill")
    parser.add_argument("--phase", choices=[*PHASES, *LONG_NAMES], default="reduce")
    parser.add_argument("--target", choices=TARGETS, default="owner", help="the victim's part in the plan (default owner)")
    parser.add_argument(
        "--part", choices=[*PARTS, "turn"], default="turn", help="which of a peer's processes, for kill and stop (default: in turn)"
    )
    parser.add_argument("--reps", type=int, default=5, help="trials that meet their phase (default 5)")
    parser.add_argument("--elements", type=int, default=25_000_000, help="length of the vector (default 25,000,000)")
    parser.add_argument("--peers", type=int, default=4, help="default 4")
    parser.add_argument("--mbit", type=float, default=None, help="rate of each peer's host; default: no limit")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="round-trip time between hosts (default 0)")
    options = parser.parse_args()
    options.phase = LONG_NAMES.get(options.phase, options.phase)
    if options.reps < 1 or options.elements < 1 or options.peers < 3:
        parser.error("--reps and --elements are at least 1, --peers at least 3")
    return options


def main() -> int:
    """Exit code: 0 measured, 1 not, 64 cannot be done here."""
    options = parse()
    reason = missing()
    options.lab = not reason
    if reason and (options.fault in NETWORK or options.mbit or options.rtt_ms):
        progress(f"cannot do --fault {options.fault} without a network laboratory: {reason}")
        return CANNOT
    folder = Path(tempfile.mkdtemp(prefix="atoll-faults-"))
    try:
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(options.peers, mbit=options.mbit, rtt_ms=options.rtt_ms)) if options.lab else None
            progress(f"starting {options.peers} peers {'on hosts of their own' if lab else 'on loopback'}")
            swarm = stack.enter_context(Peers(folder, options.peers, options.elements, hosts=lab.hosts if lab else ()))
            run(options, Bench(options, swarm))
    except AssertionError as error:
        progress(f"cannot measure: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
