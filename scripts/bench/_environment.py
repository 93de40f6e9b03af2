"""What rivals need is set up once, in environments of their own below .ci/out. Standard library
only: this is imported inside them, too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / ".ci" / "out"
INSTALL_S = 600


class Unavailable(Exception):
    """What is measured beside us cannot be had here; the text says why."""


def set_up(what: str, command: list[str], limit_s: float) -> str:
    """Run a command to its end; what it printed. Raises Unavailable, with the line that tells most
    of what ``what`` lacks.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {command[0]}: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        lines = [
            line for line in lines if not line.startswith(("note:", "ERROR:", "error: subprocess"))
        ] or lines  # pip's own words say less
        telling = next(
            (line for line in reversed(lines) if "rror:" in line),
            lines[-1] if lines else f"exit status {done.returncode}",
        )
        raise Unavailable(f"{what} cannot be set up here: {telling[:300]}")
    return done.stdout


def made(what: str, name: str, packages: Sequence[str], check: str) -> str:
    """Python of an environment with these packages and our torch, made on first use, in which the
    line ``check`` runs. Raises Unavailable.
    """
    folder = OUT / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"{what}: making .ci/out/{name}", file=sys.stderr, flush=True)
        set_up(what, [sys.executable, "-m", "venv", "--clear", str(folder)], 120)
        # torch is ours, so that both use the same; what a rival brings itself comes first
        site = next((folder / "lib").glob("python*")) / "site-packages"
        import torch

        own = str(Path(torch.__path__[0]).parent)
        (site / "zz_torch.pth").write_text(own + "\n", encoding="utf-8")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
        set_up(what, [*install, *packages], INSTALL_S)
        set_up(what, [str(python), "-c", check], 120)
        (folder / "complete").touch()
    return str(python)
