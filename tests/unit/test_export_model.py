"""The exported folder is the model: loaded in a process without atoll, by the line that the command
prints, it gives the outputs that the script's anchor gave, bit for bit.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import exported_models
import msgspec
import pytest
import torch
from exported_models import CASES, output
from exporting_kit import KeptSwarm, trained
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.collectives.errors import ConfigError, ModelMismatchError, StorageError
from atoll.collectives.layout import make_layout
from atoll.collectives.swarm import RunSettings
from atoll.node.cli import run
from atoll.node.joining.beginning import beginning
from atoll.node.manifest import (
    list_runs,
)
from atoll.node.records.beginnings import keep_start, weights_in
from atoll.node.run.status import read_run_status
from atoll.node.views.documents import finished_text
from atoll.optim import SoloSwarm, attach
from atoll.optim.model.adapter_names import saved_names
from atoll.optim.model.flat import FlatVector
from atoll.optim.model.tensor_file import write_tensors


def loaded(tmp_path: Path, probes: dict[str, Tensor], lines: dict[str, str]) -> dict[str, Tensor]:
    """The outputs of fresh models that were loaded by these lines, in a process without atoll."""
    save_file({name: probe.clone() for name, probe in probes.items()}, tmp_path / "probes")
    command = [sys.executable, exported_models.__file__, tmp_path / "probes", tmp_path / "results"]
    done = subprocess.run(
        [*command, *(f"{name}={line}" for name, line in lines.items())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return load_file(tmp_path / "results")


def test_what_is_exported_is_the_model(atoll_home: Path, tmp_path: Path) -> None:
    wanted, lines = dict[str, Tensor](), dict[str, str]()
    for case, (build, probe) in CASES.items():
        torch.manual_seed(3)
        model = build()
        swarm, wanted[case] = trained(atoll_home, case, model, probe)
        done = swarm.export(tmp_path / case)
        assert done.missing == ()
        state = model.state_dict()
        weights = load_file(tmp_path / case / "model.safetensors")
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        if "load_state_dict" in done.load:  # which asks for all names
            tied = {}
        assert {name: (t.dtype, t.shape) for name, t in weights.items()} == {
            # a tied tensor is there once, as save_pretrained writes it
            name: (t.dtype, t.shape)
            for name, t in state.items()
            if name not in tied
        }
        lines[case] = done.load
    found = loaded(tmp_path, {case: probe for case, (_, probe) in CASES.items()}, lines)
    unequal = [case for case in CASES if not torch.equal(found[case], wanted[case])]
    assert unequal == []


def test_a_type_can_be_chosen(atoll_home: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = exported_models.library("Llama")().to(torch.bfloat16)
    swarm, _ = trained(atoll_home, "typed", model, exported_models.IDS)
    anchor = torch.empty(sum(p.numel() for p in model.parameters()))
    swarm.anchor().copy_into(anchor)
    done = swarm.export(tmp_path / "full", dtype="float32")
    weights = load_file(tmp_path / "full" / "model.safetensors")
    layout = FlatVector(model, swarm.settings).layout
    flat = torch.cat([weights[spec.name].flatten() for spec in layout.tensors])
    assert torch.equal(flat, anchor)  # the bits that all members have
    assert json.loads((tmp_path / "full" / "config.json").read_text())["dtype"] == "float32"
    assert done.load.startswith("import transformers; model = transformers.LlamaForCausalLM.from_")
    swarm.export(tmp_path / "trained")
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    half = load_file(tmp_path / "trained" / "model.safetensors")
    assert all(torch.equal(half[name], weights[name].to(torch.bfloat16)) for name in weights)


def test_configuration_generation_and_tokenizer_are_the_models_own(
    atoll_home: Path, tmp_path: Path
) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "tide": 1, "reef": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    model: Any = exported_models.library("GPT2")()
    model.generation_config.max_new_tokens = 7
    model.config._name_or_path = str(tmp_path)  # a path of this machine
    swarm, _ = trained(atoll_home, "words", model, exported_models.IDS, tokenizer=tokenizer)
    out = tmp_path / "out"
    done = swarm.export(out)
    assert {"config.json", "generation_config.json", "tokenizer.json"} < set(done.files)
    assert str(tmp_path) not in (out / "config.json").read_text()
    again: Any = transformers.AutoTokenizer.from_pretrained(out)
    assert again("reef tide")["input_ids"] == [2, 1]
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (type(found).__name__, found.generation_config.max_new_tokens) == ("GPT2LMHeadModel", 7)
    with pytest.raises(ConfigError, match="save_pretrained"):
        attach(nn.Linear(1, 1), None, SoloSwarm(), tokenizer="a name")


def test_a_model_of_ones_own_has_ones_own_configuration(atoll_home: Path, tmp_path: Path) -> None:
    swarm, _ = trained(atoll_home, "own", exported_models.Tied(), exported_models.IDS)
    swarm.export(tmp_path / "tied")
    assert json.loads((tmp_path / "tied" / "config.json").read_text()) == {
        "vocabulary": 16,
        "width": 8,
    }
    swarm, _ = trained(atoll_home, "none", nn.Linear(6, 3), exported_models.ROWS)
    done = swarm.export(tmp_path / "none")
    assert done.files == ("model.safetensors", "atoll.json", "README.md")


def test_buffers_are_named_as_ones_own(atoll_home: Path, tmp_path: Path) -> None:
    """They do not travel; and under [secure] nothing was put over them."""
    swarm, _ = trained(atoll_home, "buffers", exported_models.Codebook(), exported_models.ROWS)
    (note,) = swarm.export(tmp_path / "open").notes
    assert note == "1 buffers do not travel and are this machine's own, of round 3: centre"
    secure = 'kind = "federated"\n[federated]\nmethod = "fedavg"\n[secure]\nthreshold = 3\n'
    swarm, _ = trained(
        atoll_home, "sealed", exported_models.Codebook(), exported_models.ROWS, secure
    )
    _, note = swarm.export(tmp_path / "sealed").notes
    assert "neither masks nor noise" in note
    swarm, _ = trained(atoll_home, "constant", nn.LayerNorm(6), exported_models.ROWS)
    assert swarm.export(tmp_path / "constant").notes == ()


def test_frozen_parameters_that_move_are_exported_as_they_are(
    atoll_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="atoll")
    swarm, _ = trained(atoll_home, "teacher", exported_models.Teacher(), exported_models.ROWS)
    told = [r.getMessage() for r in caplog.records if "frozen parameters change" in r.getMessage()]
    assert [words.partition(". ")[0] for words in told] == [
        "frozen parameters change in training: teacher.weight"
    ]
    (note,) = swarm.export(tmp_path / "out").notes
    assert note == (
        "1 buffers and frozen parameters do not travel and are this machine's own, of round 3: "
        "teacher.weight"
    )


def test_a_model_inside_of_a_wrapper_is_named_so(atoll_home: Path, tmp_path: Path) -> None:
    wrapped: Any = torch.compile(nn.Linear(6, 3), backend="eager")
    swarm, _ = trained(atoll_home, "wrapped", wrapped, exported_models.ROWS)
    done = swarm.export(tmp_path / "out")
    assert sorted(done.tensors) == ["bias", "weight"]
    assert done.notes == ("The script wraps its model (torch.compile, DDP); load before it does.",)


def test_tensors_lie_in_a_file_as_in_memory_of_their_own(tmp_path: Path) -> None:
    """Kernels that add in another order where memory is less aligned find it as they left it."""
    tensors = {
        "odd": torch.ones(3),
        "even": torch.ones(32),
        "half": torch.ones(64, dtype=torch.bfloat16),
        "flag": torch.ones(1, dtype=torch.bool),
    }
    for extra in range(64):
        write_tensors(tmp_path / "file", tensors, {"format": "x" * extra})
        found = load_file(tmp_path / "file")
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert [found[name].data_ptr() % 64 for name in ("even", "half")] == [0, 0]
        assert found["odd"].data_ptr() % 4 == 0


class OddState(nn.Linear):
    """Its state_dict() has something that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        """As torch's hook of that name."""
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        """As torch's hook of that name."""


def test_what_is_not_the_whole_model_is_called_so(
    atoll_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = exported_models.Normalised(frozen=True)
    swarm, wanted = trained(atoll_home, "gone", model, exported_models.IMAGES)
    (swarm.folder / "model" / "frozen.safetensors").unlink()
    assert run(["export", "gone", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "not the whole model. Missing: conv.weight (frozen, and its file is gone); " in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "atoll.json",
        "partial.safetensors",
    ]
    line = said.split("Load what there is: ")[1].strip()
    assert line.endswith("strict=False)")
    names = {"model": model}
    exported_models.RUN(compile(line, "printed", "single"), names)  # as it stands
    with torch.no_grad():
        assert torch.equal(output(model.eval(), exported_models.IMAGES), wanted)
    swarm, _ = trained(atoll_home, "odd", OddState(6, 3), exported_models.ROWS)
    done = swarm.export(tmp_path / "odd")
    assert done.missing == ("_extra_state (dict: no tensor)",)
    shutil.rmtree(swarm.folder / "model")
    (missing,) = swarm.export(tmp_path / "none").missing
    assert missing.startswith("whatever was not trained: buffers, frozen parameters, names")


def test_a_card_that_cannot_be_written_ends_no_training(
    atoll_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Blocked(KeptSwarm):
        @property
        def model_folder(self) -> Path:  # type: ignore[override]
            return self.folder / "manifest" / "model"  # a file is in its way

    swarm = Blocked(atoll_home, "blocked", RunSettings(sync_every=1, rounds=2))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, swarm, batch_size=4)
    while not sync.done:
        model(exported_models.ROWS).square().mean().backward()
        optimizer.step()
    told = [r.getMessage() for r in caplog.records if "are not kept, so atoll export" in r.message]
    assert len(told) == 1


def test_no_file_is_replaced_unasked(atoll_home: Path, tmp_path: Path) -> None:
    swarm, _ = trained(atoll_home, "kept", exported_models.Tied(), exported_models.IDS)
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(StorageError, match=r"config.json exists"):
        swarm.export(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["config.json"]
    swarm.export(tmp_path, force=True)
    assert (tmp_path / "config.json").read_text() != "mine"


# ---- a run that goes on


def typed(text: str, folder: Path) -> list[list[str]]:
    """The commands in a text, as somebody types them who has a folder and a name."""
    found = re.findall(r"atoll ((?:export|new) .+?)(?=;|    |$)", text)
    return [
        shlex.split(each.replace("DIR", str(folder)).replace("NAME", "another")) for each in found
    ]


def test_what_a_finished_run_advises_does_what_it_says(
    atoll_home: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the script's last words and by status: a model that loads, and another run from it, whose
    settings are the same and whose folder alone is written to.
    """
    swarm, wanted = trained(atoll_home, "first", exported_models.Tied(), exported_models.IDS)
    (told,) = [r.getMessage() for r in caplog.records if "is finished" in r.getMessage()]
    shown = finished_text(read_run_status({"run_id": swarm.run_id}))
    commands = typed(told, tmp_path / "out")
    assert commands == typed(shown, tmp_path / "out")
    assert [command[0] for command in commands] == ["export", "new"]
    swarm.paths.founded_file(swarm.run_id).parent.mkdir(exist_ok=True)
    swarm.paths.founded_file(swarm.run_id).touch()  # as the node notes it
    before = sorted(path for path in swarm.folder.rglob("*") if path.is_file())
    for command in commands:
        assert run(command) == 0
    said = capsys.readouterr()
    line = said.err.split("Load it: ")[1].splitlines()[0]
    names = {"model": exported_models.Tied()}
    exported_models.RUN(compile(line, "printed", "single"), names)
    with torch.no_grad():
        assert torch.equal(output(names["model"].eval(), exported_models.IDS), wanted)
    runs = {signed.open().name: signed for signed in list_runs(swarm.paths, []).values()}
    assert sorted(runs) == ["another", "first"]
    again = runs["another"].open()
    first = swarm.signed.open()
    assert msgspec.structs.replace(again, name="first", nonce=first.nonce) == first
    start = swarm.paths.run_dir(runs["another"].run_id) / "start.safetensors"
    assert start.read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert sorted(path for path in swarm.folder.rglob("*") if path.is_file()) == before


def test_the_settings_of_a_begun_run_make_no_new_one(
    atoll_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm, _ = trained(atoll_home, "first", exported_models.Tied(), exported_models.IDS)
    swarm.export(tmp_path / "out")
    toml = tmp_path / "run.toml"
    toml.write_text('schema = 1\nname = "mine"\n[model]\nentry = "local:x"\n')
    assert run(["new", str(toml)]) == 0
    (mine,) = (s for s in list_runs(swarm.paths, []).values() if s.open().name == "mine")
    folder = swarm.paths.run_dir(mine.run_id)
    assert run(["new", str(toml), "--from", str(tmp_path / "out")]) == 0  # it has not begun
    assert run(["new", str(toml), "--from", str(tmp_path / "out")]) == 0
    swarm.paths.founded_file(mine.run_id).parent.mkdir(exist_ok=True)
    swarm.paths.founded_file(mine.run_id).touch()
    assert run(["new", str(toml), "--from", str(tmp_path / "out")]) == 0  # the same start
    other = tmp_path / "other"
    save_file({"w": torch.ones(1)}, tmp_path / "one")
    other.mkdir()
    (tmp_path / "one").rename(other / "model.safetensors")
    kept = (folder / "start.safetensors").read_bytes()
    capsys.readouterr()
    assert run(["new", str(toml), "--from", str(other)]) == 73
    said = capsys.readouterr().err
    assert "has begun" in said
    assert "--name NAME" in said
    assert (folder / "start.safetensors").read_bytes() == kept
    assert run(["new", str(toml), "--from", str(other), "--name", "yours"]) == 0
    assert run(["new", str(toml), "--from", str(other), "--name", "not a name"]) == 78
    assert run(["new", "--from", str(other)]) == 78  # it does not say any settings
    assert run(["new", str(toml), "--from", str(tmp_path)]) == 73
    names = sorted(signed.open().name for signed in list_runs(swarm.paths, []).values())
    assert names == ["first", "mine", "yours"]


def starting(home: Path, name: str, source: Path) -> KeptSwarm:
    """A run that begins with what was exported."""
    swarm = KeptSwarm(home, name, RunSettings(sync_every=1, rounds=1))
    keep_start(weights_in(source), swarm.folder)
    return swarm


def test_a_run_goes_on_from_a_model_with_more_than_parameters(
    atoll_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    model = exported_models.Normalised(frozen=True)
    swarm, _ = trained(atoll_home, "first", model, exported_models.IMAGES)
    swarm.export(tmp_path / "out")
    again = starting(atoll_home, "second", tmp_path / "out")
    sync = attach(model, None, again)
    values = torch.full((sync._flat.layout.numel,), 9.0)
    beginning(again.folder, sync._flat.layout, lambda destination: None)(values)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(
        values, torch.cat([weights[s.name].flatten() for s in sync._flat.layout.tensors])
    )
    sync.detach()
    other = exported_models.Normalised(frozen=True)  # of another seed
    with pytest.raises(ModelMismatchError, match=r"frozen tensors .* conv.weight") as caught:
        attach(other, None, starting(atoll_home, "third", tmp_path / "out"))
    line = str(caught.value.hint).removeprefix("Before attach(): ")
    exported_models.RUN(compile(line, "printed", "single"), {"model": other})  # as it stands
    attach(other, None, starting(atoll_home, "fourth", tmp_path / "out")).detach()
    caplog.clear()
    other.pixel_mean.fill_(1.0)
    attach(other, None, starting(atoll_home, "fifth", tmp_path / "out")).detach()
    assert "has other values in pixel_mean than" in caplog.text
    with pytest.raises(ModelMismatchError, match="tensors that the script's has not: bn"):
        attach(nn.Linear(6, 3), None, starting(atoll_home, "sixth", tmp_path / "out"))


# ---- PEFT


RECORD = json.loads((Path(__file__).parent.parent / "records" / "peft_names.json").read_text())
ELSEWHERE = {"vblora"}  # PEFT saves its vectors under a name of the whole model


@pytest.mark.parametrize("kind", sorted(RECORD["kinds"].keys() - ELSEWHERE))
def test_peft_names_are_found_without_peft(kind: str) -> None:
    rows = RECORD["kinds"][kind]
    live = {name: tuple(shape) for name, shape, _ in rows}
    saved = {name: tuple(shape) for _, shape, name in rows}
    assert saved_names(live, saved) == {name: to for name, _, to in rows}


def test_an_adapter_that_names_do_not_give_is_refused(atoll_home: Path, tmp_path: Path) -> None:
    rows = RECORD["kinds"]["vblora"]
    live = {name: tuple(shape) for name, shape, _ in rows}
    saved = {name: tuple(shape) for _, shape, name in rows}
    found = saved_names(live, saved)
    assert [name.split(".")[-2] for name in live if name not in found] == ["vblora_vector_bank"]
    swarm = starting_adapter(atoll_home, tmp_path, saved)
    with pytest.raises(ModelMismatchError, match=r"1 tensors differ, .*vblora_vector_bank"):
        beginning(swarm.folder, make_layout(list(live.items())), lambda destination: None)(
            torch.zeros(10_000)
        )


def starting_adapter(home: Path, folder: Path, saved: dict[str, tuple[int, ...]]) -> KeptSwarm:
    """A run that begins with an adapter of these tensors."""
    save_file(
        {name: torch.ones(shape) for name, shape in saved.items()},
        folder / "adapter_model.safetensors",
    )
    return starting(home, "adapter", folder)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "vera", "trainable_tokens", "ln_tuning"])
def test_a_run_begins_with_an_adapter(atoll_home: Path, tmp_path: Path, kind: str) -> None:
    rows = RECORD["kinds"][kind]
    layout = make_layout([(name, tuple(shape)) for name, shape, _ in rows])
    swarm = starting_adapter(atoll_home, tmp_path, {name: tuple(s) for _, s, name in rows})
    values = torch.zeros(layout.numel)
    beginning(swarm.folder, layout, lambda destination: None)(values)
    assert values.unique().tolist() == [1.0]
