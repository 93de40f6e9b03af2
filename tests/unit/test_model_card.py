"""The card of an exported model, and weights in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from atoll.node.cli.templates import FINETUNE, with_model
from atoll.node.look.machine import MachineReadings
from atoll.node.manifest import parse_manifest, sign_manifest
from atoll.node.manifest.tables import BaseTable
from atoll.node.recipes.finetune.reporting import keep_energy, keep_evaluations
from atoll.node.records.beginnings import weights_in
from atoll.node.records.model_card import (
    ENERGY_FILE,
    Energy,
    Worked,
    card_of,
    energy_in,
    evaluation_in,
)
from atoll.node.records.sharding import INDEX_FILE, cut, index_of, remove_others
from atoll.optim.model.tensor_file import write_tensors
from atoll.security.identity import Identity


def card(text: str = FINETUNE, **more: Any) -> str:
    """Of a run of SmolLM2-135M."""
    manifest = parse_manifest(with_model(text, "HuggingFaceTB/SmolLM2-135M"))
    base = BaseTable({"model.safetensors": "0" * 64}, 9, 134_515_008, licence="apache-2.0")
    model = structs.replace(manifest.model, base=base, revision="c" * 40)
    signed = sign_manifest(structs.replace(manifest, model=model), Identity.generate())
    return card_of(signed, 30, **more).decode()


def test_a_card_says_run_base_licence_work_and_evaluation() -> None:
    worked = Worked({"a": 30, "b": 12}, 4_096_000)  # type: ignore[dict-item]
    text = card(
        worked=worked,
        evaluation={"held_out": 1.23456, "tokens": 50_000, "round": 30},
        credited=("Ada [x](http://evil)",),
        how="import peft",
    )
    head = text.split("---")[1].strip().splitlines()
    assert head == [
        'license: "apache-2.0"',
        'base_model: "HuggingFaceTB/SmolLM2-135M"',
        "base_model_relation: adapter",
        "library_name: peft",
        "pipeline_tag: text-generation",
        "tags:",
        "- atoll",
    ]
    assert f"`HuggingFaceTB/SmolLM2-135M` at `{'c' * 40}`, 134.5M parameters" in text
    assert "Its licence: apache-2.0." in text
    assert "LoRA of rank 16, alpha 32." in text
    assert "2 members contributed 4,096,000 learned tokens." in text
    assert "1.2346 nats a token on 50,000 held-out tokens of one member, at round 30." in text
    assert r"Ada \[x\](http://evil)" in text
    base = f"from_pretrained('HuggingFaceTB/SmolLM2-135M', revision='{'c' * 40}')"
    loads = f"import transformers\nmodel = transformers.AutoModelForCausalLM.{base}\nimport peft\n"
    assert f"```python\n{loads}```" in text
    merged = card(how="import peft", merged=True)
    assert "```python\nimport peft\n```" in merged
    assert "Energy: not counted on this machine." in text
    assert "Trained by several machines together" in text
    alone = card(worked=Worked({"a": 30}, 4_096_000))  # type: ignore[dict-item]
    assert "Trained by one machine on its data" in alone


def test_an_adapter_of_a_gguf_file_says_how_that_is_loaded() -> None:
    manifest = parse_manifest(FINETUNE.replace('hub = "ORG/NAME"', 'gguf = "tiny.gguf"'))
    base = BaseTable({"tiny.gguf": "0" * 64}, 9, 9)
    model = structs.replace(manifest.model, base=base)
    signed = sign_manifest(structs.replace(manifest, model=model), Identity.generate())
    text = card_of(signed, 1, how="import peft").decode()
    assert "from_pretrained('FOLDER_OF_THE_FILE', gguf_file='tiny.gguf')\nimport peft\n" in text


def test_a_card_says_the_energy_that_one_machine_counted() -> None:
    text = card(energy=Energy({"package-0": 3.0e6, "GPU 0, H200 [x](y)": 4.2e6}, 3661.0))
    assert (
        r"* Energy: 2 kWh in 1 h 1 min, all that one member's machine took by its own counters "
        r"(package-0, GPU 0, H200 \[x\](y)) while it trained. The others' is not known."
    ) in text


class Meter(MachineReadings):
    """A machine with these counters."""

    def __init__(self, *readings: tuple[dict[str, float], float | None]) -> None:
        super().__init__(Path("/nowhere"))
        self.readings = list(readings)

    def read(self) -> dict[str, Any]:
        zones, gpu = self.readings.pop(0)
        gpus = [] if gpu is None else [{"index": 0, "name": "H200", "joules": gpu}]
        return {"energy_joules": zones, "gpus": [*gpus, {"index": 1, "name": "mute"}]}


def test_energy_is_counted_while_a_script_trains_and_over_its_lives(tmp_path: Path) -> None:
    def zones(package: float, dram: float) -> dict[str, float]:
        """The core's is part of its package's, and psys has both."""
        inside = {"package-0/core": 999.0 * package, "psys": 999.0 * package}
        return {"package-0": package, "package-0/dram": dram, **inside}

    now, said = [0.0], list[str]()
    meter = Meter((zones(5.0, 1.0), 100.0), (zones(15.0, 2.0), 130.0), (zones(25.0, 4.0), 10.0))
    say = keep_energy(lambda record: said.append(record["event"]), tmp_path, meter, lambda: now[0])
    now[0] = 30.0
    say({"event": "round"})
    assert energy_in(tmp_path) is None  # written once a minute, and at the end
    now[0] = 40.0
    say({"event": "final"})
    counted = {"package-0": 20.0, "package-0/dram": 3.0, "GPU 0, H200": 30.0}
    assert energy_in(tmp_path) == Energy(counted, 40.0)  # a driver that was loaded anew adds none
    again = Meter((zones(7.0, 4.0), None), (zones(8.0, 4.0), 55.0))
    say = keep_energy(lambda record: said.append(record["event"]), tmp_path, again, lambda: now[0])
    now[0] = 101.0
    say({"event": "round"})
    assert energy_in(tmp_path) == Energy({**counted, "package-0": 21.0}, 101.0)
    assert said == ["round", "final", "round"]


def test_where_nothing_counts_energy_none_is_kept(tmp_path: Path) -> None:
    say = keep_energy(lambda record: None, tmp_path, Meter(({}, None), ({}, None)))
    say({"event": "final"})
    assert list(tmp_path.iterdir()) == []
    for text in ("", "{}", '{"joules": {"a": -1}, "seconds": 1}', '{"joules": [], "seconds": 1}'):
        (tmp_path / ENERGY_FILE).write_text(text)
        assert energy_in(tmp_path) is None


def test_a_card_names_nobody_unasked_and_says_what_is_not_known() -> None:
    text = card(FINETUNE.replace('method = "lora"', 'method = "full"'))
    assert "agreed to be named" not in text
    assert "Evaluation: none was made on this machine." in text
    assert "all of it trained" in text
    assert "library_name: transformers" in text
    assert "base_model_relation: finetune" in text
    assert "base_model_relation: finetune" in card(merged=True)


def test_the_newest_evaluation_is_kept_for_the_card(tmp_path: Path) -> None:
    said = list[dict[str, Any]]()
    say = keep_evaluations(said.append, tmp_path)
    assert evaluation_in(tmp_path) is None
    for round_, tokens in ((1, 10), (2, 20), (3, 0)):
        say({"event": "evaluation", "round": round_, "tokens": tokens, "held_out": 2.0, "nll": 1})
    say({"event": "step"})
    assert [each["event"] for each in said] == ["evaluation"] * 3 + ["step"]
    assert evaluation_in(tmp_path) == {"round": 2, "tokens": 20, "held_out": 2.0}


def test_weights_are_cut_in_their_order_and_read_again(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((10 + i,), float(i)) for i in range(5)}  # 40 to 56 bytes
    assert cut(tensors, 1000) == {}
    shards = cut(tensors, 100)
    assert [list(group) for group in shards.values()] == [
        ["layer.0", "layer.1"],
        ["layer.2", "layer.3"],
        ["layer.4"],
    ]
    assert next(iter(shards)) == "model-00001-of-00003.safetensors"
    assert len(cut(tensors, 1)) == 5
    index = json.loads(index_of(shards))
    assert index["metadata"] == {"total_size": 240}
    assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    for name, group in shards.items():
        write_tensors(tmp_path / name, group, {"format": "pt"})
    (tmp_path / INDEX_FILE).write_bytes(index_of(shards))
    from safetensors.torch import load

    found = load(weights_in(tmp_path))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    (tmp_path / "model.safetensors").write_bytes(b"old")
    remove_others(tmp_path, {*shards, INDEX_FILE}, "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*shards, INDEX_FILE])
    remove_others(tmp_path, {"model.safetensors"}, "model.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd"])
def test_an_index_names_no_file_elsewhere(tmp_path: Path, file: str) -> None:
    from atoll.collectives.errors import StorageError

    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(StorageError, match="is no file of the folder"):
        weights_in(tmp_path)


def test_transformers_loads_a_model_in_several_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from random_models import write_model
    from safetensors.torch import load_file

    from atoll.node.records.contents import Contents
    from atoll.node.records.export import _shards, _write

    source, out = write_model(tmp_path / "source"), tmp_path / "out"
    contents = Contents(
        file="model.safetensors",
        tensors=load_file(source / "model.safetensors"),
        how="import transformers; model = …",
        files={"config.json": (source / "config.json").read_bytes()},
        library_class="LlamaForCausalLM",
    )
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"of an export before")
    shards = _shards(contents, 30_000)
    assert len(shards) > 2
    _write(out, contents, shards)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*shards, INDEX_FILE, "config.json"]
    )
    ids = torch.arange(9)[None]
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        for folder in (source, out)
    )
    assert torch.equal(one, other)
    contents.how = "load_file({file})"
    assert _shards(contents, 30_000) == {}
    contents.library_class = ""
    assert _shards(contents, 30_000) == {}
