"""From a file and a folder to a model that answers: the command line alone, two homes on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import random_models
from cli_kit import LISTEN, atoll, nothing_stays, start

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.slow

LOAD = """
import sys, torch, transformers
torch.set_num_threads(1)
base, out = sys.argv[1:]
ids = torch.arange(5, 37).view(2, 16)
load = transformers.AutoModelForCausalLM.from_pretrained
if base == out:
    model = load(out)
else:
    import peft
    model = peft.PeftModel.from_pretrained(load(base), out)
assert not [name for name in sys.modules if name.startswith("atoll.")]
print(model.eval()(input_ids=ids).logits.double().sum().item().hex())
"""


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    with nothing_stays():
        yield


def records(path: Path, word: str) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{word} {number}"},
                {"role": "assistant", "content": f"the {word} answers {number % 7}"},
            ]
        }
        for number in range(120)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def line_of(stream: IO[str], start: str) -> str:
    """The rest of the first line that starts so."""
    seen = list[str]()
    for line in stream:
        seen.append(line)
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise AssertionError("".join(seen))


def elsewhere(base: Path, out: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(base), str(out)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return float.fromhex(done.stdout.split()[-1])


@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_members_type_a_file_and_an_invite(method: str, tmp_path: Path) -> None:
    base = random_models.write_model(tmp_path / "tiny", "llama_tied")
    one, two = tmp_path / "one", tmp_path / "two"
    file = tmp_path / "run.toml"
    file.write_text(
        f'schema = 1\nname = "tiny"\n[model]\nfolder = "tiny"\nmethod = "{method}"\n'
        '[data]\nsource = "local"\nlength = 64\nheld_out = 0.1\n'
        "[train]\nsync_every = 2\nrounds = 3\nstart_with = 2\n"
        "[train.inner]\nlr = 1e-2\nsteps = 6\ntokens_per_step = 128\n"
        "[evaluate]\n[checkpoint]\nevery = 1\n"
    )
    given = ("--yes", "--no-input", "--threads", "1")
    mine = records(tmp_path / "mine.jsonl", "swarm")
    other = records(tmp_path / "other.jsonl", "model")
    first = start(one, "join", str(file), "--data", str(mine), *given)
    assert first.stderr is not None
    invite = line_of(first.stderr, "invite ")
    second = start(two, "join", invite, "--data", str(other), "--model", str(base), *given)
    for process in (first, second):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        assert "is finished: all its 3 rounds are committed" in err
    again = atoll(one, "join", str(file), "--dry-run")
    out = tmp_path / "out"
    exported = atoll(one, "export", again["run_id"], str(out))
    assert (exported["round"], exported["missing"]) == (3, [])
    atoll(two, "export", again["run_id"], str(tmp_path / "same"))
    source = base if method == "lora" else out
    same = tmp_path / "same"
    assert elsewhere(source, out) == elsewhere(base if method == "lora" else same, same)
    assert elsewhere(source, out) != elsewhere(base, base)
    told = atoll(one, "chat", str(out), "swarm 1", "--tokens", "8")
    assert (
        told["answer"] == atoll(two, "chat", again["run_id"], "swarm 1", "--tokens", "8")["answer"]
    )
    if method == "lora":
        atoll(one, "export", again["run_id"], str(tmp_path / "merged"), "--merge")
        assert (tmp_path / "merged" / "model.safetensors").exists()


def test_another_base_is_refused_before_training(tmp_path: Path) -> None:
    random_models.write_model(tmp_path / "tiny", "llama_tied")
    other = random_models.write_model(tmp_path / "other", "llama_tied", seed=8)
    file = tmp_path / "run.toml"
    file.write_text(
        'schema = 1\nname = "tiny"\n[model]\nfolder = "tiny"\nmethod = "lora"\n'
        '[data]\nsource = "local"\n[train]\nrounds = 3\n'
    )
    mine = records(tmp_path / "mine.jsonl", "swarm")
    found = atoll(
        tmp_path / "one",
        "join",
        str(file),
        "--data",
        str(mine),
        "--model",
        str(other),
        "--yes",
        status=78,
    )
    assert found["error"]["code"] == "E415"
    assert "model.safetensors differs" in found["error"]["message"]


SLOW_DATA = """
import json, pathlib, time
def make():
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.05)
    return [json.loads(line) for line in open({rows!r})]
"""
RECIPE = [sys.executable, "-m", "atoll.node.recipes.finetune", "--progress", "--threads", "1"]


def recipe(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """The recipe that `atoll join` starts, with what it says as records on its stdout."""
    return subprocess.Popen(
        [*RECIPE, "--home", str(home), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ATOLL_HOME": str(home), "CI": "1"},
    )


@pytest.fixture
def up(tmp_path: Path) -> Iterator[list[Path]]:
    """Two homes whose nodes are up."""
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        atoll(home, "up", "--background", *LISTEN)
    yield homes
    for home in homes:
        atoll(home, "down")


def test_status_top_and_page_have_the_figures_that_the_scripts_said(
    up: list[Path], tmp_path: Path
) -> None:
    """What the page is sent is what `atoll top --json` prints."""
    base = random_models.write_model(tmp_path / "tiny", "llama_tied")
    homes, file = up, tmp_path / "run.toml"
    file.write_text(
        'schema = 1\nname = "tiny"\n[model]\nfolder = "tiny"\nmethod = "lora"\n'
        '[data]\nsource = "local"\nlength = 64\nheld_out = 0.1\n'
        "[train]\nsync_every = 2\nrounds = 8\nstart_with = 2\n"
        "[train.inner]\nlr = 1e-2\nsteps = 16\ntokens_per_step = 128\n"
        '[prompts]\ntexts = ["swarm 1"]\nevery = 1\ntokens = 4\n'
    )
    invite = atoll(homes[0], "new", str(file))["invite"]
    rows, made, go = records(tmp_path / "two.jsonl", "two"), tmp_path / "own.py", tmp_path / "go"
    made.write_text(SLOW_DATA.format(rows=str(rows), go=str(go)))
    data = (str(records(tmp_path / "one.jsonl", "one")), f"{made}:make")
    scripts = [
        recipe(home, run, "--data", given, "--model", str(base), "--evaluate-every", "4")
        for home, run, given in zip(homes, ("tiny", invite), data, strict=True)
    ]
    wanted = {str(scripts[1].pid): "reads its data"}
    while prepared_at(homes[1]) != wanted:
        assert scripts[1].poll() is None, scripts[1].communicate()
        time.sleep(0.2)
    go.touch()
    said = list[list[dict[str, Any]]]()
    for process in scripts:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        said.append([json.loads(line) for line in out.splitlines()])
    finals = {
        record["peer"]: record for rows in said for record in rows if record["event"] == "final"
    }
    assert len(finals) == 2
    for home, rows in zip(homes, said, strict=True):
        found = atoll(home, "top", "tiny")
        (run,) = atoll(home, "status")["runs"]
        for peer in found["peers"]:
            assert peer["samples"] == finals[peer["id"]]["samples_counted"]
            assert peer["rounds"] == finals[peer["id"]]["counted"]
        told = [row for row in rows if row["event"] == "evaluation"][-1]
        (end,) = (row for row in rows if row["event"] == "final")
        assert found["evaluation"]["held_out"] == run["evaluation"]["held_out"] == end["held_out"]
        assert found["evaluation"] == {key: told[key] for key in ("round", "tokens", "held_out")}
        mine = [row for row in rows if row["event"] == "sample"]
        assert [answer[1:3] for answer in found["answers"]] == [
            [row["round"], row["prompt"]] for row in mine
        ]
        assert [row["text"] for row in run["answers"]] == [row["text"] for row in mine[-1:]]
        rounds = [event for event in told_of(home) if event["contributors"]]
        assert [event["round"] for event in rounds] == list(range(1, 9))
        span = rounds[-1]["at"] - rounds[0]["at"]
        samples = sum(sum(event["contributors"].values()) for event in rounds[1:])
        assert found["rate"]["unit"] == run["rate"]["unit"] == "tokens"
        assert found["rate"]["all"] == run["rate"]["all"] == round(samples / span, 4)
        rates = {peer["id"]: peer["rate"] for peer in found["peers"]}
        assert rates == run["rate"]["members"]
        assert sum(rates.values()) == pytest.approx(found["rate"]["all"], abs=1e-3)
        last = [row for row in rows if row["event"] == "step"][-1]
        assert found["quick"]["loss"] == run["metrics"]["loss"]
        assert last["tokens_s"] > 0
        assert run["metrics"]["tokens_s"] > 0
    answered = [row["round"] for rows in said for row in rows if row["event"] == "sample"]
    assert len(answered) == len(set(answered)) > 0  # each by the one member that is drawn for it


def prepared_at(home: Path) -> dict[str, str]:
    """What scripts of a home say that they do before they attach, by process."""
    runs = atoll(home, "status")["runs"]
    return {pid: what for run in runs for pid, (what, _) in run["preparing"].items()}


def told_of(home: Path) -> list[dict[str, Any]]:
    return told(home, "round.committed")


def processes_of(home: Path) -> list[int]:
    """Command, node and script of one home."""
    mark, found = f"ATOLL_HOME={home}".encode(), list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def told(home: Path, kind: str) -> list[dict[str, Any]]:
    """What a home's node has told of so far, of one kind; a kill leaves lines that are not whole."""
    found = list[dict[str, Any]]()
    for file in home.glob("state/runs/*/events.jsonl"):
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [event for event in found if event.get("event") == kind]


def until_given(home: Path, wanted: int, after: int) -> int:
    """Wait for a round beyond ``after`` with so many contributors; its number."""
    while True:
        for event in told(home, "round.committed"):
            if event["round"] > after and len(event["contributors"]) == wanted:
                return int(event["round"])
        time.sleep(0.2)


@pytest.mark.rota(7)
def test_a_member_is_killed_and_returns_and_a_third_joins_late(tmp_path: Path) -> None:
    base = random_models.write_model(tmp_path / "tiny", "llama_tied")
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    file = tmp_path / "run.toml"
    file.write_text(
        'schema = 1\nname = "tiny"\n[model]\nfolder = "tiny"\nmethod = "lora"\n'
        '[data]\nsource = "local"\nlength = 64\nheld_out = 0.1\n'
        "[train]\nsync_every = 20\nstart_with = 2\nrounds = 100_000\n"
        '[train.inner]\nlr = 1e-3\nschedule = "constant"\ntokens_per_step = 128\n'
        "[checkpoint]\nevery = 1\n"
    )
    given = ("--yes", "--no-input", "--threads", "1")
    mine = records(tmp_path / "mine.jsonl", "swarm")
    other = records(tmp_path / "other.jsonl", "model")
    first = start(one, "join", str(file), "--data", str(mine), *given)
    assert first.stderr is not None
    invite = line_of(first.stderr, "invite ")
    joining = ("join", invite, "--data", str(other), "--model", str(base), "--quiet", *given)
    start(two, *joining)
    both = until_given(one, 2, 0)
    killed = processes_of(two)
    assert len(killed) == 3
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    alone = until_given(one, 1, both + 1)
    start(two, *joining)
    again = until_given(one, 2, alone)
    start(three, *joining)
    until_given(one, 3, again)
    roots = [
        {event["entry"]: event["root"] for event in told(home, "state.root")}
        for home in (one, two, three)
    ]
    shared = roots[0].keys() & roots[1].keys() & roots[2].keys()
    assert shared
    assert all(roots[0][entry] == root[entry] for root in roots[1:] for entry in shared)
