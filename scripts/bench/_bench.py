"""What the benchmark scripts share: the machine, the commit, percentiles, a manifest, and the one
JSON object at the end of stdout.

from _bench import emit, percentile, progress
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault(
    "ATOLL_NETWORK__LAN_DISCOVERY", "false"
)  # nodes that find each other by multicast are not what is measured
CANNOT = 64  # EX_USAGE: asked for something that cannot be measured here


class FailedError(Exception):
    """The measurement could not be made."""


def manifest(name: str, codec: str, *, plain: bool = False) -> str:
    """The manifest of a run whose peers only exchange: the text of a TOML file. ``plain``: over
    lanes without encryption.
    """
    exchange = f'[exchange]\ncodec = "{codec}"\n' + "[lanes]\nencrypt = false\n" * plain
    return f'schema = 1\nname = "{name}"\n[model]\nentry = "local:{name}"\n[train]\nsync_every = 1\nmethod = "local_sgd"\n{exchange}'


def progress(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` (0 to 1) of all samples do not exceed; nan
    without samples.
    """
    if not samples:
        return math.nan
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def commit() -> str:
    """The commit of the checkout, with "+" when files differ from it; "unknown" outside of git."""
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def machine() -> dict[str, Any]:
    """Cores, CPU, kernel, torch, TCP congestion control and the load when asked."""
    return {
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "cpu": _cpu(),
        "kernel": platform.release(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "load": round(os.getloadavg()[0], 2),
    }


def emit(name: str, settings: Mapping[str, Any], runs: Sequence[Any], **figures: Any) -> None:
    """Print the result as one JSON object, the last line of stdout. ``runs``: the raw samples. NaN
    and infinity become null.
    """
    result = {
        "name": name,
        "commit": commit(),
        "machine": machine(),
        "settings": dict(settings),
        **figures,
        "runs": list(runs),
    }
    sys.stderr.flush()
    print(json.dumps(_finite(result)), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
