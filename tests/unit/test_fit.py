"""What fits on which machine: shapes, sizes, machines as people name them, and the commands."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from house import ROOT
from msgspec import structs

from atoll.collectives.errors import ConfigError
from atoll.node.cli import run
from atoll.node.cli.consent import check_fit
from atoll.node.cli.fit import _row, _to_install
from atoll.node.cli.fitting import changed, hold, judge, refuse_too_large, tokens_s, toml_of
from atoll.node.cli.machines import machines_of
from atoll.node.cli.needs import FreeHere, needs_of, shortages, step_settings
from atoll.node.cli.templates import FINETUNE, with_model
from atoll.node.manifest import Manifest, parse_manifest
from atoll.node.manifest.tables import BaseTable, ShapeTable
from atoll.node.recipes.models.libraries import has_bitsandbytes
from atoll.node.recipes.models.shapes import (
    KNOWN,
    adapter_parameters,
    known_shape,
    shape_of,
    whole_parameters,
)
from atoll.node.recipes.models.sizing import StepBytes, StepSettings, step_bytes

sys.path.append(str(ROOT / "scripts" / "bench"))
import bench_fleets

GIB = 1 << 30


def of_model(name: str, method: str = "lora", **more: Any) -> Manifest:
    """The template's run of a model of the hub."""
    text = with_model(FINETUNE, name).replace('method = "lora"', f'method = "{method}"')
    for key, value in more.items():
        text = text.replace("[model]", f"[model]\n{key} = {value}")
    return parse_manifest(text)


def bound(manifest: Manifest, shape: ShapeTable) -> Manifest:
    """As its founder signs it, without looking at files."""
    base = BaseTable({"model.safetensors": "0" * 64}, 2 * whole_parameters(shape), 1, shape=shape)
    return structs.replace(manifest, model=structs.replace(manifest.model, base=base))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("SmolLM2-135M", 134_515_008),
        ("Llama-3.2-1B", 1_235_814_400),
        ("Llama-3.2-3B", 3_212_749_824),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.1-70B", 70_553_706_496),
        ("Mistral-7B", 7_248_023_552),
    ],
)
def test_known_shapes_have_as_many_parameters_as_their_models(name: str, parameters: int) -> None:
    assert whole_parameters(KNOWN[name]) == parameters


def test_a_model_is_known_by_the_beginning_of_its_name() -> None:
    assert known_shape("HuggingFaceTB/SmolLM2-135M-Instruct") == KNOWN["SmolLM2-135M"]
    assert known_shape("SmolLM2-135M-Instruct.Q4_1.gguf") == KNOWN["SmolLM2-135M"]
    assert known_shape("meta-llama/Meta-Llama-3.1-8B") == KNOWN["Llama-3.1-8B"]
    assert known_shape("Qwen/Qwen3-14B") == KNOWN["Qwen3-14B"]
    assert known_shape("ORG/Qwen3-1.7Bx") is None


def test_what_config_json_lacks_is_no_shape() -> None:
    whole = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    found = shape_of({"model_type": "llama", **whole})
    assert found is not None
    assert (found.inner, found.groups, found.width, found.tied) == (32, 2, 4, False)
    for key in whole:
        assert shape_of({k: v for k, v in whole.items() if k != key}) is None
    assert shape_of({**whole, "hidden_size": True}) is None
    assert shape_of({**whole, "vocab_size": 1 << 40}) is None
    assert shape_of({"text_config": {"model_type": "gemma3", **whole}}) is not None


def test_bytes_of_weights_gradients_and_states() -> None:
    shape = KNOWN["Llama-3.1-8B"]
    whole, adapters = whole_parameters(shape), adapter_parameters(shape, 16)
    full = step_bytes(shape, StepSettings("full", "bfloat16", True))
    assert (full.weights, full.gradients, full.optimizer) == (2 * whole, 2 * whole, 4 * whole)
    lora = step_bytes(shape, StepSettings("lora", "bfloat16", True))
    assert (lora.weights, lora.gradients) == (2 * whole + 4 * adapters, 4 * adapters)
    assert lora.optimizer == 8 * adapters
    backward = StepSettings("full", "bfloat16", True, accumulated=1, in_backward=True)
    assert step_bytes(shape, backward).gradients == 0
    four = step_bytes(shape, StepSettings("qlora", "bfloat16", True))
    assert 5.4 * GIB < four.weights < 5.9 * GIB  # embedding and head stay in 16 bits


@pytest.mark.parametrize(
    ("text", "count", "free", "up", "down"),
    [
        ("8 x 4090@100Mbit/64GB", 8, FreeHere(64 * GIB, 24 * GIB, None), 12.5e6, 12.5e6),
        ("cpu", 1, FreeHere(None, None, None), None, None),
        ("RTX 3060@20Mbit/s:50Mbit/s", 1, FreeHere(None, 12 * GIB, None), 2.5e6, 6.25e6),
        ("2x20GB/32GiB/1TB", 2, FreeHere(32 * GIB, 20 * GIB, 1024 * GIB), None, None),
        ("NVIDIA A100-80", 1, FreeHere(None, 80 * GIB, None), None, None),
    ],
)
def test_machines_are_named_in_one_line(
    text: str, count: int, free: FreeHere, up: float | None, down: float | None
) -> None:
    found = machines_of([text])
    assert len({each.name for each in found}) == len(found) == count
    assert {(each.free, each.up, each.down) for each in found} == {(free, up, down)}
    assert {each.gpu for each in found} == {free.gpu is not None}


def test_all_that_is_wrong_of_machines_is_told_at_once() -> None:
    texts = ["0 x 4090", "9999", "4090@", "4090/3", "4090/1GB/1GB/1GB", "4090@slow", ""]
    with pytest.raises(ConfigError) as error:
        machines_of(texts)
    assert len(error.value.message.splitlines()) == len(texts)
    with pytest.raises(ConfigError, match="5,000 machines"):
        machines_of(["5000 x cpu"])


def test_the_mildest_setting_that_makes_it_fit_is_named() -> None:
    shape = KNOWN["Llama-3.1-8B"]
    manifest = of_model("ORG/Llama-3.1-8B")

    def told(method: str, gpu: float, host: float = 64) -> str:
        machine = FreeHere(round(host * GIB), round(gpu * GIB), None)
        found = judge(manifest, shape, {"it": machine}, method)
        assert found is not None
        assert found.fits == (not found.short)
        return toml_of(found.change) if found.fits else "no"

    assert told("lora", 48) == ""
    assert told("lora", 24) == "[model] checkpointing = true"
    assert told("qlora", 12) == (
        '[model] method = "qlora", checkpointing = true; [adapters] base = "shapes"'
    )
    assert told("full", 80) == "no"  # atoll's own share is 20 bytes a parameter of host memory
    assert "in_backward = true" in told("full", 45, 256)
    assert told("qlora", 4) == "no"


def test_cards_of_one_machine_hold_a_model_together() -> None:
    """Each its part of weights, gradients and optimizer; activations are each one's own."""
    shape, run = KNOWN["Llama-3.1-8B"], bound(of_model("ORG/Llama-3.1-8B"), KNOWN["Llama-3.1-8B"])
    full = bound(of_model("ORG/Llama-3.1-8B", "full", checkpointing="true"), shape)

    def machine(*cards: int, host: int = 64) -> FreeHere:
        sizes = tuple(each * GIB for each in cards)
        return FreeHere(host * GIB, max(sizes), None, sizes if len(sizes) > 1 else ())

    needs = needs_of(full)
    assert needs is not None
    assert needs.gpu is not None
    each = [needs.on_each(cards) or 0 for cards in (1, 2, 4, 8)]
    assert each[0] == needs.gpu
    assert each == sorted(each, reverse=True)
    assert each[1] - each[3] == -(-needs.shared // 2) - -(-needs.shared // 8)
    lacks = shortages(needs, machine(*[24] * 8, host=512))
    assert [line for line in lacks if "on each of 8 cards" in line] == lacks
    assert shortages(needs, machine(*[48] * 8, host=512)) == []
    assert len(shortages(needs, machine(*[48] * 7, 16, host=512))) == 1  # the smallest decides
    refuse_too_large(run, machine(24, 24))
    with pytest.raises(ConfigError, match="GPU memory"):
        refuse_too_large(run, machine(24))
    four = needs_of(changed(run, {"model.method": "qlora", "adapters.base": "shapes"}))
    assert four is not None
    assert (four.shared, four.on_each(8)) == (0, four.gpu)  # one card trains it
    named = [
        replace(each, flops=1e14, gpu=True, free=machine(24, 24)) for each in machines_of(["4090"])
    ]
    alone = [replace(each, free=machine(24)) for each in named]
    assert tokens_s(named[0], shape, run) == 2 * (tokens_s(alone[0], shape, run) or 0)


def test_what_fits_by_the_formula_has_to_fit_as_it_is_counted() -> None:
    run, shape = of_model("ORG/SmolLM2-135M"), KNOWN["SmolLM2-135M"]
    machine = {"this": FreeHere(8 << 30, None, None)}
    asked = list[StepSettings]()

    def more(shape: ShapeTable, settings: StepSettings) -> StepBytes:
        """What keeps eight times as much without checkpointing."""
        asked.append(settings)
        found = step_bytes(shape, settings)
        return replace(found, peak=found.peak * (1 if settings.checkpointing else 8))

    plain = judge(run, shape, machine, "lora")
    counted = judge(run, shape, machine, "lora", count=more)
    assert plain is not None
    assert counted is not None
    assert (plain.change, counted.change) == ({}, {"model.checkpointing": True})
    assert [each.checkpointing for each in asked] == [False, True]


def test_joining_is_refused_with_the_settings_that_would_fit() -> None:
    shape = KNOWN["Llama-3.1-8B"]
    signed = bound(of_model("ORG/Llama-3.1-8B"), shape)
    refuse_too_large(signed, FreeHere(64 * GIB, 48 * GIB, None))
    refuse_too_large(signed, FreeHere(None, None, None))
    refuse_too_large(of_model("ORG/unknown"), FreeHere(1, 1, None))
    with pytest.raises(ConfigError, match="GPU memory") as error:
        refuse_too_large(signed, FreeHere(64 * GIB, 24 * GIB, None))
    assert error.value.code == "E416"
    assert error.value.hint == "It would fit with [model] checkpointing = true"
    with pytest.raises(ConfigError, match="host memory") as error:
        refuse_too_large(signed, FreeHere(4 * GIB, None, None))
    assert "smaller model" in error.value.hint


@pytest.mark.parametrize("name", bench_fleets.MODELS)
def test_no_machine_is_given_more_than_it_has(name: str) -> None:
    found = [bench_fleets.check(name, seed, plans=False) for seed in range(30)]
    assert [why for _, why in found if why] == []
    assert any(kind.startswith("proposed") for kind, _ in found)


def say(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints."""
    assert run([*arguments]) == code
    told = capsys.readouterr()
    return told.out + told.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run that all of a model of 8 billion parameters would train in."""
    path = tmp_path / "run.toml"
    path.write_text(
        with_model(FINETUNE, "ORG/Llama-3.1-8B").replace('method = "lora"', 'method = "full"')
    )
    return path


def test_plan_says_take_lora_and_proposes_what_all_hold(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path / "home")]
    machines = ["--machine", "4 x 4090@100Mbit/64GB"]
    told = say(capsys, *home, "plan", str(file), *machines)
    assert told.startswith('memory: take LoRA: method = "lora". Of 4 machines none holds')
    assert '[model]\nmethod = "lora"\ncheckpointing = true\n' in told
    assert "as run.toml is, not every machine holds it" in told
    found = json.loads(say(capsys, *home, "plan", str(file), *machines, "--json"))
    assert found["parameters"] == adapter_parameters(KNOWN["Llama-3.1-8B"], 16)
    assert found["held"]["method"] == "lora"
    assert found["settings"]["model"] == {"method": "lora", "checkpointing": True}
    small = ["--machine", "2 x 3050@100Mbit/8GB/10GB"]
    told = say(capsys, *home, "plan", str(file), *small, code=78)
    assert told.startswith("E416 none of 2 machines holds this run")


def test_plan_asks_for_all_that_it_misses_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(with_model(FINETUNE, "ORG/unknown"))
    told = say(capsys, "--home", str(tmp_path), "plan", str(path), code=78)
    assert "how long does an inner step take?" in told
    assert "how many parameters do its adapters have?" in told
    assert "--step-ms 250 --parameters 10000000" in " ".join(told.split())
    path.write_text(with_model(FINETUNE, "ORG/Llama-3.2-1B"))
    given = ["plan", str(path), "--step-ms", "100"]
    found = json.loads(say(capsys, "--home", str(tmp_path), *given, "--json"))
    assert found["parameters"] == 11_272_192  # of the adapters, not of the base
    told = say(capsys, "--home", str(tmp_path), *given, "--parameters", "1235814400", code=78)
    assert "11,272,192 travel of this run's model" in told


def test_fit_tells_each_model_and_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--home", str(tmp_path), "fit", "--machine", "8 x 4090@100Mbit/64GB"]
    told = say(capsys, *given)
    assert told.splitlines()[0] == ("8 x 4090: 24.0 GiB of GPU memory, 64.0 GiB free, 100 Mbit/s")
    rows = {line.split()[0]: line for line in told.splitlines() if "M  " in line or "B  " in line}
    assert " no " in rows["Llama-3.1-8B"]
    assert "checkpointing" in rows["Llama-3.1-8B"]
    found = json.loads(say(capsys, *given, "--model", "ORG/Llama-3.1-8B", "--json"))
    (machine,) = found["machines"]
    (model,) = machine["models"]
    assert (machine["count"], model["parameters"]) == (8, 8_030_261_248)
    assert model["methods"]["lora"]["settings"] == {"model.checkpointing": True}
    assert not model["methods"]["full"]["fits"]
    assert found["together"][0]["method"] == "lora"
    assert found["together"][0]["days"] > 0
    nothing = ["--machine", "3050/8GB", "--model", "ORG/Llama-3.1-70B"]
    assert "no method fits" in say(capsys, "--home", str(tmp_path), "fit", *nothing, code=1)


def test_fit_and_plan_say_what_has_to_be_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ["--home", str(tmp_path)]
    given = [*home, "fit", "--machine", "4090/64GB"]
    both = "adamw8bit and qlora need bitsandbytes, on each machine: pip install 'atoll[4bit]'"
    assert both in [line.strip() for line in say(capsys, *given).splitlines()]
    one = [*given, "--model", "ORG/Llama-3.2-3B"]
    found = json.loads(say(capsys, *one, "--json"))["machines"][0]["models"][0]["methods"]
    assert {method: each["install"] for method, each in found.items()} == {
        "full": "atoll[4bit]",
        "lora": "",
        "qlora": "atoll[4bit]",
    }
    held = hold(
        of_model("ORG/Llama-3.2-3B", "full"), KNOWN["Llama-3.2-3B"], machines_of(["24GB/256GB"])
    )
    assert (
        "optimizer = \"adamw8bit\" needs pip install 'atoll[4bit]' on each machine" in held.advice
    )


@pytest.mark.parametrize("there", [False, True])
def test_what_this_machine_has_is_not_asked_for(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, find = ModuleSpec("bitsandbytes", None) if there else None, importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "bitsandbytes" else find(name)
    )
    (card,) = machines_of(["24GB/64GB"])
    rows = [_row(of_model("ORG/Llama-3.2-3B"), KNOWN["Llama-3.2-3B"], card, None)]
    told = "adamw8bit and qlora need bitsandbytes, which is not installed here: pip install 'atoll[4bit]'"
    assert _to_install(rows, here=True) == ([] if there else [told])
    large = bound(of_model("ORG/Llama-3.1-8B", "full"), KNOWN["Llama-3.1-8B"])
    with pytest.raises(ConfigError, match="GPU memory") as error:
        refuse_too_large(large, FreeHere(256 * GIB, 45 * GIB, None))
    assert 'optimizer = "adamw8bit"' in error.value.hint
    assert error.value.hint.endswith(", which needs pip install 'atoll[4bit]'") is not there


@pytest.mark.skipif(has_bitsandbytes(), reason="bitsandbytes is installed")
@pytest.mark.parametrize(
    ("method", "optimizer", "key"),
    [
        ("lora", "adamw8bit", "$.train.inner.optimizer"),
        ("qlora", "adamw", "$.model.method"),
        ("lora", "adamw", ""),
    ],
)
def test_joining_what_takes_bitsandbytes_is_refused_without_it(
    method: str, optimizer: str, key: str, tmp_path: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"text": "a"}\n', encoding="utf-8")
    manifest = of_model("ORG/Llama-3.2-1B")
    manifest = structs.replace(manifest, model=structs.replace(manifest.model, method=method))
    inner = structs.replace(manifest.train.inner, optimizer=optimizer)
    manifest = structs.replace(manifest, train=structs.replace(manifest.train, inner=inner))
    check_fit(manifest, Path("train.py"), str(chats))  # a script of one's own loads its own
    if not key:
        check_fit(manifest, None, str(chats))
        return
    with pytest.raises(ConfigError, match="which bitsandbytes has") as error:
        check_fit(manifest, None, str(chats))
    assert (error.value.code, error.value.key) == ("E415", key)
    assert error.value.hint.startswith("pip install 'atoll[4bit]'")


def test_fit_refuses_what_it_cannot_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path)]
    told = say(capsys, *home, "fit", "--model", "ORG/one", "--model", "two", code=78)
    assert "the shape of ORG/one, two is not known" in told
    told = say(capsys, *home, "fit", "--measure", code=2)
    assert "--measure is for one model on this machine" in told
    path = tmp_path / "run.toml"
    path.write_text('schema = 1\nname = "x"\n[model]\nentry = "local:x"\n')
    assert "whose steps only its script knows" in say(capsys, *home, "fit", str(path), code=78)


def test_a_folder_says_its_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    about = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    (model / "config.json").write_text(
        json.dumps({**about, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 96})
    )
    given = ["--home", str(tmp_path), "fit", "--machine", "cpu@1Gbit/4GB", "--model", str(model)]
    found = json.loads(say(capsys, *given, "--json").splitlines()[0])
    (one,) = found["machines"][0]["models"]
    assert one["parameters"] == 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 2 * 100 * 64 + 64
    settings = step_settings(of_model("ORG/SmolLM2-135M"))
    assert (settings.length, settings.accumulated, settings.rank) == (1024, 8, 16)
