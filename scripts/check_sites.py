#!/usr/bin/env python
"""Play random federated runs with real nodes, and hold each to its end.

Work, weights, sample, masks, privacy and threshold are drawn, and so is what happens: nodes and
scripts are killed, sites come back on their disk, or with a fresh key under their name. Each run has to
end: every script with exit status 0, every node's status with the true reason, and nobody's spent
privacy below the masked vectors that its nodes handed over in all its lives. Where most members have
fresh keys the organiser types what its status asks for. A run follows from its number, but for when a
blow lands. Results are lines of --out; numbers that are there are passed over. The last line of stdout
is one JSON object; exit status 1 where a run was wrong.

    scripts/check_sites.py --runs 30 --out sites.jsonl
    scripts/check_sites.py --first 17 --runs 1 --out again.jsonl --keep
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

from _bench import progress  # noqa: E402
from bad_input_kit import Run, new_home, new_run  # noqa: E402
from cli_kit import atoll  # noqa: E402

from atoll.collectives.swarm import PrivacySettings  # noqa: E402
from atoll.node.home.lifecycle import read_node_file  # noqa: E402
from atoll.node.home.paths import find_paths  # noqa: E402
from atoll.node.joining import NodeClient  # noqa: E402
from atoll.security.privacy.budget import most_rounds  # noqa: E402

PATIENCE_S, ASK_S = 1200.0, 30.0
"""So long nobody says anything where a run hangs: five nodes start in minutes where all is busy."""


@dataclass(frozen=True)
class Blow:
    """To ``site``, ``delay_s`` after it has heard of round ``after``: its "node" dies, or "both" with
    the script, which is started again ``back_s`` later; "fresh": with a new home and key.
    """

    site: int
    after: int
    delay_s: float
    kind: str
    back_s: float


@dataclass
class Plan:
    """A drawn run. ``ends``: what its end has to say: "rounds" or "budget"; "either" where a lost
    vector decides.
    """

    manifest: str
    examples: list[int]
    speeds: list[float]
    blows: list[Blow]
    private: bool
    ends: str
    words: str


def drawn(number: int) -> Plan:
    """The run of a number."""
    rng = random.Random(f"sites/{number}")
    sites = rng.choice([3, 3, 4, 4, 5])
    kind = rng.choice(["open", "masked", "private", "private"])
    work = rng.choice(["{ epochs = 1 }", "{ epochs = 2 }", "{ steps = 6 }", "{ samples = 70 }"])
    weights = rng.choice(["examples", "equal"])
    examples = [rng.choice([7, 20, 64, 100, 160]) for _ in range(sites)]
    needed = 1 if kind == "open" else 3
    sample = rng.choice([None, max(needed, sites - 1)]) if sites > needed else None
    rounds, ends, slack = rng.randint(3, 6), "rounds", 0
    tables = '[exchange]\ncodec = "fp32"\n'
    if kind != "open":
        threshold = rng.choice([3, sites]) if sample is None else 3
        heavy = "max_weight = 1000\n" if kind == "masked" and weights == "examples" else ""
        tables = f"[secure]\nthreshold = {threshold}\n{heavy}"
    if kind == "private":
        terms = PrivacySettings(noise=3.0, clip=1.0, delta=1e-5, stop_at_epsilon=4.0)
        slack = rng.choice([0, 0, 1, 2])
        rounds = most_rounds(terms) - slack
        ends = "either"
        declared = "most_examples = 100\nnormaliser = 2.0\n" if weights == "examples" else ""
        tables += (
            "[privacy]\nnoise = 3.0\nclip = 1.0\ndelta = 1e-5\nstop_at_epsilon = 4.0\n" + declared
        )
    share = f"sample = {sample}\n" if sample is not None else ""
    manifest = f"""
schema = 1
name = "sites-{number}"
kind = "federated"
[model]
entry = "local:logistic"
[data]
source = "local"
[federated]
work = {work}
weights = "{weights}"
{share}[train]
rounds = {rounds}
start_with = {sites}
{tables}
[checkpoint]
every = 1
"""
    blows = [
        Blow(
            rng.randrange(sites),
            rng.randint(0, rounds - 1),
            rng.choice([0.0, 0.1, 0.4, 1.0]),
            rng.choice(["node", "both", "both", "fresh"]),
            rng.choice([0.0, 1.0, 5.0, 20.0]),
        )
        for _ in range(rng.choice([0, 1, 1, 2, 3]))
    ]
    blows = [
        Blow(
            b.site,
            b.after,
            b.delay_s,
            "both" if b.kind == "fresh" and not b.site else b.kind,
            b.back_s,
        )
        for b in blows
    ]
    speeds = [rng.choice([0.002, 0.01, 0.05]) for _ in range(sites)]
    words = f"{kind}, {sites} sites, {work}, {weights}, sample {sample}, {rounds} rounds"
    return Plan(manifest, examples, speeds, blows, kind == "private", ends, words)


@dataclass
class Site:
    """One site's lives. All of them write to one tap."""

    number: int
    run: Run
    plan: Plan
    said: queue.Queue[tuple[int, dict[str, Any]]]
    lives: int = 0
    homes: list[Path] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    ended: dict[str, Any] | None = None
    process: subprocess.Popen[str] | None = None

    @property
    def tap(self) -> Path:
        """Where its nodes write what they hand over."""
        return self.run.folder / f"tap-{self.number}"

    def start(self, *, fresh: bool = False) -> None:
        """A life more; with ``fresh`` of another key."""
        if fresh or not self.homes:
            name = f"site-{self.number}-{len(self.homes)}"
            home = self.run.home if not self.number else new_home(self.run.folder / name)
            self.homes.append(home)
        options = {"name": f"s{self.number}"} if self.plan.private else {}
        invite = self.run.signed.run_id if not self.number else self.run.invite(**options)
        self.lives += 1
        command = [sys.executable, str(ROOT / "scripts" / "_random_site.py")]
        command += [str(self.homes[-1]), invite, str(self.plan.examples[self.number])]
        command += [str(self.plan.speeds[self.number])]
        with open(self.run.folder / f"site-{self.number}.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "ATOLL_TEST_TAP": str(self.tap), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        threading.Thread(target=self._read, args=(self.process, self.lives), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], life: int) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.said.put((self.number, json.loads(line) | {"life": life}))
        self.said.put((self.number, {"event": "exit", "code": process.wait(), "life": life}))

    def kill(self, what: str) -> None:
        """SIGKILL to the node as it is now, and to the script."""
        node = read_node_file(find_paths(self.homes[-1]))
        pids = [node.pid] if node is not None else []
        if what != "node" and self.process is not None:
            pids.append(self.process.pid)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    @property
    def handed(self) -> int:
        """Masked vectors of all its lives."""
        return len(self.tap.read_text().splitlines()) if self.tap.exists() else 0


def play(plan: Plan, folder: Path) -> dict[str, Any]:
    """One run: what was wrong with it, and how it ended."""
    run = new_run(folder, manifest=plan.manifest.replace("{", "{{").replace("}", "}}"))
    said: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    sites = [Site(number, run, plan, said) for number in range(len(plan.examples))]
    for site in sites:
        site.start()
    blows, wrong = list(plan.blows), list[str]()
    asked_at = time.monotonic()
    try:
        while not all(site.ended for site in sites):
            try:
                number, each = said.get(timeout=ASK_S)
            except queue.Empty:
                if time.monotonic() - asked_at > PATIENCE_S:
                    raise
                obey(sites)
                continue
            asked_at, site = time.monotonic(), sites[number]
            if each["life"] != site.lives:
                continue
            if each["event"] == "ready" and each["peer"] not in site.keys:
                site.keys.append(each["peer"])
            if each["event"] == "ended":
                site.ended = each
            if each["event"] == "exit":
                wrong.append(f"site {number} ended with {each['code']} before its run")
                break
            heard = each.get("round", 0) if each["event"] in ("ready", "round") else -1
            for blow in [b for b in blows if b.site == number and 0 <= heard >= b.after]:
                blows.remove(blow)
                time.sleep(blow.delay_s)
                site.kill(blow.kind)
                if blow.kind != "node":
                    time.sleep(blow.back_s)
                    site.start(fresh=blow.kind == "fresh")
    except queue.Empty:
        waits = [site.number for site in sites if not site.ended]
        wrong.append(f"nothing for {PATIENCE_S:.0f} s; {waits} have not ended")
    wrong += judged(plan, sites)
    wrong += closed(sites, said)
    return {
        "wrong": wrong,
        "blows": [f"{b.kind} of {b.site} in round {b.after + 1}" for b in plan.blows],
        "ends": sorted({site.ended["state"] for site in sites if site.ended}),
        "handed": [site.handed for site in sites],
        "spent": [site.ended["spent"] if site.ended else None for site in sites],
    }


def obey(sites: list[Site]) -> None:
    """Does what the organiser's status asks for, where most members have fresh keys now: nobody but
    the organiser can say that those with the old ones are gone.
    """
    with NodeClient.connect(find_paths(sites[0].homes[-1])) as client:
        (status,) = client.status()["runs"]
    lost = [key for site in sites for key in site.keys[:-1] if key in (status["members"] or ())]
    waits = status["waiting"] or {}
    if waits.get("state") == "no quorum" and "atoll recertify" in waits["ends"] and lost:
        without = [word for key in lost for word in ("--without", key)]
        atoll(sites[0].homes[-1], "recertify", status["run_id"], *without, "--yes")


def judged(plan: Plan, sites: list[Site]) -> list[str]:
    """What is not true of a run that has ended."""
    wrong = list[str]()
    for site in sites:
        if site.ended is None:
            continue
        state = site.ended["state"]
        whole = "rounds are committed" in state
        if not site.ended["finished"] or not state.startswith("finished: "):
            wrong.append(f"site {site.number} has ended, and its status says {state!r}")
        elif not whole and (plan.ends == "rounds" or "epsilon" not in state):
            wrong.append(f"site {site.number} says {state!r}")
        if plan.private and site.ended["spent"] < site.handed:
            wrong.append(
                f"site {site.number} tells of {site.ended['spent']} contributions, and handed over "
                f"{site.handed}"
            )
    return wrong


def closed(sites: list[Site], said: queue.Queue[tuple[int, dict[str, Any]]]) -> list[str]:
    """End the scripts; who does not do so in order."""
    wrong = list[str]()
    for site in sites:
        process = site.process
        assert process is not None
        assert process.stdin is not None
        if site.ended is None:
            site.kill("both")
            continue
        process.stdin.close()
        try:
            if code := process.wait(PATIENCE_S):
                wrong.append(f"the script of site {site.number} ended with {code}")
        except subprocess.TimeoutExpired:
            wrong.append(f"the script of site {site.number} does not end")
            site.kill("both")
    return wrong


def main() -> int:
    """The whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--out", type=Path, required=True, help="file of lines of JSON")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folders of runs that were right"
    )
    given = parser.parse_args()
    known = (
        [json.loads(line) for line in given.out.read_text().splitlines()]
        if given.out.exists()
        else []
    )
    done = {each["run"]: each for each in known}
    for number in range(given.first, given.first + given.runs):
        if number in done:
            continue
        plan, folder = drawn(number), Path(tempfile.mkdtemp(prefix=f"sites-{number}-"))
        began = time.monotonic()
        found: dict[str, Any] = {"run": number, "what": plan.words, **play(plan, folder)}
        found["seconds"] = round(time.monotonic() - began, 1)
        done[number] = found
        with open(given.out, "a") as out:
            out.write(json.dumps(found) + "\n")
        progress(f"run {number}: {'; '.join(found['wrong']) or 'well'} ({found['seconds']} s)")
        if found["wrong"]:
            progress(f"  kept: {folder}")
        elif not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    bad = [number for number, each in sorted(done.items()) if each["wrong"]]
    ends = Counter(end for each in done.values() for end in each["ends"])
    print(json.dumps({"runs": len(done), "wrong": bad, "ends": dict(ends)}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
