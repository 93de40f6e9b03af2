"""torchft beside us, in an environment of its own: of it bench_race.py uses DiLoCo and lighthouse."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # helpers of the measurements

from _environment import made

VERSION = "0.2.0"
WHAT = f"torchft {VERSION}"
LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:29510", min_replicas=int(sys.argv[1]), join_timeout_ms=1000)
print(server.address(), flush=True)
sys.stdin.readline()
"""


def environment() -> str:
    """Python of an environment with torchft, made on first use. Raises Unavailable."""
    return made(WHAT, "torchft", [f"torchft=={VERSION}"], "import torchft")
