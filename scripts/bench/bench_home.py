#!/usr/bin/env python3
"""What a member's home holds after many rounds, and how long its next start takes: real files,
rounds without training.

One member's journal, results and checkpoints are written as by a node of a run of --members,
--rounds times: promise, vote, result bytes and entry, and a checkpoint every 10 rounds, all forced
to the medium. Then the process is taken to have been killed, and the next life opens them. The last
line of stdout is one JSON object.

    scripts/bench/bench_home.py --rounds 10000 --members 3
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _bench import emit
from blake3 import blake3

from atoll.collectives.group import Certified, Contributor, Entry, Member, Part, Reading, Vote
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.collectives.outer_rules import OuterSettings
from atoll.node.session.replica import ModelReplica, PlainSlots
from atoll.node.storage.run_files import RunFiles

NUMEL = 256
LAYOUT = make_layout([("w", (NUMEL,))])
EVERY, KEPT_ROUNDS = 10, 8


def opened(folder: Path) -> RunFiles:
    """One life of the member."""
    return RunFiles(
        folder,
        run_id="bench",
        outer=OuterSettings("nesterov", 0.7, 0.9),
        slots=PlainSlots,
        trouble=lambda error: print(error.message),
    )


def entry_of(round_: int, base: bytes, config: tuple[Member, ...]) -> Entry:
    """An entry as of a round that counts everybody; digests and ids are as long as real ones, and
    as little alike.
    """

    def hashed(*about: object) -> bytes:
        return blake3(repr((round_, *about)).encode()).digest()

    return Entry(
        "main/bench",
        round_,
        base,
        hashed("root"),
        tuple(
            Contributor(member, hashed(member)[:16], 1000 + round_, Reading(1.5, 2.5, 3.5))
            for member in config
        ),
        tuple(Part(member.peer, at, at + 1) for at, member in enumerate(config)),
        tuple(hashed("part", member) for member in config),
        NUMEL,
        NUMEL,
        "fp32",
        "mean",
        config,
    )


def size_of(folder: Path) -> dict[str, int]:
    """Bytes of each thing in a folder."""
    return {
        each.name: sum(file.stat().st_size for file in each.rglob("*") if file.is_file())
        if each.is_dir()
        else each.stat().st_size
        for each in sorted(folder.iterdir())
    }


def play(folder: Path, rounds: int, members: int) -> dict[str, Any]:
    """All rounds of one life, then two starts."""
    config = tuple(
        Member(PeerId(f"12D3KooW{blake3(bytes([n])).hexdigest(22)}"), 0) for n in range(members)
    )
    files, replica = (
        opened(folder),
        ModelReplica(LAYOUT, OuterSettings("nesterov", 0.7, 0.9), PlainSlots(NUMEL)),
    )
    replica.initialise(torch.zeros(NUMEL))
    replica.publish(0)
    genesis = Entry(
        "main/bench", 0, bytes(32), bytes(32), (), (), (), NUMEL, NUMEL, "fp32", "mean", config
    )
    files.found(replica, Certified(genesis, (Vote(config[0], 0, bytes(64)),)))
    base, took = genesis.hash(), list[float]()
    for round_ in range(1, rounds + 1):
        began = time.perf_counter()
        entry, journal = entry_of(round_, base, config), files.journal()
        data = files.results.allocate(4 * NUMEL)
        files.results.force(entry.log, round_, entry.part_digests, data)
        journal.promise(0)
        journal.accept(0, entry)
        files.sync()
        replica.apply(entry, data)
        replica.publish(round_)
        quorum = members // 2 + 1
        votes = tuple(
            Vote(member, 0, blake3(entry.hash() + bytes([n])).digest(64))
            for n, member in enumerate(config[:quorum])
        )
        certified = Certified(entry, votes)
        journal.append(certified)
        if round_ % EVERY == 0:
            files.states.checkpoint(replica, certified, round_)
        files.results.forget(round_ + 1 - KEPT_ROUNDS)
        base = entry.hash()
        took.append(time.perf_counter() - began)
    before = size_of(folder)
    starts, cpu, left_out = list[float](), list[float](), 0
    for _ in range(2):  # as after kill -9: nothing was closed. The first leaves out old votes
        began, busy = time.perf_counter(), time.process_time()
        again = opened(folder)
        again.states.replica(LAYOUT, restore=True)
        starts.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
        assert len(again.journal().entries) == rounds + 1
        left_out += again.journal().left_out
    after = size_of(folder)
    return {
        "round_median_ms": round(1e3 * median(took), 2),
        "home_bytes_before_start": sum(before.values()),
        "home_bytes": sum(after.values()),
        "bytes_a_round_before_start": before["journal"] // rounds,
        "bytes_a_round": after["journal"] // rounds,
        "votes_left_out_bytes": left_out,
        "beside_journal_bytes": sum(after.values()) - after["journal"],
        "start_s": [round(each, 3) for each in starts],
        "start_cpu_s": [
            round(each, 3) for each in cpu
        ],  # what it takes of a machine that has other work as well
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = play(Path(folder) / "run", given.rounds, given.members)
    emit("home", {"rounds": given.rounds, "members": given.members}, (), **found)


if __name__ == "__main__":
    main()
