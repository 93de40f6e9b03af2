"""From a file of settings to a run, once; templates; and answers of an exported model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_models
import torch
from exporting_kit import KeptSwarm

from atoll.collectives.errors import StateError
from atoll.collectives.swarm import RunSettings
from atoll.node.cli import run
from atoll.node.cli.costs import schedule_lines
from atoll.node.cli.templates import TEMPLATES, with_model
from atoll.node.home.paths import find_paths
from atoll.node.manifest import load_run, parse_manifest
from atoll.node.manifest.presets import explain_outer
from atoll.node.recipes.models.chatting import Conversation
from atoll.node.recipes.models.loading import stops_of
from atoll.optim import attach

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

Json = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model's folder, called tiny."""
    return random_models.write_model(tmp_path_factory.mktemp("models") / "tiny", "llama_tied")


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], atoll_home: Path) -> Json:
    """Runs a command in this process; its JSON."""

    def ask(*argv: str, status: int = 0) -> dict[str, Any]:
        assert run([*argv, "--json"]) == status
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return ask


def written(tmp_path: Path, model: Path, more: str = "") -> Path:
    text = with_model(TEMPLATES["finetune"], str(model)) + more
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


@pytest.mark.parametrize(
    ("name", "ending"),
    [("finetune", "tuned"), ("pretrain", "trained")],
    ids=["finetune", "pretrain"],
)
def test_the_template_is_short_and_nothing_advises_against_it(
    name: str, ending: str, tmp_path: Path, model: Path
) -> None:
    text = TEMPLATES[name]
    assert len(text.splitlines()) <= 25
    found = parse_manifest(text)
    assert found.train.start_with == 2
    assert found.train.inner.steps == found.train.rounds * found.train.sync_every  # type: ignore[operator]
    assert '"auto" takes for this run' in explain_outer(found)
    assert schedule_lines(found) == []
    for given, entry in ((str(model), "folder"), ("org/tiny", "hub")):
        made = parse_manifest(with_model(text, given))
        assert (made.model.entry, made.name) == (entry, f"tiny-{ending}")
    (tmp_path / "A model.Q4_1.gguf").touch()
    made = parse_manifest(with_model(text, str(tmp_path / "A model.Q4_1.gguf")))
    assert (made.model.entry, made.name) == ("gguf", f"a-model.q4-1-{ending}")
    for folder in ("größer 模型 \U0001f9ea", '"quoted"\\'):
        (tmp_path / folder).mkdir()
        assert parse_manifest(with_model(text, str(tmp_path / folder))).model.entry == "folder"


def test_a_schedule_that_does_not_end_with_the_run_is_said(
    asked: Json, tmp_path: Path, model: Path
) -> None:
    file = written(tmp_path, model)
    text = (
        file.read_text()
        .replace("rounds = 30", "rounds = 4")
        .replace("sync_every = 10", "sync_every = 2")
    )
    for inner, words in (
        ("", ["still 100% of lr at the end: the run makes 8 steps, its schedule 300", "20 of 8"]),
        ("warmup = 1\nsteps = 20\n", ["still 65% of lr at the end: the run makes 8 steps"]),
        (
            "warmup = 1\nsteps = 5\n",
            ["the last 3 of 8 steps are made at 1 % of lr: [train.inner] "],
        ),
        ("warmup = 1\nsteps = 8\n", []),
        ('warmup = 1\nschedule = "constant"\nsteps = 5\n', []),
    ):
        lines = [line for line in text.splitlines() if not (inner and line.startswith("steps"))]
        file.write_text("\n".join(lines).replace("[train.inner]", f"[train.inner]\n{inner}"))
        said = asked("validate", str(file))["schedule"]
        assert len(said) == len(words), said
        assert all(each in line for each, line in zip(words, said, strict=True)), said


def test_an_export_before_the_first_round_says_that_nothing_was_trained(
    capsys: pytest.CaptureFixture[str], atoll_home: Path, tmp_path: Path
) -> None:
    swarm = KeptSwarm(atoll_home, "early", RunSettings(sync_every=2, rounds=3))
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sync = attach(module, optimizer, swarm, batch_size=1)
    words = ["export", swarm.run_id, str(tmp_path / "out"), "--force"]
    for trained in (False, True):
        while trained and not sync.done:
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        swarm.checkpoint(sync._flat.layout)
        assert run(words) == 0
        assert ("Nothing was trained yet" in capsys.readouterr().err) is not trained
    sync.detach()


def test_what_is_neither_on_this_machine_nor_a_name_on_the_hub(asked: Json) -> None:
    text = TEMPLATES["finetune"]
    given = parse_manifest(with_model(text, "https://huggingface.co/org/tiny/"))
    assert (given.model.hub, given.name) == ("org/tiny", "tiny-tuned")
    for wrong in ("./nothing", "org/tiny@main", "org/tiny/tree/main", "no such folder"):
        found = asked("new", "--template", "finetune", "--model", wrong, status=2)["error"]
        assert found["message"].startswith(f"there is no folder or file {wrong}, and no model")


def test_one_text_is_one_run_wherever_its_model_has_moved(
    asked: Json, atoll_home: Path, tmp_path: Path, model: Path
) -> None:
    own = random_models.write_model(tmp_path / "own", "llama_tied")
    file = written(tmp_path, own)
    first = asked("new", str(file))
    assert first["known"] is False
    random_models.write_model(own, "llama_tied", seed=9)  # as a branch of the hub moves
    again = asked("new", str(file))
    assert (again["run_id"], again["known"]) == (first["run_id"], True)
    other = asked("new", str(written(tmp_path, model)))
    assert other["run_id"] != first["run_id"]
    seen = asked("join", str(file), "--dry-run")  # of the last text
    assert seen["run_id"] == other["run_id"]
    about = seen["pretrained"]
    assert (about["folder"], about["lora"]["rank"]) == ("tiny", 16)
    assert about["base"]["parameters"] > seen["parameters"]
    assert str(tmp_path) not in json.dumps(about)
    signed = load_run(find_paths(atoll_home), first["run_id"])
    assert str(tmp_path).encode() not in signed.encode()


def test_what_a_model_is_stands_in_the_question(
    capsys: pytest.CaptureFixture[str], atoll_home: Path, tmp_path: Path, model: Path
) -> None:
    file = written(tmp_path, model)
    assert run(["join", str(file), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "model    tiny, " in text
    assert "its licence is not known" in text
    assert "compared by sha256" in text
    assert "LoRA of rank 16, alpha 32, on all-linear" in text
    assert "nothing is downloaded and executed" in text


def test_refusals_of_the_command_line(asked: Json, tmp_path: Path, model: Path) -> None:
    assert asked("new", "--template", "lora", "--model", "a/b", status=2)["error"]
    file = written(tmp_path, model)
    file.write_text(file.read_text().replace(str(model), str(tmp_path / "none")))
    found = asked("new", str(file), status=78)["error"]
    assert (found["code"], found["key"]) == ("E415", "$.model.folder")
    found = asked("join", str(file), status=78)["error"]  # said before the model is looked at
    assert (found["key"], found["hints"][0][:18]) == ("$.data.source", "--data chats.jsonl")
    (tmp_path / "chats.xlsx").touch()
    found = asked("join", str(file), "--data", str(tmp_path / "chats.xlsx"), status=78)["error"]
    assert found["message"].startswith("chats.xlsx is of a kind that is not read")


# ---- answers


def opened(folder: Path) -> Conversation:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return Conversation(model, transformers.AutoTokenizer.from_pretrained(folder))


def test_an_answer_ends_where_the_template_ends_it(model: Path, tmp_path: Path) -> None:
    tokenizer = random_models.write_tokenizer(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    other = transformers.AutoModelForCausalLM.from_pretrained(model)
    other.generation_config.eos_token_id = [7, 9]
    tokenizer.eos_token = None
    assert stops_of(other, tokenizer) == [7, 9, end]  # known from the template alone
    talk = Conversation(other, tokenizer)
    with torch.no_grad():  # all tokens are alike, and the first of them is the end
        other.model.norm.weight.zero_()
    assert "".join(talk.answer("the swarm", 50)) == ""
    assert talk._history[1]["content"] == ""


def test_what_was_said_is_remembered(model: Path) -> None:
    talk = opened(model)
    talk._model.generation_config.suppress_tokens = [0, 1, 2, 3]  # a random model says them, too
    said = "".join(talk.answer("the model answers", 12))
    assert len(said) >= 12
    assert [each["role"] for each in talk._history] == ["user", "assistant"]
    assert talk._history[1]["content"] == said
    talk.forget()
    assert "".join(talk.answer("the model answers", 12)) == said  # as the first time


def test_chat_answers_from_a_folder(
    asked: Json, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked("chat", str(model), "the swarm trains", "--tokens", "5")
    assert found["prompt"] == "the swarm trains"
    assert run(["chat", str(model), "the swarm trains", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == found["answer"].rstrip("\n")
    assert asked("chat", str(model), status=2)["error"]
    assert asked("chat", str(model.parent), "x", status=78)["error"]["code"] == "E415"


def test_an_answer_of_nothing_is_said(
    capsys: pytest.CaptureFixture[str], atoll_home: Path, tmp_path: Path
) -> None:
    folder = random_models.write_model(tmp_path / "tiny", "llama_tied")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # all tokens are alike, and the first of them is the end
        model.model.norm.weight.zero_()
    model.save_pretrained(folder)
    assert run(["chat", str(folder), "the swarm trains"]) == 0
    told = capsys.readouterr()
    assert told.out == "\n"
    assert "The answer is empty" in told.err


def test_what_cannot_be_answered_is_said(
    capsys: pytest.CaptureFixture[str], atoll_home: Path, tmp_path: Path
) -> None:
    folder = random_models.write_model(tmp_path / "gpt2", "gpt2")
    talk = opened(folder)
    with pytest.raises(StateError, match="the model gives no answer"):
        list(talk.answer("the swarm trains " * 100, 5))  # of 128 positions
    assert talk._history == []
    assert "".join(talk.answer("the swarm", 5)) is not None
    talk._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(StateError, match="refuses the conversation: “roles must alternate”"):
        list(talk.answer("and", 5))
    assert run(["chat", str(folder), "the swarm trains " * 100, "--tokens", "5"]) == 74
    assert "Traceback" not in capsys.readouterr().err
