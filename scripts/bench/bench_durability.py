#!/usr/bin/env python3
"""What it costs that nothing is said before it is on the medium: milliseconds of a decision, and of
a round of training among three nodes.

A decision: a member's own files force the result's bytes, then promise and vote (one sync), then
the entry; on --folder as it is, and as on a medium whose syncs take 10 ms at least (the call is
wrapped here). A round: three nodes with their own homes on --folder, scripts that train for
--train-s and contribute --elements numbers; a round lasts until all three were told that all were
counted. Each node's syncs are switched from round to round, in an order drawn anew for each block:
real, none (they return at once; no setting of the product), and, in quick rounds, slow (10 ms).
Quick rounds train for a tenth of a second: so that, as in any round that trains, the sync of the
entry before is over when a contribution is offered. Medians. The last line of stdout is one JSON
object.

round_ratio    median seconds of a round with syncs over those without, at --train-s of training
extra_ms       of a quick round: median with real (slow) syncs less the median without
full_ratio     1 + extra_ms / --train-s: the same for a round with training, from quick ones, whose
               times vary less

    scripts/bench/bench_durability.py --folder ~/somewhere-on-ext4
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from _bench import ROOT, emit, percentile, progress
from _synced_node import mapped, wrap

sys.path.append(str(ROOT / "tests"))

import numpy as np
import torch
from bad_input_kit import Member, new_home, new_run, one_round
from bench_home import entry_of

from atoll.collectives.group import Certified, Vote
from atoll.collectives.group import Member as Who
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.node.storage.journal import FileJournal
from atoll.node.storage.results import ResultFiles

NODE = Path(__file__).parent / "_synced_node.py"
MEMBERS, EVERY = 3, 10
QUICK_S = 0.1
WORDS = {"r": "real", "n": "none", "s": "slow"}


def decisions(folder: Path, count: int, elements: int) -> dict[str, Any]:
    """Milliseconds of each forced write of ``count`` rounds, without any training: median and 95th
    percentile.
    """
    results, journal = ResultFiles(folder / "results"), FileJournal(folder / "journal")
    config = tuple(Who(PeerId(f"12D3KooW{n:044d}"), 0) for n in range(MEMBERS))
    genesis = entry_of(0, bytes(32), config)
    journal.append(Certified(genesis, ()))
    journal.sync()
    base, took = genesis.hash(), dict[str, list[float]]()

    def timed(name: str, *acts: Callable[[], object]) -> None:
        began = time.perf_counter()
        for act in acts:
            act()
        took.setdefault(name, []).append(1e3 * (time.perf_counter() - began))

    for round_ in range(1, count + 1):
        entry, data = entry_of(round_, base, config), results.allocate(4 * elements)
        np.frombuffer(data, dtype=np.uint8)[:] = round_ % 256  # as received: every page is dirty
        began = time.perf_counter()
        timed("result", partial(results.keep, str(round_), round_, data, forced=True))
        timed(
            "promise_and_vote",
            partial(journal.promise, 0),
            partial(journal.accept, 0, entry),
            journal.sync,
        )
        votes = tuple(Vote(member, 0, bytes([n]) * 64) for n, member in enumerate(config[:2]))
        timed("entry", partial(journal.append, Certified(entry, votes)), journal.sync)
        took.setdefault("all", []).append(1e3 * (time.perf_counter() - began))
        results.forget(round_ - 1)
        base = entry.hash()
    journal.close()
    results.close()
    return {
        name: {"median": round(median(each), 3), "p95": round(percentile(each, 0.95), 3)}
        for name, each in took.items()
    }


def fill(value: float, out: torch.Tensor) -> None:
    """A contribution."""
    out.fill_(value)


class Swarm:
    """Three nodes and their scripts."""

    def __init__(self, folder: Path, elements: int) -> None:
        folder.mkdir()
        self.switch = folder / "syncs"
        self.switch.write_bytes(b"r")
        self.letter = mapped(self.switch)
        command = [sys.executable, str(NODE), str(self.switch)]
        layout = make_layout([("w", (elements,))])
        run = new_run(folder, every=EVERY)
        self.members = list[Member]()
        try:
            self.members.append(run.organiser(command=command, layout=layout))
            for name in ("b", "c"):
                self.members.append(
                    Member(new_home(folder / name), run.invite(), command=command, layout=layout)
                )
            one_round(*self.members)
        except BaseException:
            self.close()
            raise

    def round(self, how: str, train_s: float) -> dict[str, Any]:
        """One round with syncs so."""
        self.letter[0] = ord(how)
        began = time.monotonic()
        time.sleep(train_s)
        ready = time.monotonic()
        tickets = [
            member.swarm.contribute(samples=1, write=partial(fill, n))
            for n, member in enumerate(self.members)
        ]
        outcomes = [ticket.wait(60) for ticket in tickets]
        now = time.monotonic()
        return {
            "syncs": WORDS[how],
            "train_s": train_s,
            "seconds": now - began,
            "exchange_s": now - ready,
            "all": all(
                each.counted and len(each.contributors) == len(self.members) for each in outcomes
            ),
        }

    def close(self) -> None:
        """End scripts and nodes."""
        for member in self.members:
            with contextlib.suppress(Exception):
                member.swarm.close()


def rounds(swarm: Swarm, kinds: str, blocks: int, train_s: float, rng: random.Random) -> list[Any]:
    """Each kind once in a block, in an order drawn anew."""
    found = list[Any]()
    for _ in range(blocks):
        found += [swarm.round(how, train_s) for how in rng.sample(kinds, len(kinds))]
    return found


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    letter = "r"

    def how() -> str:
        return letter

    wrap(how)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as name:
        folder, decided = Path(name), dict[str, Any]()
        for letter, count in (("r", 200), ("s", 50), ("n", 200)):
            decided[WORDS[letter]] = decisions(folder / letter, count, options.elements)
            progress(f"{WORDS[letter]}: {decided[WORDS[letter]]} ms")
        letter = "r"
        swarm = Swarm(folder / "swarm", options.elements)
        try:
            rounds(swarm, "rn", 3, QUICK_S, rng)  # warm
            quick = rounds(swarm, "rns", options.quick, QUICK_S, rng)
            progress(f"{len(quick)} quick rounds")
            trained = rounds(swarm, "rn", options.blocks, options.train_s, rng)
        finally:
            swarm.close()

    def middle(samples: list[Any], kind: str, key: str) -> float:
        return median(each[key] for each in samples if each["syncs"] == kind and each["all"])

    base = middle(quick, "none", "seconds")
    real, slow = (middle(quick, kind, "seconds") for kind in ("real", "slow"))
    ratio = middle(trained, "real", "seconds") / middle(trained, "none", "seconds")
    emit(
        "bench_durability",
        {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
        },
        quick + trained,
        decision_ms=decided,
        round_ratio=round(ratio, 4),
        wanted=1.02,
        round_s={kind: round(middle(trained, kind, "seconds"), 4) for kind in ("real", "none")},
        quick_ms={
            "none": round(1e3 * base, 2),
            "real": round(1e3 * real, 2),
            "slow": round(1e3 * slow, 2),
        },
        extra_ms={"real": round(1e3 * (real - base), 2), "slow": round(1e3 * (slow - base), 2)},
        full_ratio={
            kind: round(1 + (each - base) / options.train_s, 4)
            for kind, each in (("real", real), ("slow", slow))
        },
        not_all=sum(not each["all"] for each in quick + trained),
    )
    return 0 if ratio <= 1.02 else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="where homes lie (default: for temporary files)"
    )
    parser.add_argument("--elements", type=int, default=1_000_000, help="of a contribution, fp32")
    parser.add_argument("--train-s", type=float, default=2.0, help="training before a contribution")
    parser.add_argument(
        "--blocks", type=int, default=12, help="of (real, none) rounds with training"
    )
    parser.add_argument("--quick", type=int, default=30, help="of quick (real, none, slow) rounds")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if parsed.folder is not None and not parsed.folder.is_dir():
        parser.error(f"there is no folder {parsed.folder}")
    return parsed


if __name__ == "__main__":
    sys.exit(run(parse()))
