"""Every script of scripts/examples runs, alone and on tiny data, and trains what it says it trains;
the plain one, the lines of the README, and a job of two sharded ranks with a peer of one process
also as two peers with real nodes."""

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

from atoll.node.views.documents import privacy_text

EXAMPLES = {  # rounds, samples counted, loss at most: it starts at 4 to 5 (trainer: 2.8)
    "plain": (6, 6 * 10 * 32, 2.0),
    "notebook": (3, 25 * 32, 5.5),
    "trainer": (4, 4 * 5 * 8 * 2, 2.0),
    "lightning": (6, 6 * 10 * 32, 2.0),
    "fsdp2": (6, 6 * 10 * 32 * 2, 2.0),
    "hospital/train": (8, 8 * 10 * 20, 0.5),  # it starts at 0.9
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
EXAMPLE = str(ROOT / "scripts/examples/{}.py")


def test_all_are_here() -> None:
    folder = ROOT / "scripts/examples"
    there = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py")}
    assert there == {
        *EXAMPLES,
        "experts",
        "hospital/site",
        "hospital/task",
    }  # data of the one beside them, in a run and in a simulation


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ATOLL_DATA__FACTORY": f"{EXAMPLE.format('hospital/site')}:make",
    }
    command = [sys.executable, *(TORCHRUN if name == "fsdp2" else []), EXAMPLE.format(name)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = re.search(
        r"^round (\d+), (\d+) samples counted, (?:held-out )?loss ([\d.]+)$",
        done.stdout,
        re.MULTILINE,
    )
    assert said is not None, done.stdout
    rounds, samples, most = EXAMPLES[name]
    assert (int(said[1]), int(said[2])) == (rounds, samples)
    assert float(said[3]) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says", "least", "most"),
    [
        ([], "drawn points are ([\\d.]+) from the middle", 0.0, 0.4),  # the data's: 0.16
        (["classes"], "([\\d.]+) of the points are classified right", 0.9, 1.0),
    ],
)
def test_experts_and_a_router(
    words: list[str], says: str, least: float, most: float, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE.format("experts"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (found := re.search(says, done.stdout)) is not None, done.stdout
    assert least <= float(found[1]) <= most


RUN = """
schema = 1
name = "mine"
[model]
entry = "local:mlp"
[train]
round_s = 0.5
rounds = 30
start_with = 2
"""


def atoll(home: Path, *argv: str) -> dict[str, Any]:
    """A command's one object."""
    command = [sys.executable, "-m", "atoll.node.cli", *argv, "--json"]
    done = subprocess.run(
        command, env=around(home), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def around(home: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ATOLL_HOME": str(home),
        "ATOLL_NODE__LISTEN": "/ip4/127.0.0.1/tcp/0",
        "CI": "1",
        **more,
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["plain", "readme", "fsdp2"])
def test_two_peers_with_nodes_of_their_own(what: str, tmp_path: Path) -> None:
    """The first has a node that was started before, the second is invited and gets a private one."""
    first, second, plain = tmp_path / "one", tmp_path / "two", [EXAMPLE.format("plain")]
    if what == "readme":
        plain = [str(tmp_path / "train.py")]
        readme = re.findall(
            r"```python\n(.*?)```",
            (ROOT / "README.md").read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )[0]
        (tmp_path / "train.py").write_text(readme)
    other = (
        [*TORCHRUN, EXAMPLE.format("fsdp2")] if what == "fsdp2" else plain
    )  # of one mesh size and of another: the same model
    (tmp_path / "run.toml").write_text(RUN)
    atoll(first, "up", "--background")
    try:
        invite = atoll(first, "new", str(tmp_path / "run.toml"))["invite"]
        pipe = subprocess.PIPE
        scripts = [
            subprocess.Popen(
                [sys.executable, *command, *argv],
                env=environment,
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
            for command, argv, environment in (
                (plain, [] if what == "readme" else [invite], around(second, ATOLL_INVITE=invite)),
                (other, [] if what == "readme" else ["mine"], around(first)),
            )
        ]
        said = [process.communicate(timeout=200) for process in scripts]
        assert [process.returncode for process in scripts] == [0, 0], "\n".join(
            f"{out}\n{err}" for out, err in said
        )
        rounds = atoll(first, "status", "mine")["runs"][0]
        assert rounds["round"] == 30
        if what != "readme":
            pattern = r"^round (\d+), (\d+) samples counted, held-out loss ([\d.]+)$"
            lines = [re.search(pattern, out, re.MULTILINE) for out, _ in said]
            assert all(line and int(line[1]) == 30 and int(line[2]) > 0 for line in lines), said
            assert len({line[3] for line in lines if line}) == 1  # they have the same anchor
    finally:
        atoll(first, "down")


@pytest.mark.slow
def test_the_hospital_template_with_four_sites(tmp_path: Path) -> None:
    """From `atoll new --template` to a trained model, on tiny data: each site with a data file of
    its own, none of which a manifest names.
    """
    text = atoll(tmp_path / "p0", "new", "--template", "federated-hospital")["text"]
    text = (
        text.replace("most_examples = 1000", "most_examples = 160")
        .replace("normaliser = 3.0", "normaliser = 4.0")
        .replace("rounds = 50", "rounds = 3")
        .replace("noise = 5.0", "noise = 0.5")
    )
    (tmp_path / "run.toml").write_text(text.replace("epsilon = 12\n", "epsilon = 60\n"))
    script, data = EXAMPLE.format("hospital/train"), f"{EXAMPLE.format('hospital/site')}:make"
    homes = [tmp_path / f"p{index}" for index in range(4)]
    atoll(homes[0], "up", "--background")
    try:
        made = atoll(homes[0], "new", str(tmp_path / "run.toml"))
        assert made["invite"] is None  # each site has one of its own, by name
        invites = [
            atoll(homes[0], "invite", "new", made["run_id"], "--name", f"clinic-{index}")["invite"]
            for index in range(1, 4)
        ]
        sites = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "atoll.node.cli",
                    "join",
                    target,
                    "--script",
                    script,
                    "--data",
                    data,
                    "--yes",
                    *form,
                ],
                env=around(home, SITE=home.name),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            for home, target, form in zip(
                homes, ["hospitals", *invites], [(), ("--json",), (), ()], strict=True
            )
        ]
        said = [site.communicate(timeout=250) for site in sites]
        assert [site.returncode for site in sites] == [0] * 4, "\n".join(
            f"{out}\n{err}" for out, err in said
        )
        losses = [
            re.search(r"round 3, \d+ samples counted, held-out loss ([\d.]+)", out + err)
            for out, err in said
        ]
        assert all(losses), said
        assert len({found[1] for found in losses if found}) == 1  # they have the same anchor
        (run,) = atoll(homes[0], "status")["runs"]
        assert run["secure"]["last"]["members"]
        assert 0 < run["privacy"]["epsilon"] <= 60
        told = re.search(r"^epsilon ([\d.]+) spent here at delta", said[0][0], re.MULTILINE)
        assert told, said[0]
        assert 0 < float(told[1]) <= round(run["privacy"]["epsilon"], 3)
        right = re.search(
            r"^accuracy at this site: ([\d.]+) with the run's model, ([\d.]+) with one of its own",
            said[0][0],
            re.MULTILINE,
        )
        assert right, said[0]
        reported = [run["metrics"][name] for name in ("accuracy_here", "accuracy_own")]
        assert [round(value, 3) for value in reported] == [float(right[1]), float(right[2])]
        assert run["privacy"]["steps"] >= 3
        assert f"Privacy: {privacy_text(run['privacy'])}\n" in said[0][1]
        spent = json.loads(said[1][0])["privacy"]
        assert spent.keys() == run["privacy"].keys()
        assert spent["steps"] >= 3
    finally:
        atoll(homes[0], "down")
