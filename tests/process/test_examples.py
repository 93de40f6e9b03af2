"""Every script of scripts/examples runs, alone and on tiny data, and trains what it says it trains; the plain one, and the lines of the
README, also as two peers with real nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


RUN = """
schema = 1
name = "mine"
[model]
entry = "local:mlp"
[train]
round_s = 0.5
rounds = 30
"""


def atoll(home: Path, *argv: str) -> dict[str, Any]:
    """A command's one object."""
    command = [sys.executable, "-m", "atoll.node.cli", *argv, "--json"]
    done = subprocess.run(command, env=around(home), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def around(home: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_HOME": str(home), "ATOLL_NODE__LISTEN": "/ip4/127.0.0.1/tcp/0", "CI": "1", **more}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["plain", "readme"])
def test_two_peers_with_nodes_of_their_own(what: str, tmp_path: Path) -> None:
    """The first has a node that was started before, the second is invited and gets a private one."""
    first, second, script = tmp_path / "one", tmp_path / "two", ROOT / "scripts/examples/plain.py"
    if what == "readme":
        script = tmp_path / "train.py"
        script.write_text(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)[0])
    (tmp_path / "run.toml").write_text(RUN)
    atoll(first, "up", "--background")
    try:
        invite = atoll(first, "new", str(tmp_path / "run.toml"))["invite"]
        pipe = subprocess.PIPE
        scripts = [
            subprocess.Popen([sys.executable, str(script), *argv], env=environment, stdout=pipe, stderr=pipe, text=True)
            for argv, environment in (
                ([invite] if what == "plain" else [], around(second, ATOLL_INVITE=invite)),
                (["mine"] if what == "plain" else [], around(first)),
            )
        ]
        said = [process.communicate(timeout=200) for process in scripts]
        assert [process.returncode for process in scripts] == [0, 0], said
        rounds = atoll(first, "status", "mine")["runs"][0]
        assert rounds["round"] == 30
        if what == "plain":
            lines = [re.fullmatch(r"round (\d+), (\d+) samples counted, held-out loss ([\d.]+)\n", out) for out, _ in said]
            assert all(line and int(line[1]) == 30 and int(line[2]) > 0 for line in lines), said
            assert len({line[3] for line in lines if line}) == 1  # they have the same anchor
    finally:
        atoll(first, "down")
