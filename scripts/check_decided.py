#!/usr/bin/env python3
"""Whether a change of the code has changed what is decided: seeded swarms with faults are played,
and each decided entry is compared with the record in tests/records/decided.txt.

    scripts/check_decided.py                       # 300 seeds of each of seven kinds of swarms
    scripts/check_decided.py --seeds 30            # the first 30 of each kind
    scripts/check_decided.py --kinds ring,lying    # two kinds of swarms

The record has short hashes of every decided entry: of its contributors with their weights, of the
results and the model after it, of the next configuration, and of what each script was told of its
contribution. The first entry that differs is printed, with what was decided now, and with the
command that plays its seed. --show KIND:SEED prints all that a seed decides, one line an entry: the
output of two versions of the code can be compared line by line.

--renew WHY plays all seeds (with --kinds: of these kinds; others stay as they are recorded) and
writes what they decide now into the record, with the reason. Each seed that has changed needs a
counter that was above 0 when the seed was recorded and that shows that the seed enters what was
changed:

    scripts/check_decided.py --renew "branches are gone" --entered "branch begun"

--only plays these seeds alone, and --only-entered, of the recorded ones, those that entered one of
the counters --entered: for a change that nothing else can meet, such as one of what follows a disk's
refusal. The other seeds stay as they are recorded, and the next whole comparison tells whether that
was true.

torch is told to use no instructions beyond those that every x86-64 has (ATEN_CPU_CAPABILITY), and one
thread: some seeds draw other numbers with AVX2. The last line of stdout is one JSON object. The exit
status is 1 where something differs or cannot be renewed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parent / "bench"))  # helpers of the measurements
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # the harness

from _bench import CANNOT, ROOT, commit, emit, progress
from _decided import (
    KINDS,
    DecidedRecord,
    Difference,
    Key,
    PlayedSeed,
    RecordError,
    by_kind,
    compare_logs,
    read_record,
    renew,
    write_record,
)

if TYPE_CHECKING:
    from kits.rounds.decided import DecidedEntry
    from kits.rounds.swarm import Options

RECORD = ROOT / "tests" / "records" / "decided.txt"
SEEDS = 300  # of each kind, when all are recorded
CAPABILITY = "default"


# ---- for people
def describe(played: PlayedSeed, difference: Difference | None, replay: str) -> str:
    """For people: which seed, which entry, what was recorded, what came, and how to play it."""
    lines = [f"kind {played.kind}, seed {played.seed}: what is decided has changed"]
    if played.problem:
        lines = [f"kind {played.kind}, seed {played.seed} fails: {played.problem}"]
    if difference is not None:
        log = f" of fragment {difference.log}" if len(played.logs) > 1 else ""
        if difference.entry is None:
            lines.append(f"  all entries{log} are equal; what became of contributions is not")
        elif not difference.now:
            lines.append(f"  entry {difference.entry}{log} was decided, and is not any more")
        elif not difference.recorded:
            lines.append(f"  entry {difference.entry}{log} is new")
        else:
            differs = ", ".join(difference.aspects)
            lines.append(
                f"  entry {difference.entry}{log} is the first that differs, in: {differs}"
            )
        lines.append(f"  recorded: {difference.recorded or 'nothing'}")
        lines.append(f"  now:      {difference.now or 'nothing'}")
        lines += [f"    {text}" for text in _values(played, difference)]
    show = f"scripts/check_decided.py --show {played.kind}:{played.seed}"
    lines += ["  to play it:", f"    {replay}"]
    lines += ["  to compare all that it decides with another version's output:", f"    {show}"]
    return "\n".join(lines)


def _values(played: PlayedSeed, difference: Difference) -> list[str]:
    """What was decided now, of the aspects that differ."""
    if difference.log >= len(played.values):
        return []
    log = played.values[difference.log]
    if difference.entry is None or difference.entry >= len(log.entries):
        return []
    found = as_words(log.entries[difference.entry])
    return [f"{name}: {text}" for name, text in found.items() if name in difference.aspects]


def as_words(entry: DecidedEntry) -> dict[str, str]:
    """An entry's values, by aspect."""
    from kits.rounds.decided import ASPECTS

    def name(member: Any) -> str:
        return f"p{member[0]}/{member[1]}"

    *parts, anchor = entry.results
    results = [f"p{owner} [{first}, {stop}) {value.hex()}" for owner, first, stop, value in parts]
    aspects = (
        [f"{name(who)} weight {weight} units {units}" for who, weight, units in entry.contributors],
        [*results, f"anchor {anchor.hex()}"],
        [name(who) for who in entry.next_config],
        [f"p{who} life {life} {status} {units}" for who, life, status, units in entry.statuses],
    )
    return {name: "; ".join(texts) for name, texts in zip(ASPECTS, aspects, strict=True)}


# ---- playing
def pin() -> None:
    """Before torch computes anything, for this process and its children: the same bits on every
    x86-64.
    """
    os.environ["ATEN_CPU_CAPABILITY"] = CAPABILITY
    os.environ["OMP_NUM_THREADS"] = "1"


def settle_down() -> None:
    """Before the first seed of a process. Raises RuntimeError unless torch is pinned."""
    import torch
    from simulate_rounds import settle_down as settle

    settle()
    found = torch.backends.cpu.get_cpu_capability()
    if found.lower() != CAPABILITY or torch.get_num_threads() != 1:
        raise RuntimeError(
            f"torch computes with {found} in {torch.get_num_threads()} threads, not with "
            f"{CAPABILITY} in one: what it decides cannot be compared"
        )


def options_of(kind: str) -> Options:
    """As scripts/simulate_rounds.py has them."""
    import simulate_rounds

    arguments = simulate_rounds.parse(list(KINDS[kind]))
    return simulate_rounds.options_of(arguments, arguments.kinds)


def replay_of(kind: str, seed: int) -> str:
    """The command that plays a seed."""
    import simulate_rounds

    command = simulate_rounds.again(simulate_rounds.parse(list(KINDS[kind])), seed)
    return f"ATEN_CPU_CAPABILITY={CAPABILITY} {command}"


def play(task: Key) -> PlayedSeed:
    """One seed, in a worker process."""
    from kits.rounds.decided import play_decided

    kind, seed = task
    try:
        verdict, logs, counters = play_decided(seed, options_of(kind))
    except Exception as error:  # a defect that is no violated predicate is one all the same
        return PlayedSeed(kind, seed, f"{type(error).__name__}: {error}", (), ())
    above = tuple(name for name, times in counters.items() if times)
    hashes = tuple(log.hashes() for log in logs)
    return PlayedSeed(kind, seed, verdict.problem, hashes, above, logs)


def plays(tasks: Sequence[Key], jobs: int) -> Iterator[PlayedSeed]:
    """All of them, in order."""
    if jobs <= 1:
        settle_down()
        yield from map(play, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, settle_down) as pool:
        yield from pool.imap(play, tasks, chunksize=2)


# ---- the command
def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, help=f"the first so many of each kind (default: all, {SEEDS})"
    )
    parser.add_argument(
        "--kinds", default=",".join(KINDS), metavar="NAME,...", help=f"of {', '.join(KINDS)}"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--renew", metavar="WHY", help="write what is decided now into the record")
    parser.add_argument(
        "--entered",
        action="append",
        default=[],
        metavar="COUNTER",
        help="with --renew: a counter that shows that a seed enters what was changed; may be repeated",
    )
    parser.add_argument(
        "--only-entered",
        action="store_true",
        help="play the recorded seeds alone that entered one of these counters",
    )
    parser.add_argument("--only", metavar="KIND:SEED,...", help="play these seeds alone")
    parser.add_argument("--show", metavar="KIND:SEED", help="print what this seed decides")
    parser.add_argument("--record", type=Path, default=RECORD, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.seeds = SEEDS if arguments.seeds is None else arguments.seeds
    arguments.kinds = arguments.kinds.split(",")
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"no kind {min(unknown)!r}; there are: {', '.join(KINDS)}")
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs are at least 1")
    for option, value in (("--show", arguments.show), ("--only", arguments.only)):
        for each in value.split(",") if value is not None else ():
            kind, _, seed = each.partition(":")
            if kind not in KINDS or not seed.isdecimal():
                parser.error(f"{option} takes KIND:SEED, such as default:17")
    if arguments.entered and arguments.renew is None and not arguments.only_entered:
        parser.error("--entered is for --renew and --only-entered")
    if arguments.only_entered and not arguments.entered:
        parser.error("--only-entered needs --entered")
    return arguments


def show(kind: str, seed: int) -> int:
    """--show: one line for each aspect of each entry."""
    settle_down()
    played = play((kind, seed))
    for number, log in enumerate(played.values):
        for at, entry in enumerate(log.entries):
            for name, text in as_words(entry).items():
                print(f"log {number}, entry {at}, {name}: {text}")
        for who, life, weight, units, counted, told in log.fates:
            at = "no entry" if counted is None else f"entry {counted}"
            print(
                f"log {number}, contribution of p{who} life {life}, weight {weight}, units {units}: "
                f"in {at}{''.join(f', {each}' for each in told)}"
            )
    if played.problem:
        print(f"the seed fails: {played.problem}")
    return 1 if played.problem else 0


def compare(record: DecidedRecord, tasks: Sequence[Key], jobs: int) -> dict[str, Any]:
    """Play all, and print the first difference at once. Returns all that was played, the keys of
    seeds that differ and of those that are not recorded, and the first that differs.
    """
    began = shown = time.perf_counter()
    played, different, unknown = list[PlayedSeed](), list[Key](), list[Key]()
    first: dict[str, Any] | None = None
    for each in plays(tasks, jobs):
        key = (each.kind, each.seed)
        known = record.seeds.get(key)
        difference = compare_logs(known.logs, each.logs) if known and not each.problem else None
        if known is None and not each.problem:
            unknown.append(key)
        elif difference is not None or each.problem:
            different.append(key)
        if first is None and different:
            text = describe(each, difference, replay_of(*key))
            entry = difference.entry if difference is not None else None
            first = {"kind": each.kind, "seed": each.seed, "entry": entry, "text": text}
            print(text, flush=True)
        played.append(replace(each, values=()))
        if time.perf_counter() - shown > 10:
            shown = time.perf_counter()
            progress(
                f"{len(played)} of {len(tasks)} seeds, {len(different)} differ, "
                f"{len(unknown)} are not recorded, {shown - began:.0f} s"
            )
    return {"played": played, "different": different, "unknown": unknown, "first": first}


def renew_file(
    path: Path,
    record: DecidedRecord,
    played: Sequence[PlayedSeed],
    tasks: Sequence[Key],
    arguments: argparse.Namespace,
) -> tuple[bool, str]:
    """--renew: whether the file was written, and why it was refused, if it was."""
    try:
        fresh = renew(
            record,
            played,
            why=arguments.renew,
            entered=arguments.entered,
            date=datetime.now(UTC).date().isoformat(),
            tree=commit(),
            only=tasks if arguments.only or arguments.only_entered else None,
        )
    except RecordError as error:
        print(f"not renewed: {error}")
        return False, str(error)
    if fresh is None:
        print("nothing has changed: the record stays as it is")
        return False, ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_record(fresh), encoding="utf-8")
    print(f"renewed: {msgspec.json.encode(fresh.renewals[-1]).decode()}")
    return True, ""


def main(argv: Sequence[str]) -> int:
    """Exit code of the script."""
    pin()
    arguments = parse(argv)
    if arguments.show is not None:
        kind, _, seed = arguments.show.partition(":")
        return show(kind, int(seed))
    began, path = time.perf_counter(), arguments.record
    try:
        record = read_record(path.read_text(encoding="utf-8")) if path.exists() else DecidedRecord()
    except RecordError as error:
        print(error, file=sys.stderr)
        return CANNOT
    if platform.machine() not in ("x86_64", "AMD64"):
        progress(f"the record is of x86-64; seeds may draw other numbers on {platform.machine()}")
    tasks = [(kind, seed) for kind in arguments.kinds for seed in range(arguments.seeds)]
    if arguments.only:
        named = [each.split(":") for each in arguments.only.split(",")]
        tasks = [(kind, int(seed)) for kind, seed in named]
    if arguments.only_entered:
        known = [key for key in tasks if key in record.seeds]
        tasks = [key for key in known if record.entered(key) & set(arguments.entered)]
    found = compare(record, tasks, arguments.jobs)
    renewed, refused = False, ""
    if arguments.renew is not None:
        renewed, refused = renew_file(path, record, found["played"], tasks, arguments)
    elif found["unknown"]:
        print(f"not in the record: {by_kind(found['unknown'])}")
    equal = not found["different"] and not found["unknown"]
    emit(
        "check_decided",
        {"kinds": arguments.kinds, "seeds": arguments.seeds, "jobs": arguments.jobs},
        [],
        capability=CAPABILITY,
        seeds=len(found["played"]),
        equal=equal,
        different=by_kind(found["different"]),
        unknown=by_kind(found["unknown"]),
        first=found["first"],
        renewed=renewed,
        refused=refused,
        wall_s=round(time.perf_counter() - began, 1),
    )
    return 0 if (equal or renewed) and not refused else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
