#!/usr/bin/env python3
"""Two peers train a byte-level GPT on one GPU: what the exchange costs them, and what happens when
one of them is killed. Each is a script with its node (`_gpu_peer.py`); AdamW inside, Nesterov
outside, parameters in float32, matrix products in bfloat16, the text that ships with Python.

plain_tokens_s   tokens a second of both together, not attached
tokens_s         the same attached, between rounds: without the boundaries' pauses; round_tokens_s:
                 with them
pause_s          how long a round's end kept the script (`optimizer.step` of the last inner step, the
                 device waited for), median of all rounds but the first; waited_s: how much of it was
                 waiting for the decision, the slower peer's last steps among it
loss             nats a byte of the anchor on held-out text, before and after
bytes_per_param  sent by a peer's node, a round and parameter
gpu_bytes        the most that torch had allocated for a peer; gpu_reserved_bytes: had reserved
host_bytes       proportional set size of a peer's script and node after the rounds
same_anchor      whether both held the same anchor, bit for bit (true, or nothing is printed)
attach_s         what attach() took the newcomer: its node fetched the state
killed           with --kill: the rounds of the other peer after one was killed with its node, by
                 SIGKILL in its second round; rejoin_s: how long its attach() took after its start
                 anew; rounds with both after that; and whether both held the same anchor then
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _attach_model import pss
from _bench import CANNOT, FailedError, emit, progress
from _kits import Peer, Peers

PATIENCE_S = 550.0
PLAIN_STEPS = 20
ALONE = 3  # rounds that the survivor is watched for
AGAIN = 2  # rounds with the peer that is back

TEXT = """\
schema = 1
name = "gpu"
[model]
entry = "local:gpu"
[train]
sync_every = {every}
[train.outer]
lr = 0.7
momentum = 0.9
[exchange]
codec = "{codec}"
feedback = {feedback}
"""


def ask(among: list[Peer], do: str, **fields: Any) -> list[dict[str, Any]]:
    """Have all do something at once; their answers."""
    for peer in among:
        peer.say(do=do, **fields)
    return [peer.expect(do, PATIENCE_S) for peer in among]


def rounds_of(peer: Peer, count: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What a peer says of its rounds, and of itself after them."""
    rounds = [peer.expect("round", PATIENCE_S) for _ in range(count)]
    for each in rounds:
        progress(f"{peer.name}: {each}")
    return rounds, peer.expect("train", PATIENCE_S)


def train(among: list[Peer], count: int) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """So many rounds of all."""
    for peer in among:
        peer.say(do="train", rounds=count)
    return [rounds_of(peer, count) for peer in among]


def evaluate(among: list[Peer]) -> dict[str, Any]:
    """Round and loss of the anchor, which must be the same at all."""
    seen = ask(among, "evaluate")
    if any((one["round"], one["digest"]) != (seen[0]["round"], seen[0]["digest"]) for one in seen):
        raise FailedError(f"the peers hold different anchors: {seen}")
    progress(f"anchor {seen[0]}")
    return seen[0]


def model_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a peer is told to make."""
    names = ("device", "layers", "width", "heads", "context", "batch", "lr", "threads")
    return {name: getattr(options, name) for name in names}


def killed(options: argparse.Namespace, swarm: Peers) -> dict[str, Any]:
    """One peer dies in its second round; the other trains on; the first comes back."""
    survivor, victim = swarm.all
    survivor.say(do="train", rounds=ALONE + 1)
    victim.say(do="train", rounds=ALONE + 1)
    victim.expect("round", PATIENCE_S)
    victim.signal("both", signal.SIGKILL)
    rounds, _ = rounds_of(survivor, ALONE + 1)
    began = time.monotonic()
    victim.start()
    victim.expect("ready", PATIENCE_S)
    ask([victim], "make", **model_of(options))
    started = time.monotonic() - began
    rejoin_s = ask([victim], "attach", every=options.every)[0]["seconds"]
    both = [rounds for rounds, _ in train(swarm.all, AGAIN)]
    after = evaluate(swarm.all)
    return {
        "alone": [
            {key: each[key] for key in ("round", "status", "contributors", "pause_s")}
            for each in rounds
        ],
        "start_s": round(started, 2),
        "rejoin_s": round(rejoin_s, 2),
        "again": [
            [{key: each[key] for key in ("round", "status", "contributors")} for each in rounds]
            for rounds in both
        ],
        "loss": after["loss"],
        "round": after["round"],
        "same_anchor": True,
    }


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and print."""
    text = TEXT.format(
        every=options.every, codec=options.codec, feedback=str(options.feedback).lower()
    )
    with Peers(folder, 2, 1, Path(__file__).with_name("_gpu_peer.py"), manifest=text) as swarm:
        numel = ask(swarm.all, "make", **model_of(options))[0]["numel"]
        progress(f"{numel:,} parameters")
        tokens = options.batch * options.context
        plain = [
            tokens * PLAIN_STEPS / told["seconds"]
            for told in ask(swarm.all, "plain", steps=PLAIN_STEPS)
        ]
        attached = ask(swarm.all, "attach", every=options.every)
        before = evaluate(swarm.all)
        ended = train(swarm.all, options.rounds)
        after = evaluate(swarm.all)
        host = [(pss(peer.process.pid), pss(peer.node_pid)) for peer in swarm.all]
        fate = killed(options, swarm) if options.kill else None
    rounds = [each for rounds, _ in ended for each in rounds[1:]]
    whole = [each for each in rounds if each["contributors"] == 2]
    if not whole:
        raise FailedError("no round counted both peers")
    emit(
        "bench_gpu",
        vars(options),
        [rounds for rounds, _ in ended],
        params=numel,
        gpu=torch.cuda.get_device_name() if options.device == "cuda" else None,
        plain_tokens_s=round(sum(plain)),
        tokens_s=round(2 * statistics.median(each["tokens_s"] for each in whole)),
        round_tokens_s=round(
            2 * tokens * options.every / statistics.median(each["whole_s"] for each in whole)
        ),
        pause_s=round(statistics.median(each["pause_s"] for each in whole), 3),
        waited_s=round(statistics.median(each["waited_s"] for each in whole), 3),
        decided_s=round(statistics.median(each["decided_s"] for each in whole), 3),
        whole_rounds=len(whole),
        loss=[round(before["loss"], 4), round(after["loss"], 4)],
        bytes_per_param=round(statistics.median(each["bytes_sent"] for each in whole) / numel, 3),
        gpu_bytes=max(told["gpu_bytes"] for _, told in ended),
        gpu_reserved_bytes=max(told["gpu_reserved_bytes"] for _, told in ended),
        host_bytes={
            "script": max(script for script, _ in host),
            "node": max(node for _, node in host),
        },
        attach_s=[round(told["seconds"], 2) for told in attached],
        same_anchor=True,
        killed=fate,
    )
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu")
    parser.add_argument("--layers", type=int, default=18, help="default 18")
    parser.add_argument("--width", type=int, default=768, help="default 768: 128 million")
    parser.add_argument("--heads", type=int, default=12, help="default 12")
    parser.add_argument("--context", type=int, default=512, help="bytes, default 512")
    parser.add_argument("--batch", type=int, default=32, help="of a peer, default 32")
    parser.add_argument("--lr", type=float, default=3e-4, help="of AdamW, default 3e-4")
    parser.add_argument("--every", type=int, default=20, help="steps a round, default 20")
    parser.add_argument("--rounds", type=int, default=6, help="default 6, at least 2")
    parser.add_argument("--codec", default="int8", help="default int8")
    parser.add_argument("--feedback", action="store_true", help="carry what the codec loses")
    parser.add_argument("--threads", type=int, default=1, help="of torch in a script, default 1")
    parser.add_argument("--kill", action="store_true", help="kill a peer at the end, too")
    options = parser.parse_args()
    if options.rounds < 2 or options.width % options.heads:
        parser.error("--rounds is at least 2, and --heads divides --width")
    return options


def main() -> int:
    """Exit code: 0 measured, 1 not, 64 cannot be done here."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        progress("cannot do it: there is no CUDA device (--device cpu, with a small model)")
        return CANNOT
    folder = Path(tempfile.mkdtemp(prefix="atoll-gpu-"))
    try:
        return run(options, folder)
    except (FailedError, AssertionError) as error:
        progress(f"cannot measure: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
