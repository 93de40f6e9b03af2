"""Every script of scripts/examples runs, alone and on tiny data, and trains what it says it trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from house import ROOT

EXAMPLES = {  # rounds, samples counted, loss at most: it starts at 4 to 5 (trainer: 2.8)
    "plain": (6, 6 * 10 * 32, 2.0),
    "notebook": (3, 25 * 32, 5.5),
    "trainer": (4, 4 * 5 * 8 * 2, 2.0),
    "lightning": (6, 6 * 10 * 32, 2.0),
    "fsdp2": (6, 6 * 10 * 32 * 2, 2.0),
}


def test_all_are_here() -> None:
    assert {path.stem for path in (ROOT / "scripts/examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name == "fsdp2" else []
    command = [sys.executable, *torchrun, str(ROOT / "scripts/examples" / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = re.search(r"^round (\d+), (\d+) samples counted, (?:held-out )?loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert said is not None, done.stdout
    rounds, samples, most = EXAMPLES[name]
    assert (int(said[1]), int(said[2])) == (rounds, samples)
    assert float(said[3]) < most
