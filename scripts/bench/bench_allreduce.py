"""How long an all-reduce of one float32 vector takes, end to end, beside gloo (and hivemind).

Each peer is two processes, as in use: a training process and its node. "Ours" is what a script sees
of `swarm.all_reduce`: encoding into shared memory, encrypted lanes, hashing, the decision that all
agree on, decoding out of it, and the result in the script's tensor. gloo's `all_reduce` runs in the
same training processes, turn about (gloo, ours, ours, gloo), started at a common moment. Times are
those of the slowest peer; CPU seconds are user and system time of all processes that take part, the
nodes included. Medians over the runs.

--round: a round of training, whose votes are on the medium, is measured instead: the vector is
contributed, the decided mean is applied to the anchor (plain averaging), and the new anchor is
copied into the script's tensor. There is then no engine_seconds and decision_ms, and
engine_memory_mib holds the run's state as well.

engine_seconds       inside the data plane of the slowest node: from the plan's arrival to the last
                     byte of the result
decision_ms          from the last byte of the result to the decision, at the median peer
engine_memory_mib    peak resident memory of a node over what it had before the first operation
                     (node_extra_mib), less what must be kept until the decision: contribution
                     (encoded, or the script's own tensor where that is shared), result, and the
                     parts received, encoded; the largest of all nodes
node_cpu_seconds     the nodes' share of cpu_seconds; the rest is the training processes'
incomplete           how many operations were measured that did not count everybody: they are in no
                     other figure
bytes_sent           by all nodes for one operation: lanes with headers and encryption, and control
                     messages
idle_cpu             CPU seconds a second of all nodes together while nothing is asked of them; it
                     is part of cpu_seconds
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _bench import CANNOT, FailedError, emit, manifest, progress
from rivals._hivemind import Unavailable, averagings

from atoll.collectives.codecs.codec import CODECS, DEFAULT_CHUNK_ELEMENTS, Chunking
from atoll.node.home.paths import find_paths
from atoll.node.manifest import parse_manifest, save_run, sign_manifest
from atoll.node.run.invite import make_invite
from atoll.security.key_file import load_or_create

RIVALS = ("gloo", "hivemind")
LEAD_S = 0.05  # between telling the peers and the common start
IDLE_S = 2.0
ANSWER_S = 400.0


class Worker:
    """A training process."""

    def __init__(self, rank: int, folder: Path, options: dict[str, Any], port: int) -> None:
        self.rank, self.log = rank, folder / f"worker{rank}.log"
        environment = {
            **os.environ,
            "ATOLL_NODE__LISTEN": f"/ip4/127.0.0.1/tcp/{port}",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            str(Path(__file__).parent / "_allreduce_worker.py"),
            json.dumps({**options, "rank": rank}),
        ]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def tell(self, do: str, **arguments: Any) -> None:
        """Give a command."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._dead() from None

    def hear(self) -> dict[str, Any]:
        """Its answer. Raises FailedError when it died or does not answer."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise self._dead()
        return json.loads(line)

    def _dead(self) -> FailedError:
        return FailedError(
            f"peer {self.rank} ended, or did not answer in {ANSWER_S:g} s:\n{self.log.read_text()[-3000:]}"
        )

    def end(self) -> None:
        """End it; its node ends with it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait(10)


class Bench:
    """The peers, and what is asked of them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.workers = options, list[Worker]()
        settings = {
            "peers": options.peers,
            "elements": options.elements,
            "tensor": options.tensor,
            "round": options.round,
            "gloo": str(folder / "gloo") if "gloo" in options.against else "",
        }
        home, port = folder / "p0", _free_port()
        paths = find_paths(home)
        paths.ensure()
        identity = load_or_create(paths.identity_file)
        signed = sign_manifest(
            parse_manifest(manifest("bench", options.codec, plain=options.plain)), identity
        )
        save_run(paths, signed)
        invite = make_invite(
            signed.run_id,
            [f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer}"],
            identity,
            now_s=time.time(),
        ).encode()
        try:
            self.workers.append(
                Worker(0, folder, {**settings, "home": str(home), "run": signed.run_id}, port)
            )
            self.workers[0].hear()
            for rank in range(1, options.peers):
                self.workers.append(
                    Worker(
                        rank,
                        folder,
                        {**settings, "home": str(folder / f"p{rank}"), "run": invite},
                        0,
                    )
                )
            for worker in self.workers[1:]:
                worker.hear()
            self._settle()
            self.all("prepare")
        except BaseException:
            self.end()
            raise

    def all(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """One command to all peers at once; their answers."""
        for worker in self.workers:
            worker.tell(do, **arguments)
        return [worker.hear() for worker in self.workers]

    def _settle(self) -> None:
        for _ in range(60):
            self.all("settle")
            seen = self.all("members")
            lanes = [path for answer in seen for path in answer["paths"]]
            if all(answer["members"] == self.options.peers for answer in seen) and all(lanes):
                if any(path.endswith("not encrypted") != self.options.plain for path in lanes):
                    raise FailedError(f"lanes are not what was asked for: {lanes}")
                return
        raise FailedError("the peers did not become members of one run, with lanes to one another")

    def measure(self, what: str, **how: Any) -> dict[str, Any]:
        """One operation ("gloo" or "ours", this one as ``how`` says: a mean, or a robust rule)."""
        self.all("reset")
        at = time.monotonic() + LEAD_S
        answers = self.all(what, at=at, **how)
        used = self.all("used")
        found = {
            "what": what,
            "seconds": max(answer["end"] for answer in answers) - at,
            "ok": all(answer["ok"] for answer in answers),
        }
        found["cpu_seconds"] = sum(answer["script_cpu_s"] for answer in used)
        if what == "ours":
            found["node_cpu_seconds"] = sum(answer["node_cpu_s"] for answer in used)
            found["cpu_seconds"] += found["node_cpu_seconds"]
            found["bytes_sent"] = sum(answer["bytes_sent"] for answer in answers)
            found["late_s"] = max(answer["late_s"] for answer in answers)
            found["spun_per_s"] = sum(answer["spun_per_s"] for answer in answers)
            inside = self.all("inside")
            if found["ok"] and not self.options.round:
                found["engine_seconds"] = max(answer["reduce_s"] for answer in inside)
                found["decision_ms"] = 1000 * statistics.median(
                    answer["decision_s"] for answer in inside
                )
            elif not found["ok"]:
                progress(
                    f"not everybody was counted: {[(a['status'], a['reason']) for a in answers]}"
                )
        return found

    def quality(self, outliers: bool) -> tuple[float, bool]:
        """Relative error and bit equality of one more operation."""
        self.all("load", outliers=outliers)
        for _ in range(5):
            if self.measure("ours")["ok"]:
                answers = self.all("check", outliers=outliers)
                return answers[0]["error"], len({answer["digest"] for answer in answers}) == 1
        raise FailedError("no operation counted everybody")

    def idle(self) -> float:
        """CPU seconds a second of all nodes that are not asked for anything."""
        self.all("reset")
        started = time.monotonic()
        time.sleep(IDLE_S)
        return sum(answer["node_cpu_s"] for answer in self.all("used")) / (
            time.monotonic() - started
        )

    def end(self) -> None:
        """End all peers."""
        for worker in self.workers:
            worker.end()


@contextmanager
def started(options: argparse.Namespace) -> Generator[Bench]:
    """The peers, with homes that go with them. Raises FailedError."""
    progress(f"starting {options.peers} peers with their nodes")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", ignore_cleanup_errors=True) as folder:
        bench = Bench(options, Path(folder))
        try:
            yield bench
        finally:
            bench.end()


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    try:
        with started(options) as bench:
            order = (
                ("gloo", "ours", "ours", "gloo") if "gloo" in options.against else ("ours", "ours")
            )
            for what in dict.fromkeys(order):
                bench.measure(what)  # warm up: buffers, sockets, pages
            runs = list[dict[str, Any]]()
            for rep in range(options.reps):
                runs += [bench.measure(what) for what in order]
                progress(
                    f"run {rep + 1} of {options.reps}: "
                    + "  ".join(f"{r['what']} {r['seconds']:.3f} s" for r in runs[-len(order) :])
                )
            memory = bench.all("memory")
            idle = bench.idle()
            relative, equal = bench.quality(outliers=False)
            outliers, equal_too = bench.quality(outliers=True) if options.outliers else (None, True)
    except FailedError as error:
        progress(f"cannot measure: {error}")
        return 1
    figures = summary(options, runs, memory)
    if figures is None:
        progress("cannot measure: no operation counted everybody")
        return 1
    figures |= {
        "relative_error": relative,
        "relative_error_outliers": outliers,
        "bit_equal": equal and equal_too,
        "idle_cpu": round(idle, 4),
    }
    figures |= against_hivemind(options, figures)
    settings = {
        **vars(options),
        "path": "end to end",
        "cipher": "none" if options.plain else "aes-128-gcm",
        "torch_threads": 1,
        "sockets": "cubic, ours and gloo's",
    }
    emit("bench_allreduce", settings, runs, **figures)
    return 0


def summary(
    options: argparse.Namespace, runs: list[dict[str, Any]], memory: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Medians and ratios; None when no operation counted everybody."""
    ours = [found for found in runs if found["what"] == "ours" and found["ok"]]
    gloo = [found for found in runs if found["what"] == "gloo"]
    if not ours:
        return None

    def median(samples: list[dict[str, Any]], key: str) -> float | None:
        known = [sample[key] for sample in samples if key in sample]
        return round(statistics.median(known), 5) if known else None

    def ratio(key: str) -> float | None:
        mine, theirs = median(ours, key), median(gloo, key)
        return round(mine / theirs, 3) if mine and theirs else None

    extra = max(answer["extra_kib"] for answer in memory) / 1024
    chunking = Chunking(options.codec, options.elements, DEFAULT_CHUNK_ELEMENTS[options.codec])
    source = 4 * options.elements if options.tensor == "shared" else chunking.nbytes
    kept = (source + chunking.nbytes * (2 - 1 / options.peers)) / 2**20
    return {
        "seconds": median(ours, "seconds"),
        "cpu_seconds": median(ours, "cpu_seconds"),
        "node_cpu_seconds": median(ours, "node_cpu_seconds"),
        "engine_seconds": median(ours, "engine_seconds"),
        "decision_ms": median(ours, "decision_ms"),
        "gloo_seconds": median(gloo, "seconds"),
        "gloo_cpu_seconds": median(gloo, "cpu_seconds"),
        "ratio_to_gloo": ratio("seconds"),
        "engine_ratio_to_gloo": round(e / g, 3)
        if (e := median(ours, "engine_seconds")) and (g := median(gloo, "seconds"))
        else None,
        "cpu_ratio_to_gloo": ratio("cpu_seconds"),
        "bytes_sent": median(ours, "bytes_sent"),
        "engine_memory_mib": round(max(0.0, extra - kept), 1),
        "node_extra_mib": round(extra, 1),
        "node_baseline_mib": round(max(answer["baseline_kib"] for answer in memory) / 1024, 1),
        "incomplete": sum(not found["ok"] for found in runs),
    }


def against_hivemind(options: argparse.Namespace, ours: dict[str, Any]) -> dict[str, Any]:
    """hivemind's averaging, after ours: its processes would take the cores from both."""
    if "hivemind" not in options.against:
        return {
            "ratio_to_hivemind": None,
            "hivemind_reason": "not asked for: --against gloo,hivemind",
        }
    try:
        theirs = averagings(options.peers, options.elements, options.codec, options.reps)
    except Unavailable as reason:
        progress(str(reason))
        return {"ratio_to_hivemind": None, "hivemind_reason": str(reason)}
    median = {key: statistics.median(samples) for key, samples in theirs.items()}
    return {
        "ratio_to_hivemind": round(ours["seconds"] / median["seconds"], 3),
        "cpu_ratio_to_hivemind": round(ours["cpu_seconds"] / median["cpu_seconds"], 3),
        "hivemind_seconds": median["seconds"],
        "hivemind_cpu_seconds": median["cpu_seconds"],
        "hivemind_runs": theirs,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process with status CANNOT for what is known and cannot be done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, choices=(2, 4, 8), default=4)
    parser.add_argument(
        "--elements", type=int, default=25_000_000, help="length of the vector (default 25,000,000)"
    )
    parser.add_argument(
        "--codec",
        default="int8",
        help=f"how contributions travel: {', '.join(CODECS)} (default int8)",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="bulk bytes without encryption ([lanes] encrypt = false)",
    )
    parser.add_argument(
        "--round", action="store_true", help="a round of training instead of an all-reduce"
    )
    parser.add_argument(
        "--against", default="gloo", help="rivals, separated by commas: gloo, hivemind; or none"
    )
    parser.add_argument(
        "--tensor",
        choices=("shared", "ordinary"),
        default="shared",
        help="swarm.buffer, or memory of the script's own",
    )
    parser.add_argument(
        "--reps", type=int, default=5, help="times (gloo, ours, ours, gloo) (default 5)"
    )
    parser.add_argument(
        "--outliers",
        action="store_true",
        help="also the error with one element in a million a hundred times larger",
    )
    options = parser.parse_args(arguments)
    options.against = [name for name in options.against.split(",") if name not in ("", "none")]
    cannot = [
        (options.codec not in CODECS, f"--codec {options.codec}: there is {', '.join(CODECS)}"),
        (
            not set(options.against) <= set(RIVALS),
            f"--against {','.join(options.against)}: there is {', '.join(RIVALS)}",
        ),
        (options.elements < 1 or options.reps < 1, "--elements and --reps are at least 1"),
    ]
    for wrong, text in cannot:
        if wrong:
            print(f"{parser.prog}: cannot do {text}", file=sys.stderr)
            sys.exit(CANNOT)
    return options


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(run(parse()))
