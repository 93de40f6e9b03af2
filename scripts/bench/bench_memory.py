#!/usr/bin/env python3
"""How much host memory a peer of a large model needs between rounds, and what holds it.

--peers on this machine, each a script with its node (`_memory_peer.py`), and a model whose steps
each touch one hundredth of its values, on the CPU or, with --device cuda, on a GPU. Memory is proportional set size (PSS, from smaps), which
counts what processes share once, by what is mapped. Programs and libraries cost the same whatever
the model's size, so figures a parameter are differences to a small model; of the script they are
beyond what it had before it attached. --frozen: so many parameters that nobody trains besides;
figures are for each one that is trained.

said, said_peak   what `atoll validate` says of such a run, between rounds and at the peak
bytes_per_param   script and node between rounds, once nothing is on its way back to the system:
                  the sum of shared, files and anonymous
at_once           the same at the moment in which the last round was over
peak              the most of them while rounds were under way, as looked at every millisecond: what
                  each process has of its own (RssAnon, RssFile), and each shared memory file once.
                  The thread that looks comes before all other programs, where the system lets it
blind_s           the longest time for which it did not look, all the same
peak_bound        an upper bound: the sum of both processes' own high-water marks (VmHWM, reset by
                  clear_refs before the rounds), less what both had of shared memory at the peak.
                  They come one after the other, so that it is above what both had together
returned_s        how long memory was on its way back after the last round; null: the node still
                  held more than one generation of the anchor after RETURN_S
shared            of it memory that script and node share: contribution and anchor generations;
                  it can only be swapped out
files             of it mapped files of the peer's home, results of rounds in use: page cache, which
                  the system writes back and takes when it is short of memory
anonymous         of it memory of one process: the outer optimizer's state in the node, scratch,
                  and what the allocator keeps of freed memory
pause_s           how long a round kept the script, median
same_anchor       whether both peers hold the same anchor, bit for bit (true, or nothing is printed)
join_s            with --join: how long a third peer's attach() took at the end, whose node fetched
                  anchor and momentum from the two; start_s: how long its script and node took to
                  start, and the script to make its model, before
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _attach_model import pss
from _bench import CANNOT, FailedError, emit, progress
from _kits import Peer, Peers

from atoll.node.cli.needs import needs_of
from atoll.node.client.reclaiming import LEAST_BYTES
from atoll.node.control.shared_memory import FLOAT_BYTES
from atoll.node.manifest import parse_manifest

STEPS = 100  # before a peer attaches: each value was touched once
SMALL = 40_000  # parameters of the model that shows what programs cost
PATIENCE_S = 550.0
# while somebody joins, and ten seconds longer, a node keeps a copy of the state for it (8 bytes a
# parameter)
SERVED_S = 12.0
RETURN_S = 120.0
LOOK_S = 0.001
KINDS: tuple[str, ...] = ("shared", "files", "anonymous")

TEXT = """\
schema = 1
name = "memory"
[model]
entry = "local:memory"
[train]
sync_every = 1000000
overlap = "{overlap}"
[train.outer]
lr = 0.9
momentum = 0.6
momentum_dtype = "{momentum_dtype}"
[exchange]
codec = "{codec}"
"""


def mapped(pid: int, home: Path) -> dict[str, int]:
    """Proportional set size of a process in bytes, by what is mapped; libraries are left out."""
    found, kind = dict.fromkeys(KINDS, 0), ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):  # a mapping: addresses, rights, offset, device, inode, path
            kind = kind_of(rest[4] if len(rest) > 4 else "", home)
        elif name == "Pss:" and kind:
            found[kind] += int(rest[0]) * 1024
    return found


def kind_of(path: str, home: Path) -> str:
    """What a mapping of this path holds; "": a program's own code and data."""
    if path.startswith("/memfd:atoll"):
        return "shared"
    if path.startswith(str(home)):
        return "files"
    return "anonymous" if not path or path.startswith("[") else ""


def shared_by(pid: int) -> int:
    """Bytes of all memory that a node shares with its script, whoever has it mapped."""
    found = dict[int, int]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("/memfd:atoll"):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:  # closed just now
            continue
    return sum(found.values())


def resident(pid: int) -> dict[str, int]:
    """Bytes of a process by kind, as /proc/PID/status says: Anon, File, Shmem; and HWM, the most
    resident memory since `forget_peak`."""
    found = dict[str, int]()
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss") or name == "VmHWM":
            found[name[3:] if name != "VmHWM" else "HWM"] = int(value.split()[0]) * 1024
    return found


def forget_peak(pid: int) -> None:
    """Begin the high-water mark of a process anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


class Peak(threading.Thread):
    """The most memory of a script and its node, looked at every LOOK_S until `stop`: reading what
    the kernel counts anyway takes a fraction of a millisecond, where adding up pages took seconds.
    """

    def __init__(self, script: int, node: int) -> None:
        super().__init__(daemon=True)
        self._pids, self._node, self._over = (script, node), node, threading.Event()
        self._most = self._shared = 0
        self.blind_s = 0.0
        for pid in self._pids:
            forget_peak(pid)
        self.start()

    def run(self) -> None:
        """Look."""
        before_all_others()
        looked = time.monotonic()
        while not self._over.wait(LOOK_S):
            before, looked = looked, time.monotonic()
            self.blind_s = max(self.blind_s, looked - before)
            own = [resident(pid) for pid in self._pids]
            shared = shared_by(self._node)
            total = sum(each["Anon"] + each["File"] for each in own) + shared
            if total > self._most:
                self._most = total
                self._shared = min(each["Shmem"] for each in own)

    def stop(self) -> tuple[int, int]:
        """Bytes: the most that was seen, and what it was at most."""
        self._over.set()
        self.join()
        marks = sum(resident(pid)["HWM"] for pid in self._pids)
        return self._most, max(self._most, marks - self._shared)


def before_all_others() -> None:
    """Have this thread run when it wants to, on a machine that is busy, too."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(1))


def returned(peer: Peer, bound: int) -> float | None:
    """Have the script do what a training loop does after a step until the node shares no more
    than ``bound`` bytes: seconds that it took.
    """
    began = time.monotonic()
    while time.monotonic() < began + RETURN_S:
        ask([peer], "look")
        if shared_by(peer.node_pid) <= bound:
            return time.monotonic() - began
    return None


def ask(among: list[Peer], do: str, **fields: Any) -> list[dict[str, Any]]:
    """Have all do something at once; their answers."""
    for peer in among:
        peer.say(do=do, **fields)
    return [peer.expect(do, PATIENCE_S) for peer in among]


def made(options: argparse.Namespace) -> dict[str, Any]:
    """What the peers' models are beside their size."""
    return {"optimizer": options.optimizer, "frozen": options.frozen}


def joined(options: argparse.Namespace, swarm: Peers, folder: Path, worker: Path) -> dict[str, Any]:
    """Seconds of a newcomer: until it stands with a model, and of its attach()."""
    began = time.monotonic()
    swarm.all.append(Peer("p2", folder / "p2", swarm.invite, swarm.numel, script=worker))
    newcomer = swarm.all[-1:]
    newcomer[0].expect("ready", PATIENCE_S)
    ask(newcomer, "make", device=options.device, steps=0, **made(options))
    start_s = time.monotonic() - began
    return {"start_s": start_s, "join_s": ask(newcomer, "attach")[0]["seconds"]}


def measure(
    options: argparse.Namespace, folder: Path, numel: int, *, join: bool = False
) -> dict[str, Any]:
    """One size: bytes of a peer's script (beyond the model's own) and node, and pauses."""
    text = text_of(options)
    worker, count = Path(__file__).with_name("_memory_peer.py"), options.peers
    rounds = {"count": options.rounds, "peers": count, "meanwhile": int(options.overlap != "none")}
    with Peers(folder, count, numel, worker, manifest=text) as swarm:
        peer = swarm.all[0]
        script, node = peer.process.pid, peer.node_pid
        model = {"device": options.device, "steps": STEPS, **made(options)}
        trained = ask(swarm.all, "make", **model)[0]["numel"]
        own, own_pss, before = mapped(script, folder), pss(script), resident(script)
        ask(swarm.all, "attach")
        ask(swarm.all, "rounds", **rounds)
        time.sleep(SERVED_S)
        peak = Peak(script, node)
        seen = ask(swarm.all, "rounds", **rounds)
        most, bound = peak.stop()
        at_once = pss(script) + pss(node)
        returned_s = returned(peer, FLOAT_BYTES * trained + LEAST_BYTES)
        # gives back what was freed
        ask(swarm.all, "make", **model)
        in_script, in_node = mapped(script, folder), mapped(node, folder)
        newcomer = joined(options, swarm, folder, worker) if join else {}
    if len({(each["round"], each["digest"]) for each in seen}) > 1:
        raise FailedError(f"the peers hold different anchors: {seen}")
    if not (pauses := [pause for each in seen for pause in each["pauses"]]):
        raise FailedError("no round counted all peers")
    progress(f"{trained:,} parameters: script {in_script}, before {own}; node {in_node}")
    return {
        "numel": trained,
        "blind_s": peak.blind_s,
        "script": {kind: in_script[kind] - own[kind] for kind in KINDS},
        "node": in_node,
        "at_once": at_once - own_pss,
        "peak": most - before["Anon"] - before["File"],
        "peak_bound": bound - before["Anon"] - before["File"],
        "returned_s": returned_s,
        "pauses": pauses,
        "newcomer": {key: round(seconds, 2) for key, seconds in newcomer.items()},
    }


def text_of(options: argparse.Namespace) -> str:
    """The run's manifest."""
    return TEXT.format(
        codec=options.codec, momentum_dtype=options.momentum_dtype, overlap=options.overlap
    )


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    small = measure(options, folder / "small", SMALL)
    large = measure(options, folder / "large", options.params, join=options.join)
    values = large["numel"] - small["numel"]
    each = {
        where: {
            kind: round((large[where][kind] - small[where][kind]) / values, 2) for kind in KINDS
        }
        for where in ("script", "node")
    }
    beside = {
        name: round((large[name] - small[name]) / values, 2)
        for name in ("at_once", "peak", "peak_bound")
    }
    returned_s = large["returned_s"]
    said = needs_of(parse_manifest(text_of(options)), large["numel"])
    assert said is not None
    assert said.host is not None
    assert said.host_peak is not None
    total = {kind: round(each["script"][kind] + each["node"][kind], 2) for kind in KINDS}
    emit(
        "memory",
        vars(options),
        large["pauses"],
        params=large["numel"],
        said=round(said.host / large["numel"], 2),
        said_peak=round(said.host_peak / large["numel"], 2),
        bytes_per_param=round(sum(total.values()), 2),
        **total,
        **beside,
        blind_s=round(max(small["blind_s"], large["blind_s"]), 4),
        returned_s=None if returned_s is None else round(returned_s, 3),
        script=each["script"],
        node=each["node"],
        pause_s=round(statistics.median(large["pauses"]), 3),
        same_anchor=True,
        **large["newcomer"],
    )
    return 0


def main() -> int:
    """Exit code: 0 measured, 1 not, 64 cannot be done here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--params", type=int, default=20_000_000, help="of the model (default 20,000,000)"
    )
    parser.add_argument("--codec", default="int8", help="default int8")
    parser.add_argument(
        "--momentum-dtype", choices=("fp32", "bf16"), default="fp32", help="default fp32"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="before memory is measured, twice (default 3)"
    )
    parser.add_argument("--device", default="cpu", help="of the models: cpu (default), or cuda")
    parser.add_argument("--overlap", choices=("none", "late"), default="none")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="inner")
    parser.add_argument("--frozen", type=int, default=0, help="parameters beside those trained")
    parser.add_argument("--peers", type=int, default=2, help="default 2")
    parser.add_argument("--join", action="store_true", help="measure a join at the end, too")
    options = parser.parse_args()
    if options.params < 10 * SMALL or options.rounds < 1:
        parser.error(f"--params is at least {10 * SMALL}, --rounds at least 1")
    if not Path("/proc/self/smaps").exists():
        progress("cannot do it: only Linux says what is mapped (/proc/PID/smaps)")
        return CANNOT
    folder = Path(tempfile.mkdtemp(prefix="atoll-memory-")).resolve()
    for name in ("small", "large"):
        (folder / name).mkdir()
    try:
        return run(options, folder)
    except (FailedError, AssertionError) as error:
        progress(f"cannot measure: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
