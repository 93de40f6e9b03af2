#!/usr/bin/env python3
"""Real power cuts: nodes whose homes lie on a loop image; the image as it is, without a flush, is
what they wake up with.

scripts/bench/power_cuts.py --cuts 3 --members 1 2 3 5 --filesystem ext4

At a random instant all nodes are stopped (SIGSTOP) and the image's file is copied: what was forced
has reached it, what was not is in the page cache of the mounted file system. Two copies must be
equal, so that no write-back fell between. Then the nodes are killed, the copy is mounted in the
place of the image (the file system replays its own journal), the boot's name is changed in each
home, and all start again. Shown: every member goes on by itself, no round is lost that any script
was told of, and after one more round all anchors are equal. ``--privacy``: a federated run with
``[secure]`` and ``[privacy]``, four members at least; shown as well: what a member's medium counts
as spent of its privacy is never behind what its node or script was told of, nor behind the vectors
that it notes as handed over. Needs root and loop devices; exits with 64 and one reason where there
are none. The last line is one JSON object.

``--lines FILE`` appends what each cut came to, and leaves out what the file has already from the
same commit: a series that was ended goes on. A trial that fails before its cut (no first round of
all) says nothing about power: it is told as "unplayed", and played again at the next start.
``--patience`` bounds hangs; how long it took is in ``again_s``, beside the machine's load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _bench import CANNOT, ROOT, FailedError, commit, progress

sys.path.append(str(ROOT / "tests"))

import msgspec
import torch
from bad_input_kit import Member, Run, new_home, new_run
from swarm_kit import free_port

from atoll.collectives.group import Entry
from atoll.node.home.paths import find_paths
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.storage.journal import FileJournal
from atoll.security.key_file import load_or_create

PATIENCE_S = 600.0  # the law gives seconds; the machine may be loaded
MIB = {"ext4": 160, "xfs": 320}
ENDS_S = 15.0  # for the last contribution of a script
PAUSE_S = 0.05  # between two contributions
LEAST = 4  # members of a run with privacy
GIVEN = (
    "given/"  # how a node notes a vector that was handed over: see atoll.node.modes.secure.spending
)
PRIVATE = """
schema = 1
name = "private"
kind = "federated"
[model]
entry = "local:test"
[train]
rounds = 1000
sync_every = 1
[secure]
[privacy]
noise = 50.0
clip = 1.0
delta = 1e-5
stop_at_epsilon = 50
[checkpoint]
every = 3
"""


@dataclass
class Trial:
    """``told``: the newest round that a script was told of; ``back``: the rounds that the members
    woke up with; ``spent``, with privacy: of each member, how many vectors were surely handed over,
    and how many its medium counts."""

    members: int
    told: int
    back: list[int]
    lost: int
    again_s: float
    spent: list[tuple[int, int]]
    troubles: list[str]


class UnplayedError(FailedError):
    """There was no cut."""


@dataclass
class Cut:
    """One line of a series: a trial, or why it failed. ``unplayed``: there was no cut."""

    commit: str
    filesystem: str
    privacy: bool
    members: int
    seed: str
    load: float = 0.0
    trial: Trial | None = None
    failure: str = ""
    unplayed: bool = False


def sh(*command: str) -> None:
    """Run a command. Raises FailedError."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise FailedError(f"{' '.join(command)}: {done.stderr.strip()}")


def holders(place: Path) -> dict[int, str]:
    """Processes with a file, folder or mapping below ``place``, and what they are."""
    found = dict[int, str]()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended
            held = [process / "cwd", process / "root", *(process / "fd").iterdir()]
            names = [os.readlink(each) for each in held] + (process / "maps").read_text().split()
            if any(Path(name).is_relative_to(place) for name in names):
                command = (process / "cmdline").read_bytes().replace(bytes(1), b" ")
                found[int(process.name)] = command.decode(errors="replace").strip()
    return found


def unmount(place: Path) -> None:
    """Of a machine without power nothing runs: ends nodes that scripts have started meanwhile.
    Raises FailedError where somebody else holds it, by name.
    """
    held = dict[int, str]()
    for turn in range(100):
        if subprocess.run(["umount", str(place)], capture_output=True).returncode == 0:
            return
        if turn % 10 == 9:
            held = holders(place)
            for pid, command in held.items():
                if pid != os.getpid() and f" {place}/" in command:  # its home is there
                    progress(f"ends with the power: {pid}: {command}")
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    raise FailedError(f"{place} is busy: {held}")


def image(path: Path, filesystem: str) -> None:
    """An empty file system in a file."""
    with open(path, "wb") as file:
        file.truncate(MIB[filesystem] << 20)
    sh(f"mkfs.{filesystem}", *(["-q", "-F"] if filesystem == "ext4" else ["-q"]), str(path))


def train(member: Member, told: dict[bytes, int], stop: threading.Event, value: float) -> None:
    """A script that contributes until its node is gone; ``told`` grows by the contributions that it
    hears to be counted, with their rounds.
    """

    def fill(out: torch.Tensor) -> None:
        out.fill_(value)

    with contextlib.suppress(Exception):
        while not stop.is_set():
            ticket = member.swarm.contribute(samples=1, write=fill)
            outcome = ticket.wait(30)
            if outcome.counted:
                told[ticket.cid] = outcome.round
            stop.wait(PAUSE_S)


def cut(members: list[Member], disk: Path, copy: Path) -> None:
    """Power goes."""
    pids = [member.pid for member in members]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for _ in range(20):
        shutil.copyfile(disk, copy)
        if subprocess.run(["cmp", "-s", str(disk), str(copy)]).returncode == 0:
            break
    else:
        raise FailedError("the image never stood still")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def other_boot(place: Path) -> None:
    """The machine has booted since."""
    for meta in place.rglob("meta.json"):
        with contextlib.suppress(ValueError):
            meta.write_text(json.dumps({**json.loads(meta.read_text()), "boot_id": "another"}))


def private_run(folder: Path) -> Run:
    """Of a run with noise, whose organiser has not started yet."""
    port = free_port()
    paths = find_paths(new_home(folder / "organiser", port))
    identity = load_or_create(paths.identity_file)
    signed = sign_manifest(parse_manifest(PRIVATE), identity)
    save_run(paths, signed)
    return Run(folder, signed, identity, f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer}")


@contextlib.contextmanager
def running(
    threads: list[threading.Thread], stop: threading.Event, ends_s: float = 1.0
) -> Generator[None]:
    """Threads that end once ``stop`` is set, within ``ends_s`` where their nodes live."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        until = time.monotonic() + ends_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def asked(members: list[Member]) -> Generator[list[int]]:
    """Of each member, the most vectors that its node has told to be handed over, or about to be."""
    stop, told = threading.Event(), [0 for _ in members]

    def ask(number: int) -> None:
        while not stop.wait(0.02):
            with contextlib.suppress(Exception):  # the node is gone
                told[number] = max(told[number], members[number].state()["privacy"]["steps"])

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(len(members))]
    with running(threads, stop):
        yield told


def spent(
    folders: list[Path], told: list[int], counted: list[dict[bytes, int]]
) -> list[tuple[int, int]]:
    """Of each member, vectors that were handed over and what the medium counts. Raises FailedError
    where that is behind.
    """
    found = list[tuple[int, int]]()
    for folder, steps, rounds in zip(folders, told, counted, strict=True):
        noted = sum(line.startswith(GIVEN) for line in (folder / "operations").read_text().split())
        found.append(
            (max(steps, len(rounds) + 1, noted), int((folder / "privacy").read_text().split()[0]))
        )
    if any(handed > medium for handed, medium in found):
        raise FailedError(f"handed over, and counted on the medium: {found}")
    return found


def trial(
    count: int,
    filesystem: str,
    folder: Path | None,
    rng: random.Random,
    *,
    privacy: bool,
    patience_s: float,
    times: int = 1,
) -> list[Trial]:
    """So many cuts of all members of a run, one after another. Raises FailedError where something
    is lost, UnplayedError where it did not come to a cut."""
    with tempfile.TemporaryDirectory(
        prefix="atoll-cut-", dir=folder, ignore_cleanup_errors=True
    ) as scratch:
        place, disk, copy = Path(scratch) / "m", Path(scratch) / "disk", Path(scratch) / "copy"
        place.mkdir()
        image(disk, filesystem)
        sh("mount", "-o", "loop", str(disk), str(place))
        members: list[Member] = []
        trials, all_told = list[Trial](), list[dict[bytes, int]]()
        try:
            try:
                run = private_run(place) if privacy else new_run(place, every=3)
                force(run.home)
                members = start(run, count, patience_s)
                first_round(members, patience_s)
            except (FailedError, AssertionError, OSError) as error:
                raise UnplayedError(f"no first round: {error}") from error
            folders = [member.folder for member in members]
            for _ in range(times):
                with training(members) as told, asked(members if privacy else []) as steps:
                    time.sleep(rng.uniform(1, 8) if privacy else rng.uniform(0.3, 4))
                    cut(members, disk, copy)
                close(members)
                unmount(place)
                sh("mount", "-o", "loop", str(copy), str(place))
                disk, copy = copy, disk
                handed = spent(folders, steps, told) if privacy else []
                other_boot(place)
                all_told += told
                newest = max((max(each.values(), default=0) for each in told), default=0)
                began = time.monotonic()
                members = start(run, count, patience_s)
                back = [member.anchor()[0] for member in members]
                after = go_on(members, max(newest, *back) + 2, began, patience_s)
                troubles = sorted({code for member in members for code in member.codes()})
                trials.append(Trial(count, newest, back, 0, round(after, 2), handed, troubles))
                progress(
                    f"{count} members: told of {newest}, back at {back}; all take part after {after:.1f} s {troubles} {handed or ''}"
                )
            close(members)
            log = max(logs_of(folders), key=len)
            found = Counter(each.cid for entry in log for each in entry.contributors)
            lost = {r for each in all_told for cid, r in each.items() if found[cid] == 0}
            if privacy:  # its log has means, not vectors: the same in the name of all
                newest = max(max(each.told, *each.back) for each in trials)
                found, lost = Counter[bytes](), {newest} - set(range(len(log)))
            if lost or max(found.values(), default=0) > 1:
                raise FailedError(f"rounds {sorted(lost)} were told and are lost; counted {found}")
            return trials
        except (FailedError, AssertionError):
            for member in members:
                progress(f"{member.home.name}: {json.dumps(said(member))}")
            raise
        finally:
            close(members)
            unmount(place)


def logs_of(folders: list[Path]) -> list[list[Entry]]:
    """The logs of members that have ended. Raises FailedError where two differ."""
    logs = list[list[Entry]]()
    for folder in folders:
        journal = FileJournal(folder / "journal")
        logs.append([certified.entry for certified in journal.entries])
        journal.close()
    longest = max(logs, key=len)
    for log in logs:
        if [entry.hash() for entry in log] != [entry.hash() for entry in longest[: len(log)]]:
            raise FailedError("two members have different logs")
    return logs


def said(member: Member) -> dict[str, Any]:
    """What a member tells of itself, for somebody who looks for the cause."""
    with contextlib.suppress(Exception):
        status = member.status()
        run, network = status["runs"][0], status["network"]
        seen = {key: run[key] for key in ("phase", "round", "entry", "member", "waiting")}
        return seen | {
            "troubles": run["troubles"],
            "connected": network["connected"],
            "bootstrap": network["bootstrap"],
            "addresses": status["addresses"],
            "log": member.log()[-1500:],
        }
    return {"log": member.log()[-3000:]}


def close(members: list[Member]) -> None:
    """End scripts and nodes."""
    for member in members:
        with contextlib.suppress(Exception):
            member.swarm.close()
    members.clear()


def force(home: Path) -> None:
    """The user's own files were written long ago: on the medium."""
    for path in [*home.rglob("*"), home, home.parent]:
        if path.is_file() or path.is_dir():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


@contextlib.contextmanager
def training(members: list[Member], ends_s: float = 1.0) -> Generator[list[dict[bytes, int]]]:
    """All contribute meanwhile; of each, which of its contributions it was told to be counted, in
    which rounds.
    """
    stop, told = threading.Event(), [dict[bytes, int]() for _ in members]
    threads = [
        threading.Thread(target=train, args=(m, told[i], stop, i + 1.0), daemon=True)
        for i, m in enumerate(members)
    ]
    with running(threads, stop, ends_s):
        yield told


def first_round(members: list[Member], patience_s: float) -> None:
    """Until every one was counted. Raises FailedError."""

    def fill(out: torch.Tensor) -> None:
        out.fill_(1)

    until = time.monotonic() + patience_s
    while True:
        tickets = [m.swarm.contribute(samples=1, write=fill) for m in members]
        outcomes = [ticket.wait(patience_s) for ticket in tickets]
        if all(outcome.counted for outcome in outcomes):
            return
        if time.monotonic() > until:
            raise FailedError(f"not all are counted: {outcomes}")


def go_on(members: list[Member], target: int, began: float, patience_s: float) -> float:
    """All train until every one has counted and reached ``target`` rounds; then their anchors are
    equal. Returns the seconds from ``began`` until the former. Raises FailedError."""
    until = time.monotonic() + patience_s
    with training(members, ENDS_S) as told:
        while not (all(told) and min(m.anchor()[0] for m in members) >= target):
            if time.monotonic() > until:
                rounds = [m.anchor()[0] for m in members]
                raise FailedError(
                    f"no {target} rounds of all within {patience_s:g} s: {rounds}, counted {[len(t) for t in told]}"
                )
            time.sleep(0.1)
        after = time.monotonic() - began
    until = time.monotonic() + patience_s
    while len({member.anchor() for member in members}) > 1:
        if time.monotonic() > until:
            raise FailedError(f"anchors differ: {[member.anchor()[0] for member in members]}")
        time.sleep(0.1)
    return after


def start(run: Run, count: int, patience_s: float) -> list[Member]:
    """All members at once: none waits for another to be back. Raises FailedError."""
    members: dict[int, Member] = {}
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            home = run.folder / f"m{number}"
            if number and not (home / "config.toml").exists():
                force(new_home(home))
            members[number] = run.member(home.name) if number else run.organiser()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 0:
            thread.join()  # it founds the run, and the others dial it
    for thread in threads:
        thread.join(patience_s)
    if failed or len(members) < count:
        back = len(members)
        close(list(members.values()))
        for log in sorted(run.folder.rglob("private-node.log")):
            progress(f"{log.relative_to(run.folder)}: {log.read_text(errors='replace')[-1500:]}")
        raise FailedError(f"{back} of {count} are back: {failed}")
    return [members[number] for number in range(count)]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=3, help="runs for each number of members")
    parser.add_argument("--times", type=int, default=1, help="cuts of each run, one by one")
    parser.add_argument("--members", type=int, nargs="+", default=None)
    parser.add_argument("--filesystem", choices=["ext4", "xfs"], default="ext4")
    parser.add_argument(
        "--folder", type=Path, help="for the images; else the system's for temporary files"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--privacy", action="store_true", help="runs with noise (default members: 4)"
    )
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, help="seconds, for hangs (default 600)"
    )
    parser.add_argument("--lines", type=Path, help="what each cut came to; a series goes on")
    args = parser.parse_args()
    numbers = args.members or ([LEAST] if args.privacy else [1, 2, 3, 5])
    if args.privacy and min(numbers) < LEAST:
        parser.error(f"--privacy needs {LEAST} members")
    why = (
        "not root"
        if os.geteuid()
        else f"no mkfs.{args.filesystem}"
        if shutil.which(f"mkfs.{args.filesystem}") is None
        else "no loop devices"
        if not Path("/dev/loop-control").exists()
        else ""
    )
    if why:
        progress(f"power cannot be cut here: {why}")
        return CANNOT
    cuts = series(args, numbers)
    trials = [each.trial for each in cuts if each.trial is not None]
    failures = [f"{e.members} members: {e.failure}" for e in cuts if e.failure and not e.unplayed]
    print(
        json.dumps(
            {
                "filesystem": args.filesystem,
                "cuts": len(trials) + len(failures),
                "went_on": len(trials),
                "anchors_equal": len(trials),
                "privacy": args.privacy,
                "rounds_lost": max((each.lost for each in trials), default=0),
                "again_s": max((each.again_s for each in trials), default=0.0),
                "failures": failures,
                "unplayed": sum(each.unplayed for each in cuts),
                "trials": [asdict(each) for each in trials],
            }
        )
    )
    return 1 if failures else 0


def series(args: argparse.Namespace, numbers: list[int]) -> list[Cut]:
    """All cuts that were asked for, the numbers of members in turn; those that the file of lines
    has are taken from there.
    """
    now, had, cuts = commit(), dict[tuple[bool, str], list[Cut]](), list[Cut]()
    if args.lines is not None and args.lines.exists():
        for line in args.lines.read_bytes().splitlines():
            cut = msgspec.json.decode(line, type=Cut)
            if cut.commit == now and not cut.unplayed:
                had.setdefault((cut.privacy, cut.seed), []).append(cut)
    for turn, count in ((turn, count) for turn in range(args.cuts) for count in numbers):
        seed = f"{args.filesystem} {args.seed} {count} {turn}"
        if (args.privacy, seed) in had:
            cuts += had[args.privacy, seed]
            continue
        began, made = Cut(now, args.filesystem, args.privacy, count, seed), list[Cut]()
        try:
            trials = trial(
                count,
                args.filesystem,
                args.folder,
                random.Random(seed),
                privacy=args.privacy,
                patience_s=args.patience,
                times=args.times,
            )
            made += [replace(began, trial=each) for each in trials]
        except (FailedError, AssertionError) as error:
            progress(f"{count} members: {error}")
            unplayed = isinstance(error, UnplayedError)
            made.append(replace(began, failure=str(error)[:400], unplayed=unplayed))
        for each in made:
            each.load = round(os.getloadavg()[0], 1)
        cuts += made
        if args.lines is not None:
            with open(args.lines, "ab") as file:
                file.writelines(msgspec.json.encode(each) + b"\n" for each in made)
    return cuts


if __name__ == "__main__":
    sys.exit(main())
