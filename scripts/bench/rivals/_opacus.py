"""Epsilon as opacus calculates it, in an environment of its own: the table that our accountant is
tested against.

python scripts/bench/rivals/_opacus.py > tests/unit/privacy_opacus.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

VERSION, SCIPY = "1.6.0", "1.17.1"
FOLDER = Path(__file__).resolve().parents[3] / ".ci" / "out" / "opacus"
INSTALL_S = 600

NOISES = (0.5, 0.7, 1.0, 1.5, 3.0, 6.0)
RATES = (0.001, 0.01, 0.05, 0.2, 1.0)
STEPS = (1, 100, 10_000)
DELTA = 1e-5

ASK = """
import importlib.util, json, pathlib, sys, warnings
import numpy
warnings.simplefilter("ignore")  # that the best order is the last one
file = next(pathlib.Path(sys.prefix).glob("lib/python*/site-packages/opacus/accountants/analysis/rdp.py"))
spec = importlib.util.spec_from_file_location("rdp", file)  # by its path: the package would load torch
rdp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rdp)
orders = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))  # opacus.accountants.RDPAccountant.DEFAULT_ALPHAS
table = []
for noise, rate, steps, delta in json.load(sys.stdin):
    costs = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=orders)
    table.append([noise, rate, steps, float(rdp.get_privacy_spent(orders=orders, rdp=costs, delta=delta)[0])])
json.dump(table, sys.stdout)
"""


def environment() -> str:
    """Python of an environment with opacus' formulas, made on first use."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / "complete").exists():
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True, timeout=INSTALL_S
        )
        for what in (f"scipy=={SCIPY}", f"opacus=={VERSION}"):
            subprocess.run(
                [str(python), "-m", "pip", "install", "-q", "--no-deps", what],
                check=True,
                timeout=INSTALL_S,
            )
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "numpy"], check=True, timeout=INSTALL_S
        )
        (FOLDER / "complete").touch()
    return str(python)


def main() -> None:
    """See the top of the file."""
    settings = [
        (noise, rate, steps, DELTA) for noise in NOISES for rate in RATES for steps in STEPS
    ]
    done = subprocess.run(
        [environment(), "-c", ASK],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        check=True,
    )
    rows = ",\n  ".join(json.dumps(row) for row in json.loads(done.stdout))
    print(
        f'{{"opacus": "{VERSION}", "delta": {DELTA}, "noise, rate, steps, epsilon": [\n  {rows}\n]}}'
    )


if __name__ == "__main__":
    main()
