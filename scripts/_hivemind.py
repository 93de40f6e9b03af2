"""hivemind beside us: its own pinned environment, its averaging of a flat vector among worker processes, its DHT and its optimizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _bench import ROOT, progress

VERSION = "1.1.12"
NUMPY = "numpy<2.4"  # with a newer one its 8-bit codecs silently do nothing
FOLDER = ROOT / ".ci" / "out" / "hivemind"
COMPRESSION = {
    "fp32": "NoCompression",
    "fp16": "Float16Compression",
    "int8": "Uniform8BitQuantization",
}  # its blockwise one needs bitsandbytes
INSTALL_S, RUN_S = 600, 600


class Unavailable(Exception):
    """hivemind cannot be measured here; the text says why."""


def environment() -> str:
    """Python of an environment with hivemind, made on first use. Raises Unavailable."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / "complete").exists():
        progress(f"hivemind: making {FOLDER.relative_to(ROOT)} with hivemind {VERSION}")
        _run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], 120)
        # torch is ours, so that both use the same; what hivemind brings itself comes first
        site = next((FOLDER / "lib").glob("python*")) / "site-packages"
        import torch

        (site / "zz_torch.pth").write_text(str(Path(torch.__path__[0]).parent) + "\n", encoding="utf-8")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
        _run([*install, f"hivemind=={VERSION}", NUMPY, "setuptools<81"], INSTALL_S)
        _run([str(python), "-c", "import hivemind; hivemind.DHT(start=True).shutdown()"], 120)  # its daemon runs on this machine
        (FOLDER / "complete").touch()
    return str(python)


def _run(command: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        lines = [
            line for line in lines if not line.startswith(("note:", "ERROR:", "error: subprocess"))
        ] or lines  # pip's own words say less
        telling = next((line for line in reversed(lines) if "rror:" in line), lines[-1] if lines else f"exit status {done.returncode}")
        raise Unavailable(f"hivemind {VERSION} cannot be set up here: {telling[:300]}")
    return done.stdout


def averagings(peers: int, elements: int, codec: str, reps: int) -> dict[str, list[float]]:
    """``seconds`` of the slowest peer and ``cpu_seconds`` of all for each of ``reps`` averagings, matchmaking left out. Raises Unavailable."""
    if codec not in COMPRESSION:
        raise Unavailable(f"hivemind has no codec like {codec}")
    settings = {"peers": peers, "elements": elements, "compression": COMPRESSION[codec], "reps": reps}
    return _said("_hivemind_peers.py", settings)


def dht_times(peers: int, reps: int, pause_s: float, warmup: int = 5) -> dict[str, list[float]]:
    """Milliseconds of each of ``reps`` stores (``store_ms``) and gets (``get_ms``) among ``peers`` nodes. Raises Unavailable."""
    progress(f"hivemind: {peers} nodes, {reps} stores and gets")
    return _said("_hivemind_dht.py", {"peers": peers, "reps": reps, "pause_s": pause_s, "warmup": warmup})


def step_cpu(params: int, pairs: int) -> dict[str, list[float]]:
    """CPU seconds of the script for each of so many steps between averagings: "plain", "local" and "gradients". Raises Unavailable."""
    progress(f"hivemind: steps of {params:,} parameters")
    return _said("_hivemind_attach.py", {"params": params, "pairs": pairs})


def _said(script: str, settings: dict[str, Any]) -> dict[str, list[float]]:
    lines = _run([environment(), str(Path(__file__).parent / script), json.dumps(settings)], RUN_S).splitlines()
    try:
        return {key: [float(value) for value in values] for key, values in json.loads(lines[-1]).items()}
    except (IndexError, AttributeError, TypeError, ValueError):
        raise Unavailable("hivemind's workers said nothing of use") from None
