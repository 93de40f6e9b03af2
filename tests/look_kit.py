"""A run as its events tell it, made up: any number of members, one killed and one late, so that
pictures of it can be checked by values.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli_kit import ATOLL

RUN = "lookrunlookrunlookrunlook"
NUMEL = 1_000_000
ROUND_S, WAIT_S = 10.0, 1.0
STEPS, SAMPLES = 20, 160
SENT = 2_000_000  # bytes a round


def peer_id(number: int) -> str:
    """A peer's id, of the usual length."""
    return f"12D3KooW{number:044d}"


def made_up(
    rounds: int, members: int = 3, *, killed: int = 0, late: int = 0, start: float = 1_000_000.0
) -> Iterator[dict[str, Any]]:
    """Events in the order of a node's file. The last of the first members is killed before round
    ``killed``, another comes in round ``late``; 0: nobody.
    """
    rng = random.Random(0)
    me, there = peer_id(0), [peer_id(number) for number in range(members)]
    yield {"at": start, "event": "script.attached", "run": RUN, "pid": 7}
    for number in range(1, rounds + 1):
        at, lost = start + ROUND_S * number, []
        if number == killed:
            lost = [there.pop()]
        if number == late:
            there = [*there, peer_id(members)]
        slow = there[-1]
        yield {
            "at": at - WAIT_S,
            "event": "reduction.timed",
            "run": RUN,
            "peer": me,
            "log": f"main/{RUN}",
            "round": number,
            "op_id": "",
            "reducer": "mean",
            "codec": "int8_dither",
            "numel": NUMEL,
            "contributors": there,
            "planned_s": 0.1,
            "reduced_s": 0.5,
            "decided_s": 0.9,
            "elapsed_s": WAIT_S,
            "phases": {"ready": dict.fromkeys(there, 0.0), "vote": dict.fromkeys(there, 0.9)},
            "lanes": {peer: {"sent": SENT // 2, "received": 1000} for peer in there if peer != me},
            "slowest": {"peer": slow, "phase": "part", "behind_s": 0.25},
        }
        yield {
            "at": at,
            "event": "round.committed",
            "run": RUN,
            "fragment": 0,
            "round": number,
            "entry": number,
            "contributors": dict.fromkeys(there, SAMPLES),
            "parts": {peer: round(1 / len(there), 4) for peer in there},
            "members": list(there),
            "lost": lost,
            "counted": True,
            "elapsed_s": ROUND_S,
            "bytes_sent": SENT * number,
            "bytes_received": SENT * number // 2,
        }
        loss = 1.5 + 3.0 * math.exp(-number / (rounds / 5)) + rng.gauss(0, 0.02)
        metrics = {"step": float(STEPS * number), "samples": float(number * SAMPLES), "loss": loss}
        yield {"at": at + 0.1, "event": "script.report", "run": RUN, "metrics": metrics}


def write(file: Path, events: Iterator[dict[str, Any]], name: str = "lagoon") -> Path:
    """Events as a node's file has them."""
    with file.open("w", encoding="utf-8") as lines:
        lines.write(json.dumps({"diary": 1, "run": RUN, "name": name, "at": 0.0}) + "\n")
        for event in events:
            lines.write(json.dumps(event) + "\n")
    return file


@contextmanager
def page(*argv: str, home: Path) -> Generator[str]:
    """The address of a page that is served."""
    with subprocess.Popen(
        [*ATOLL, *argv, "--no-browser", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "ATOLL_HOME": str(home)},
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
