#!/usr/bin/env python3
"""What being attached costs a script: time of a step between rounds, and memory of script and node
beyond the model's own.

Two peers on this machine, each a script with its node (`_attach_peer.py`). Memory is proportional
set size (PSS, from smaps_rollup), which counts what processes share once; it is sampled every few
milliseconds through rounds. Programs and libraries cost the same whatever the model's size, so
figures a parameter are differences to a small model, and what those cost is told as ``fixed_mib``.
With --device cuda the models are on a GPU; memory is the host's all the same.
Then, between rounds, one script takes steps of the same model in turns: attached, and with an
optimizer that has the same state and no hooks.

step_ratio              seconds of an attached step over those of the plain ones before and after
                        it, median; cpu_ratio: the same of the script's CPU seconds; control_ratio:
                        the same of plain steps to one another, what the machine's noise makes
hook_us                 microseconds that a step of the small model takes longer, median: nothing of
                        it grows with the model
node_cpu_share          CPU seconds that the node took a second meanwhile
bytes_per_param         script and node between rounds, beyond the script after plain steps, without
                        what the C library keeps of freed memory; most_: the most through rounds,
                        beyond the most that the script had through plain steps, with it
script_bytes_per_param  of it in the script (what it shares with its node is halved)
cpu_ratio_to_hivemind   cpu_ratio over that of hivemind.Optimizer between averagings, with local
                        updates (`hivemind`: by default, too)
busy_ratio              with --busy: seconds of a round while pure Python runs in each script's
                        process, over those while it runs in an unrelated process
"""

from __future__ import annotations

import argparse
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
from rivals import _hivemind

SMALL = 40_000  # parameters of the model that shows what programs cost
TURNS_OF_SMALL = 1000  # steps of less than a millisecond
SAMPLE_S = 0.005
PATIENCE_S = 100.0
# while somebody joins, and ten seconds longer, a node keeps a copy of the state for it (8 bytes a
# parameter)
SERVED_S = 12.0

TEXT = """\
schema = 1
name = "attach"
[model]
entry = "local:attach"
[train]
sync_every = 1000000
[train.outer]
lr = 0.9
momentum = 0.6
[exchange]
codec = "{codec}"
feedback = {feedback}
"""


class Sampler:
    """The most that a script and its node have while it runs; a context manager."""

    def __init__(self, script: int, node: int) -> None:
        self._pids = script, node
        self.most = self.most_script = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            script, node = (pss(pid) for pid in self._pids)
            self.most, self.most_script = (
                max(self.most, script + node),
                max(self.most_script, script),
            )

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


def ask(among: list[Peer], do: str, **fields: Any) -> list[dict[str, Any]]:
    """Have all do something at once; their answers."""
    for peer in among:
        peer.say(do=do, **fields)
    return [peer.expect(do, PATIENCE_S) for peer in among]


def measure(
    options: argparse.Namespace, folder: Path, numel: int, pairs: int, *, beside: bool
) -> dict[str, Any]:
    """Memory of one size, bytes beyond the model's own, and times."""
    text = TEXT.format(codec=options.codec, feedback=str(options.feedback).lower())
    with Peers(
        folder, 2, numel, Path(__file__).with_name("_attach_peer.py"), manifest=text
    ) as swarm:
        peer = swarm.all[0]
        script, node = peer.process.pid, peer.node_pid
        joined = pss(script)
        made = ask(swarm.all, "make", device=options.device)[0]["numel"]
        with Sampler(script, node) as plain:
            own = ask(swarm.all, "make", device=options.device)[0]["pss"]
        ask(swarm.all, "attach")
        ask(swarm.all, "rounds", count=options.rounds, peers=2)
        time.sleep(SERVED_S)
        with Sampler(script, node) as seen:
            whole = ask(swarm.all, "rounds", count=options.rounds, peers=2)[0]["whole"]
        time.sleep(1.0)  # what a round leaves to tidy up
        resting = ask(swarm.all, "make", device=options.device)[0]["pss"] - own
        found: dict[str, Any] = {
            "numel": made,
            "own": own - joined,
            "most": seen.most - plain.most_script,
            "most_script": seen.most_script - plain.most_script,
            "resting": resting + pss(node),
            "resting_script": resting,
            "whole_rounds": whole,
        }
        began, cpu = time.monotonic(), cpu_s(node)
        peer.say(do="time", pairs=pairs)
        found["time"] = peer.expect("time", PATIENCE_S)
        found["node_cpu_share"] = (cpu_s(node) - cpu) / (time.monotonic() - began)
        found["busy"] = busy(options, swarm.all) if beside else None
    progress(
        f"{made:,} parameters: {found['resting'] / 2**20:.0f} MiB, {found['resting_script'] / 2**20:.0f} of them in the script"
    )
    return found


def means(times: dict[str, list[list[float]]]) -> list[list[float]]:
    """Of the plain steps of a turn."""
    return [
        [(one + other) / 2 for one, other in zip(*pair, strict=True)]
        for pair in zip(times["plain"], times["control"], strict=True)
    ]


def ratio(above: list[list[float]], below: list[list[float]], column: int) -> float:
    """The median of what one column is to the mean of the same in others, turn by turn."""
    return statistics.median(
        one[column] / other[column] for one, other in zip(above, below, strict=True)
    )


def busy(options: argparse.Namespace, among: list[Peer]) -> dict[str, list[float]]:
    """Seconds of rounds of all with a loop beside each script, by where the loop is."""
    seconds: dict[str, list[float]] = {"script": [], "other": []}
    for where in ("script", "other", "other", "script") * 2:
        ask(among, "busy", where=where)
        seconds[where] += ask(among, "rounds", count=options.rounds, peers=2)[0]["seconds"]
    ask(among, "busy", where="")
    if not all(seconds.values()):
        raise FailedError("no round beside the loop counted both peers")
    return seconds


def rival(options: argparse.Namespace) -> tuple[dict[str, float], str]:
    """hivemind's CPU of a step, to a plain one's; or why there is none."""
    if options.against == "none":
        return {}, "not asked"
    try:
        times = _hivemind.step_cpu(options.params, options.pairs)
    except _hivemind.Unavailable as error:
        progress(f"hivemind: {error}")
        return {}, str(error)
    plain = statistics.median(times["plain"])
    return {
        name: round(statistics.median(times[name]) / plain, 4) for name in ("local", "gradients")
    }, ""


def cpu_s(pid: int) -> float:
    """CPU seconds of another process; its clock is ~pid * 8 + 2 on Linux."""
    return time.clock_gettime((~pid << 3) | 2)


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    small = measure(options, folder / "small", SMALL, TURNS_OF_SMALL, beside=False)
    large = measure(options, folder / "large", options.params, options.pairs, beside=options.busy)
    if min(small["whole_rounds"], large["whole_rounds"]) < 1:
        raise FailedError("no round counted both peers")
    values = large["numel"] - small["numel"]
    each = {
        key: round((large[key] - small[key]) / values, 2)
        for key in ("most", "most_script", "resting", "resting_script", "own")
    }
    times, beside, short = large.pop("time"), large.pop("busy"), small.pop("time")
    around, step_s = means(times), statistics.median(wall for wall, _ in times["plain"])
    ratios = [ratio(times["attached"], around, column) for column in (0, 1)]
    hook_s = statistics.median(
        one[0] - other[0] for one, other in zip(short["attached"], means(short), strict=True)
    )
    progress(
        f"a step takes {step_s * 1e3:.2f} ms plain, {ratios[0]:.4f} of that attached, {ratios[1]:.4f} of the CPU; hooks {hook_s * 1e6:.0f} µs"
    )
    theirs, why = rival(options)
    busy_ratio = (
        round(statistics.median(beside["script"]) / statistics.median(beside["other"]), 4)
        if beside
        else None
    )
    emit(
        "bench_attach",
        vars(options),
        [{**times, "busy": beside}],
        step_ratio=round(ratios[0], 4),
        cpu_ratio=round(ratios[1], 4),
        control_ratio=round(ratio(times["control"], times["plain"], 0), 4),
        hook_us=round(hook_s * 1e6, 1),
        step_ms=round(step_s * 1e3, 3),
        bytes_per_param=each["resting"],
        script_bytes_per_param=each["resting_script"],
        most_bytes_per_param=each["most"],
        most_script_bytes_per_param=each["most_script"],
        own_bytes_per_param=each["own"],
        fixed_mib=round(small["resting"] / 2**20, 1),
        node_cpu_share=round(large["node_cpu_share"], 4),
        memory=[small, large],
        cpu_ratio_to_hivemind=round(ratios[1] / theirs["local"], 4) if theirs else None,
        hivemind=theirs,
        hivemind_missing=why,
        busy_ratio=busy_ratio,
    )
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--params", type=int, default=5_000_000, help="of the model (default 5,000,000)"
    )
    parser.add_argument("--codec", default="int8", help="default int8")
    parser.add_argument("--device", default="cpu", help="of the models: cpu (default), or cuda")
    parser.add_argument(
        "--feedback",
        action="store_true",
        help="carry what the codec loses into the next contribution",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="before memory is measured, and while it is (default 6)",
    )
    parser.add_argument(
        "--pairs", type=int, default=150, help="plain and attached steps (default 150 of each)"
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="measure rounds beside pure Python in the script's process, too",
    )
    parser.add_argument(
        "--against",
        choices=["none", "hivemind"],
        default="hivemind",
        help="whose optimizer to compare with (default hivemind)",
    )
    options = parser.parse_args()
    if options.device != "cpu" and options.against != "none":
        parser.error("hivemind is measured on the CPU: --against none")
    if options.params < 10 * SMALL or min(options.rounds, options.pairs) < 1:
        parser.error(f"--params is at least {10 * SMALL}, --rounds and --pairs at least 1")
    return options


def main() -> int:
    """Exit code: 0 measured, 1 not, 64 cannot be done here."""
    options = parse()
    if not Path("/proc/self/smaps_rollup").exists():
        progress("cannot do it: only Linux says what processes share (/proc/PID/smaps_rollup)")
        return CANNOT
    folder = Path(tempfile.mkdtemp(prefix="atoll-attach-"))
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
