"""hivemind beside us: its own pinned environment, its averaging of a flat vector among worker
processes, its DHT and its optimizer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # helpers of the measurements

from _bench import progress
from _environment import Unavailable, made, set_up

VERSION = "1.1.12"
NUMPY = "numpy<2.4"  # with a newer one its 8-bit codecs silently do nothing
WHAT = f"hivemind {VERSION}"
COMPRESSION = {
    "fp32": "NoCompression",
    "bf16": "Float16Compression",  # its format of two bytes
    "int8": "Uniform8BitQuantization",
}  # its blockwise one needs bitsandbytes
RUN_S = 600


def environment() -> str:
    """Python of an environment with hivemind, made on first use. Raises Unavailable."""
    packages = [f"hivemind=={VERSION}", NUMPY, "setuptools<81"]
    # its daemon runs on this machine
    return made(WHAT, "hivemind", packages, "import hivemind; hivemind.DHT(start=True).shutdown()")


def averagings(peers: int, elements: int, codec: str, reps: int) -> dict[str, list[float]]:
    """``seconds`` of the slowest peer and ``cpu_seconds`` of all for each of ``reps`` averagings,
    matchmaking left out. Raises Unavailable.
    """
    if codec not in COMPRESSION:
        raise Unavailable(f"hivemind has no codec like {codec}")
    settings = {
        "peers": peers,
        "elements": elements,
        "compression": COMPRESSION[codec],
        "reps": reps,
    }
    return _said("_hivemind_peers.py", settings)


def dht_times(peers: int, reps: int, pause_s: float, warmup: int = 5) -> dict[str, list[float]]:
    """Milliseconds of each of ``reps`` stores (``store_ms``) and gets (``get_ms``) among ``peers``
    nodes. Raises Unavailable.
    """
    progress(f"hivemind: {peers} nodes, {reps} stores and gets")
    return _said(
        "_hivemind_dht.py", {"peers": peers, "reps": reps, "pause_s": pause_s, "warmup": warmup}
    )


def step_cpu(params: int, pairs: int) -> dict[str, list[float]]:
    """CPU seconds of the script for each of so many steps between averagings: "plain", "local" and
    "gradients". Raises Unavailable.
    """
    progress(f"hivemind: steps of {params:,} parameters")
    return _said("_hivemind_attach.py", {"params": params, "pairs": pairs})


def _said(script: str, settings: dict[str, Any]) -> dict[str, list[float]]:
    lines = set_up(
        WHAT, [environment(), str(Path(__file__).parent / script), json.dumps(settings)], RUN_S
    ).splitlines()
    try:
        return {
            key: [float(value) for value in values] for key, values in json.loads(lines[-1]).items()
        }
    except (IndexError, AttributeError, TypeError, ValueError):
        raise Unavailable("hivemind's workers said nothing of use") from None
