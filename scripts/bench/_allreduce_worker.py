"""One peer of bench_allreduce.py: a training process with its private node, and a rank of gloo.
Commands and answers are JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3

from atoll.collectives import api
from atoll.collectives.engine.settings import control
from atoll.collectives.layout import make_layout
from atoll.node import join
from atoll.node.home.lifecycle import read_node_file
from atoll.node.home.paths import find_paths
from atoll.node.joining.commands import NodeClient

# elements at the beginning over which errors are computed; equality is checked over all
CHECKED = 2_000_000
DEADLINE_S = 300.0
MODEL_ELEMENTS = 256  # of the run: what is reduced has a length of its own


def values(rank: int, elements: int, outliers: bool) -> torch.Tensor:
    """The input of a rank: Gaussian; with ``outliers`` one in a million is a hundred times larger."""
    out = torch.empty(elements)
    head = min(CHECKED, elements)
    out[:head].normal_(generator=torch.Generator().manual_seed(rank))
    out[head:].normal_(generator=torch.Generator().manual_seed(1000 + rank))
    if outliers:
        out[outlier_places(rank, elements)] *= 100
    return out


def outlier_places(rank: int, elements: int) -> torch.Tensor:
    """Where a rank has its outliers: one in a million, at least one, and at least one among the
    checked elements.
    """
    generator = torch.Generator().manual_seed(2000 + rank)
    places = torch.randint(elements, (max(1, elements // 1_000_000),), generator=generator)
    places[0] = places[0] % min(CHECKED, elements)
    return places


def error(result: torch.Tensor, peers: int, elements: int, outliers: bool) -> float:
    """RMS of (result - mean) relative to the RMS of the mean, in float64, over the checked elements
    that are no outliers.
    """
    head = min(CHECKED, elements)
    mean = torch.zeros(head, dtype=torch.float64)
    usual = torch.ones(head, dtype=torch.bool)
    for rank in range(peers):
        mean += values(rank, head, False).double()  # the first elements do not depend on the length
        if outliers:
            places = outlier_places(rank, elements)
            usual[places[places < head]] = False
    mean = mean[usual] / peers
    return float(
        (result[:head].double()[usual] - mean).square().mean().sqrt() / mean.square().mean().sqrt()
    )


def process_cpu_s(pid: int) -> float:
    """User and system time of another process with all its threads; the clock of a process is ~pid
    * 8 + 2 on Linux.
    """
    return time.clock_gettime((~pid << 3) | 2)


def memory_kib(pid: int, field: str) -> int:
    """A field of /proc/PID/status such as VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/status has no {field}")


class Worker:
    """State of one peer."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.rank, self.peers, self.elements = (
            int(options["rank"]),
            int(options["peers"]),
            int(options["elements"]),
        )
        self.swarm = join(
            options["run"],
            home=options["home"],
            private=True,
            progress=lambda stage, done, total: None,
        )
        self.rounds = bool(options["round"])
        self.swarm.open(
            make_layout([("flat", (self.elements if self.rounds else MODEL_ELEMENTS,))]), _zero
        ).release()
        self.paths = find_paths(options["home"])
        node = read_node_file(self.paths)
        assert node is not None
        self.node_pid = node.pid
        self.source, self.flat = torch.empty(0), torch.empty(0)
        self.before = torch.empty(0)  # the anchor before a round
        self.cpu = (0.0, 0.0)
        self.baseline_kib = 0
        self.operation = 0
        self.counter_file = Path(options["home"]).with_suffix(".spun")
        self.counter: mmap.mmap | bytes = bytes(8)
        self.loop_ends, self.thread = threading.Event(), None
        self.neighbour: subprocess.Popen[bytes] | None = None

    # ---- preparation
    def settle(self) -> dict[str, Any]:
        """A training round of nothing: newcomers become members with it."""
        pending = self.swarm.contribute(samples=1, write=_zero)
        outcome = pending.wait(30)
        return {"members": len(self.swarm.members()), "contributors": len(outcome.contributors)}

    def members(self) -> dict[str, Any]:
        """How many members this peer sees, and what kind of lane it has to each of the others."""
        seen = self.swarm.members()
        return {
            "members": len(seen),
            "paths": [member.path for member in seen if member.peer != self.swarm.peer],
        }

    def prepare(self) -> dict[str, Any]:
        """Make the input, enter gloo, take the node's memory as the baseline."""
        self.load(outliers=False)
        if self.options["gloo"]:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self.options['gloo']}",
                rank=self.rank,
                world_size=self.peers,
            )
            as_lanes_do()
        if self.rounds:
            self.before = torch.empty(self.elements)
        self.baseline_kib = memory_kib(self.node_pid, "VmRSS")
        Path(f"/proc/{self.node_pid}/clear_refs").write_text(
            "5", encoding="ascii"
        )  # the peak counts from here
        return {}

    def load(self, outliers: bool) -> dict[str, Any]:
        """Make the input."""
        self.source = values(self.rank, self.elements, outliers)
        if not self.flat.numel():
            shared = self.options["tensor"] == "shared" and not self.rounds
            self.flat = (
                self.swarm.buffer(self.elements) if shared else torch.empty_like(self.source)
            )
        return {}

    # ---- measuring
    def reset(self) -> dict[str, Any]:
        """Before an operation: the input as it was, the clocks."""
        self.flat.copy_(self.source)
        if self.rounds:
            self._read_anchor(self.before)
        self.cpu = time.process_time(), process_cpu_s(self.node_pid)
        return {}

    def gloo(self, at: float) -> dict[str, Any]:
        """gloo's sum, in place."""
        _sleep_until(at)
        dist.all_reduce(self.flat)
        return {"end": time.monotonic(), "ok": True}

    def ours(
        self, at: float, op: Any = "mean", f: int = 0, before: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The swarm's mean, or a robust rule, in place, from end to end; of a round, as the anchor
        that comes of it.
        """
        self.operation += 1
        _sleep_until(at)
        spun, began = self.spun(), time.monotonic()
        if self.rounds:
            outcome = self.swarm.contribute(samples=1, write=self._give).wait(DEADLINE_S)
            self._read_anchor(self.flat)
        else:
            name = f"bench {self.operation}"
            options: dict[str, Any] = {
                "op": op,
                "f": f,
                "before": before,
                "deadline_s": DEADLINE_S,
                "codec": self.swarm.settings.codec,
            }
            outcome = api.all_reduce(self.swarm, self.flat, op_id=name, **options).wait()
        end = time.monotonic()
        rate = (self.spun() - spun) / (end - at)
        ok = outcome.status == "committed" and len(outcome.contributors) == self.peers
        told = {
            "status": outcome.status,
            "reason": outcome.reason,
            "bytes_sent": outcome.bytes_sent,
        }
        return {"end": end, "ok": ok, **told, "spun_per_s": rate, "late_s": began - at}

    def _give(self, out: torch.Tensor) -> None:
        out.copy_(self.flat)

    def _read_anchor(self, out: torch.Tensor) -> None:
        view = self.swarm.anchor()
        view.copy_into(out)
        view.release()

    # ---- a busy neighbour
    def busy(self, where: str) -> dict[str, Any]:
        """Start a pure-Python loop, in this process ("script") or in an unrelated one ("other"); ""
        ends it.
        """
        self.loop_ends.set()
        if self.neighbour is not None:
            self.neighbour.kill()
            self.neighbour.wait()
            self.neighbour = None
        elif self.thread is not None:
            self.thread.join()
        self.thread = None
        if where:
            self.loop_ends = threading.Event()
            with open(self.counter_file, "w+b") as file:
                file.write(bytes(8))
                file.flush()
                self.counter = mmap.mmap(file.fileno(), 8)
        if where == "script":
            self.thread = threading.Thread(
                target=spin, args=(self.counter, self.loop_ends), daemon=True
            )
            self.thread.start()
        elif where == "other":
            self.neighbour = subprocess.Popen(
                [sys.executable, __file__, "spin", str(self.counter_file)]
            )
        while where and not self.spun():
            time.sleep(0.01)
        return {}

    def spun(self) -> int:
        """Turns of the loop so far."""
        return int.from_bytes(self.counter[:8], "little")

    def spin_alone(self) -> dict[str, Any]:
        """Turns of the loop a second, while nothing else is done."""
        began, spun = time.monotonic(), self.spun()
        time.sleep(0.3)
        return {"spun_per_s": (self.spun() - spun) / (time.monotonic() - began)}

    def used(self) -> dict[str, Any]:
        """CPU seconds since `reset` of the script and of its node."""
        return {
            "script_cpu_s": time.process_time() - self.cpu[0],
            "node_cpu_s": process_cpu_s(self.node_pid) - self.cpu[1],
        }

    def inside(self) -> dict[str, Any]:
        """What the node measured of the last operation."""
        with NodeClient.connect(self.paths) as client:
            operation = (
                client.status()["runs"][0]["last_operation"] or {}
            )  # of a round nothing is known
        return {key: operation.get(key) for key in ("reduce_s", "decision_s")}

    def check(self, outliers: bool) -> dict[str, Any]:
        """Digest of the result, and at rank 0 its error."""
        digest = blake3(self.flat.numpy().data.cast("B"), max_threads=1).hexdigest()
        mean = (
            self.before - self.flat if self.rounds else self.flat
        )  # plain averaging: the anchor less the mean is the next anchor
        return {
            "digest": digest,
            "error": error(mean, self.peers, self.elements, outliers) if self.rank == 0 else None,
        }

    def memory(self) -> dict[str, Any]:
        """Peak of the node's resident memory since `prepare`, less what it was then."""
        return {
            "extra_kib": memory_kib(self.node_pid, "VmHWM") - self.baseline_kib,
            "baseline_kib": self.baseline_kib,
        }


def spin(counter: mmap.mmap, ends: threading.Event) -> None:
    """Python work without end that tells in ``counter`` how far it is. A method of the event is
    Python, too.
    """
    turns, value = 0, 1
    while not ends.is_set():
        for _ in range(500):
            value = (value * 69_069 + 1) % 4_294_967_296
        turns += 500
        counter[:8] = turns.to_bytes(8, "little")


def as_lanes_do() -> None:
    """Give gloo's connections the congestion control that lanes have on a path like this, as far as
    the system allows.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # gone since it was listed
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    control(sock, "cubic")


def _zero(out: torch.Tensor) -> None:
    out.zero_()


def _sleep_until(at: float) -> None:
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)


def main() -> None:
    """Answer commands until stdin ends."""
    if sys.argv[1] == "spin":
        with open(sys.argv[2], "r+b") as file:
            spin(mmap.mmap(file.fileno(), 8), threading.Event())
    torch.set_num_threads(1)
    worker = Worker(json.loads(sys.argv[1]))
    print(json.dumps({"ready": worker.swarm.peer}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(worker, command.pop("do"))(**command)), flush=True)
    worker.busy("")
    worker.swarm.close()


if __name__ == "__main__":
    main()
