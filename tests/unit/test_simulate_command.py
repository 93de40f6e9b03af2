"""`atoll simulate`: from a manifest and options to a table, a document and a picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from house import ROOT

from atoll.node.cli import run
from atoll.node.cli.templates import TEMPLATES
from atoll.security.identity import Identity

RUN = 'schema = 1\nname = "tide"\n[model]\nentry = "local:blobs"\n[train]\nsync_every = 4\n[train.inner]\nbatch = 8\n'
TASK = """
import torch
from torch import nn
from atoll.optim.federated.simulation import Task

def blobs():
    chance = torch.Generator().manual_seed(0)
    y = torch.arange(160) % 4
    x = torch.eye(4)[y] * 3 + torch.randn(160, 4, generator=chance)
    def model():
        torch.manual_seed(0)
        return nn.Linear(4, 4)
    return Task(model, x[:120], y[:120], x[120:], y[120:])

nothing = dict
"""


@pytest.fixture
def folder(atoll_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "blobs.py").write_text(TASK)
    return tmp_path


def simulated(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> dict[str, Any]:
    assert run(["simulate", "run.toml", *options, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_methods_are_compared_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace.json").write_text('{"period_s": 100, "clients": [[[0, 90]], [[10, 100]]]}')
    options = [
        "--task",
        "blobs.py:blobs",
        "--clients",
        "5",
        "--speeds",
        "1,1.5,2,4,5",
        "--rounds",
        "6",
        "--seeds",
        "2",
        "--out",
        "found",
    ]
    options += [
        "--methods",
        "fedavg, scaffold,fedcompass",
        "--dropout",
        "0.1",
        "--trace",
        "trace.json",
        "--personal",
        "ditto",
    ]
    found = simulated(capsys, *options)
    assert list(found["table"]) == list(found["curves"]) == ["fedavg", "scaffold", "fedcompass"]
    assert found["table"]["fedavg"]["rounds"] == 6
    assert (
        found["table"]["scaffold"]["bytes"] == 2 * found["table"]["fedavg"]["bytes"]
    )  # the same clients were asked, and dropped
    assert found["table"]["fedcompass"]["idle_share"] < found["table"]["fedavg"]["idle_share"]
    assert all(len(found["curves"][name]) == 2 for name in found["table"])
    assert [(name, len(sites["own"])) for name, sites in found["sites"].items()] == [
        ("fedavg", 5),
        ("scaffold", 5),
    ]
    assert all(len(accuracies) == 5 for accuracies in found["by_site"].values())
    written = json.loads((folder / "found" / "simulation.json").read_text())
    assert written["table"] == found["table"]
    drawn = folder / "found" / "curves.png"
    assert drawn.exists() == (importlib.util.find_spec("matplotlib") is not None)
    if drawn.exists():
        assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_built_in_model_is_simulated_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "config = { width = 8, layers = 1, heads = 1, context = 8 }"
    (folder / "run.toml").write_text(
        f'schema = 1\nname = "text"\n[model]\n{config}\n[train]\nrounds = 2\nsync_every = 2\n'
    )
    found = simulated(capsys, "--clients", "30", "--asked", "3", "--shards", "2")
    assert (found["table"]["fedavg"]["rounds"], found["table"]["fedavg"]["turns"]) == (2, 6)


def test_the_manifests_rule_holds_against_an_attack(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--task",
        "blobs.py:blobs",
        "--clients",
        "6",
        "--alpha",
        "100",
        "--rounds",
        "8",
        "--attack",
        "sign_flip_1000",
        "--hostile",
        "2",
    ]
    plain = simulated(capsys, *options)["table"]["fedavg"]["accuracy"]
    (folder / "run.toml").write_text(RUN + '[robust]\nrule = "median"\nf = 2\n')
    assert simulated(capsys, *options)["table"]["fedavg"]["accuracy"] > plain + 0.2


def test_the_manifests_method_and_outer_step_are_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--task", "blobs.py:blobs", "--clients", "4", "--rounds", "3"]
    plain = simulated(capsys, *options)["curves"]["fedavg"][0][-1]["loss"]
    (folder / "run.toml").write_text(
        RUN.replace(
            "[model]", 'kind = "federated"\n[federated]\nmethod = "fedavg"\nlr = 0.01\n[model]', 1
        )
    )
    slow = simulated(capsys, *options)["curves"]["fedavg"][0]
    assert plain < slow[-1]["loss"] < slow[0]["loss"]
    assert (
        simulated(capsys, *options, "--server-lr", "1")["curves"]["fedavg"][0][-1]["loss"] == plain
    )
    (folder / "run.toml").write_text(
        RUN.replace("[model]", 'kind = "federated"\n[federated]\nmethod = "scaffold"\n[model]', 1)
    )
    assert list(simulated(capsys, *options)["table"]) == ["scaffold"]
    assert list(simulated(capsys, *options, "--methods", "fedprox")["table"]) == ["fedprox"]


def federated(tables: str) -> str:
    return RUN.replace("[model]", 'kind = "federated"\n[model]', 1) + tables


def test_contributions_are_bounded_and_have_the_noise_that_the_manifest_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulation without it would show a hospital a model that it never gets."""
    options = [
        "--task",
        "blobs.py:blobs",
        "--clients",
        "6",
        "--alpha",
        "100",
        "--rounds",
        "9",
        "--methods",
        "fedavg,scaffold",
    ]
    secure = "[secure]\nthreshold = 3\n"
    privacy = (
        "[privacy]\nnoise = {}\nclip = 0.5\ndelta = 1e-5\nstop_at_epsilon = 200\nquantile = 0.5\n"
    )
    found = dict[str, dict[str, Any]]()
    for name, tables in {
        "plain": "",
        "masked": secure,
        "quiet": secure + privacy.format(0.5),
        "loud": secure + privacy.format(20.0),
    }.items():
        (folder / "run.toml").write_text(
            federated(tables).replace("sync_every", "rounds = 9\nsync_every")
        )
        found[name] = simulated(capsys, *options)
    accuracy = {name: each["table"]["fedavg"]["accuracy"] for name, each in found.items()}
    assert accuracy["plain"] == accuracy["masked"] > 0.9
    assert accuracy["quiet"] > accuracy["loud"] + 0.2
    assert (
        found["quiet"]["table"]["fedavg"]["epsilon"]
        > 5 * found["loud"]["table"]["fedavg"]["epsilon"]
        > 0
    )
    assert "epsilon" not in found["masked"]["table"]["fedavg"]
    assert (
        "epsilon" not in found["loud"]["table"]["scaffold"]
    )  # with which it does not go, which is said
    assert found["loud"]["table"]["scaffold"]["accuracy"] > 0.9


def test_the_hospitals_example_is_simulated_with_its_template(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.toml").write_text(TEMPLATES["federated-hospital"])
    found = simulated(
        capsys,
        "--task",
        f"{ROOT / 'scripts/examples/hospital/task.py'}:hospitals",
        "--clients",
        "20",
        "--rounds",
        "3",
        "--steps",
        "5",
    )
    assert found["run"] == "hospitals"
    assert found["table"]["fedavg"]["rounds"] == 3
    assert 0 < found["table"]["fedavg"]["epsilon"] < 12
    assert found["table"]["fedavg"]["accuracy"] > 0.5


def test_buckets_are_compared_and_too_few_sites_make_no_round(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--task",
        "blobs.py:blobs",
        "--alpha",
        "100",
        "--rounds",
        "6",
        "--attack",
        "sign_flip_1000",
        "--hostile",
        "1",
    ]
    (folder / "run.toml").write_text(federated("[secure]\nthreshold = 3\nreach = 1e6\n"))
    spoilt = simulated(capsys, *options, "--clients", "9")["table"]["fedavg"]["accuracy"]
    (folder / "run.toml").write_text(
        federated(
            '[secure]\nthreshold = 3\nreach = 1e6\nbuckets = 3\n[robust]\nrule = "median"\nf = 1\n'
        )
    )
    assert (
        simulated(capsys, *options, "--clients", "9")["table"]["fedavg"]["accuracy"] > spoilt + 0.2
    )
    assert simulated(capsys, *options, "--clients", "8", status=78)["error"]["key"] == "clients"
    assert (
        "without a step"
        in simulated(capsys, *options, "--clients", "9", "--dropout", "0.9", status=75)["error"][
            "message"
        ]
    )


WORK = RUN.replace(
    "[model]", 'kind = "federated"\n[federated]\nwork = { epochs = 1 }\n[model]', 1
).replace("sync_every = 4\n", "")


def test_sites_of_a_size_and_a_speed_are_played_with_their_deaths(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.toml").write_text(WORK)
    (folder / "churn.txt").write_text("at 12 kill 1   # for good\nat 21 kill site-2 back 1\n")
    options = ["--task", "blobs.py:blobs", "--rounds", "3", "--sites", "60@1s, 30@1s, 2 x 10@3s"]
    options += ["--churn", "churn.txt"]
    (found,) = simulated(capsys, *options)["rounds"]["fedavg"]
    assert found["stalled"] == ""
    first, second, third = found["rounds"]
    everybody = {"site-0": 60, "site-1": 30, "site-2": 10, "site-3": 10}
    assert (first["seconds"], first["weights"]) == (8.0, everybody)
    assert first["steps"] == {"site-0": 8, "site-1": 4, "site-2": 2, "site-3": 2}
    # done at 12 s, and killed then: it is waited for 15 s
    assert (second["seconds"], second["missing"]) == (27.0, ["site-1"])
    assert second["weights"].keys() == {"site-0", "site-2", "site-3"}
    assert (third["seconds"], third["missing"]) == (35.0, [])
    assert run(["simulate", "run.toml", *options]) == 0
    assert "fedavg: not in all of 3 rounds: site-1 in 1" in capsys.readouterr().out


def test_a_run_of_too_few_sites_gets_no_further_and_says_what_it_lacks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.toml").write_text(WORK + "[secure]\nmax_weight = 100\n")
    (folder / "churn.txt").write_text("at 12 kill 1\n")
    options = ["--task", "blobs.py:blobs", "--rounds", "9", "--sites", "60, 30, 10"]
    options += ["--churn", "churn.txt"]
    (found,) = simulated(capsys, *options)["rounds"]["fedavg"]
    assert len(found["rounds"]) == 1
    assert found["stalled"] == "2 of 3 sites are there and done, and a round needs 3"
    assert run(["simulate", "run.toml", *options]) == 0
    assert f"fedavg: no further round after 1: {found['stalled']}" in capsys.readouterr().out


def test_fednova_divides_by_the_steps_of_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was FedAvg in a simulation: with unequal steps it is another method."""
    (folder / "run.toml").write_text(WORK)
    options = ["--task", "blobs.py:blobs", "--rounds", "2", "--sites", "100, 10, 10"]
    told = simulated(capsys, *options, "--methods", "fedavg,fednova")["curves"]
    assert told["fedavg"][0][-1]["loss"] != told["fednova"][0][-1]["loss"]
    (folder / "run.toml").write_text(WORK.replace("epochs = 1", "steps = 4"))
    told = simulated(capsys, *options, "--methods", "fedavg,fednova")["curves"]
    assert told["fedavg"][0][-1]["loss"] == pytest.approx(told["fednova"][0][-1]["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ([], "task"),
        (["--task", "blobs.py"], "task"),
        (["--task", "none.py:blobs"], "task"),
        (["--task", "blobs.py:nothing"], "task"),
        (["--task", "blobs.py:blobs", "--methods", "fed"], "methods"),
        (["--task", "blobs.py:blobs", "--speeds", "1,x"], "speeds"),
        (["--task", "blobs.py:blobs", "--trace", "run.toml"], "trace"),
        (["--task", "blobs.py:blobs", "--attack", "storm", "--hostile", "1"], "attack"),
        (["--task", "blobs.py:blobs", "--sites", "960@x"], "sites"),
        (["--task", "blobs.py:blobs", "--sites", "960, 640"], "sites"),
        (["--task", "blobs.py:blobs", "--sites", "9, 9", "--clients", "2"], "clients"),
        (["--task", "blobs.py:blobs", "--churn", "mtbf=2h"], "churn"),
    ],
)
def test_what_cannot_be_simulated_is_a_coded_error(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], key: str
) -> None:
    assert simulated(capsys, *options, status=78)["error"]["key"].endswith(key)


def test_an_attack_on_a_run_with_btard_is_refused_with_the_script_that_plays_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = [str(Identity(bytes([number]) * 32).peer) for number in range(7)]
    join = f"[join]\npolicy = 'allow'\nallow = {peers}\n[btard]\nvalidators = 2\n[train]"
    (folder / "run.toml").write_text('kind = "seeded"\n' + RUN.replace("[train]", join, 1))
    for attack in ("equivocation", "sign_flip", "storm"):
        refused = simulated(capsys, "--attack", attack, "--hostile", "2", status=78)["error"]
        assert refused["key"].endswith("attack")
        assert refused["message"] == "--attack was removed for runs with [btard], as tide is"
        assert "scripts/bench/bench_btard.py --runs 0 --attacks NAME" in refused["hints"][0]
