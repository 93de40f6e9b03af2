"""byzfl beside us: its own pinned environment, and a process there that runs its rules on the rows
we name.

python scripts/bench/rivals/_byzfl.py        (inside that environment) answers one JSON line for each on its
                                standard input
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # helpers of the measurements

from _environment import OUT, Unavailable, set_up

VERSION, SCIPY = "0.0.11", "1.17.1"
WHAT, FOLDER = f"byzfl {VERSION}", OUT / "byzfl"
INSTALL_S = 600

RULES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # ours -> theirs; "f" stands for the number of hostile rows
    "median": ("Median", {}),
    "trimmed_mean": ("TrMean", {"f": "f"}),
    "meamed": ("Meamed", {"f": "f"}),
    "krum": ("Krum", {"f": "f"}),
    "multi_krum": ("MultiKrum", {"f": "f"}),
    "mda": ("MDA", {"f": "f"}),
    "monna": ("MoNNA", {"f": "f", "idx": 0}),
    "geometric_median": ("GeometricMedian", {"nu": 0.1, "T": 3}),
    "centred_clip": ("CenteredClipping", {"L": 5, "tau": 100.0}),
    "clip_once": ("CenteredClipping", {"L": 1, "tau": 100.0}),
    "caf": ("CAF", {"f": "f"}),
    "nnm": ("NNM", {"f": "f"}),
    "bucketing": ("Bucketing", {"s": 2}),
    "clipping": ("Clipping", {"c": 2.0}),
    "clipping_kept": ("Clipping", {"c": 2.0}),
    "arc": ("ARC", {"f": "f"}),
    "arc_kept": ("ARC", {"f": "f"}),
}


def environment() -> str:
    """Python of an environment with byzfl's rules, made on first use. Raises Unavailable."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / "complete").exists():
        print(f"byzfl: making an environment with byzfl {VERSION}", file=sys.stderr)
        set_up(WHAT, [sys.executable, "-m", "venv", "--clear", str(FOLDER)], INSTALL_S)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
        set_up(WHAT, [*install, f"scipy=={SCIPY}"], INSTALL_S)
        set_up(
            WHAT, [*install, "--no-deps", f"byzfl=={VERSION}"], INSTALL_S
        )  # its plots and image data sets are not what is measured
        import torch

        site = next((FOLDER / "lib").glob("python*")) / "site-packages"
        (site / "zz_torch.pth").write_text(
            str(Path(torch.__path__[0]).parent) + "\n", encoding="utf-8"
        )  # ours: both use the same
        (FOLDER / "complete").touch()
    return str(python)


class Byzfl:
    """The process, while the context lasts; ``threads`` of torch and of numpy's BLAS. Raises
    Unavailable where there is none.
    """

    def __init__(self, threads: int = 1) -> None:
        settings = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)
        )
        command = [environment(), __file__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )

    def __enter__(self) -> Byzfl:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def ask(self, **question: Any) -> Any:
        """The process's answer to one question."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"byzfl's process ended at {question}")
        return json.loads(line)


def _aggregators() -> ModuleType:
    """byzfl.aggregators without the package around it, which wants torchvision and seaborn."""
    import importlib
    from importlib.util import find_spec

    found = find_spec("byzfl")
    assert found is not None
    package = ModuleType("byzfl")
    package.__path__ = list(found.submodule_search_locations or [])
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators")


def serve() -> None:
    """Answers {n, d, seed} by making rows, {file} by loading them, {rule, f, backend, value} by
    milliseconds, wall and CPU (and the value).
    """
    import numpy as np
    import torch

    theirs, rows = _aggregators(), np.zeros((1, 1), np.float32)
    for line in sys.stdin:
        question = json.loads(line)
        if "n" in question:
            rows = np.random.default_rng(question["seed"]).standard_normal(
                (question["n"], question["d"]), dtype=np.float32
            )
        if "rows" in question:
            rows = np.array(question["rows"], np.float64)
        if "rule" not in question:
            print(json.dumps("ready"), flush=True)
            continue
        name, options = RULES[question["rule"]]
        settings = {
            key: question["f"] if value == "f" else value for key, value in options.items()
        } | question.get("options", {})
        rule = getattr(theirs, name)(**settings)
        given = (
            rows.copy() if question["backend"] == "numpy" else torch.from_numpy(rows.copy())
        )  # some overwrite what they are given
        cpu, start = time.process_time(), time.perf_counter()
        value = rule(given)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(
            json.dumps(
                {
                    "ms": 1000 * wall,
                    "cpu_ms": 1000 * cpu,
                    "value": np.asarray(value).tolist() if question.get("value") else None,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    serve()
