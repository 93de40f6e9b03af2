"""`atoll join --dry-run`: what a run takes and how its data are read, and nothing is left of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from fake_hub import FakeHub
from finetune_kit import chat, many_chats, tiny_gguf, tiny_model, tiny_tokenizer, write_jsonl

from atoll.node.cli import run
from atoll.node.manifest import load_manifest
from atoll.node.recipes.models.finding import find_model

pytest.importorskip("peft", reason="peft is not installed")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="no client of the hub")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
RUN = (
    'schema = 1\nname = "tiny"\n[model]\n{}\n[data]\nsource = "local"\nlength = 64\n'
    "[train]\nsync_every = 2\nrounds = 3\n"
)


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, and one of its own for what is there for a moment."""
    write_jsonl(tmp_path / "chats.jsonl", *many_chats(40))
    (tmp_path / "moment").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "moment"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(where: str) -> Path:
    file = Path("run.toml")
    file.write_text(RUN.format(where))
    return file


def write_folder(path: Path) -> Path:
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def listed(top: Path) -> set[Path]:
    return {path.relative_to(top) for path in top.rglob("*")}


def test_a_gguf_file_is_looked_at_its_data_are_read_and_nothing_stays(
    cwd: Path, atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    tiny_gguf(cwd / "tiny.gguf")
    settings('gguf = "tiny.gguf"')
    before = listed(cwd)
    assert run(["join", "run.toml", "--dry-run", "--data", "chats.jsonl"]) == 0
    told = capsys.readouterr()
    assert listed(cwd) == before
    assert listed(atoll_home) == set()  # no key either
    assert "model    tiny.gguf, 38.0k parameters" in told.out
    assert "data     40 records (40 of messages)" in told.err
    assert "⟦the<|im_end|>\n⟧" in told.err


def test_what_is_looked_at_without_weights_is_what_a_founder_signs(cwd: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    tiny_gguf(cwd / "tiny.gguf")
    manifest = load_manifest(settings('gguf = "tiny.gguf"'))
    (cwd / "aside").mkdir()
    light = find_model(manifest, cwd, cwd / "none", cwd / "aside")
    founded = find_model(manifest, cwd, cwd / "cache")
    assert light.manifest == founded.manifest
    assert not (cwd / "none").exists()
    assert light.folder == cwd / "aside"
    assert not list((cwd / "aside").glob("*.safetensors"))
    (cwd / "other").mkdir()
    assert find_model(manifest, cwd, cwd / "cache", cwd / "other").folder == founded.folder


def test_of_the_hub_only_what_is_small_is_fetched_and_it_does_not_stay(
    cwd: Path,
    atoll_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    constants = huggingface_hub.constants
    with FakeHub({"org/tiny": write_folder(cwd / "tiny")}) as hub:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cwd / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        settings('hub = "org/tiny"')
        before = listed(cwd)
        status = run(["join", "run.toml", "--dry-run", "--data", "chats.jsonl"])
        told = capsys.readouterr()
        assert status == 0, told.err
    assert {path for path in listed(cwd) - before if path.suffix == ".safetensors"} == set()
    assert listed(cwd) == before
    assert listed(atoll_home) == set()
    assert "data     40 records (40 of messages)" in told.err


def test_data_that_cannot_be_trained_on_are_named_with_file_and_line(
    cwd: Path, atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(cwd / "tiny")
    settings('folder = "tiny"')
    Path("bad.jsonl").write_text('{"messages": [{"role": "user"\n{"a": 1}\n')
    assert run(["join", "run.toml", "--dry-run", "--data", "bad.jsonl"]) == 78
    told = capsys.readouterr()
    assert "bad.jsonl:1: the line ends within its JSON" in told.err
    assert "bad.jsonl:2: its keys are" in told.err
    assert run(["join", "run.toml", "--dry-run"]) == 0
    assert "data     none is given: --data FILE reads it, too" in capsys.readouterr().err
    assert listed(atoll_home) == set()


def test_tokens_that_were_added_and_the_model_lacks_are_refused(
    cwd: Path, atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a run is founded with them; data that make none of them can be trained on."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<call-{number}>" for number in range(20)])
    tokenizer.save_pretrained(write_folder(cwd / "tiny"))
    settings('folder = "tiny"')
    assert run(["join", "run.toml", "--dry-run", "--data", "chats.jsonl"]) == 0
    write_jsonl(cwd / "calls.jsonl", chat("what?", "<call-19>"))
    capsys.readouterr()
    assert run(["join", "run.toml", "--dry-run", "--data", "calls.jsonl"]) == 78
    told = " ".join(capsys.readouterr().err.split())
    assert f"the tokenizer makes token {len(tokenizer) - 1:,}, and the model has 304" in told
    assert "model.resize_token_embeddings(len(tokenizer))" in told


def test_an_id_is_said_once_it_is_the_runs(
    cwd: Path, atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ids() -> set[str | None]:
        found = set[str | None]()
        for words in (["validate", "run.toml"], ["join", "run.toml", "--dry-run"]):
            assert run([*words, "--json"]) == 0
            found.add(json.loads(capsys.readouterr().out)["run_id"])
        return found

    write_folder(cwd / "tiny")
    settings('folder = "tiny"')
    assert ids() == {None}
    assert run(["validate", "run.toml"]) == 0
    assert "(its id follows from its founder's key and the model's files" in capsys.readouterr().out
    assert run(["new", "run.toml", "--json"]) == 0
    founded = json.loads(capsys.readouterr().out)["run_id"]
    assert ids() == {founded}
    Path("run.toml").write_text('schema = 1\nname = "plain"\n')  # no model to be looked at
    (of_the_key,) = ids()
    assert run(["new", "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == of_the_key


def test_devices_that_cannot_be_are_refused_before_anything_is_entered(
    cwd: Path, atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(cwd / "tiny")
    settings('folder = "tiny"')
    words = ["join", "run.toml", "--data", "chats.jsonl", "--devices", "4096", "--yes"]
    assert run(words) == 78
    assert "--devices 4096" in capsys.readouterr().err
    assert not list((atoll_home / "state" / "runs").iterdir())
