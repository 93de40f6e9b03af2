#!/usr/bin/env python3
"""A race to a loss over shaped links: atoll as `atoll plan` says and with a plain mean, beside one
machine alone, DDP over gloo, torch's post-local SGD, hivemind's Optimizer and torchft's DiLoCo.

Four hosts of a network laboratory train a byte-level GPT of a million parameters (`_race_task.py`).
A step lasts --step-s, within forward and backward, whatever the load. Losses by step of "alone",
"ddp" and "local" do not depend on time: they are computed without a network, and only the seconds
of a step are measured in the laboratory. Weights of the others are saved in the race and evaluated
after it. Zero is when all four are ready. Before that each contestant is tuned on --tune-seed, with
as many trials as the others, in one process (`_race_tune.py`).

    scripts/bench/bench_race.py --links 100 --arms planned --seeds 0 --out race.jsonl     one curve
    scripts/bench/bench_race.py --out race.jsonl     all of them; what is in the file is not run again
    scripts/bench/bench_race.py --out race.jsonl --known > printed.txt     of what is in the file
    scripts/bench/plot_race.py printed.txt -o race.svg         the picture of that

table    by link and contestant: seconds until the held-out losses that one machine alone has after
         --targets steps, which are not exceeded again; the median over seeds
tuned    by link and contestant: the values that were best on --tune-seed
void     races that do not count, after --tries, and are run again by the next call, and why: steps
         late by more than 1 %, plain TCP between two spare hosts below 95 % of its first rate, pings
         off target
r        by link: seconds of a ring of fp32 gradients at line rate over those of a step
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _bench import FailedError, emit, progress
from _environment import Unavailable
from _kits import Lab, Peers, in_laboratory
from _race import (
    ARMS,
    LINKS,
    OFFLINE,
    Records,
    manifest,
    plain_settings,
    ring_over_step,
    targets,
    void,
)
from _race import table as table_of
from _race_task import Model, Task, curve
from _race_tune import TRIALS, Rounds, alike, averaged, best, exchange_s, rounds_of, timed
from rivals import _hivemind, _torchft

from atoll.node.manifest import parse_manifest

HERE = Path(__file__).parent
WORKERS, LIGHTHOUSE, SPARE = 4, 4, (5, 6)  # hosts
PROBED_S, PROBE_S = 20.0, 1.0  # from one plain transfer to the next, and about how long one takes
READY_S, START_S = 180.0, 2.0
PARAMETERS = sum(parameter.numel() for parameter in Model(0).parameters())
PUBLISHED = {"outer_lr": 0.7, "momentum": 0.9}  # torchft's outer step
SWARMS = ("planned", "plain")  # atoll's contestants


def settings_of(
    given: argparse.Namespace, folder: Path, arm: str, link: str, every: int
) -> dict[str, dict[str, Any]]:
    """The tables of atoll's manifest: of the plain mean, or as `atoll plan` says."""
    plain = plain_settings(given.steps, every)
    if arm == "plain":
        return plain
    asked = {"train": {"sync_every": every, "rounds": plain["train"]["rounds"]}}
    path = folder / "asked.toml"
    path.write_text(manifest(asked, PARAMETERS, WORKERS), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "atoll.node.cli", "--json", "plan", str(path)),
        *("--step-ms", f"{1000 * given.step_s:g}", "--peers", str(WORKERS)),
        *("--up", f"{LINKS[link].up:g}Mbit/s", "--down", f"{LINKS[link].down:g}Mbit/s"),
        *("--rtt-ms", f"{LINKS[link].rtt_ms:g}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    settings = json.loads(done.stdout.splitlines()[-1])["settings"]
    progress(f"planned: {settings}")
    return dict(settings)


class Worker:
    """A rival's process on a host, with the host's address as its name."""

    def __init__(self, host: Any, python: str, script: Sequence[str], log: Path) -> None:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host.address]
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                host.command([*named, python, *script]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def line(self, timeout_s: float) -> str:
        """The next line that it prints. Raises FailedError."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise FailedError(f"nothing was said for {timeout_s:g} s: {self._end()}")
        if not (line := self.process.stdout.readline()):
            raise FailedError(f"a worker ended: {self._end()}")
        return line.decode()

    def _end(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def expect(self, event: str, timeout_s: float) -> dict[str, Any]:
        """What it says of this event; what its libraries print is not read."""
        while True:
            line = self.line(timeout_s)
            if line.startswith('{"event"') and (found := json.loads(line))["event"] == event:
                return dict(found)

    def say(self, **words: Any) -> None:
        """A line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")


class Probe:
    """Plain TCP between two spare hosts, before, during and after a race: ``rates`` in bytes/s."""

    def __init__(self, lab: Any, mbit: float) -> None:
        self._lab, self._ended = lab, threading.Event()
        self._data = os.urandom(round(mbit * 1e6 / 8 * PROBE_S))
        self.rates = list[float]()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def once(self) -> None:
        """One transfer."""
        _, seconds = self._lab.transfer(self._data, *SPARE)
        self.rates.append(len(self._data) / seconds)

    def _go_on(self) -> None:
        while not self._ended.wait(PROBED_S):
            self.once()

    def __enter__(self) -> Probe:
        self.once()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        if exc[0] is None:
            self.once()


def cpu_s(lab: Any) -> float:
    """Processor seconds of all processes on the workers' hosts."""
    used = 0
    for host in lab.hosts[:WORKERS]:
        pids = subprocess.run(
            ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
        )
        for pid in pids.stdout.split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += int(fields[11]) + int(fields[12])
    return used / os.sysconf("SC_CLK_TCK")


class Race:
    """One contestant over one link."""

    def __init__(
        self,
        given: argparse.Namespace,
        folder: Path,
        arm: str,
        link: str,
        values: Mapping[str, Any],
    ) -> None:
        self.given, self.folder, self.arm, self.link = given, folder, arm, LINKS[link]
        self._name, self._values = link, values

    def run(self, seed: int, steps: int) -> dict[str, Any]:
        """Run it; of worker 0 what it saved and when, of all what they needed."""
        folder = self.folder / f"{self.arm}-{time.monotonic_ns()}"
        folder.mkdir()
        told = {
            "seed": seed, "steps": steps, "step_s": self.given.step_s, "look": self.given.look,
            "workers": WORKERS, "arm": self.arm, "folder": str(folder), **self._values,
        }  # fmt: skip
        link = self.link
        with Lab(max(SPARE) + 1, rtt_ms=link.rtt_ms) as lab:
            for host in lab.hosts:
                host.rate(link.up, link.down)
            pings = [lab.ping_ms(*SPARE)]
            if self.arm in SWARMS:
                every = self._values["every"]
                tables = settings_of(self.given, folder, self.arm, self._name, every)
                text = manifest(tables, PARAMETERS, WORKERS)
                script = HERE / "_race_atoll.py"
                with Peers(
                    folder, WORKERS, PARAMETERS, script, hosts=lab.hosts[:WORKERS], manifest=text
                ) as swarm:
                    for worker, peer in enumerate(swarm.all):
                        peer.say(**told, worker=worker)
                    for peer in swarm.all:
                        peer.expect("attached", READY_S)
                    found = self._raced(lab, swarm.all, steps)
            else:
                found = self._raced(lab, self._rivals(lab, told, folder), steps)
            pings.append(lab.ping_ms(*SPARE))
            on_target = all(map(lab.on_target, pings))
        losses = Task(seed, 0, self._values["lr"]).losses(folder)
        points = [(at, step, losses[step]) for step, at in found["points"] if step in losses]
        return {**found, "points": points, "pings": pings, "on_target": on_target}

    def _rivals(self, lab: Any, told: dict[str, Any], folder: Path) -> list[Worker]:
        kits = {"hivemind": _hivemind, "torchft": _torchft}
        python = kits[self.arm].environment() if self.arm in kits else sys.executable
        log = folder / "workers.log"
        more: dict[str, Any] = {"first": lab.hosts[0].address, "found": [], "lighthouse": ""}
        if self.arm == "torchft":
            told["steps"] -= told["steps"] % told["every"]
            light = [*("-c", _torchft.LIGHTHOUSE), str(WORKERS)]
            self._light = Worker(lab.hosts[LIGHTHOUSE], python, light, log)
            more["lighthouse"] = self._light.line(READY_S).strip()
        workers = list[Worker]()
        for number, host in enumerate(lab.hosts[:WORKERS]):
            words = {**told, **more, "worker": number, "address": host.address}
            script = [str(HERE / "_race_worker.py"), json.dumps(words)]
            workers.append(Worker(host, python, script, log))
            if self.arm == "hivemind" and not number:  # its address is the others' way in
                more["found"] = workers[0].expect("ready", READY_S)["found"]
        for worker in workers[self.arm == "hivemind" :]:
            worker.expect("ready", READY_S)
        return workers

    def _raced(self, lab: Any, workers: Sequence[Any], steps: int) -> dict[str, Any]:
        step_s = self.given.step_s
        used = cpu_s(lab)
        with Probe(lab, self.link.up) as probe:
            zero = time.monotonic() + START_S
            for worker in workers:
                worker.say(zero=zero)
            most_s = START_S + 10 * steps * step_s + READY_S
            told = [worker.expect("trained", most_s) for worker in workers]
            used = cpu_s(lab) - used
        return {
            "points": told[0]["points"],
            "seconds": max(each["seconds"] for each in told),
            "steps": steps,
            "late": max(each["late_s"] / each["seconds"] for each in told),
            "sent": sum(each["sent"] for each in told) / len(told),
            "cpu_s": used,
            "rates": probe.rates,
        }


class Races:
    """Curves of all contestants, those that are in the file among them."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder, self._records = given, folder, Records(given.out)
        self._began = time.monotonic()
        self.void = dict[str, list[str]]()

    def _found(
        self, make: Callable[[], dict[str, Any]], values: Mapping[str, Any], *key: object
    ) -> dict[str, Any] | None:
        given = self._given
        whole = (*key, given.step_s, *values.values())
        found, tries = self._records.find(*whole), 0
        while tries < given.tries and (found is None or (void(found) and not given.count_void)):
            if given.known or time.monotonic() - self._began >= 60 * given.minutes:
                break
            tries += 1
            progress(" ".join(map(str, whole)))
            found = self._records.keep(make(), *whole)
        if found is not None and (reasons := void(found)):
            self.void[found["key"]] = reasons
            return found if given.count_void else None
        return found

    def _given_values(self) -> dict[str, Any]:
        return {"lr": self._given.lr, "every": self._given.every, **PUBLISHED}

    def _trial(self, arm: str, link: str, values: Mapping[str, Any]) -> list[list[Any]] | None:
        """(step, rounds, loss) on the seed that is for tuning; None: not known."""
        given, seed = self._given, self._given.tune_seed

        def by_step() -> list[tuple[int, int, float]]:
            steps = max(given.targets) if arm == "alone" else given.steps
            lr, every = values["lr"], values["every"]
            found = curve(arm, seed, lr, steps, every, WORKERS, given.look)
            return [(step, 0, loss) for step, loss in found]

        def make() -> dict[str, Any]:
            if arm in ("alone", "ddp"):
                return {"trial": by_step()}
            rounds: Rounds = alike(int(values["every"]), 1.0, 0.0)
            if arm == "torchft":
                rounds = alike(int(values["every"]), values["outer_lr"], values["momentum"])
            elif arm == "planned":
                tables = settings_of(given, self._folder, arm, link, given.every)
                rounds = rounds_of(parse_manifest(manifest(tables, PARAMETERS, WORKERS)).settings())
            return {"trial": averaged(seed, values["lr"], given.steps, WORKERS, rounds)}

        # The plan follows from the link. What others make of a step does not.
        where = link if arm == "planned" else "any"
        found = self._found(make, values, "trial", arm, where, seed, given.steps)
        return None if found is None else found["trial"]

    def tuned(self, arm: str, link: str) -> dict[str, Any] | None:
        """The values of a contestant over a link; None: not all trials are known."""
        given, usual = self._given, self._given_values()
        if given.as_given:
            return usual
        trials = [{**usual, **each} for each in TRIALS[arm]]
        curves = [self._trial(arm, link, each) for each in trials]
        known = [each for each in curves if each is not None]
        if len(known) < len(curves):
            return None
        if arm in ("alone", "ddp"):  # an exchange is in a step, or there is none
            points = [timed(each, given.step_s, 0.0) for each in known]
        else:
            exchange = exchange_s(arm, LINKS[link], PARAMETERS, WORKERS)
            points = [timed(each, given.step_s, exchange) for each in known]
        if arm == "alone":  # the lowest where it ends
            ends = [each[-1][2] for each in points]
            return trials[ends.index(min(ends))]
        if (alone := self.tuned("alone", link)) is None:
            return None
        told = self._trial("alone", link, alone)
        assert told is not None
        losses = targets([(step, loss) for step, _, loss in told], given.targets)
        return dict(best(list(zip(trials, points, strict=True)), losses))

    def by_step(self, arm: str, link: str, seed: int) -> list[tuple[int, float]] | None:
        """Held-out loss by step of what does not depend on time."""
        given = self._given
        if (values := self.tuned(arm, link)) is None:
            return None
        steps = max(given.targets) if arm == "alone" else given.steps
        lr, every = values["lr"], values["every"]

        def make() -> dict[str, Any]:
            found = curve(arm, seed, lr, steps, every, WORKERS, given.look)
            return {"curve": found}

        found = self._found(make, values, "curve", arm, seed, steps)
        return None if found is None else [(step, loss) for step, loss in found["curve"]]

    def points(self, arm: str, link: str, seed: int) -> list[tuple[float, float, float]] | None:
        """Seconds, step and loss of one contestant over one link; None: not known."""
        given = self._given
        if (values := self.tuned(arm, link)) is None:
            return None
        race = Race(given, self._folder, arm, link, values)
        if arm not in OFFLINE:
            key = "race", arm, link, seed, given.steps
            found = self._found(lambda: race.run(seed, given.steps), values, *key)
            return None if found is None else [tuple(each) for each in found["points"]]
        by_step, step_s = self.by_step(arm, link, seed), given.step_s
        if by_step is None:
            return None
        if arm != "alone":
            whole = given.measured - given.measured % values["every"] or values["every"]
            found = self._found(lambda: race.run(0, whole), values, "lab", arm, link, whole)
            if found is None:
                return None
            step_s = found["seconds"] / found["steps"]
        return [(step_s * step, step, loss) for step, loss in by_step]


def run(given: argparse.Namespace, folder: Path) -> int:
    """Race what the file lacks, and print the table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces would stay behind
    torch.set_num_threads(1)
    races, rows = Races(given, folder), list[dict[str, Any]]()
    tables, tuned = dict[str, Any](), dict[str, dict[str, Any]]()
    found_alone = [races.by_step("alone", given.links[0], seed) for seed in given.seeds]
    alone = [found for found in found_alone if found is not None]
    losses = [targets(each, given.targets) for each in alone]
    for link in given.links:
        raced = dict[str, list[Any]]()
        for arm in given.arms:
            try:
                found = [races.points(arm, link, seed) for seed in given.seeds]
                tuned.setdefault(link, {})[arm] = races.tuned(arm, link)
            except (  # the others are raced all the same
                Unavailable,
                FailedError,
                AssertionError,
                OSError,
                subprocess.SubprocessError,
            ) as error:
                progress(f"{arm} over {link}: {error}")
                continue
            if None not in found:
                raced[arm] = found
                rows += [
                    {"link": link, "arm": arm, "seed": seed, "points": points}
                    for seed, points in zip(given.seeds, found, strict=True)
                ]
        if len(losses) == len(given.seeds):
            tables[link] = table_of(raced, losses)
            progress(f"{link}: {tables[link]}")
    emit(
        "bench_race",
        {**vars(given), "out": str(given.out)},
        rows,
        table=tables,
        targets=losses,
        tuned=tuned,
        void=races.void,
        parameters=PARAMETERS,
        r={
            link: round(ring_over_step(LINKS[link], PARAMETERS, WORKERS, given.step_s), 2)
            for link in given.links
        },
    )
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--links", nargs="+", choices=LINKS, default=[*LINKS])
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, default=400, help="of each worker")
    add("--measured", type=int, default=60, help="steps whose time is measured for ddp and local")
    add("--targets", type=int, nargs="+", default=[300, 600, 900], help="steps of alone")
    add("--step-s", type=float, default=0.5)
    add("--tune-seed", type=int, default=9, help="on which everybody is tuned; none of --seeds")
    add("--as-given", action="store_true", help="tune nothing: --lr and --every for all")
    add("--lr", type=float, default=2e-3, help="of AdamW, where it is not tuned")
    add("--every", type=int, default=20, help="steps between two averages, where it is not tuned")
    add("--tries", type=int, default=3, help="of a race that is void, in one call")
    add("--look", type=int, default=10, help="steps between two losses of alone and ddp")
    add("--out", type=Path, help="lines are appended to this file; what it has is not run again")
    add("--minutes", type=float, default=1e9, help="nothing begins later than that")
    add("--known", action="store_true", help="run nothing")
    add("--count-void", action="store_true", help="as if they were not void: to try the script")
    given = parser.parse_args()
    if given.tune_seed in given.seeds:
        parser.error(f"seed {given.tune_seed} is for tuning: race on others")
    return given


if __name__ == "__main__":
    sys.exit(in_laboratory(parse(), run))
