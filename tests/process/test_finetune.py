"""From a file and a folder to a model that answers: the command line alone, two homes on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import random_models
import trio
from cli_kit import LISTEN, alive, atoll, nothing_stays, start

from atoll.collectives.identifiers import PeerId
from atoll.collectives.messages import Get
from atoll.node.bases.pieces import encode
from atoll.node.composing.announced import read_invite
from atoll.node.net.network import PeerNetwork
from atoll.node.run.invite import parse_invite
from atoll.security.identity import Identity

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.slow
RUN = (
    'schema = 1\nname = "tiny"\n[model]\nfolder = "tiny"\nmethod = "{}"\n'
    '[data]\nsource = "local"\nlength = 64\nheld_out = 0.1\n'
)
THREE_ROUNDS = (
    "[train]\nsync_every = 2\nrounds = 3\nstart_with = 2\n"
    "[train.inner]\nlr = 1e-2\nsteps = 6\ntokens_per_step = 128\n"
)

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
    file.write_text(RUN.format(method) + THREE_ROUNDS + "[evaluate]\n[checkpoint]\nevery = 1\n")
    given = ("--yes", "--no-input", "--threads", "1")
    mine = records(tmp_path / "mine.jsonl", "swarm")
    other = records(tmp_path / "other.jsonl", "model")
    first = start(one, "join", str(file), "--data", str(mine), *given)
    assert first.stderr is not None
    invite = line_of(first.stderr, "invite ")
    named = ("--model", str(base)) if method == "full" else ()  # else members have it
    second = start(two, "join", invite, "--data", str(other), *named, *given)
    for process in (first, second):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        assert "is finished: all its 3 rounds are committed" in err
    fetched = two / "cache" / "models"
    if method == "lora":
        assert f"from members of the run, by sha256\n           into {fetched}" in err
        assert "from 1 member now; every file has its sha256" in err
        (folder,) = fetched.iterdir()
        assert {each.name for each in folder.iterdir()} <= {each.name for each in base.iterdir()}
        assert all(
            each.read_bytes() == (base / each.name).read_bytes() for each in folder.iterdir()
        )
    else:
        assert not fetched.exists()
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


@pytest.mark.rota(7)
def test_a_base_comes_from_a_member_though_its_fetcher_is_killed_and_no_stranger_gets_it(
    tmp_path: Path,
) -> None:
    base = random_models.write_model(tmp_path / "tiny", "llama_tied")
    (base / "vocab.txt").write_bytes(random.Random(0).randbytes(12 << 20))
    one, two = tmp_path / "one", tmp_path / "two"
    file = tmp_path / "run.toml"
    file.write_text(RUN.format("lora") + THREE_ROUNDS)
    given = ("--yes", "--no-input", "--threads", "1")
    mine = records(tmp_path / "mine.jsonl", "swarm")
    other = records(tmp_path / "other.jsonl", "model")
    first = start(one, "join", str(file), "--data", str(mine), "--max-up", "1MB/s", *given)
    assert first.stderr is not None
    invite = line_of(first.stderr, "invite ")
    joining = ("join", invite, "--data", str(other), *given)
    second = start(two, *joining)
    while not any(part.stat().st_blocks * 512 >= 4 << 20 for part in parts_of(two)):
        assert second.poll() is None
        time.sleep(0.05)
    for pid in processes_of(two):
        os.kill(pid, signal.SIGKILL)
    second.communicate(timeout=60)
    (part,) = parts_of(two)
    assert part.name == ".vocab.txt.part"
    assert refusal_of_a_stranger(invite, base / "config.json") in ("E201", "E203")
    second = start(two, *joining)
    for process in (first, second):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        assert "is finished: all its 3 rounds are committed" in err
    came = re.search(r"12\.\d MiB are in .*, ([0-9.]+) MiB of them from 1 member now", err)
    assert came is not None, err
    assert float(came[1]) <= 8.1  # what was here before the kill was not sent again
    assert not parts_of(two)


def parts_of(home: Path) -> list[Path]:
    """Files of a base that are not whole yet."""
    return list(home.glob("cache/models/*/.*.part"))


def refusal_of_a_stranger(invite: str, wanted: Path) -> str:
    """The code with which the node at the invite's addresses refuses who knows the run, and has no
    certificate: it asks for a file of the base all the same, and is told nothing.
    """
    known = parse_invite(invite, now_s=time.time())
    name = hashlib.sha256(wanted.read_bytes()).digest()
    said, got = list[str](), list[bytes]()

    async def main() -> None:
        network = PeerNetwork(
            Identity.generate(),
            listen=["/ip4/127.0.0.1/tcp/0"],
            bootstrap=known.bootstrap,
            rng=random.Random(3),
            read_invite=read_invite,
        )
        refused = trio.Event()

        def on_refused(topic: str, peer: PeerId, code: str, reason: str) -> None:
            said.append(code)
            refused.set()

        network.on_refused = on_refused
        network.on_message(known.run_id, lambda peer, data: got.append(data))
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(network.run)
                network.send(known.run_id, known.organiser, encode(Get(name, ())))
                await refused.wait()
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert got == []
    return said[0]


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
        RUN.format("lora") + "[train]\nsync_every = 2\nrounds = 8\nstart_with = 2\n"
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
        RUN.format("lora") + "[train]\nsync_every = 20\nstart_with = 2\nrounds = 100_000\n"
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


def cards_of(home: Path) -> list[int]:
    """The processes of the cards but the first."""
    found = list[int]()
    for pid in processes_of(home):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"finetune.launching") for word in words):
                found.append(pid)
    return found


def run_of_many_rounds(tmp_path: Path) -> tuple[Path, Path]:
    base = random_models.write_model(tmp_path / "tiny", "llama_tied")
    file = tmp_path / "run.toml"
    file.write_text(
        RUN.format("lora") + "[train]\nsync_every = 3\nrounds = 100_000\n"
        '[train.inner]\nlr = 1e-3\nschedule = "constant"\ntokens_per_step = 128\n'
        "[checkpoint]\nevery = 1\n"
    )
    return file, base


def test_two_devices_are_one_member(tmp_path: Path) -> None:
    """Beside a member of one: both have the model that comes of it, in full."""
    base = random_models.write_model(tmp_path / "tiny", "llama_tied")
    one, two = tmp_path / "one", tmp_path / "two"
    file = tmp_path / "run.toml"
    file.write_text(
        RUN.format("full") + THREE_ROUNDS + "[evaluate]\n[checkpoint]\nevery = 1\n"
        '[prompts]\ntexts = ["swarm 1"]\nevery = 1\ntokens = 4\n'
    )
    given = ("--yes", "--no-input", "--threads", "1")
    mine = records(tmp_path / "mine.jsonl", "swarm")
    other = records(tmp_path / "other.jsonl", "model")
    first = start(one, "join", str(file), "--data", str(mine), "--devices", "2", *given)
    assert first.stderr is not None
    invite = line_of(first.stderr, "invite ")
    second = start(two, "join", invite, "--data", str(other), "--model", str(base), *given)
    said = list[str]()
    for process in (first, second):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        assert "is finished: all its 3 rounds are committed" in err
        said.append(out + err)
    assert "2 devices of this machine train as one member" in said[0]
    assert said[0].count("120 records (120 of messages)") == 1  # one process speaks
    counted = [event for event in told(one, "round.committed") if len(event["contributors"]) == 2]
    assert counted
    assert all(event["contributors"] for event in told(one, "round.committed"))
    found = [
        atoll(home, "export", "tiny", str(tmp_path / f"out{at}"))
        for at, home in enumerate((one, two))
    ]
    assert [(each["round"], each["missing"]) for each in found] == [(3, [])] * 2
    out, same = tmp_path / "out0", tmp_path / "out1"
    assert elsewhere(out, out) == elsewhere(same, same) != elsewhere(base, base)


def test_a_card_that_dies_ends_the_script_and_the_node_goes_on(tmp_path: Path) -> None:
    file, _ = run_of_many_rounds(tmp_path)
    one = tmp_path / "one"
    mine = records(tmp_path / "mine.jsonl", "swarm")
    node = int(atoll(one, "up", "--background", *LISTEN)["pid"])
    member = (
        "join",
        str(file),
        "--data",
        str(mine),
        "--devices",
        "2",
        "--yes",
        "--no-input",
        "--threads",
        "1",
    )
    first = start(one, *member)
    until_given(one, 1, 1)
    (card,) = cards_of(one)
    os.kill(card, signal.SIGKILL)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 74, out + err
    said = " ".join((out + err).split())
    assert "E300 the process of card 1 (of 0 to 1) was killed by SIGKILL" in said
    assert "none of them can go on. The node does." in said
    assert "Traceback" not in said
    assert alive(node)
    assert cards_of(one) == []
    reached = atoll(one, "status")["runs"][0]["round"]
    again = start(one, *member)
    until_given(one, 1, reached + 1)
    again.send_signal(signal.SIGINT)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 130, out + err
    assert "going on after step" in out + err
    assert "Traceback" not in out + err
    assert cards_of(one) == []
    assert alive(node)
    atoll(one, "down")


def test_devices_that_the_run_cannot_use_are_refused(tmp_path: Path) -> None:
    file, _ = run_of_many_rounds(tmp_path)
    file.write_text(file.read_text() + "[exchange]\nfragments = 2\n")
    mine = records(tmp_path / "mine.jsonl", "swarm")
    member = start(
        tmp_path / "one",
        "join",
        str(file),
        "--data",
        str(mine),
        "--devices",
        "2",
        "--yes",
        "--no-input",
    )
    out, err = member.communicate(timeout=120)
    said = " ".join((out + err).split())
    assert member.returncode == 78, said
    assert "this run cannot be trained by 2 devices of one machine" in said
    assert "it has fragments" in said
    assert "--devices 1" in said
